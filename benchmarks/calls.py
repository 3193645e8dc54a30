"""``python -m benchmarks.calls``: the Python calls that one plain request takes, counted.

A model service and a router run in this process, each behind gRPC on a socket of its own, and a client sends one
request at a time. A call is the start of a frame of a file under ``services/``; a coroutine that continues after an
await is no new call. The calls of the router's tasks are the router's, those of all other tasks and threads the model
service's. The counts are exact and do not depend on the machine.
"""

import argparse
import asyncio
import contextvars
import logging
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from types import CodeType, FrameType
from typing import Any

import grpc
import numpy as np
from grpc.aio import _channel

from benchmarks import fused
from benchmarks.report import table
from weft.backends import BACKENDS
from weft.base.core import CallContext, InferCall
from weft.base.tensors import encode
from weft.router.core import RouterCore
from weft.router.targets.connect import make_target
from weft.serving.core import ServingCore
from weft.v2.client.wires import WireName
from weft.v2.server.server import ClosableCore, add_services
from weft.v2.server.servicer import Extension
from weft_protos import grpc_service_pb2 as pb
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

ROOT = Path(__file__).resolve().parents[1]
_OWN = str(ROOT / "services")
_NEVER_S = 3600.0
_NUM_WARM_UP = 10
#: How long the servers have after an answer to finish what the request leaves behind, in seconds.
_SETTLE_S = 0.02

MODEL_SERVICE, ROUTER = "model service", "router"
_SIDE: "contextvars.ContextVar[str]" = contextvars.ContextVar("side", default=MODEL_SERVICE)

_STUB_CALL = _channel.UnaryUnaryMultiCallable.__call__.__code__

_GRAPH = """
platform: "ensemble" max_batch_size: 64
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ 16 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 16 ] } ]
ensemble_scheduling { STEPS }
"""
_STEP = """step [ { model_name: "identity" model_version: -1
    input_map { key: "INPUT0" value: "INPUT" } output_map { key: "OUTPUT0" value: "OUTPUT" } } ]
"""


