"""Further calls while the first has not answered: the first answer counts, and nothing is left of the others."""

import asyncio
import json
from typing import Any

import pytest
from tests.unit.router import make
from tests.unit.router.fake_target import answering, failing, in_turn
from tests.unit.router.outcomes import GONE, models, outcome
from tests.unit.router.virtual_clock import VirtualClock

from weft.language.plan import GraphPlan, NodePlan
from weft.router.executor import GraphExecutor
from weft.router.operators.sequence import SequencePlan
from weft.router.policies.hedge import HedgePlan
from weft.router.policies.retry import RetryPlan
from weft.router.runtime import Runtime
from weft.router.target import RetryBudget

pytestmark = pytest.mark.usefixtures("virtual_clock")


def one(plan: HedgePlan, action: "str | NodePlan" = "m", outputs: str = "Y", **options: Any) -> GraphPlan:
    given = {"IN": "X"} if isinstance(action, str) else {"X": "X"}
    named = {"OUT": "Y"} if isinstance(action, str) else {name: name for name in outputs}
    steps = [make.step("a", action, given, named, hedge=plan, **options)]
    return make.graph(make.node("root", SequencePlan, steps, inputs=["X"], outputs=list(outputs)))


async def slow_to_leave(call: Any, context: Any) -> dict[str, Any]:
    try:
        await asyncio.sleep(1_000)
    finally:
        await asyncio.sleep(0.1)
    return {}


PLACE = "g/1: root/a -> m@1:"


@pytest.mark.parametrize(
    ("max_extra", "answers", "options", "num_calls", "expected"),
    [
        # An answer in time needs no hedge; else the first answer counts, and the slow call is cancelled.
        (1, [answering(5.0, after_ms=39)], {}, 1, "Y=5 root.a 39 ms"),
        (1, [answering(1.0, after_ms=200), answering(2.0, after_ms=10)], {}, 2, "Y=2 root.a 50 ms ~m"),
        (1, [answering(1.0, after_ms=60), answering(2.0, after_ms=60)], {}, 2, "Y=1 root.a 60 ms ~m"),
        # A failure waits for the call that runs; one before the hedge is a failure, which retries are for.
        (1, [failing(after_ms=50), answering(2.0, after_ms=60)], {}, 2, "Y=2 root.a 100 ms"),
        (3, [failing(after_ms=10)], {}, 1, f"{GONE}: {PLACE} gone root.a! 10 ms"),
        # If all fail the first call's error is told, whichever failed first.
        (
            1,
            [failing("INTERNAL", "slow", after_ms=90), failing("UNAVAILABLE", "quick")],
            {},
            2,
            f"INTERNAL: {PLACE} slow root.a! 90 ms",
        ),
        # The deadline holds for all calls.
        (
            1,
            [answering(after_ms=1000)],
            {"timeout_ms": 100},
            2,
            f"DEADLINE_EXCEEDED: {PLACE} no answer of 'm' in 100 ms root.a! 100 ms",
        ),
        # No call starts while the others go away.
        (5, [slow_to_leave, answering(2.0, after_ms=10)], {}, 2, "Y=2 root.a 150 ms ~m"),
        # Each attempt of a retry is hedged.
        (
            1,
            [failing(after_ms=60), failing(after_ms=60), answering(after_ms=500), answering(4.0, after_ms=10)],
            {"retry": RetryPlan(2, 0, frozenset({"UNAVAILABLE"}), 20.0)},
            4,
            "Y=4 root.a 150 ms ~m",
        ),
    ],
)
async def test_the_first_answer_counts(
    max_extra: int, answers: list[Any], options: dict[str, Any], num_calls: int, expected: str
) -> None:
    """A further call starts 40 ms after the one before."""
    target = models(m=in_turn(*answers))
    assert expected == await outcome(one(HedgePlan(40, max_extra), **options), target)
    assert num_calls == len(target.calls)


