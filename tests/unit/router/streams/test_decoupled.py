"""Decoupled graphs by hand-built plans: what follows a stream runs for each response, in order, with back-pressure."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
from tests.unit.router import make
from tests.unit.router.fake_target import answering, failing
from tests.unit.router.stream_targets import Plans, collected, counting, numbers, stream_of, stream_target

from weft.base.core import CallContext, InferCall, InferResult
from weft.language.plan import ShadowPlan
from weft.router.executor import GraphExecutor
from weft.router.runtime import Runtime


@pytest.fixture
def target() -> Any:
    return stream_target()


@pytest.fixture
def build() -> Plans:
    return Plans()


async def test_what_follows_runs_for_each_response(build: Plans, target: Any) -> None:
    """One response of the graph for each of the model's, in order, the last final; what comes before runs once."""
    target.streams["llm"] = counting(3)
    context = CallContext()
    got, error = await collected(stream_of(build.chat(), target, context=context))
    assert error is None
    assert [1, 2, 3] == numbers(got)
    assert [(False, False), (False, False), (True, False)] == [(result.is_final, result.is_null) for result in got]
    assert {("g", "1", "r")} == {(r.model_name, r.model_version, r.request_id) for r in got}
    assert ["pre", "llm", "post", "post", "post"] == target.called()
    assert [("x-graph-path", "root.pre;llm;post")] == context.trailing_metadata
    assert (0, 0) == (target.num_open, make.num_other_tasks())


async def test_no_response_is_an_end_and_nothing_else(build: Plans, target: Any) -> None:
    """What follows never runs."""
    target.streams["llm"] = counting(0)
    context = CallContext()
    got, error = await collected(stream_of(build.chat(), target, context=context))
    assert (None, [True]) == (error, [result.is_null for result in got])
    assert ["pre", "llm"] == target.called()
    assert [("x-graph-path", "root.pre;llm")] == context.trailing_metadata


async def test_a_last_response_may_carry_outputs(build: Plans, target: Any) -> None:
    """A model that marks a real response as its last: so does the graph, and no empty one follows."""

    async def script(call: InferCall, context: CallContext) -> AsyncIterator[Any]:
        yield make.tensor(1)
        yield InferResult("llm", "1", outputs={"OUT": make.tensor(2)}, is_final=True)

    target.streams["llm"] = script
    got, _ = await collected(stream_of(build.chat(), target))
    assert [1, 2] == numbers(got)
    assert [(False, False), (True, False)] == [(result.is_final, result.is_null) for result in got]


@pytest.mark.parametrize("limit", [1, 2, 3, 9])
async def test_the_last_response_is_final_whoever_reads_the_end(build: Plans, target: Any, limit: int) -> None:
    """Also where the stream is read further at that moment to open another run."""
    target.streams["llm"] = counting(3)
    got, _ = await collected(stream_of(build.chat(max_inflight_responses=limit), target))
    assert [False, False, True] == [result.is_final for result in got]


async def test_an_end_that_comes_late_is_a_response_of_its_own(build: Plans, target: Any) -> None:
    """A response is not held back for an end that is not there yet: an empty one is final then."""
    ends = asyncio.Event()

    async def script(call: InferCall, context: CallContext) -> AsyncIterator[Any]:
        yield make.tensor(1)
        await ends.wait()

    target.streams["llm"] = script
    async with aclosing(stream_of(build.chat(), target)) as results:
        first = await anext(results)
        ends.set()
        rest = [result async for result in results]
    assert [(False, False), (True, True)] == [(result.is_final, result.is_null) for result in (first, *rest)]


async def test_a_client_that_leaves_while_a_response_is_read_ahead_leaves_nothing(build: Plans, target: Any) -> None:
    """The stream is closed, and its call cancelled, with the response that nobody waits for."""

    async def script(call: InferCall, context: CallContext) -> AsyncIterator[Any]:
        yield make.tensor(1)
        await asyncio.Event().wait()

    target.streams["llm"] = script
    async with aclosing(stream_of(build.chat(), target)) as results:
        await anext(results)
    assert (["llm"], 0, 0) == (target.cancelled, target.num_open, make.num_other_tasks())