class CallCounter:
    """Counts the calls of own frames while it records.

    Attributes:
        calls: Number of calls by side, thread and function since the last ``record``.
        depth: Most own frames on the stack when the router called a gRPC stub since then.
    """

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, int, CodeType]] = Counter()
        self.depth = 0
        self._is_recording = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Profile this thread, and every thread that starts in the block."""
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)
        try:
            yield
        finally:
            self._is_recording = False
            threading.setprofile(None)
            sys.setprofile(None)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Count the calls of the block."""
        self.calls, self.depth = Counter(), 0
        self._is_recording = True
        try:
            yield
        finally:
            self._is_recording = False

    def of(self, side: str) -> int:
        """Number of calls of one side."""
        return sum(count for (of_side, _, _), count in self.calls.items() if of_side == side)

    def _on_event(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or not self._is_recording:
            return
        code, side = frame.f_code, _SIDE.get()
        if code is _STUB_CALL and side == ROUTER:
            self.depth = max(self.depth, _num_own_frames(frame))
        if code.co_filename.startswith(_OWN) and _is_start(frame):
            self.calls[side, threading.get_ident(), code] += 1  # of one thread each, so that no count is lost


def _is_start(frame: FrameType) -> bool:
    """Whether the frame begins: ``RESUME 0``; the argument is another one after a yield or an await."""
    return frame.f_code.co_code[frame.f_lasti + 1] == 0


def _num_own_frames(frame: FrameType | None) -> int:
    num_frames = 0
    while frame is not None:
        num_frames += frame.f_code.co_filename.startswith(_OWN)
        frame = frame.f_back
    return num_frames


@dataclass(frozen=True, slots=True)
class Count:
    """Calls of one request.

    Attributes:
        model_service, router: Medians over the requests.
        is_exact: Whether every request took as many.
        by_function: Of the last request: number of calls by side and function.
    """

    model_service: int
    router: int
    is_exact: bool
    by_function: "Counter[tuple[str, str]]"

    @property
    def both(self) -> int:
        """Of model service and router."""
        return self.model_service + self.router


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table; ``goal`` and ``before`` are None for a figure that has no goal.

    Attributes:
        case: What was counted.
        value: Number of calls, or of frames.
        goal: At most so many.
        before: The same figure before the restructuring of the packages into layers.
        is_exact: Whether every request took as many.
    """

    case: str
    value: int
    goal: int | None = None
    before: int | None = None
    is_exact: bool = True

    @property
    def is_met(self) -> bool:
        """Whether the value is within the goal, if there is one."""
        return self.goal is None or self.value <= self.goal


@dataclass(frozen=True, slots=True)
class Counts:
    """What was counted: identity on the model service alone, through the router, and graphs of one and three steps.

    Attributes:
        nesting: Own frames on the stack of the router, from the RPC's method to the stub of the target, in a graph.
        in_process: Graphs of one and of four steps in one process without a wire, from ``FusedCore.infer`` on; of a
            Python model that executes on the event loop.
    """

    alone: Count
    passed_through: Count
    one_step: Count
    three_steps: Count
    nesting: int
    in_process: tuple[int, int]

    def lines(self) -> list[Line]:
        """The figures beside their goals."""
        alone, one, three, through = self.alone, self.one_step, self.three_steps, self.passed_through
        return [
            Line("identity, model service alone", alone.model_service, 80, 141, alone.is_exact),
            Line("graph of one step, router", one.router, 80, 148, one.is_exact),
            Line("graph of one step, both", one.both, 160, 301, one.is_exact),
            Line("graph of three steps, both", three.both, 370, 697, three.is_exact),
            Line("graph of one step, one process", self.in_process[0], 125),
            Line("one more step, one process", (self.in_process[1] - self.in_process[0]) // 3, 85),
            Line("nesting from the RPC to the stub, router", self.nesting, 8, 13),
            Line("graph of three steps, router", three.router, is_exact=three.is_exact),
            Line("identity passed through, router", through.router, is_exact=through.is_exact),
            Line("identity passed through, both", through.both, is_exact=through.is_exact),
        ]


async def count(num_requests: int = 8) -> Counts:
    """Start the services and count; the profiler of this thread is taken for as long."""
    counter = CallCounter()
    with counter.installed(), tempfile.TemporaryDirectory() as folder:
        for num_steps, name in ((1, "one"), (3, "three")):
            _write_graph(Path(folder), name, num_steps)
        models = ServingCore(
            ROOT / "model_repository" / "model", BACKENDS, model_control="explicit", load_models=["identity"]
        )
        async with _serving(models, models.extension, MODEL_SERVICE) as model_address:
            router = RouterCore(
                Path(folder), [make_target("model", model_address, wire=WireName.GRPCIO)], poll_s=_NEVER_S
            )
            async with _serving(router, router.extension, ROUTER) as router_address:
                router._rollouts.hold()  # it looks twice a second, in some request or other
                with counter.recording():
                    await _ask(router_address, "one", num_requests=1)
                nesting = counter.depth
                in_process = await _count_in_process(counter, num_requests)
                return Counts(
                    await _count(counter, model_address, "identity", num_requests),
                    await _count(counter, router_address, "identity", num_requests),
                    await _count(counter, router_address, "one", num_requests),
                    await _count(counter, router_address, "three", num_requests),
                    nesting,
                    in_process,
                )


@asynccontextmanager
async def _serving(core: ClosableCore, extend: Any, side: str) -> AsyncIterator[str]:
    """The address where a core answers; its tasks, and those that they start, are of one side."""
    token = _SIDE.set(side)
    server = grpc.aio.server()
    await core.start()
    extension: Extension = extend()
    add_services(server, core, f"weft.{side}", extension)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    _SIDE.reset(token)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
        await core.close(grace_s=0)


async def _count(counter: CallCounter, address: str, name: str, num_requests: int) -> Count:
    await _ask(address, name, _NUM_WARM_UP)
    sides: list[tuple[int, int]] = []
    for _ in range(num_requests):
        with counter.recording():
            await _ask(address, name, 1)
        sides.append((counter.of(MODEL_SERVICE), counter.of(ROUTER)))
    by_function: Counter[tuple[str, str]] = Counter()
    for (side, _, code), number in counter.calls.items():
        where = Path(code.co_filename).relative_to(_OWN).parts[1:]
        by_function[side, f"{'/'.join(where)}:{code.co_firstlineno} {code.co_qualname}"] += number
    of_models, of_router = zip(*sides, strict=True)
    return Count(median_low(of_models), median_low(of_router), len(set(sides)) == 1, by_function)


async def _count_in_process(counter: CallCounter, num_requests: int) -> tuple[int, int]:
    """The fewest of several: on a busy machine some requests also warn that their model held the event loop."""
    numbers = []
    async with fused.serving() as core:
        for name in ("identity_py_1", "identity_py_4"):
            call = InferCall(name, inputs={"INPUT0": encode(np.zeros((1, 16), np.float32))})
            for _ in range(_NUM_WARM_UP):
                await core.infer(call, CallContext())
            fewest = sys.maxsize
            for _ in range(num_requests):
                with counter.recording():
                    await core.infer(call, CallContext())
                fewest = min(fewest, counter.of(MODEL_SERVICE))
            numbers.append(fewest)
    return numbers[0], numbers[1]


async def _ask(address: str, name: str, num_requests: int) -> None:
    """Send requests one after another; the last has left nothing to be done."""
    request = pb.ModelInferRequest(model_name=name, raw_input_contents=[bytes(64)])
    request.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 16])
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)
        for _ in range(num_requests):
            await stub.ModelInfer(request)
            await asyncio.sleep(_SETTLE_S)


def _write_graph(folder: Path, name: str, num_steps: int) -> None:
    """Identities in a row, in the ensemble syntax of Triton Inference Server."""
    tensors = ["INPUT0", *(f"between_{i}" for i in range(1, num_steps)), "OUTPUT0"]
    steps = (
        _STEP.replace('"INPUT"', f'"{tensors[i]}"').replace('"OUTPUT"', f'"{tensors[i + 1]}"') for i in range(num_steps)
    )
    (folder / name / "1").mkdir(parents=True)
    (folder / name / "config.pbtxt").write_text(f'name: "{name}"' + _GRAPH.replace("STEPS", "".join(steps)))


def render(lines: Sequence[Line]) -> str:
    """A table with one line for each figure."""
    cells = [["Python calls of one request", "now", "goal", "before", ""]]
    for line in lines:
        goal, before = ("" if figure is None else str(figure) for figure in (line.goal, line.before))
        remark = "" if line.is_met else "missed"
        cells.append([line.case, f"{line.value}{'' if line.is_exact else ' (varies)'}", goal, before, remark])
    return table(cells, left_columns={0, 4})


def render_functions(title: str, by_function: "Counter[tuple[str, str]]") -> str:
    """Calls by function, most first."""
    cells = [[str(number), side, function] for (side, function), number in by_function.most_common()]
    return f"{title}\n{table(cells, left_columns={1, 2})}"


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every goal is met, 1 when one is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.calls", description="Python calls that one request takes.")
    parser.add_argument("--verbose", action="store_true", help="list the calls of each case by function")
    options = parser.parse_args(argv)
    logging.disable()
    try:
        counts = asyncio.run(count())
    finally:
        logging.disable(logging.NOTSET)
    if options.verbose:
        print(render_functions("identity, model service alone", counts.alone.by_function), end="\n\n")
        print(render_functions("identity passed through", counts.passed_through.by_function), end="\n\n")
        print(render_functions("graph of one step", counts.one_step.by_function), end="\n\n")
        print(render_functions("graph of three steps", counts.three_steps.by_function), end="\n\n")
    lines = counts.lines()
    print(render(lines))
    return 0 if all(line.is_met for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
