"""Kept cases of graphs: graph text, how the models answer, a request, and what becomes of it.

Cases are blocks of tests/case_files.py::

    == An answer that is accepted ends the cascade
    graph: X O? -> Y V? batch 16
    model a: X -> Y W
    node { name: "root" cascade { ... } }
    --- a=5 b=UNAVAILABLE@20 timeout=50
    -> Y=5 root<a;b!> 20 ms ~b
    -> calls a(X=1) b(X=1)

``graph:`` declares the tensors of the graph, by default X -> Y; ``ensemble:`` is a graph with
the rules of Triton Inference Server; ``graph NAME:`` begins another graph that steps may name. ``model NAME:`` declares
the tensors of a model, by default X -> Y; its batch is that of the graph. A tensor is NAME:DATATYPE:DIMS, by default
FP32 and 1; ``?`` makes it optional. Text that begins with ``name:`` is a whole graph file. A case without graph and
models has those of the case before it.

``---`` is a request to a new router, ``+++`` a further one to the same. NAME=ANSWER is what a model gives: a value for
each row, ``[[1],[2]]`` or ``empty(0,1)`` for exactly this tensor, ``+10`` or ``sum`` of its first or all inputs,
``{Y}`` for these outputs only, a status for an error. ``@20`` is 20 ms later, ``?tokens=3`` adds a response parameter,
``A|B`` answers call after call. A model without an answer echoes its first input.
X=VALUES is an input, a value for each row, ``-`` for none; an input that is not given is 1. ``timeout=`` and
``cancel=`` are ms from the start, ``outputs=`` the requested outputs, ``id=``, ``header.NAME=`` and ``parameter.NAME=``
are of the request, ``draw=`` are the random draws, ``at_once=`` sends so many, ``pins`` allows pinning.

The answer is outputs or error, path, time and cancelled models; ``refused`` has the codes of what is wrong with the
file. A line ``calls`` has each call with its inputs, ``called`` the models alone, ``asked`` the requested outputs,
``trace`` the entries of the trace, ``evaluated`` how often each condition was.
"""

import ast
import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterable
from itertools import takewhile
from typing import Any
from unittest.mock import patch

import numpy as np
from tests.case_files import Case, blocks
from tests.unit.router import make
from tests.unit.router.fake_random import FakeRandom
from tests.unit.router.fake_target import FakeTarget, failing, in_turn
from tests.unit.router.virtual_clock import VirtualClock

from weft.base.core import CallContext, InferCall, InferResult
from weft.base.errors import WeftError
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import NUMPY_BY_DATATYPE, WireTensor, bytes_tensor, decode, encode
from weft.language import GraphError, GraphSource
from weft.language.plan import GraphPlan
from weft.language.types.conditions import CelCondition
from weft.router.compile import compile_graph
from weft.router.executor import GraphExecutor
from weft.router.runtime import Runtime

_ERROR_ID = re.compile(r" \(error id \w+\)")
_REQUEST = ("---", "+++")
_KINDS = ("calls", "called", "asked", "trace", "evaluated")
_DECLARATION = re.compile(r"(graph|ensemble|model)( [^\s:]+)?: (.*?)(?: batch (\d+))?")


def text_of(case: Case) -> list[str]:
    """The graph and models of a case, or of the last before it that has them."""
    text: list[str] = []
    for title, lines in blocks(case.file.read_text())[1:]:
        text = list(takewhile(lambda line: not line.startswith(_REQUEST), lines)) or text
        if title == case.title:
            break
    return text


def requests_of(case: Case) -> list[tuple[str, list[str]]]:
    """Each request of a case, with what is expected."""
    found = [(line, expected) for line, expected in case.script if line.startswith(_REQUEST)]
    assert found, "a case without a request holds nothing"
    return found


def check_requests(case: Case, found: Iterable[list[str]]) -> None:
    """Each request of a case has the expected answer."""
    answers = iter(found)
    case.check_script(lambda line: next(answers) if line.startswith(_REQUEST) else ())


