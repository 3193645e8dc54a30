"""Runs the cases of a ``cases.pbtxt``, as ``protos/graph_test.proto`` has it, on the executor and a fake clock."""

import asyncio
import contextlib
import json
import random
import re
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import Message
from typing_extensions import override

from weft.authoring.fakes import Fake, FakeCore, fake
from weft.authoring.running import LoadedGraph, request_of
from weft.base.core import CallContext, InferCall, InferResult
from weft.base.errors import InvalidArgumentError, RemoteError, WeftError
from weft.base.repository.layout import is_version
from weft.base.signature import ModelSignature
from weft.base.tensors import array_of, datatype_of
from weft.base.text.pbtxt import Diagnostic, PbtxtError, Positions, diagnostic, parse
from weft.base.text.suggestion import suggestion
from weft.base.validation import scheduling_parameters, validate
from weft.language.plan import CallPlan, steps_of
from weft.language.syntax.file import GraphLookup, GraphSource, ModelCatalog
from weft.router.compile import compile_graph
from weft.router.executor import GraphExecutor
from weft.router.reporting.path import PATH_HEADER, SKIPPED
from weft.router.repository.files import GraphRepository
from weft.router.runtime import Runtime
from weft.router.targets.in_process import InProcessTarget
from weft.testing.golden import compare, golden_text, plain
from weft.tools.explain.paths import TimelessLoop
from weft.tools.offline import GRAPH_FOLDER, OfflineCatalog
from weft.tools.request import parameter_value
from weft.v2.client.answer import Answer
from weft.wire.interface import grpc
from weft_protos import graph_test_pb2 as pb


@dataclass
class Suite:
    """The cases of a file, with one version of the graph that they are beside.

    Attributes:
        source, catalog, graphs: The graph, and what it may call.
        models, fakes: Signatures of what the graph calls, and which of them are not real.
        steps: Paths of the steps that a name means.
    """

    path: Path
    test: pb.GraphTest
    positions: Positions
    source: GraphSource
    catalog: ModelCatalog
    graphs: GraphLookup | None

    def __post_init__(self) -> None:
        self.plan = compile_graph(self.source, self.catalog, self.graphs)
        self.title = f"{self.plan.signature.name}/{self.plan.signature.version}"
        self.models: dict[str, ModelSignature] = {}
        self.steps: dict[str, set[str]] = defaultdict(set)
        for _, step in steps_of(self.plan.root):
            if isinstance(step.action, CallPlan):
                self.models[step.action.model_name] = step.action.signature
            parts = step.path.split("/")
            for name in (step.name, *("/".join(parts[begin:]) for begin in range(len(parts)))):
                self.steps[name].add(step.path)
        self.fakes = self.models.keys() & (self.models if self.test.models else self.test.fake)
        file, places = str(self.path), self.positions
        if found := [diagnostic(file, places, places.find(at), text) for at, text in self._wrong()]:
            raise PbtxtError(found)

    def run(self, part: str = "", *, is_update: bool = False) -> list["CaseResult"]:
        """Run the cases with ``part`` in their names. Raises WeftError: A model that is real cannot be loaded."""
        fakes = {name: fake(zeros_of(self.models[name])) for name in self.fakes}
        results = [CaseResult(self, case) for case in self.test.case if part in case.name]
        with LoadedGraph(self, fakes) if self.models.keys() - self.fakes else contextlib.nullcontext() as models:
            for result in results:
                result.models, start_ns = models, time.perf_counter_ns()
                with asyncio.Runner(loop_factory=TimelessLoop) as runner:
                    runner.run(result.run())
                result.faults = result.faults or [*result.compare(is_update=is_update)]
                result.ms = (time.perf_counter_ns() - start_ns) / 1e6
        return results

    def request(self, case: pb.Case) -> tuple[InferCall, CallContext]:
        """The request of a case, without its deadline. Raises InvalidArgumentError."""
        parameters = {name: parameter_value(text) for name, text in case.parameter.items()}
        return request_of(
            self.plan.signature,
            {one.name: self.value_of(one) for one in case.input},
            parameters=parameters | ({"priority": case.priority} if case.priority else {}),
            headers=case.header,
            request_id=case.request_id,
        )

    def value_of(self, given: pb.Values) -> Any:
        """The elements as a list, nested like the JSON or by ``dims``; None: there are none. Raises as ``request``."""
        folder, text = self.path.parent, given.json
        try:
            if text:
                return json.loads((folder / text[1:]).read_bytes() if text[0] == "@" else text)
            found = [*given.number, *given.integer, *given.boolean, *given.text]
            found += [(folder / name).read_bytes() for name in given.file]
            if not found and 0 not in given.dims:
                return None
            return np.array([*found, None], np.object_)[:-1].reshape(given.dims or -1).tolist()
        except (ValueError, RecursionError, OSError) as error:
            raise InvalidArgumentError(f"value of '{given.name}': {error}") from None

    def _wrong(self) -> Iterator[tuple[str, str]]:
        """What is wrong in the file, with the field's path."""
        if not self.test.case:
            yield "", 'there is no case; write case { name: "..." input { ... } output { ... } }'
        names = list[str]()
        for number, case in enumerate(self.test.case):
            if not case.name or _file_name(case.name) in names:
                yield (
                    f"case[{number}].name",
                    f"each case needs a name of its own, in letters and digits, got '{case.name}'",
                )
            names.append(_file_name(case.name))
            try:
                call, _ = self.request(case)
                if case.error != InvalidArgumentError.code:  # else what is wrong may be what is tested
                    validate(call, self.plan.signature)
            except InvalidArgumentError as error:
                text = error.message.removeprefix("[request id: <id_unknown>] ")
                at = next((f".input[{n}]" for n, one in enumerate(case.input) if f"'{one.name}'" in text), "")
                yield f"case[{number}]{at}", text
        outputs = ("output", [one.name for one in self.plan.signature.outputs])
        known: dict[str, tuple[str, Collection[str]]] = dict.fromkeys(("step", "ran", "not_ran"), ("step", self.steps))
        known |= dict.fromkeys(("model", "fake"), ("model", self.models))
        known |= dict.fromkeys(("status", "error"), ("error status", grpc.StatusCode.__members__.keys() - {"OK"}))
        for place, field_name, name in _leaves(self.test):
            is_output = field_name == "name" and ".output[" in place and "fault[" not in place
            what, names = outputs if is_output else known.get(field_name, ("", [name]))
            if name not in names:
                yield place, f"graph '{self.title}' has no {what} '{name}'{suggestion(name, names)}"


