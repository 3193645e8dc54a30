"""Scenes: graphs as text, what their models do, requests, and all that comes of them, on a virtual clock.

A scene is the text of a graph (one that begins with a node has HEADER before it; after ``-- NAME`` comes the text of
another that its steps may name), and lines behind it::

    model NAME [stream] [collects] [batch N] [dims N,-1] [takes A B] [gives A B]: its first call | its second call | ...
    budget N          so many calls of the target may be repeated
    request [at=MS] [take=N hold=MS] [cancel=MS] [timeout=MS] [outputs=A,B] [IN=[1]] [collect] [trace] [PARAMETER=VALUE]

A model takes IN and gives OUT; without a line it echoes its first input. What it does with a call is a list of words:
a number is an answer (``2!`` the final one of a stream, ``5{p=1}`` with parameters), ``+10`` a pause of 10 ms, ``echo``
the input, ``repeat`` as many answers as the input says, ``"no_way."/3,4`` a text, "_" for a blank, for TEXT (which
has strings), and numbers for others, ``none`` no answer at all,
``UNAVAILABLE(gone)`` a failure (behind it ``@120``, when to come back), ``hang`` waits for ever, ``lingers`` does so
and takes 100 ms to be cancelled. The last of several calls repeats.
A scene without a request has one, of IN 0; a request that takes N responses waits ``hold`` ms and leaves.

What is written: each response with its time, the error, trace and path of each request, then calls in order with their
deadlines, what was cancelled, and counters of the steps. Nothing may be left in work.
"""

import ast
import asyncio
import json
import random
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np
from tests.unit.router import make
from tests.unit.router.stream_targets import HEADER, stream_target
from tests.unit.router.virtual_clock import VirtualClock

from weft.base.core import CallContext, InferCall, InferResult, RequestedOutput
from weft.base.errors import RemoteError, WeftError
from weft.base.signature import ModelSignature
from weft.base.tensors import WireTensor, decode, encode
from weft.language import GraphSource
from weft.router.compile import compile_graph
from weft.router.executor import GraphExecutor
from weft.router.runtime import Runtime
from weft.router.target import RetryBudget

_OWN = {"at", "take", "hold", "cancel", "timeout", "outputs", "collect", "trace"}
_NOT_TOLD = {"path", "target", "start_ms", "ms", "status"}
_ERROR_ID = re.compile(r" \(error id \w+\)")


@dataclass
class Model:
    """One model: its signature, and the words of each call."""

    signature: ModelSignature
    calls: list[list[str]]

    @classmethod
    def of(cls, name: str, options: str = "", words: str = "echo") -> "Model":
        """What a line says."""
        given = dict(re.findall(r"(\w+) ([A-Z0-9, -]+?)(?= [a-z]|$)", options))
        dims = ast.literal_eval(given.get("dims", "(-1,)"))
        inputs, outputs = (
            [make.spec(one, "BYTES" if one.startswith("TEXT") else "FP32", size) for one in names.split()]
            for names, size in ((given.get("takes", "IN"), dims), (given.get("gives", "OUT"), (-1,)))
        )
        signature = make.signature(name, inputs, outputs, max_batch_size=int(given.get("batch", 0)))
        signature = replace(signature, is_decoupled="stream" in options, can_collect="collects" in options)
        return cls(signature, [call.split() for call in words.split("|")])

    async def answers(self, call: InferCall, context: CallContext) -> AsyncIterator[Any]:
        """The answers to its next call."""
        words = self.calls.pop(0) if len(self.calls) > 1 else self.calls[0]
        given = next(iter(call.inputs.values()))
        for word in words:
            if word.startswith("+"):
                await asyncio.sleep(float(word[1:]) / 1e3)
            elif word in ("hang", "lingers"):
                try:
                    await asyncio.Event().wait()
                finally:
                    await asyncio.sleep(0.1 if word == "lingers" else 0)
            elif failure := re.fullmatch(r"([A-Z_]+)\((.*)\)(?:@(\d+))?", word):
                raise RemoteError(failure[1], failure[2], retry_after_ms=int(failure[3]) if failure[3] else None)
            elif word == "repeat":
                for _ in range(int(decode(given).ravel()[0])):
                    yield self._result(call, given)
            elif word == "echo":
                yield self._result(call, given)
            elif word != "none":
                form = r'("[^"]*"|[-\d.]+)(/[\d,]*)?(!?)(\{.*\})?'
                value, numbers, final, parameters = re.fullmatch(form, word).groups()  # type: ignore[union-attr]
                value = ast.literal_eval(value.replace("_", " "))
                tensor = make.text(value) if isinstance(value, str) else make.tensor(value)
                others = None if numbers is None else make.tensor(*map(float, filter(None, numbers[1:].split(","))))
                named = dict(one.split("=") for one in parameters[1:-1].split(",")) if parameters else {}
                yield self._result(
                    call, tensor, {k: int(one) for k, one in named.items()}, others, is_final=bool(final)
                )

    def _result(
        self, call: InferCall, tensor: Any, parameters: Any = None, others: Any = None, *, is_final: bool = False
    ) -> InferResult:
        specs = self.signature.outputs
        outputs = {one.name: others if others and one.datatype != "BYTES" else tensor for one in specs}
        return InferResult(call.model_name, "1", "", parameters or {}, outputs, is_final=is_final)


