"""Further calls while the first has not answered: the first answer counts, and nothing is left of the others."""

import asyncio
import json
from typing import Any

import pytest
from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget, answering, failing, in_turn
from tests.unit.router.virtual_clock import VirtualClock

from weft.base.core import CallContext
from weft.base.errors import RemoteError
from weft.language.plan import GraphPlan
from weft.router.executor import GraphExecutor
from weft.router.operators.sequence import SequencePlan
from weft.router.policies.hedge import HedgePlan
from weft.router.policies.retry import RetryPlan
from weft.router.runtime import Runtime
from weft.router.target import RetryBudget

SEQUENCE = SequencePlan
pytestmark = pytest.mark.usefixtures("virtual_clock")


def one(plan: HedgePlan, **options: Any) -> GraphPlan:
    steps = [make.step("a", "m", {"IN": "X"}, {"OUT": "Y"}, hedge=plan, **options)]
    return make.graph(make.node("root", SEQUENCE, steps, inputs=["X"], outputs=["Y"]))


async def test_an_answer_in_time_needs_no_hedge(virtual_clock: VirtualClock) -> None:
    """One call is made."""
    target = FakeTarget(m=answering(5.0, after_ms=39))
    result = await make.run(one(HedgePlan(40, 1)), target)
    assert (make.tensor(5.0), 1, 39.0) == (result.outputs["Y"], len(target.calls), virtual_clock.elapsed_ms())


async def test_the_first_answer_counts(virtual_clock: VirtualClock) -> None:
    """The slow call is cancelled and awaited; its answer and its parameters are nowhere."""
    target = FakeTarget(m=in_turn(answering(1.0, after_ms=200, slow=1), answering(2.0, after_ms=10)))
    result = await make.run(one(HedgePlan(40, 1)), target, parameters={"graph_trace": True})
    assert (make.tensor(2.0), 50.0) == (result.outputs["Y"], virtual_clock.elapsed_ms())
    assert (2, ["m"], 0, 0) == (len(target.calls), target.cancelled, target.num_open, make.num_other_tasks())
    assert {"graph_trace"} == set(result.parameters)
    assert 2 == json.loads(str(result.parameters["graph_trace"]))[0]["attempts"]


async def test_the_first_call_may_still_win(virtual_clock: VirtualClock) -> None:
    """The further one is cancelled then."""
    target = FakeTarget(m=in_turn(answering(1.0, after_ms=60), answering(2.0, after_ms=60)))
    result = await make.run(one(HedgePlan(40, 1)), target)
    assert (make.tensor(1.0), 60.0, ["m"]) == (result.outputs["Y"], virtual_clock.elapsed_ms(), target.cancelled)


async def test_both_at_once_make_one_answer() -> None:
    """Outputs and parameters of one call, nothing of the other."""
    target = FakeTarget(m=in_turn(answering(1.0, after_ms=80, a=1), answering(2.0, after_ms=40, b=2)))
    result = await make.run(one(HedgePlan(40, 1)), target)
    answers = [(make.tensor(1.0), {"a": 1}), (make.tensor(2.0), {"b": 2})]
    assert 1 == answers.count((result.outputs["Y"], result.parameters))  # type: ignore[arg-type]


@pytest.mark.parametrize(("max_extra", "expected"), [(1, 2), (2, 3), (5, 4)])
async def test_further_calls_start_one_after_another(
    virtual_clock: VirtualClock, max_extra: int, expected: int
) -> None:
    """Each `after_ms` after the one before, up to `max_extra`, and up to the budget."""
    target = FakeTarget(m=answering(after_ms=1000))
    runtime = Runtime({"model": target}, clock_ns=virtual_clock, budgets={"model": RetryBudget(max_tokens=3)})
    executor = GraphExecutor(one(HedgePlan(100, max_extra)), runtime)
    request = asyncio.create_task(make.run(executor))
    seen = []
    for _ in range(4):
        await asyncio.sleep(0.1001)
        seen.append(len(target.calls))
    assert [min(n, expected) for n in (2, 3, 4, 4)] == seen
    await request
    assert (1000.0, expected - 1) == (virtual_clock.elapsed_ms(), len(target.cancelled))


async def test_a_failure_waits_for_the_call_that_runs(virtual_clock: VirtualClock) -> None:
    """As long as one may still answer nothing is lost."""
    target = FakeTarget(m=in_turn(failing(after_ms=50), answering(2.0, after_ms=60)))
    result = await make.run(one(HedgePlan(40, 1)), target)
    assert (make.tensor(2.0), 100.0) == (result.outputs["Y"], virtual_clock.elapsed_ms())


async def test_a_failure_before_the_hedge_is_a_failure(virtual_clock: VirtualClock) -> None:
    """Hedges are for slow calls, retries for failed ones."""
    target = FakeTarget(m=failing(after_ms=10))
    with pytest.raises(RemoteError, match=r"^g/1: root/a -> m@1: gone$"):
        await make.run(one(HedgePlan(40, 3)), target)
    assert (10.0, 1) == (virtual_clock.elapsed_ms(), len(target.calls))


async def test_if_all_fail_the_first_calls_error_is_told() -> None:
    """Whichever failed first."""
    target = FakeTarget(m=in_turn(failing("INTERNAL", "slow", after_ms=90), failing("UNAVAILABLE", "quick")))
    with pytest.raises(RemoteError, match="slow") as caught:
        await make.run(one(HedgePlan(40, 1)), target)
    assert "INTERNAL" == caught.value.code


