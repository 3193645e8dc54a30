"""Responses of several steps merged by arrival: MERGE."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
from tests.unit.router import make
from tests.unit.router.fake_target import answering, failing
from tests.unit.router.stream_targets import collected, compiled, counting, numbers, stream_of, stream_target

from weft.base.core import CallContext, InferCall
from weft.base.errors import RemoteError, WeftError
from weft.router.executor import GraphExecutor
from weft.router.runtime import Runtime

MERGE = 'combine { output: "OUT" method: MERGE }'


@pytest.fixture
def target() -> Any:
    return stream_target()


def merged(*steps: str) -> str:
    return f'node {{ name: "root" ensemble {{ {" ".join(steps)} {MERGE} }} }}'


def step(model: str, more: str = "") -> str:
    return f'step {{ name: "{model}" model_name: "{model}" {more} }}'


def every(pause_ms: float, *values: int, failure: WeftError | None = None) -> Any:
    """A stream with a pause before each response."""

    async def script(call: InferCall, context: CallContext) -> AsyncIterator[Any]:
        for value in values:
            await asyncio.sleep(pause_ms / 1e3)
            yield make.tensor(value)
        if failure is not None:
            raise failure

    return script


async def test_responses_come_as_they_arrive(target: Any, virtual_clock: Any) -> None:
    """Each names its step; those of one step keep their order, and only the last of all is final."""
    target.streams |= {"a": every(10, 1, 2, 3), "b": every(14, 11, 12)}
    target.answers["one"] = answering(5, after_ms=12)
    context = CallContext()
    got, error = await collected(
        stream_of(compiled(merged(step("a"), step("b"), step("one"))), target, context=context)
    )
    assert (None, [1, 5, 11, 2, 12, 3]) == (error, numbers(got, "OUT"))
    assert ["a", "one", "b", "a", "b", "a"] == [result.parameters["graph_step"] for result in got]
    assert [False] * 5 + [True] == [result.is_final for result in got]
    assert [("x-graph-path", "root{a;b;one}")] == context.trailing_metadata
    assert (0, 0) == (target.num_open, make.num_other_tasks())


async def test_a_merge_of_models_that_do_not_stream_is_a_stream(target: Any, virtual_clock: Any) -> None:
    """Their answers come as they are there; one that takes long holds up nobody."""
    target.answers |= {"quick": answering(1, after_ms=1), "slow": answering(2, after_ms=9)}
    got, error = await collected(stream_of(compiled(merged(step("slow"), step("quick"))), target))
    assert (None, [1, 2]) == (error, numbers(got, "OUT"))
    assert 9.0 == virtual_clock.elapsed_ms()


@pytest.mark.parametrize(("end_ms", "is_told"), [(1, True), (5, False)])
async def test_the_last_response_waits_a_moment_for_the_end_of_the_others(
    target: Any, virtual_clock: Any, end_ms: float, is_told: bool
) -> None:
    """As that of one model does for its own end; so clients who ask for no empty responses learn of it by its flag."""

    async def silent(call: InferCall, context: CallContext) -> AsyncIterator[Any]:
        yield make.tensor(1)
        await asyncio.sleep((10 + end_ms) / 1e3)

    target.streams |= {"a": silent, "b": every(10, 11)}
    got, error = await collected(stream_of(compiled(merged(step("a"), step("b"))), target))
    assert (None, [1, 11]) == (error, numbers(got, "OUT"))
    assert ([False, True] if is_told else [False, False, True]) == [result.is_final for result in got]


async def test_responses_of_many_do_not_wait_for_one_another(target: Any, virtual_clock: Any) -> None:
    """A response waits to learn whether it is the last where no other is there; else they would queue up."""
    models = "abcdefgh"
    target.streams |= {model: every(10, *range(20)) for model in models}
    got, error = await collected(stream_of(compiled(merged(*map(step, models))), target))
    assert (None, 160) == (error, len(got))
    assert 230 > virtual_clock.elapsed_ms()
    assert [False] * 159 + [True] == [result.is_final for result in got]


async def test_what_follows_a_merge_runs_for_each_response(target: Any, virtual_clock: Any) -> None:
    """It is a step of a sequence as any other that streams."""
    target.streams |= {"a": every(10, 1, 2), "b": every(15, 11)}
    text = f"""node {{ name: "root" sequence {{
      step {{ name: "m" node: "m" output_map {{ key: "OUT" value: "T" }} }}
      step {{ name: "post" model_name: "post" input_map {{ key: "IN" value: "T" }} }} }} }}
      {merged(step("a"), step("b")).replace('"root"', '"m"')}"""
    context = CallContext()
    got, error = await collected(stream_of(compiled(text), target, context=context))
    assert (None, [1, 11, 2]) == (error, numbers(got, "OUT"))
    assert [("x-graph-path", "root.m=m{a;b};post")] == context.trailing_metadata
    assert ["a", "b", "a"] == [result.parameters["graph_step"] for result in got if not result.is_null]


async def test_merges_in_merges_name_the_way(target: Any) -> None:
    """Outermost step first."""
    target.streams |= {"a": counting(1)}
    text = merged(step("one"), 'step { name: "m" node: "m" }') + merged(step("a")).replace('"root"', '"m"')
    got, _ = await collected(stream_of(compiled(text), target))
    assert {"one", "m/a"} == {result.parameters["graph_step"] for result in got if not result.is_null}


@pytest.mark.parametrize("is_soft", [False, True])
async def test_a_failing_step_ends_a_merge_unless_it_is_soft(target: Any, virtual_clock: Any, is_soft: bool) -> None:
    """What came before is delivered; a SOFT step has no more responses, and the others go on."""
    soft = "dependency: SOFT" if is_soft else ""
    target.streams |= {"a": every(10, 1, failure=RemoteError("UNAVAILABLE", "gone")), "b": every(8, 11, 12, 13)}
    got, error = await collected(stream_of(compiled(merged(step("a", soft), step("b"))), target))
    if is_soft:
        assert (None, [11, 1, 12, 13]) == (error, numbers(got, "OUT"))
    else:
        assert ([11, 1], "g/1: root[a] -> a@1: gone") == (numbers(got, "OUT"), error.message)
        assert ["b"] == target.cancelled
    assert (0, 0) == (target.num_open, make.num_other_tasks())


async def test_a_merge_fails_where_no_soft_step_answers(target: Any) -> None:
    """The message lists what became of each; a step that answers without a response is an answer."""
    target.answers["one"] = failing("UNAVAILABLE", "gone")
    target.streams["a"] = counting(0, RemoteError("UNAVAILABLE", "away"))
    plan = compiled(merged(step("one", "dependency: SOFT"), step("a", "dependency: SOFT")))
    got, error = await collected(stream_of(plan, target))
    assert error is not None
    assert ([], "UNAVAILABLE") == (got, error.code)
    assert "one failed: UNAVAILABLE" in error.message
    target.streams["a"] = counting(0)
    got, error = await collected(stream_of(plan, target))
    assert ([True], None) == ([result.is_null for result in got], error)


async def test_a_step_whose_when_is_false_is_left_out(target: Any) -> None:
    """It has no response."""
    target.streams |= {"a": counting(2)}
    got, error = await collected(
        stream_of(compiled(merged(step("a"), step("one", "when: 'inputs.IN[0] > 1.0'"))), target)
    )
    assert (None, [1, 2]) == (error, numbers(got, "OUT"))


async def test_models_of_a_merge_wait_for_the_client(target: Any) -> None:
    """One response of each is made ahead, and one read to learn whether the latest is the last."""
    target.streams |= {"a": counting(9), "b": counting(9)}
    async with aclosing(stream_of(compiled(merged(step("a"), step("b"))), target)) as results:
        await anext(results)
        for _ in range(50):
            await asyncio.sleep(0)
        assert target.num_made <= 3
    assert (0, 0) == (target.num_open, make.num_other_tasks())


@pytest.mark.parametrize("num_taken", range(6))
async def test_a_client_that_leaves_a_merge_ends_all_steps(target: Any, num_taken: int) -> None:
    """After any number of responses."""
    target.streams |= {"a": counting(3), "b": counting(3)}
    executor = GraphExecutor(compiled(merged(step("a"), step("b"), step("one"))), Runtime({"model": target}))
    async with aclosing(stream_of(executor, target)) as results:
        for _ in range(num_taken):
            await anext(results)
    assert (0, 0) == (target.num_open, make.num_other_tasks())