@pytest.mark.parametrize("limit", [0, 1, 3])
async def test_each_response_of_a_chain_opens_a_stream(build: Plans, target: Any, limit: int) -> None:
    """The second model answers as often as the number that it gets says; the order is that of nested loops."""

    async def repeat(call: InferCall, context: CallContext) -> AsyncIterator[Any]:
        number = next(n for n in range(9) if make.tensor(n) == call.inputs["IN"])
        for _ in range(number):
            yield make.tensor(number)

    target.streams |= {"a": counting(3), "b": repeat}
    plan = build.graph(
        build.stream("a", "X", "t"),
        build.step("mid", "t", "m"),
        build.stream("b", "m", "u"),
        build.step("end", "u", "Y"),
        max_inflight_responses=limit,
    )
    context = CallContext()
    got, error = await collected(stream_of(plan, target, context=context))
    assert (None, [1, 2, 2, 3, 3, 3]) == (error, numbers(got))
    assert [1, 3, 3, 6] == [target.called().count(name) for name in ("a", "mid", "b", "end")]
    assert [("x-graph-path", "root.a;mid;b;end")] == context.trailing_metadata
    assert (0, 0) == (target.num_open, make.num_other_tasks())


async def test_steps_beside_the_stream_run_once_and_at_the_same_time(build: Plans, target: Any) -> None:
    """Their tensors are in every response; a response waits for them."""
    both = asyncio.Barrier(2)

    async def script(call: InferCall, context: CallContext) -> AsyncIterator[Any]:
        await both.wait()
        yield make.tensor(1)
        yield make.tensor(2)

    async def side(call: InferCall, context: CallContext) -> dict[str, Any]:
        await both.wait()
        return {"OUT": make.tensor(7)}

    target.streams["llm"] = script
    target.answers["side"] = side
    plan = build.graph(
        build.stream("llm", "X", "t"),
        build.step("side", "X", "s"),
        make.step("join", "join", {"IN": "t", "SIDE": "s"}, {"OUT": "Y"}),
        outputs={"Y": "Y", "S": "s"},
    )
    async with asyncio.timeout(5):
        got, error = await collected(stream_of(plan, target))
    assert (None, [1, 2], [7, 7]) == (error, numbers(got), numbers(got, "S"))
    assert ["join", "join", "llm", "side"] == sorted(target.called())


async def test_a_stream_is_not_read_faster_than_its_responses_are_taken(build: Plans, target: Any) -> None:
    """With no limit given one response is in work at once; one more is read ahead, to know whether there is one."""
    target.streams["llm"] = counting(5)
    async with aclosing(stream_of(build.chat(), target)) as results:
        for number in (1, 2, 3):
            await anext(results)
            for _ in range(20):
                await asyncio.sleep(0)
            assert number + 1 == target.num_made


@pytest.mark.parametrize("limit", [1, 2, 9])
async def test_a_response_does_not_wait_for_those_after_it(build: Plans, target: Any, limit: int) -> None:
    """However many may be in work at once, it is there before the model makes the next."""
    goes_on = asyncio.Event()

    async def script(call: InferCall, context: CallContext) -> AsyncIterator[Any]:
        yield make.tensor(1)
        await goes_on.wait()
        yield make.tensor(2)

    target.streams["llm"] = script
    async with (
        asyncio.timeout(5),
        aclosing(stream_of(build.chat(max_inflight_responses=limit), target)) as results,
    ):
        first = await anext(results)
        goes_on.set()
        assert [1, 2] == numbers([first, await anext(results)])


async def test_so_many_responses_are_in_work_at_once(build: Plans, target: Any) -> None:
    """Three of five meet in the step that follows; the stream is read no further; answers keep their order."""
    release = [asyncio.Event() for _ in range(6)]
    entered: list[int] = []

    async def post(call: InferCall, context: CallContext) -> dict[str, Any]:
        number = next(n for n in range(9) if make.tensor(n) == call.inputs["IN"])
        entered.append(number)
        await release[number].wait()
        return {"OUT": call.inputs["IN"]}

    target.streams["llm"] = counting(5)
    target.answers["post"] = post
    results = stream_of(build.chat(max_inflight_responses=3), target)
    first = asyncio.ensure_future(anext(results))
    for _ in range(50):
        await asyncio.sleep(0)
    assert ([1, 2, 3], 3) == (entered, target.num_made)
    release[3].set()
    release[2].set()
    for _ in range(50):
        await asyncio.sleep(0)
    assert ([1, 2, 3], False) == (entered, first.done())
    for event in release:
        event.set()
    got = [await first, *(await collected(results))[0]]
    assert [1, 2, 3, 4, 5] == numbers(got)
    assert 0 == make.num_other_tasks()


