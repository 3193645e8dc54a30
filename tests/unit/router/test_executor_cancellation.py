"""A request is cancelled after each turn of the loop that it takes, for every graph of ``cancelled.txt``."""

import asyncio
import gc
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
from tests.case_files import Case, cases
from tests.unit.router import make
from tests.unit.router.fake_random import FakeRandom
from tests.unit.router.fake_target import FakeTarget
from tests.unit.router.virtual_clock import VirtualClock

from weft.base.core import CallContext, InferCall
from weft.base.errors import RemoteError, WeftError
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import WireTensor, decode, encode
from weft.language import GraphSource
from weft.language.plan import GraphPlan
from weft.router.compile import compile_graph
from weft.router.executor import GraphExecutor
from weft.router.runtime import Runtime

_HEADER = """
name: "g" platform: "graph" max_batch_size: 4
input  [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""


class Models:
    """Signatures; all but `judge` and `add` take X and give Y."""

    def find(self, model_name: str, version: str) -> tuple[str, ModelSignature]:
        """As `Catalog.find`."""
        inputs = [TensorSpec("X", "FP32", (1,))]
        if model_name == "add":
            inputs.append(TensorSpec("Z", "FP32", (1,)))
        if model_name == "judge":
            inputs = [TensorSpec("S", "FP32", (3, 1)), TensorSpec("MASK", "BOOL", (3,))]
        return "model", ModelSignature(model_name, "1", "", 4, tuple(inputs), (TensorSpec("Y", "FP32", (1,)),))

    def names(self) -> list[str]:
        """As `Catalog.names`."""
        return []


def answers() -> dict[str, Any]:
    """What the models answer; `flaky` fails the first call of each request, the first call of `lame` takes long."""
    called: set[tuple[str, str]] = set()

    def script(after_ms: int, *, fails: bool = False, first_ms: int = 0, first_fails: bool = False) -> Any:
        async def answer(call: InferCall, context: CallContext) -> dict[str, WireTensor]:
            is_first = (call.model_name, call.request_id) not in called
            called.add((call.model_name, call.request_id))
            await asyncio.sleep((first_ms if is_first and first_ms else after_ms) / 1e3)
            if fails or (is_first and first_fails):
                raise RemoteError("UNAVAILABLE", "gone")
            arrays = {name: decode(tensor) for name, tensor in call.inputs.items()}
            if "S" in arrays:
                return {"Y": encode(arrays["S"].sum(axis=1) * arrays["MASK"].all())}
            return {"Y": encode(arrays["X"] + arrays.get("Z", 0) + np.float32(after_ms))}

        return answer

    return {
        "quick": script(1),
        "mid": script(3),
        "slow": script(7),
        "add": script(2),
        "judge": script(2),
        "bad": script(2, fails=True),
        "flaky": script(1, first_fails=True),
        "lame": script(3, first_ms=50),
    }


class World:
    """A graph on a clock of its own.

    Args:
        complaints: Receives what the event loop says of errors that nobody has looked at.
    """

    def __init__(self, plan: GraphPlan, complaints: list[Any]) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))
        self.clock = VirtualClock()
        self.target = FakeTarget(**answers())
        self.runtime = Runtime({"model": self.target}, clock_ns=self.clock, generator=FakeRandom(0.5))
        self.executor = GraphExecutor(plan, self.runtime)

    def ask(self, request_id: str) -> "asyncio.Task[Any]":
        """A request of two rows has begun."""
        x = make.tensor(1, 3, shape=(2, 1))
        return asyncio.create_task(make.run(self.executor, inputs={"X": x}, request_id=request_id))

    async def end(self) -> None:
        """Only copies may be in work when the requests are over, and they end with the router."""
        shadows = self.runtime.shadows
        assert shadows.num_inflight == make.num_other_tasks()
        await self.runtime.close()
        assert (0, 0) == (self.target.num_open, make.num_other_tasks())


def outcome(request: "asyncio.Task[Any]") -> Any:
    """Output, or code and message of the error."""
    if request.cancelled():
        return "cancelled"
    error = request.exception()
    if error is None:
        return request.result().outputs["Y"].data
    assert isinstance(error, WeftError), repr(error)
    return error.code, error.message


def cancel_at_turn(request: "asyncio.Task[Any]", turns: Collection[int]) -> Callable[[], int]:
    """Cancel a request when the loop has made so many turns; the function returned tells how many it has made."""
    loop: Any = asyncio.get_running_loop()
    select, num_turns = loop._selector.select, 0

    def counted(timeout_s: float | None) -> Any:
        nonlocal num_turns
        num_turns += 1
        if num_turns in turns and request.cancel():
            return select(0)
        return select(timeout_s)

    loop._selector.select = counted
    return lambda: num_turns


@cases(Path(__file__).with_name("cancelled.txt"))
def test_a_cancel_after_any_turn_of_the_loop_costs_nobody_anything(case: Case) -> None:
    """It ends the request at that moment; the one beside it, and the two after them, are answered as ever.

    No task, no call, no place and no part of the retry budget stays taken, also where the cancel comes twice.
    """

    async def undisturbed() -> tuple[list[Any], int]:
        world = World(plan, complaints)
        requests = [world.ask("r0"), world.ask("r1")]
        num_turns = cancel_at_turn(requests[0], ())
        await asyncio.wait(requests)
        total = num_turns()
        await world.end()
        return [outcome(request) for request in requests], total

    async def disturbed(turn: int, num_cancels: int) -> bool:
        world = World(plan, complaints)
        requests = [world.ask("r0"), world.ask("r1")]
        cancel_at_turn(requests[0], range(turn, turn + num_cancels))
        await asyncio.wait(requests)
        was_cancelled = requests[0].cancelled()
        assert outcome(requests[0]) in ("cancelled", expected[0])
        assert expected[1] == outcome(requests[1])
        assert world.runtime.shadows.num_inflight == make.num_other_tasks()
        again = [world.ask("r2"), world.ask("r3")]
        await asyncio.wait(again)
        assert expected == [outcome(request) for request in again]
        await world.end()
        return was_cancelled

    plan = compile_graph(GraphSource(_HEADER + case.text, "graph.pbtxt"), Models())
    complaints: list[Any] = []
    expected, num_turns = asyncio.run(undisturbed())
    for num_cancels in (1, 2):
        were_cancelled = [asyncio.run(disturbed(turn, num_cancels)) for turn in range(1, num_turns + 1, num_cancels)]
        assert were_cancelled == sorted(were_cancelled, reverse=True)
        assert were_cancelled[0]
    gc.collect()  # tasks that nobody has looked at complain when they are freed
    assert [] == complaints