def _specs(text: str) -> tuple[TensorSpec, ...]:
    specs = []
    for one in text.split():
        name, datatype, dims = (one.split(":") + ["FP32", "1"][one.count(":") :])[:3]
        sizes = tuple(int(size) for size in dims.split(",") if size)
        specs.append(TensorSpec(name.removesuffix("?"), datatype, sizes, name.endswith("?")))
    return tuple(specs)


def _head(name: str, platform: str, signature: ModelSignature) -> str:
    def listed(specs: tuple[TensorSpec, ...]) -> str:
        return ", ".join(
            f'{{ name: "{one.name}" data_type: TYPE_{"STRING" if one.datatype == "BYTES" else one.datatype} '
            f"dims: {list(one.dims)}{' optional: true' if one.is_optional else ''} }}"
            for one in specs
        )

    text = f'name: "{name}" platform: "{platform}" input [ {listed(signature.inputs)} ]'
    batch = f" max_batch_size: {signature.max_batch_size}" if signature.max_batch_size else ""
    outputs = f" output [ {listed(signature.outputs)} ]" if signature.outputs else ""
    return f"{text}{outputs}{batch}\n"


class World:
    """The graphs and models of a case, as catalog and as lookup of graphs."""

    def __init__(self, lines: list[str]) -> None:
        self.graphs: dict[str, str] = {}
        self.models: dict[str, ModelSignature] = {}
        name, batch = "g", 0
        for line in lines:
            if declared := _DECLARATION.fullmatch(line):
                kind, given, tensors, size = declared.groups()
                inputs, _, outputs = tensors.partition("->")
                is_batching = size is None and kind == "model"
                signature = ModelSignature(
                    (given or " g")[1:],
                    "1",
                    "",
                    batch if is_batching else int(size or 0),
                    _specs(inputs),
                    _specs(outputs),
                )
                if kind == "model":
                    self.models[signature.name] = signature
                else:
                    name = signature.name
                    batch = signature.max_batch_size if name == "g" else batch
                    self.graphs[name] = _head(name, kind, signature)
            else:
                if line.startswith("name:"):
                    self.graphs[name] = ""
                before = self.graphs.get(name, _head("g", "graph", _model("g", 0)))
                self.graphs[name] = f"{before}{line}\n"
        self.batch = batch

    def signature(self, model: str) -> ModelSignature:
        """That of a model."""
        return self.models.get(model) or _model(model, self.batch)

    def find(self, name: str, version: str) -> Any:
        """As `Catalog.find`."""
        return None if name == "missing" or name in self.graphs else ("model", self.signature(name))

    def names(self) -> list[str]:
        """As `Catalog.names`."""
        return []

    def plan(self) -> GraphPlan:
        """The graph, compiled."""
        return compile_graph(GraphSource(self.graphs["g"], "graph.pbtxt"), self, _Graphs(self.graphs))


def compiled(text: str) -> GraphPlan:
    """The plan of a graph that is written as in a case."""
    return World([line.strip() for line in text.splitlines() if line.strip()]).plan()


def _model(name: str, batch: int) -> ModelSignature:
    return ModelSignature(name, "1", "", batch, _specs("X"), _specs("Y"))


class _Graphs:
    def __init__(self, texts: dict[str, str]) -> None:
        self.texts = texts

    def find(self, name: str, version: str) -> GraphSource | None:
        return GraphSource(self.texts[name], f"{name}.pbtxt", name, "1") if name in self.texts else None

    def names(self) -> list[str]:
        return list(self.texts)


def _tensor(array: Any, datatype: str) -> WireTensor:
    array = np.asarray(array)
    if datatype == "BYTES":
        return bytes_tensor([str(one) for one in array.ravel()], array.shape)
    return encode(array.astype(NUMPY_BY_DATATYPE[datatype]))


def _values(text: str, rows: tuple[int, ...] = ()) -> np.ndarray:
    """Values of one row, or exactly this tensor."""
    if empty := re.fullmatch(r"empty\(([\d,]+)\)", text):
        return np.zeros([int(size) for size in empty[1].split(",")])
    if text.startswith("["):
        return np.asarray(ast.literal_eval(text))
    values = np.asarray(ast.literal_eval(f"[{text}]"))
    return np.tile(values, (*rows, 1))