def _leaves(message: Message, at: str = "") -> Iterator[tuple[str, str, Any]]:
    """Place, field and value of each field that is no message."""
    for one_field, value in message.ListFields():
        for number, one in enumerate(value if one_field.is_repeated else [value]):
            place = f"{at}{one_field.name}[{number}]" if one_field.is_repeated else at + one_field.name
            yield from _leaves(one, f"{place}.") if isinstance(one, Message) else [(place, one_field.name, one)]


def suites_of(path: Path, catalogs: dict[Path, OfflineCatalog]) -> list[Suite]:
    """The cases of a file, for each version of the graph that it is beside. Raises PbtxtError or OSError."""
    test, positions = parse(path.read_bytes(), pb.GraphTest(), file=str(path))
    folder = path.resolve().parent
    version, folder = (folder.name, folder.parent) if is_version(folder.name) else ("", folder)
    root = folder.parent
    graphs, repository = GraphRepository(root), root.parent if root.name == GRAPH_FOLDER else root
    files = [one for one in graphs.scan().get(folder.name, ()) if version in ("", one.version)]
    if not files:
        fault = "it belongs to no graph; its place is graphs/NAME/VERSION/, beside graph.pbtxt, or graphs/NAME/"
        raise PbtxtError([Diagnostic(str(path), 0, 0, fault)])
    catalog = catalogs.get(repository) or catalogs.setdefault(repository, OfflineCatalog(repository))
    return [Suite(path, test, positions, one.read(), catalog, graphs) for one in files]