async def test_response_parameters_are_those_of_one_response(build: Plans, target: Any) -> None:
    """What earlier steps said is in all; what the stream said with one response is in that one alone."""

    async def script(call: InferCall, context: CallContext) -> AsyncIterator[Any]:
        for parameters in ({"n": 1}, {}, {"n": 3}):
            yield InferResult("llm", "7", parameters=parameters, outputs={"OUT": make.tensor(1)}, is_final=False)

    target.streams["llm"] = script
    target.answers["pre"] = answering(cost=2)
    got, _ = await collected(stream_of(build.chat(max_inflight_responses=2), target))
    assert [{"cost": 2, "n": 1}, {"cost": 2}, {"cost": 2, "n": 3}] == [dict(result.parameters) for result in got]


async def test_a_trace_comes_with_the_end(build: Plans, target: Any) -> None:
    """The last response is then not null; it says how many responses there were and what was asked of the model."""
    target.streams["llm"] = counting(4)
    got, _ = await collected(stream_of(build.chat(), target, parameters={"graph_trace": True}))
    assert [False] * 5 == [result.is_null for result in got]
    assert (True, {}) == (got[-1].is_final, got[-1].outputs)
    entries = json.loads(got[-1].parameters["graph_trace"])  # type: ignore[arg-type]
    assert [("root/pre", None), ("root/llm", 4), ("root/post", None)] == [
        (entry["path"], entry.get("responses")) for entry in entries
    ]
    assert all("graph_trace" not in result.parameters for result in got[:-1])


async def test_outputs_that_need_no_stream_open_none(build: Plans, target: Any) -> None:
    """The graph answers once."""
    plan = build.graph(build.step("pre", "X", "p"), build.stream("llm", "p", "Y"), outputs={"Y": "Y", "P": "p"})
    got, error = await collected(stream_of(plan, target, outputs=("P",)))
    assert (None, [0], ["pre"]) == (error, numbers(got, "P"), target.called())


async def test_intermediate_tensors_are_those_of_one_response(build: Plans, target: Any) -> None:
    """Of the stream and of what follows; those of earlier steps are in every response."""
    target.streams["llm"] = counting(2)
    asked = ("pre/OUT", "llm/OUT", "post/OUT", "Y")
    got, _ = await collected(stream_of(build.chat(max_inflight_responses=2), target, outputs=asked))
    assert [[0, 0], [1, 2], [1, 2], [1, 2]] == [numbers(got, name) for name in asked]
    assert list(asked) == list(got[0].outputs)


async def test_a_shadow_of_a_response_holds_up_nothing(build: Plans, target: Any) -> None:
    """It gets a copy of each response, and its failure is nobody's."""
    target.streams["llm"] = counting(2)
    target.answers["new"] = failing()
    plan = build.graph(
        build.stream("llm", "X", "t"),
        build.step("post", "t", "Y"),
        make.step("new", "new", {"IN": "t"}, {}, shadow=ShadowPlan(100, 0)),
    )
    executor = GraphExecutor(plan, Runtime({"model": target}))
    got, error = await collected(stream_of(executor, target))
    await executor._runtime.close()
    assert (None, [1, 2]) == (error, numbers(got))


async def test_what_only_a_shadow_reads_runs_where_no_output_is_named(build: Plans, target: Any) -> None:
    """A request for some outputs leaves it out, and the shadow with it."""
    target.streams["llm"] = counting(2)
    plan = build.graph(
        build.stream("llm", "X", "Y"),
        build.step("side", "X", "s"),
        make.step("new", "new", {"IN": "s"}, {}, shadow=ShadowPlan(100, 0)),
    )
    executor = GraphExecutor(plan, Runtime({"model": target}))
    await collected(stream_of(executor, target))
    assert ["llm", "new", "side"] == sorted(target.called())
    target.calls.clear()
    await collected(stream_of(executor, target, outputs=("Y",)))
    assert ["llm"] == target.called()


async def test_a_stream_without_limit_ends_well_however_long(build: Plans, target: Any) -> None:
    """Thousands of responses leave no records behind."""
    target.streams["llm"] = counting(3_000)
    context = CallContext()
    got, error = await collected(stream_of(build.chat(max_inflight_responses=8), target, context=context))
    assert (None, 3_000) == (error, len(got))
    assert [("x-graph-path", "root.pre;llm;post")] == context.trailing_metadata
