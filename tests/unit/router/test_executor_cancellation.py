"""A request is cancelled after each turn of the event loop that it takes: for every kind of node and every policy."""

import asyncio
import gc
from collections.abc import Callable, Collection
from functools import cache
from typing import Any

import numpy as np
import pytest
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
_THREE = " ".join(f'step {{ name: "{name}" model_name: "{name}" }}' for name in ("quick", "mid", "slow"))
_SOFT = _THREE.replace(" }", " dependency: SOFT }")
_AVERAGE = 'combine { output: "Y" method: AVERAGE }'
_ROWS = "step { name: 'low' when: 'inputs.X[0] < 2.0' model_name: 'mid' }"
_UNSURE = "step { name: 'small' model_name: 'quick' accept: 'outputs.Y[0] < 2.0' }"
_INNER = f'node {{ name: "inner" policy {{ max_inflight: 2 }} ensemble {{ {_THREE} {_AVERAGE} }} }}'
_LISTS = 'node { name: "root" map { over: "X" collect { output: "Y" method: LIST }'
_RETRY = 'retry { attempts: 2 backoff_ms: 4 on: "UNAVAILABLE" }'


def _sequence(*steps: str, more: str = "") -> str:
    return f'node {{ name: "root" sequence {{ {" ".join(steps)} }} }} {more}'


def _root(kind: str, body: str, more: str = "") -> str:
    return f'node {{ name: "root" {kind} {{ {body} }} }} {more}'


def _map(step: str, more: str = "") -> str:
    """A map over each row's one element."""
    return f'{_LISTS} max_batch_size: 1 max_inflight: 1 step {{ name: "s" {step} }} }} }} {more}'


def _step(model: str, policy: str = "", more: str = "") -> str:
    return f'step {{ name: "s" {model} {more} policy {{ max_inflight: 2 {policy} }} }}'


#: Two requests at once fill every limit, so a place that is not given back is missed by the next two.
GRAPHS = {
    "chain": _sequence(
        'step { name: "a" model_name: "quick" output_map { key: "Y" value: "M" } }',
        'step { name: "b" model_name: "mid" input_map { key: "X" value: "M" } policy { max_inflight: 2 } }',
    ),
    "fork": _sequence(
        'step { name: "a" model_name: "quick" output_map { key: "Y" value: "M" } }',
        'step { name: "b" model_name: "slow" output_map { key: "Y" value: "N" } }',
        'step { name: "c" model_name: "add" input_map [ { key: "X" value: "M" }, { key: "Z" value: "N" } ] }',
    ),
    "loop": _sequence(
        'step { name: "a" model_name: "add" input_map { key: "Z" value: "X" } }',
        'loop { while: "max(outputs.Y) < 9.0" max_iterations: 4 carry { key: "Y" value: "X" } }',
    ),
    "node": _sequence('step { name: "s" node: "inner" }', more=_INNER),
    "switch": _root("switch", f'{_ROWS} step {{ otherwise: true model_name: "quick" }}'),
    "switch per row": _root("switch", f'per_row: true {_ROWS} step {{ otherwise: true model_name: "quick" }}'),
    "splitter": _root("splitter", f"sticky_by: '\"user\"' {_THREE}"),
    "ensemble": _root("ensemble", f"{_THREE} {_AVERAGE}"),
    "ensemble, failing": _root("ensemble", f'{_THREE} step {{ name: "bad" model_name: "bad" }} {_AVERAGE}'),
    "race": _root("ensemble", f'{_THREE} combine {{ output: "Y" method: FIRST }}'),
    "quorum": _root("ensemble", f"{_SOFT} quorum: 1 straggler_ms: 3 {_AVERAGE}"),
    "custom": _root(
        "ensemble",
        _THREE
        + """ combine { output: "Y" method: CUSTOM
          custom { model_name: "judge" input_map { key: "S" value: "Y" } policy { max_inflight: 2 } } }""",
    ),
    "cascade": _root("cascade", f'{_UNSURE} step {{ name: "large" model_name: "slow" }}'),
    "cascade per row": _root("cascade", f'per_row: true {_UNSURE} step {{ name: "large" model_name: "slow" }}'),
    "limit": _sequence(_step('model_name: "mid"')),
    "retry": _sequence(_step('model_name: "flaky"', _RETRY)),
    "retry in vain": _sequence(_step('model_name: "bad"', _RETRY)),
    "hedge": _sequence(_step('model_name: "lame"', "hedge { after_ms: 2 max_extra: 2 }")),
    "fallback": _sequence(_step('model_name: "bad"', more='fallback { model_name: "mid" policy { max_inflight: 2 } }')),
    "soft": _sequence(_step('model_name: "bad"', more='dependency: SOFT default { output: "Y" number: 7 }')),
    "timeout": _sequence(_step('model_name: "slow"', "timeout_ms: 3")),
    "cache": _sequence(_step('model_name: "slow"', "cache { ttl_ms: 1 }")),
    "cache in vain": _sequence(_step('model_name: "bad"', "cache { ttl_ms: 1 }")),
    "cache of a graph": "policy { cache { ttl_ms: 1 } }" + _root("ensemble", f"{_THREE} {_AVERAGE}"),
    "shadow": _root("splitter", _THREE + 'step { name: "copy" model_name: "slow" shadow { percent: 100 } }'),
    "map": _map('model_name: "mid" policy { max_inflight: 4 }').replace("max_inflight: 1", ""),
    "map, one by one": _map('model_name: "flaky" policy { max_inflight: 2 retry { attempts: 2 } }'),
    "map, failing": _map('model_name: "bad" policy { max_inflight: 4 }').replace("max_inflight: 1", ""),
    "map, soft": _map('model_name: "bad" dependency: SOFT default { output: "Y" number: 7 }'),
    "map of nodes": _map('node: "inner" policy { max_inflight: 2 hedge { after_ms: 2 } }', _INNER),
    "node of maps": _sequence(
        'step { name: "s" node: "each" fallback { model_name: "quick" } policy { max_inflight: 2 } }'
    )
    + _map('model_name: "flaky"').replace('"root"', '"each"'),
    "guard": _sequence(
        'step { name: "g" model_name: "mid" output_map { key: "Y" value: "G" } policy { max_inflight: 2 } }',
        'step { name: "a" model_name: "slow" after: "g" policy { max_inflight: 2 } }',
    ),
    "guard beside, failing": _sequence(
        'step { name: "g" model_name: "bad" output_map { key: "Y" value: "G" } policy { max_inflight: 2 } }',
        'step { name: "a" model_name: "slow" policy { max_inflight: 2 } }',
        'answer_after: "g"',
    ),
    "soft guard": _sequence(
        'step { name: "g" model_name: "bad" dependency: SOFT output_map { key: "Y" value: "G" } }',
        """step { name: "a" model_name: "mid" when: 'has(steps.g)' default { output: "Y" number: 7 } }""",
        'step { name: "b" model_name: "quick" after: "a" output_map { key: "Y" value: "B" } }',
        'answer_after: "b"',
    ),
    "ordered": _sequence(
        'step { name: "a" model_name: "quick" output_map { key: "Y" value: "M" } policy { max_inflight: 2 } }',
        'step { name: "b" model_name: "mid" }',
        "ordered: true",
    ),
    "everything": _sequence(
        _step(
            'node: "inner"',
            f"cache {{ ttl_ms: 1 }} hedge {{ after_ms: 2 max_extra: 1 }} {_RETRY} timeout_ms: 9",
            more='fallback { model_name: "lame" }',
        ),
        more=_INNER.replace('"quick"', '"flaky"'),
    ),
}


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