def _script(text: str, signature: ModelSignature) -> Any:
    if "|" in text:
        return in_turn(*(_script(one, signature) for one in text.split("|")))
    text, _, more = text.partition("?")
    text, _, after_ms = text.partition("@")
    parameters = {name: int(value) for name, _, value in (one.partition("=") for one in more.split(",") if one)}
    if re.fullmatch("[A-Z][A-Z_]+", text):
        return failing(text, after_ms=float(after_ms or 0), retry_after_ms=parameters.get("retry"))
    datatypes = {one.name: one.datatype for one in signature.outputs}

    async def answer(call: InferCall, context: CallContext) -> InferResult:
        if after_ms:
            await asyncio.sleep(float(after_ms) / 1e3)
        first = next(iter(call.inputs.values()))
        names = [output.name for output in call.outputs]
        if text.startswith("{"):
            outputs = dict.fromkeys(text[1:-1].split(",") if text != "{}" else [], first)
        elif text in ("", "echo"):
            outputs = dict.fromkeys(names, first)
        else:
            arrays = [decode(tensor) for tensor in call.inputs.values()]
            if text == "sum":
                array = sum(arrays)
            elif text.startswith("+"):
                array = arrays[0] + float(text[1:])
            else:
                array = _values(text, first.shape[:1] if signature.max_batch_size else ())
            outputs = {name: _tensor(array, datatypes.get(name, "FP32")) for name in names}
        return InferResult(call.model_name, call.model_version or "1", call.request_id, parameters, outputs)

    return answer


def shown(tensor: WireTensor, *, is_batched: bool) -> str:
    """Values of a tensor, with its shape if it is no plain row of numbers."""
    texts = [one.decode() if isinstance(one, bytes) else f"{one:g}" for one in decode(tensor).ravel().tolist()]
    count = len(texts)
    shape = "" if tensor.shape == ((count, 1) if is_batched else (count,)) else str(list(tensor.shape)).replace(" ", "")
    return f"{shape}={','.join(texts)}"