@pytest.mark.parametrize("after_ms", [(200, 10), (80, 40)])
async def test_nothing_of_the_other_call_is_in_the_answer(after_ms: tuple[int, int]) -> None:
    """Outputs and parameters are of one call, also where both answer at once; the trace counts both."""
    first, second = answering(1.0, after_ms=after_ms[0], a=1), answering(2.0, after_ms=after_ms[1], b=2)
    result = await make.run(one(HedgePlan(40, 1)), models(m=in_turn(first, second)), parameters={"graph_trace": True})
    parameters = dict(result.parameters)
    assert 2 == json.loads(str(parameters.pop("graph_trace")))[0]["attempts"]
    answers: list[Any] = [(make.tensor(1.0), {"a": 1}), (make.tensor(2.0), {"b": 2})]
    assert (result.outputs["Y"], parameters) in answers[after_ms[0] > 80 :]


@pytest.mark.parametrize(("max_extra", "expected"), [(1, 2), (2, 3), (5, 4)])
async def test_further_calls_start_one_after_another(
    virtual_clock: VirtualClock, max_extra: int, expected: int
) -> None:
    """Each `after_ms` after the one before, up to `max_extra`, and up to the budget."""
    target = models(m=answering(after_ms=1000))
    runtime = Runtime({"model": target}, clock_ns=virtual_clock, budgets={"model": RetryBudget(max_tokens=3)})
    request = asyncio.create_task(make.run(GraphExecutor(one(HedgePlan(100, max_extra)), runtime)))
    seen = []
    for _ in range(4):
        await asyncio.sleep(0.1001)
        seen.append(len(target.calls))
    assert [min(n, expected) for n in (2, 3, 4, 4)] == seen
    await request
    assert (1000.0, expected - 1) == (virtual_clock.elapsed_ms(), len(target.cancelled))


async def test_hedges_share_the_budget_of_retries(virtual_clock: VirtualClock) -> None:
    """A slow service is not called twice by everyone."""
    target = models(m=answering(after_ms=100))
    runtime = Runtime({"model": target}, clock_ns=virtual_clock, budgets={"model": RetryBudget(max_tokens=6)})
    executor = GraphExecutor(one(HedgePlan(40, 1)), runtime)
    await asyncio.gather(*(make.run(executor) for _ in range(30)))
    (counters,) = runtime.step_counters
    assert (36, 6, 24) == (len(target.calls), counters.events["hedges"], counters.events["retries_refused"])


async def test_a_node_is_hedged_as_a_whole(virtual_clock: VirtualClock) -> None:
    """Frames do not mix: the answer, its parameters and its path are those of one run."""
    steps = [make.step("i", "i", {"IN": "X"}, {"OUT": "S"}), make.step("j", "j", {"IN": "S"}, {"OUT": "T"})]
    inner = make.node("inner", SequencePlan, steps, inputs=["X"], outputs=["T", "S"])
    target = models(
        i=in_turn(answering(1.0, after_ms=10, first=1), answering(2.0, after_ms=10, second=2)),
        j=in_turn(answering(3.0, after_ms=500), answering(4.0, after_ms=10)),
    )
    context = make.context()
    result = await make.run(one(HedgePlan(40, 1), inner, "TS"), target, context=context)
    assert {"T": make.tensor(4.0), "S": make.tensor(2.0)} == result.outputs
    assert ({"second": 2}, 60.0, ["j"]) == (result.parameters, virtual_clock.elapsed_ms(), target.cancelled)
    assert "root.a=inner(i;j)" == context.trailing_metadata[0][1]


async def test_the_path_of_a_failure_is_that_of_the_first_call() -> None:
    """Its error is the one that is raised."""
    steps = [make.step("i", "m", {"IN": "X"}, {"OUT": "Y"})]
    inner = make.node("inner", SequencePlan, steps, inputs=["X"], outputs=["Y"])
    found = await outcome(one(HedgePlan(40, 1), inner), models(m=failing(after_ms=50)))
    assert found.endswith(" gone root.a=inner(i!)! 90 ms")