@dataclass
class Scene:
    """A scene that is read from its text; catalog and other graphs of its graph."""

    texts: dict[str, str]
    models: dict[str, Model]
    requests: list[dict[str, str]]
    budget: RetryBudget | None = None
    lines: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, text: str) -> "Scene":
        """What a text says."""
        models = re.findall(r"^model ([\w-]+)([\w ,-]*): (.*)\n", text + "\n", re.MULTILINE)
        requests = re.findall(r"^request(.*)$", text, re.MULTILINE)
        budget = re.search(r"^budget (\d+)$", text, re.MULTILINE)
        graphs = re.sub(r"^(model|request|budget)\b.*$", "", text, flags=re.MULTILINE).split("\n-- ")
        texts = {"": HEADER + graphs[0] if graphs[0].startswith("node") else graphs[0]}
        texts |= {name: other for name, _, other in (one.partition("\n") for one in graphs[1:])}
        return cls(
            texts,
            {name: Model.of(name, options, words) for name, options, words in models},
            [dict((*one.split("=", 1), "")[:2] for one in words.split()) for words in requests or [""]],
            RetryBudget(max_tokens=int(budget[1])) if budget else None,
        )

    def find(self, name: str, version: str) -> Any:
        """As ``Catalog.find``: every name is a model's, unless it is that of a graph."""
        if name in self.texts:
            return None
        return "model", self.models.setdefault(name, Model.of(name)).signature

    def names(self) -> list[str]:
        """As ``Catalog.names``."""
        return list(self.models)