@dataclass
class CaseResult:
    """A case, and what came of it.

    Attributes:
        ms, graph_ms: Real time, and time of the request on the fake clock.
        statuses: How runs of steps ended, by path.
        faults: What is not as expected; none: it passed.
    """

    suite: Suite
    case: pb.Case
    models: LoadedGraph | None = None
    happening: Sequence[list[Any]] = ()
    ms: float = 0.0
    graph_ms: float = 0.0
    path: str = ""
    answers: Sequence[Answer] = ()
    error: WeftError | None = None
    statuses: dict[str, set[str]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        """Names of graph and case."""
        return f"{self.suite.title}  {self.case.name}"

    async def run(self) -> None:
        """Send the request, on a ``TimelessLoop``."""
        loop, case, suite = asyncio.get_running_loop(), self.case, self.suite
        self.happening = [[one, one.times or -1] for one in (*case.fault, *suite.test.fault)]
        core: Any = partial(StepCore, self)
        runtime = Runtime(
            {},
            lambda: round(loop.time() * 1e9),
            random.Random(case.seed),  # noqa: S311  # no secret
            is_pinning_allowed=True,
            target_of=lambda path, call: InProcessTarget(call.target, core(path, call), clock_ns=runtime.clock_ns),
        )
        executor = GraphExecutor(suite.plan, runtime)
        for _ in range(case.requests or 1):
            start_ns, (call, context) = runtime.clock_ns(), suite.request(case)
            answers, self.error = list[InferResult](), None
            try:
                context.priority, timeout_us = scheduling_parameters(call.parameters)
                limits_us = [limit_us for limit_us in (case.timeout_ms * 1000, timeout_us) if limit_us]
                context.deadline_ns = start_ns + min(limits_us) * 1000 if limits_us else None
                call.num_rows = validate(call, suite.plan.signature)
                if suite.plan.signature.is_decoupled:
                    async for answer in executor.stream(call, context):
                        answers.append(answer)  # those before an error count too
                else:
                    answers.append(await executor.execute(call, context))
            except WeftError as error:
                self.error = error
            self.answers = [Answer(one, {}) for one in answers if not one.is_null]
            self.graph_ms = (runtime.clock_ns() - start_ns) / 1e6
            self.path = dict(context.trailing_metadata).get(PATH_HEADER, "")
        while runtime.shadows.num_inflight:  # noqa: ASYNC110  # the clock is a fake
            await asyncio.sleep(0.001)
        for one in runtime.step_counters:
            self.statuses[one.path] = {*one.failures, *(["OK"] if any(one.latency.counts) else [])}

    def compare(self, *, is_update: bool) -> Iterator[str]:
        """What is not as the case expects."""
        case, suite, error = self.case, self.suite, self.error
        got = f"{error.code}: {error.message}" if error is not None else "an answer"
        if not (got.startswith(f"{case.error}: ") and case.message in got if case.error else error is None):
            yield f"expected {f'{case.error} {case.message}'.strip() or 'an answer'}, got {got}"
        expected = [one.output for one in case.response] or [case.output] * len(self.answers)
        if len(expected) != len(self.answers) and (error is None or case.response):
            yield f"expected {len(expected)} responses, got {len(self.answers)}"
        if case.golden and (rest := _golden_file(suite, case, len(self.answers))).is_file():
            yield f"{rest} is of a response that did not come; remove it if that is right"
        for number, (values, answer) in enumerate(zip(expected, self.answers, strict=False)):
            checks = [partial(_check, one, answer, suite) for one in values]
            if case.golden:
                checks.append(partial(_check_golden, answer, _golden_file(suite, case, number), is_update=is_update))
            for check in checks:
                try:
                    check()
                except (AssertionError, WeftError) as failure:
                    yield str(failure).strip()
        if case.path not in ("", self.path):
            yield f"expected path {case.path}"
        ran = {path for path, statuses in self.statuses.items() if statuses - {SKIPPED}}
        yield from (f"step '{one}' did not run" for one in case.ran if not suite.steps[one] & ran)
        yield from (f"step '{one}' ran" for one in case.not_ran if suite.steps[one] & ran)
        if case.HasField("took_ms") and case.took_ms != round(self.graph_ms):
            yield f"expected to take {case.took_ms} ms on the fake clock, took {self.graph_ms:g}"


def _check(expected: pb.Values, answer: Answer, suite: Suite) -> None:
    """Raise AssertionError unless an output is as expected."""
    name, array = expected.name, answer.get(expected.name)
    if (array is None) != expected.absent:
        raise AssertionError(f"output '{name}' is {'not ' if array is None else ''}there")
    if array is None:
        return
    value, datatype = suite.value_of(expected), datatype_of(array)
    shape = [-1 if dim == -1 else size for dim, size in zip([*expected.dims, *array.shape], array.shape, strict=False)]
    places = array.argmax(-1).ravel().tolist() if expected.top_1 and array.ndim and array.size else []
    for what, wanted, got in (("shape", expected.dims, shape), ("the greatest at", expected.top_1, places)):
        if wanted and [*wanted] != got:
            raise AssertionError(f"output '{name}': expected {what} {[*wanted]}, got {got}")
    if expected.contains and not all(expected.contains in str(plain(one)) for one in array.flat):
        raise AssertionError(f"output '{name}': expected {expected.contains!r} in {[*map(plain, array.flat)]}")
    if value is not None:
        elements = array_of(value, datatype, what=f"value of '{name}'")
        kept = {"datatype": datatype, "shape": array.shape if elements.size == array.size else elements.shape}
        text = json.dumps({name: kept | {"data": [*map(plain, elements.flat)]}})
        compare({name: array}, text, "the case", rtol=expected.rtol, atol=expected.atol)


def _file_name(title: str) -> str:
    return re.sub(r"[^\w.]", "_", title)


def _golden_file(suite: Suite, case: pb.Case, number: int) -> Path:
    return suite.path.parent / "golden" / f"{_file_name(f'{case.name}.{number}')}.json"


def _check_golden(answer: Answer, file: Path, *, is_update: bool) -> None:
    if is_update:
        file.parent.mkdir(exist_ok=True)
        file.write_text(golden_text(answer), encoding="utf-8")
    if not file.is_file():
        raise AssertionError(f"there is no {file}; weft test --update writes it")
    compare(answer, file.read_text(encoding="utf-8"), str(file), rtol=1e-5, atol=1e-6)


class StepCore(FakeCore):
    """Answers the calls of one step: by a fault, a fake, or the real model."""

    def __init__(self, run: CaseResult, path: str, call: CallPlan) -> None:
        super().__init__({})
        self.faults: list[Any] = run.faults
        self._run, self._suite, self._path, self._signature = run, run.suite, path, call.signature

    @override
    async def stream_infer(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        fault, models = self._fault(call.model_name), self._run.models
        is_fake = fault.status or fault.output or fault.response or call.model_name in self._suite.fakes
        if models is not None and not is_fake:
            await asyncio.sleep(fault.slow_ms / 1000)
            for result in models.ask(call, CallContext(headers=context.headers)):
                yield result
            return
        error = RemoteError(fault.status, fault.message or "a fault of the case") if fault.status else None
        self._fakes = {call.model_name: (Fake(error or self._answers(fault), fault.slow_ms), self._signature)}
        async for result in super().stream_infer(call, context):
            yield result

    async def _answers(self, fault: pb.Fault) -> AsyncGenerator[dict[str, Any], None]:
        for values in [one.output for one in fault.response] or [fault.output]:
            yield zeros_of(self._signature) | {one.name: self._suite.value_of(one) for one in values}

    def _fault(self, model: str) -> pb.Fault:
        """What happens to the next call; empty if nothing does."""
        for entry in self._run.happening:
            fault: pb.Fault = entry[0]
            around = tuple(f"{one}/" for one in self._suite.steps[fault.step]) if fault.step else ""
            if entry[1] and fault.model in ("", model) and f"{self._path}/".startswith(around):
                entry[1] -= 1
                return fault
        return pb.Fault()


def zeros_of(signature: ModelSignature) -> dict[str, Any]:
    """What a fake answers: zeros and empty strings."""
    return {one.name: {"BYTES": b"", "BOOL": False}.get(one.datatype, 0) for one in signature.outputs}


def cases(graph: Any, text: str = "") -> list[CaseResult]:
    """Run the cases of a file, or of a text with a graph made in Python. Raises AssertionError: A case fails."""
    if isinstance(graph, str | Path):
        suites = suites_of(Path(graph), {})
    else:
        parsed = parse(text, pb.GraphTest(), file="cases")
        suites = [Suite(Path("cases"), *parsed, graph.source, graph.catalog, graph.graphs)]
    results = [one for suite in suites for one in suite.run()]
    if failed := [f"{one.title}: {fault}" for one in results for fault in one.faults]:
        raise AssertionError("\n".join(failed))
    return results