async def test_the_deadline_holds_for_all_calls(virtual_clock: VirtualClock) -> None:
    """Of a further call too."""
    target = FakeTarget(m=answering(after_ms=1000))
    with pytest.raises(RemoteError) as caught:
        await make.run(one(HedgePlan(40, 1), timeout_ms=100), target)
    assert ("DEADLINE_EXCEEDED", 100.0) == (caught.value.code, virtual_clock.elapsed_ms())
    assert (0, 0) == (target.num_open, make.num_other_tasks())


async def test_hedges_share_the_budget_of_retries(virtual_clock: VirtualClock) -> None:
    """A slow service is not called twice by everyone."""
    target = FakeTarget(m=answering(after_ms=100))
    runtime = Runtime({"model": target}, clock_ns=virtual_clock, budgets={"model": RetryBudget(max_tokens=6)})
    executor = GraphExecutor(one(HedgePlan(40, 1)), runtime)
    await asyncio.gather(*(make.run(executor) for _ in range(30)))
    (counters,) = runtime.step_counters
    assert (36, 6, 24) == (
        len(target.calls),
        counters.events["hedges"],
        counters.events["retries_refused"],
    )


@pytest.mark.parametrize("at_ms", [0, 20, 40, 60, 100])
async def test_a_cancel_leaves_nothing(virtual_clock: VirtualClock, at_ms: int) -> None:
    """Before, at and after the start of the further call, and at the moment of the answer."""
    target = FakeTarget(m=answering(after_ms=100))
    runtime = Runtime({"model": target}, clock_ns=virtual_clock)
    request = asyncio.create_task(make.run(GraphExecutor(one(HedgePlan(40, 1)), runtime)))
    await asyncio.sleep(at_ms / 1e3)
    request.cancel()
    await asyncio.wait((request,))
    assert (0, 0) == (target.num_open, make.num_other_tasks())
    assert len(target.calls) == len(target.cancelled) + (at_ms == 100)  # the first call had just answered


async def test_each_attempt_of_a_retry_is_hedged(virtual_clock: VirtualClock) -> None:
    """And the trace counts all calls."""
    target = FakeTarget(
        m=in_turn(
            failing(after_ms=60),
            failing(after_ms=60),
            answering(after_ms=500),
            answering(4.0, after_ms=10),
        )
    )
    plan = one(HedgePlan(40, 1), retry=RetryPlan(2, 0, frozenset({"UNAVAILABLE"}), 20.0))
    result = await make.run(plan, target, parameters={"graph_trace": True})
    assert (make.tensor(4.0), 150.0) == (result.outputs["Y"], virtual_clock.elapsed_ms())
    assert 4 == json.loads(str(result.parameters["graph_trace"]))[0]["attempts"]


async def test_a_node_is_hedged_as_a_whole(virtual_clock: VirtualClock) -> None:
    """Frames do not mix: the answer, its parameters and its path are those of one run."""
    inner = make.node(
        "inner",
        SEQUENCE,
        [make.step("i", "i", {"IN": "X"}, {"OUT": "S"}), make.step("j", "j", {"IN": "S"}, {"OUT": "T"})],
        inputs=["X"],
        outputs=["T", "S"],
    )
    steps = [make.step("a", inner, {"X": "X"}, {"T": "T", "S": "S"}, hedge=HedgePlan(40, 1))]
    plan = make.graph(make.node("root", SEQUENCE, steps, inputs=["X"], outputs=["T", "S"]))
    target = FakeTarget(
        i=in_turn(answering(1.0, after_ms=10, first=1), answering(2.0, after_ms=10, second=2)),
        j=in_turn(answering(3.0, after_ms=500), answering(4.0, after_ms=10)),
    )
    context = CallContext()
    result = await make.run(plan, target, context=context)
    assert {"T": make.tensor(4.0), "S": make.tensor(2.0)} == result.outputs
    assert ({"second": 2}, 60.0, ["j"]) == (result.parameters, virtual_clock.elapsed_ms(), target.cancelled)
    assert "root.a=inner(i;j)" == context.trailing_metadata[0][1]


async def test_the_path_of_a_failure_is_that_of_the_first_call(virtual_clock: VirtualClock) -> None:
    """Its error is the one that is raised."""
    inner = make.node("inner", SEQUENCE, [make.step("i", "m", {"IN": "X"}, {"OUT": "Y"})], inputs=["X"], outputs=["Y"])
    steps = [make.step("a", inner, {"X": "X"}, {"Y": "Y"}, hedge=HedgePlan(40, 1))]
    plan = make.graph(make.node("root", SEQUENCE, steps, inputs=["X"], outputs=["Y"]))
    context = CallContext()
    with pytest.raises(RemoteError, match="gone"):
        await make.run(plan, FakeTarget(m=failing(after_ms=50)), context=context)
    assert "root.a=inner(i!)!" == context.trailing_metadata[0][1]


async def test_no_call_starts_while_the_others_go_away(virtual_clock: VirtualClock) -> None:
    """A call that is cancelled may take its time."""

    async def slow_to_leave(call: Any, context: Any) -> dict[str, Any]:
        try:
            await asyncio.sleep(1_000)
        finally:
            await asyncio.sleep(0.1)
        return {}

    target = FakeTarget(m=in_turn(slow_to_leave, answering(2.0, after_ms=10)))
    result = await make.run(one(HedgePlan(40, 5)), target)
    assert (make.tensor(2.0), 2, 150.0) == (result.outputs["Y"], len(target.calls), virtual_clock.elapsed_ms())