class _Others:
    """The other graphs of a scene, in version 1."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.texts = texts

    def find(self, name: str, version: str) -> GraphSource | None:
        """As ``GraphLookup.find``."""
        return GraphSource(self.texts[name], f"{name}.pbtxt", name, "1") if name in self.texts else None

    def names(self) -> list[str]:
        """As ``GraphLookup.names``."""
        return list(self.texts)


class _Middle(random.Random):
    """Chance whose pauses fall in the middle."""

    def uniform(self, a: float, b: float) -> float:
        return (a + b) / 2


async def played(text: str) -> str:
    """All that comes of a scene."""
    scene, clock, target = Scene.read(text), VirtualClock(), stream_target()
    for name, model in scene.models.items():
        target.streams[name] = model.answers
        target.answers[name] = _unary(model)
    plan = compile_graph(GraphSource(scene.texts[""], "graph.pbtxt"), scene, _Others(scene.texts))
    budgets = {"model": scene.budget} if scene.budget else {}
    runtime = Runtime({"model": target}, clock_ns=clock, generator=_Middle(1), budgets=budgets)
    executor = GraphExecutor(plan, runtime)
    requests = [_Request(words, executor, clock, target) for words in scene.requests]
    await asyncio.gather(*(one.run() for one in requests))
    await asyncio.sleep(1)  # shadows go on
    await runtime.close()
    assert (0, 0) == (target.num_open, make.num_other_tasks())
    lines = requests[0].lines
    if len(requests) > 1:
        lines = [f"{i} | {line}" for i, one in enumerate(requests, 1) for line in one.lines]
    lines += ["collects"] * plan.signature.can_collect
    lines.append(f"calls {' '.join(_runs(map(_called, target.calls, target.contexts))) or 'none'}")
    lines += [f"cancelled {' '.join(sorted(target.cancelled))}"] * bool(target.cancelled)
    for counters in runtime.step_counters:
        figures = {**counters.failures, **counters.events}
        if any(figures.values()):
            lines.append(f"{counters.path} " + " ".join(f"{name}={count}" for name, count in figures.items() if count))
    return "\n".join(lines)


def shown(tensor: WireTensor) -> str:
    """The values of a tensor."""
    values = decode(tensor).ravel().tolist()
    return ",".join(one.decode() if isinstance(one, bytes) else f"{one:g}" for one in values)


def _unary(model: Model) -> Any:
    async def answer(call: InferCall, context: CallContext) -> InferResult:
        return await anext(model.answers(call, context))

    return answer


def _called(call: InferCall, context: CallContext) -> str:
    if context.deadline_ns is None:
        return call.model_name
    return f"{call.model_name}({(context.deadline_ns - 10**12) / 1e6:g})"


def _runs(names: Any) -> list[str]:
    counted = [(name, len(list(group))) for name, group in groupby(names)]
    return [name if count == 1 else f"{name}*{count}" for name, count in counted]


class _Request:
    """One request, and the lines that it has been told."""

    def __init__(self, words: Mapping[str, str], executor: GraphExecutor, clock: VirtualClock, target: Any) -> None:
        self.words, self.executor, self.clock, self.target = words, executor, clock, target
        self.lines: list[str] = []

    async def run(self) -> None:
        """Wait for its time, and do as its words say."""
        await asyncio.sleep(float(self.words.get("at", 0)) / 1e3)
        timeout = self.words.get("timeout")
        context = make.context(timeout_ms=float(timeout) if timeout else None)
        task = asyncio.ensure_future(self._answered(context))
        if "cancel" in self.words:
            asyncio.get_running_loop().call_later(float(self.words["cancel"]) / 1e3, task.cancel)
        try:
            await task
        except WeftError as error:
            self._tell(f"{error.code}: {_ERROR_ID.sub('', error.message)}")
        except asyncio.CancelledError:
            self._tell("cancelled")
        self.lines += [f"path {text}" for name, text in context.trailing_metadata if name == "x-graph-path"]

    async def _answered(self, context: CallContext) -> None:
        inputs = {b.name: make.tensor(0) for b in self.executor.plan.root.inputs}
        for name in inputs.keys() & self.words.keys():
            rows = self.words[name]
            values = np.zeros((0, 1)) if rows == "empty" else np.asarray(ast.literal_eval(rows))
            inputs[name] = encode(values.astype(np.float32))
        parameters: dict[str, Any] = {
            name: int(value) if value.isdigit() else value
            for name, value in self.words.items()
            if name not in _OWN and name not in inputs
        }
        parameters |= {"graph_trace": True} if "trace" in self.words else {}
        named = self.words.get("outputs")
        outputs = tuple(RequestedOutput(one, {}) for one in named.split(",")) if named else ()
        call = InferCall("g", "", "r", parameters, inputs, outputs)
        if "collect" in self.words or not self.executor.plan.signature.is_decoupled:
            execution = self.executor.begin(call, context, is_collected="collect" in self.words)
            await self._unary(execution, call, context)
            return
        num_left = int(self.words.get("take", 10**9))
        async with aclosing(self.executor.stream(call, context)) as results:
            while num_left and (result := await anext(results, None)) is not None:
                self._tell_result(result)
                num_left -= 1
            if not num_left:
                await asyncio.sleep(float(self.words.get("hold", 0)) / 1e3)
                self._tell(f"leaves, {self.target.num_made} made")

    async def _unary(self, execution: Any, call: InferCall, context: CallContext) -> None:
        try:
            await execution.work()
            self._tell_result(self.executor.result(execution, call))
        finally:
            self.executor.end(execution, context)

    def _tell(self, text: str) -> None:
        now_ms = self.clock.elapsed_ms()
        self.lines.append(f"{now_ms:g} ms {text}" if now_ms else text)

    def _tell_result(self, result: InferResult) -> None:
        parameters = dict(result.parameters)
        trace = parameters.pop("graph_trace", None)
        words = [f"{name}={shown(tensor)}" for name, tensor in result.outputs.items()]
        words += [f"{{{name}: {value}}}" for name, value in parameters.items()]
        words += ["final"] * (result.is_final and self.executor.plan.signature.is_decoupled)
        self._tell(" ".join(words) or "nothing")
        for entry in json.loads(str(trace)) if trace else ():
            told = {name: one for name, one in entry.items() if name not in _NOT_TOLD and one not in ("", None)}
            times = [entry[name] for name in ("start_ms", "ms")]
            text = " ".join(
                [f"{name}={one}" for name, one in told.items()] + ["{:g}+{:g} ms".format(*times)] * any(times)
            )
            self.lines.append(f"trace {entry['path']} {entry['status']} {text}".rstrip())