class Router:
    """An executor of the graph over a fake target, and what is sent to it."""

    def __init__(self, world: World, clock: VirtualClock, options: dict[str, str]) -> None:
        self.world, self.clock, self.target = world, clock, FakeTarget()
        more: dict[str, Any] = {"is_pinning_allowed": True} if "pins" in options else {}
        if "draw" in options:
            more["generator"] = FakeRandom(*map(float, options["draw"].split(",")))
        self.plan = world.plan()
        self.runtime = Runtime({"model": self.target}, clock_ns=clock, **more)
        self.executor = GraphExecutor(self.plan, self.runtime)

    async def ask(self, options: dict[str, str], kinds: list[str]) -> list[str]:
        """Send a request; lines of what becomes of it."""
        inputs, signature = {}, self.plan.signature
        for one in signature.inputs:
            text = options.pop(one.name, "-" if one.is_optional else "1")
            if text != "-":
                array = _values(text)
                if not text.startswith(("[", "empty")):
                    array = array.reshape(-1, *[1] * (len(one.dims) if self.world.batch else len(one.dims) - 1))
                inputs[one.name] = _tensor(array, one.datatype)
        named: dict[str, dict[str, str]] = {"header": {}, "parameter": {}}
        for key, value in list(options.items()):
            kind, _, name = key.partition(".")
            if name and kind in named:
                named[kind][name] = value
            elif key not in ("timeout", "cancel", "outputs", "id", "draw", "at_once", "pins"):
                assert any(f'"{key}"' in text for text in self.world.graphs.values()), f"no model '{key}' is called"
                self.target.answers[key] = _script(value, self.world.signature(key))
        self.target.calls.clear()
        self.traces: list[Any] = []
        if "trace" in kinds:
            named["parameter"]["graph_trace"] = "True"
        given = {
            "inputs": inputs,
            "outputs": options["outputs"].split(",") if "outputs" in options else (),
            "request_id": options.get("id", ""),
            "parameters": {name: _parsed(value) for name, value in named["parameter"].items()},
        }
        timeout_ms = float(options["timeout"]) if "timeout" in options else None
        contexts = [
            make.context(timeout_ms=timeout_ms, headers=dict(named["header"]))
            for _ in range(int(options.get("at_once", 1)))
        ]
        self.evaluated: Counter[str] = Counter()
        value_of = CelCondition._value

        def counted(condition: CelCondition, *values: Any) -> bool | str:
            self.evaluated[condition.source] += 1
            return value_of(condition, *values)

        with patch.object(CelCondition, "_value", counted):
            found = await asyncio.gather(*(self._one(given, context, options.get("cancel")) for context in contexts))
        shadows = self.runtime.shadows
        assert shadows.num_inflight == make.num_other_tasks()
        while shadows.num_inflight:  # noqa: ASYNC110  # nobody else waits for a shadow
            await asyncio.sleep(0.001)
        assert (0, 0) == (self.target.num_open, make.num_other_tasks())
        return [*found, *(self._told(kind) for kind in kinds)]

    async def _one(self, given: dict[str, Any], context: CallContext, cancel_ms: str | None) -> str:
        target, start_ms, num_cancelled = self.target, self.clock.elapsed_ms(), len(self.target.cancelled)
        task = asyncio.ensure_future(make.run(self.executor, context=context, **given))
        if cancel_ms is not None:
            asyncio.get_running_loop().call_later(float(cancel_ms) / 1e3, task.cancel)
        try:
            result = await task
            parameters, is_batched = dict(result.parameters), bool(self.world.batch)
            self.traces += json.loads(str(parameters.pop("graph_trace", "[]")))
            outputs = (f"{name}{shown(one, is_batched=is_batched)}" for name, one in result.outputs.items())
            found = " ".join([*outputs, *(f"{k}:{v}" for k, v in parameters.items())]) or "nothing"
        except WeftError as error:
            found = f"{error.code}: {_ERROR_ID.sub('', error.message)}"
            retry_after_ms = getattr(error, "retry_after_ms", None)
            found += f" (retry after {retry_after_ms} ms)" if retry_after_ms else ""
        except asyncio.CancelledError:
            found = "cancelled"
        path = dict(context.trailing_metadata).get("x-graph-path", "")
        time_ms = self.clock.elapsed_ms() - start_ms
        cancelled = sorted(target.cancelled[num_cancelled:])
        time = f" {time_ms:g} ms" if time_ms else ""
        return f"{found} {path}{time}" + (f" ~{','.join(cancelled)}" if cancelled else "")

    def _told(self, kind: str) -> str:
        if kind == "trace":
            entries = [[one.get(key, "") for key in ("path", "status", "fallback_of", "error")] for one in self.traces]
            return f"{kind} " + " | ".join(" ".join(filter(None, entry)) for entry in entries)
        if kind == "evaluated":
            return " | ".join([kind, *(f"{source} *{count}" for source, count in self.evaluated.items())])
        texts = []
        for call in self.target.calls:
            is_batched = bool(self.world.signature(call.model_name).max_batch_size)
            first = next(iter(call.inputs.values()))
            assert call.num_rows == max(first.shape[0] if is_batched else 1, 1)
            inputs = (f"{name}{shown(one, is_batched=is_batched)}" for name, one in call.inputs.items())
            more = {"calls": inputs, "asked": (output.name for output in call.outputs), "called": ()}[kind]
            texts.append(call.model_name + (f"({' '.join(more)})" if kind != "called" else ""))
        return " ".join([kind, *texts])


def _parsed(text: str) -> Any:
    return ast.literal_eval(text) if re.fullmatch(r"-?\d+|True", text) else text


async def check(case: Case, clock: VirtualClock) -> None:
    """Every request of a case has the expected answer."""
    world, router, answers = World(text_of(case)), None, []
    for line, expected in requests_of(case):
        options = {key: value for key, _, value in (token.partition("=") for token in line[3:].split())}
        kinds = [word for word in (each.split()[0] for each in expected) if word in _KINDS]
        try:
            if router is None or line.startswith("---"):
                router = Router(world, clock, options)
            answers.append(await router.ask(options, kinds))
        except GraphError as error:
            answers.append(
                [" ".join(["refused", *sorted({o.code for o in error.diagnostics if o.severity == "error"})])]
            )
    check_requests(case, answers)
