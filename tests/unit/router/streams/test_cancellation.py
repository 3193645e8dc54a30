"""A request for a stream is cancelled after each turn of the event loop that it takes, wherever the stream is."""

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.unit.router import make
from tests.unit.router.stream_targets import collected, compiled, numbers, stream_of, stream_target

from weft.base.core import CallContext, InferCall
from weft.base.errors import RemoteError
from weft.router.executor import GraphExecutor
from weft.router.runtime import Runtime


def _step(model: str, more: str = "") -> str:
    return f'step {{ name: "{model}" model_name: "{model}" {more} }}'


def _root(kind: str, *parts: str) -> str:
    return f'node {{ name: "root" {kind} {{ {" ".join(parts)} }} }}'


_ACCEPT = "accept: 'outputs.OUT[0] > 1.5'"
_FIRST = 'combine { output: "OUT" method: FIRST }'
_MERGE = 'combine { output: "OUT" method: MERGE }'
_INNER = f"""node {{ name: "in" policy {{ max_inflight: 2 }} sequence {{ max_inflight_responses: 2
  {_step("a", 'output_map { key: "OUT" value: "T" }')} {_step("post", 'input_map { key: "IN" value: "T" }')} }} }}"""
_NODE = 'step { name: "n" node: "in" policy { max_inflight: 2 } output_map { key: "OUT" value: "N" } }'
_AFTER = _step("end", 'input_map { key: "IN" value: "N" }')

#: Two requests at once fill every limit, so a place that is not given back is missed by the next two.
GRAPHS = {
    "branch": _root("splitter", _step("a", "policy { max_inflight: 2 }")),
    "node": _root("sequence", _NODE, _AFTER) + _INNER,
    "side by side": _root("sequence", _NODE, _AFTER, _step("side", 'output_map { key: "OUT" value: "S" }')) + _INNER,
    "fallback": _root("sequence", _step("bad", 'fallback { model_name: "a" policy { max_inflight: 2 } }')),
    "cascade": _root("cascade", _step("a", _ACCEPT), _step("b", _ACCEPT), _step("c", "dependency: SOFT")),
    "race": _root("ensemble", _step("a"), _step("b"), _step("one"), _FIRST),
    "race of nodes": _root("ensemble", 'step { name: "n" node: "in" policy { max_inflight: 2 } }', _step("b"), _FIRST)
    + _INNER,
    "sum": _root("ensemble", _step("a"), _step("one"), 'combine { output: "OUT" method: SUM }'),
    "merge": _root("ensemble", _step("a"), _step("b"), _step("one"), _MERGE),
    "merge in a node": _root("sequence", _NODE, _AFTER)
    + _root("ensemble", _step("a", "dependency: SOFT"), _step("b"), _MERGE).replace('"root"', '"in"'),
    "map": _root("map", 'over: "IN" max_inflight: 2', _step("a", "policy { max_inflight: 4 }")),
    "hedge": _root("sequence", _step("a", "policy { hedge { after_ms: 1 max_extra: 1 } }")),
    "retry": _root("sequence", _NODE.replace("policy {", "policy { retry { attempts: 2 }"), _AFTER)
    + _INNER.replace('"a"', '"f"'),
    "stream of streams": _root(
        "sequence", "max_inflight_responses: 2", _NODE, _step("b", 'input_map { key: "IN" value: "N" }')
    )
    + _INNER,
}
_TURNS = 400


def _target() -> Any:
    """Models that take a few turns for each response; `f` fails the first time."""
    target = stream_target()
    failed: set[str] = set()

    async def slow(call: InferCall, context: CallContext) -> AsyncIterator[Any]:
        for number in (1, 2):
            await asyncio.sleep(0)
            yield make.tensor(number)

    async def fails_once(call: InferCall, context: CallContext) -> AsyncIterator[Any]:
        if call.request_id not in failed:
            failed.add(call.request_id)
            raise RemoteError("UNAVAILABLE", "gone")
        async for answer in slow(call, context):
            yield answer

    async def answer(call: InferCall, context: CallContext) -> dict[str, Any]:
        await asyncio.sleep(0)
        if call.model_name == "bad":
            raise RemoteError("UNAVAILABLE", "gone")
        return {"OUT": call.inputs["IN"]}

    target.streams |= dict.fromkeys("abc", slow) | {"f": fails_once}
    target.answers |= dict.fromkeys(("post", "end", "one", "side", "bad"), answer)
    return target


@pytest.mark.parametrize("num_cancels", [1, 2])
@pytest.mark.parametrize("graph", GRAPHS)
async def test_a_cancel_after_any_turn_leaves_nothing(graph: str, num_cancels: int) -> None:
    """No task, no call and no place in a limit, and nobody is told of an error that nobody looked at."""
    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))
    plan = compiled(GRAPHS[graph])
    for num_turns in range(_TURNS):
        target = _target()
        executor = GraphExecutor(plan, Runtime({"model": target}))
        request = asyncio.create_task(collected(stream_of(executor, target)))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        is_over = request.done()
        for _ in range(num_cancels):
            request.cancel()
            await asyncio.sleep(0)
        await asyncio.wait((request,))
        assert is_over or request.cancelled()
        assert (0, 0) == (target.num_open, make.num_other_tasks())
        again = [asyncio.create_task(collected(stream_of(executor, target))) for _ in range(2)]
        await asyncio.wait(again)
        assert [None, None] == [one.result()[1] for one in again]
        assert all(numbers(one.result()[0], "OUT") for one in again)
        if is_over:
            break
    assert is_over
    gc.collect()
    assert [] == complaints