def scripts() -> dict[str, Any]:
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


@cache
def plan_of(graph: str) -> GraphPlan:
    """The plan of a graph; no request changes it."""
    return compile_graph(GraphSource(_HEADER + GRAPHS[graph], "graph.pbtxt"), Models())


class World:
    """A graph on a clock of its own.

    Args:
        complaints: Receives what the event loop says of errors that nobody has looked at.
    """

    def __init__(self, graph: str, complaints: list[Any]) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))
        self.clock = VirtualClock()
        self.target = FakeTarget(**scripts())
        self.runtime = Runtime({"model": self.target}, clock_ns=self.clock, generator=FakeRandom(0.5))
        self.executor = GraphExecutor(plan_of(graph), self.runtime)

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


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_cancel_after_any_turn_of_the_loop_costs_nobody_anything(graph: str) -> None:
    """It ends the request at that moment; the one beside it, and the two after them, are answered as ever.

    No task, no call, no place and no part of the retry budget stays taken, also where the cancel comes twice.
    """

    async def undisturbed() -> tuple[list[Any], int]:
        world = World(graph, complaints)
        requests = [world.ask("r0"), world.ask("r1")]
        num_turns = cancel_at_turn(requests[0], ())
        await asyncio.wait(requests)
        total = num_turns()
        await world.end()
        return [outcome(request) for request in requests], total

    async def disturbed(turn: int, num_cancels: int) -> bool:
        world = World(graph, complaints)
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

    complaints: list[Any] = []
    expected, num_turns = asyncio.run(undisturbed())
    for num_cancels in (1, 2):
        were_cancelled = [asyncio.run(disturbed(turn, num_cancels)) for turn in range(1, num_turns + 1)]
        assert were_cancelled == sorted(were_cancelled, reverse=True)
        assert were_cancelled[0]
    gc.collect()  # tasks that nobody has looked at complain when they are freed
    assert [] == complaints
