"""What a step or a node may have at once, and how much time a step needs at least."""

import asyncio
from typing import Any

import pytest
from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget, answering, failing

from weft.base.errors import DeadlineExceededError, ResourceExhaustedError
from weft.language.plan import GraphPlan
from weft.router.executor import GraphExecutor
from weft.router.operators.sequence import SequencePlan
from weft.router.runtime import Runtime

SEQUENCE = SequencePlan
pytestmark = pytest.mark.usefixtures("virtual_clock")


def one(**options: Any) -> GraphPlan:
    """X -> a (model m) -> Y."""
    steps = [make.step("a", "m", {"IN": "X"}, {"OUT": "Y"}, **options)]
    return make.graph(make.node("root", SEQUENCE, steps, inputs=["X"], outputs=["Y"]))


async def test_the_run_beyond_max_inflight_is_refused() -> None:
    """No call is made for it; the message names the limit, and there is a hint when to come again."""
    target = FakeTarget(m=answering(after_ms=10))
    executor = GraphExecutor(one(max_inflight=2), Runtime({"model": target}))
    outcomes = await asyncio.gather(*(make.run(executor) for _ in range(3)), return_exceptions=True)
    refused = outcomes[2]
    assert isinstance(refused, ResourceExhaustedError)
    assert (
        "g/1: root/a -> m@1: step 'root/a' has 2 requests in flight, and 'max_inflight' of its policy allows 2; "
        "try again in 10 ms" == refused.message
    )
    assert (10, 2) == (refused.retry_after_ms, len(target.calls))
    await make.run(executor)  # those that are over count no more


@pytest.mark.parametrize("ending", ["answer", "error", "cancel"])
async def test_a_place_is_free_again_however_a_run_ends(ending: str) -> None:
    """Limits of steps and of nodes do not leak."""
    inner = make.node(
        "inner",
        SEQUENCE,
        [make.step("i", "i", {"IN": "X"}, {"OUT": "Y"}, max_inflight=1)],
        inputs=["X"],
        outputs=["Y"],
        max_inflight=1,
    )
    steps = [make.step("a", inner, {"X": "X"}, {"Y": "Y"}, max_inflight=1)]
    script = failing(after_ms=5) if ending == "error" else answering(after_ms=5)
    target = FakeTarget(i=script)
    executor = GraphExecutor(
        make.graph(make.node("root", SEQUENCE, steps, inputs=["X"], outputs=["Y"])), Runtime({"model": target})
    )
    for _ in range(3):
        request = asyncio.create_task(make.run(executor))
        await asyncio.sleep(0.001)
        if ending == "cancel":
            request.cancel()
        await asyncio.wait((request,))
    assert 3 == len(target.calls)


async def test_every_use_of_a_node_counts_against_its_limit() -> None:
    """Though each use is compiled for itself; the path names the node that was refused."""

    def use() -> Any:
        steps = [make.step("i", "i", {"IN": "X"}, {"OUT": "Y"})]
        return make.node("inner", SEQUENCE, steps, inputs=["X"], outputs=["Y"], max_inflight=1)

    steps = [make.step(name, use(), {"X": "X"}, {"Y": name}) for name in ("a", "b")]
    plan = make.graph(make.node("root", SEQUENCE, steps, inputs=["X"], outputs=["a", "b"]))
    context = make.context()
    with pytest.raises(ResourceExhaustedError, match=r"g/1: root/b: node 'inner' has 1 requests in flight, and "):
        await make.run(plan, FakeTarget(i=answering(after_ms=5)), context=context)
    assert "root.a=inner(i~)~;b=inner!" == dict(context.trailing_metadata)["x-graph-path"]


async def test_a_refused_run_takes_the_fallback() -> None:
    """Too much work is a failure as any other."""
    target = FakeTarget(m=answering(after_ms=10))
    executor = GraphExecutor(
        one(max_inflight=1, fallback=make.step("spare", "spare", {"IN": "X"}, {"OUT": "Y"})),
        Runtime({"model": target}),
    )
    await asyncio.gather(make.run(executor), make.run(executor))
    assert ["m", "spare"] == target.called()


@pytest.mark.parametrize(("timeout_ms", "is_called"), [(29, False), (30, True), (None, True)])
async def test_a_step_without_the_time_that_it_needs_is_not_called(timeout_ms: int | None, is_called: bool) -> None:
    """It fails at once; without a deadline there is always time."""
    target = FakeTarget()
    run = make.run(one(min_remaining_ms=30), target, context=make.context(timeout_ms=timeout_ms))
    if is_called:
        await run
    else:
        with pytest.raises(
            DeadlineExceededError,
            match=r"root/a -> m@1: 29 ms are left, and 'min_remaining_ms' of the step asks for 30; it was not called",
        ):
            await run
    assert is_called == bool(target.calls)


async def test_lack_of_time_is_softened_while_there_is_some() -> None:
    """The step is missing, the request is not."""
    target = FakeTarget()
    result = await make.run(one(is_soft=True, min_remaining_ms=30), target, context=make.context(timeout_ms=29))
    assert ({}, []) == (result.outputs, target.called())
