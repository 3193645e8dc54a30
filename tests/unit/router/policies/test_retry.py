"""Further attempts after a failure: when, how often, how late, and at whose expense."""

import asyncio
import json
import random
from typing import Any

import pytest
from tests.unit.router import make
from tests.unit.router.fake_condition import FakeCondition
from tests.unit.router.fake_target import answering, failing, in_turn
from tests.unit.router.outcomes import GONE, models, outcome
from tests.unit.router.virtual_clock import VirtualClock

from weft.base.errors import RemoteError
from weft.language.plan import GraphPlan, NodePlan
from weft.router.executor import GraphExecutor
from weft.router.operators.sequence import SequencePlan
from weft.router.policies.retry import RetryPlan
from weft.router.runtime import Runtime
from weft.router.target import RetryBudget

pytestmark = pytest.mark.usefixtures("virtual_clock")


def retry(attempts: int = 2, backoff_ms: int = 0, codes: tuple[str, ...] = ("UNAVAILABLE",)) -> RetryPlan:
    return RetryPlan(attempts, backoff_ms, frozenset(codes), 20.0)


def one(plan: RetryPlan, action: "str | NodePlan" = "m", **options: Any) -> GraphPlan:
    names = ("IN", "OUT") if isinstance(action, str) else ("X", "Y")
    steps = [make.step("a", action, {names[0]: "X"}, {names[1]: "Y"}, retry=plan, **options)]
    return make.graph(make.node("root", SequencePlan, steps, inputs=["X"], outputs=["Y"]))


class Halves(random.Random):
    """Chance that always falls in the middle."""

    def uniform(self, a: float, b: float) -> float:
        return (a + b) / 2


WRONG, BOOM = failing("INVALID_ARGUMENT", "wrong"), failing("INTERNAL", "boom")
PLACE = "g/1: root/a -> m@1:"


@pytest.mark.parametrize(
    ("plan", "answers", "num_calls", "expected"),
    [
        # A failure that is listed is tried again, another one is not; the message says which attempt it was.
        (one(retry()), [failing(), answering(5.0)], 2, "Y=5 root.a"),
        (one(retry(5)), [WRONG], 1, f"INVALID_ARGUMENT: {PLACE} wrong root.a!"),
        (one(retry(5)), [failing(), WRONG], 2, f"INVALID_ARGUMENT: {PLACE} wrong, attempt 2 of 5 root.a!"),
        (
            one(retry(3, codes=("UNAVAILABLE", "INTERNAL"))),
            [failing(), failing(), BOOM],
            3,
            f"INTERNAL: {PLACE} boom, attempt 3 of 3 root.a!",
        ),
        # The pause doubles, half to whole of it is waited, and it has a longest length.
        (one(retry(4, 100)), [failing()], 4, f"{GONE}: {PLACE} gone, attempt 4 of 4 root.a! {75 + 150 + 300} ms"),
        (
            one(retry(60, 40_000)),
            [failing()],
            60,
            f"{GONE}: {PLACE} gone, attempt 60 of 60 root.a! {30_000 + 58 * 45_000:g} ms",
        ),
        # One timeout holds for all attempts: each has what is left of it.
        (
            one(retry(), timeout_ms=50),
            [failing(after_ms=30), answering(after_ms=30)],
            2,
            f"DEADLINE_EXCEEDED: {PLACE} no answer of 'm' in 20 ms, attempt 2 of 2 root.a! 50 ms",
        ),
        # No pause ends at the deadline or after it: the error comes at once.
        *(
            (
                one(retry(2, backoff_ms), timeout_ms=100),
                [failing(after_ms=after_ms)],
                1,
                f"{GONE}: {PLACE} gone, attempt 1 of 2, no time for another root.a! {after_ms} ms",
            )
            for backoff_ms, after_ms in ((1000, 10), (80, 40))
        ),
        # Attempts come before the fallback, and the text tells both.
        (
            one(retry(), fallback=make.step("spare", "spare", {"IN": "X"}, {"OUT": "Y"})),
            [failing()],
            2,
            f"INTERNAL: {PLACE} gone, attempt 2 of 2 (UNAVAILABLE); fallback spare: INTERNAL: boom root.a!>spare!",
        ),
    ],
)
async def test_a_failure_is_tried_again(plan: GraphPlan, answers: list[Any], num_calls: int, expected: str) -> None:
    """As often, and as late, as the policy says."""
    target = models(m=in_turn(*answers), spare=BOOM)
    assert expected == await outcome(plan, target, generator=Halves())
    assert num_calls == target.called().count("m")


async def test_the_trace_tells_how_many_attempts_there_were() -> None:
    """The response parameters are those of the attempt that counts."""
    target = models(m=in_turn(failing(), answering(5.0, p=1)))
    result = await make.run(one(retry()), target, parameters={"graph_trace": True})
    entry = json.loads(str(result.parameters["graph_trace"]))[0]
    assert (1, 2, "OK") == (result.parameters["p"], entry["attempts"], entry["status"])


async def test_the_jitter_stays_within_half_and_whole(virtual_clock: VirtualClock) -> None:
    """And is not always the same."""
    pauses = set()
    for _ in range(50):
        start_ms = virtual_clock.elapsed_ms()
        with pytest.raises(RemoteError):
            await make.run(one(retry(2, backoff_ms=100)), models(m=GONE))
        pauses.add(virtual_clock.elapsed_ms() - start_ms)
    assert 50 <= min(pauses) < 60
    assert 90 < max(pauses) <= 100


async def test_an_empty_budget_leaves_the_first_error(virtual_clock: VirtualClock) -> None:
    """Retries are for few failures; when all fail they would make it worse."""
    target = models(m=failing(after_ms=10))
    runtime = Runtime({"model": target}, clock_ns=virtual_clock, budgets={"model": RetryBudget(max_tokens=8)})
    executor = GraphExecutor(one(retry(3)), runtime)
    errors = await asyncio.gather(*(make.run(executor) for _ in range(20)), return_exceptions=True)
    refused = [error for error in errors if error.message.endswith(", retry budget exhausted")]
    assert (20, 20 + 8) == (len(refused), len(target.calls))
    (counters,) = runtime.step_counters
    assert (8, 20) == (counters.events["retries"], counters.events["retries_refused"])
    assert {"UNAVAILABLE": 20} == counters.failures


async def test_a_node_is_run_again_as_a_whole() -> None:
    """In a frame of its own: nothing of the failed attempt is in the answer, and the path shows the last attempt."""
    optional = FakeCondition(lambda request, frame: len(target.calls) == 1)
    steps = [
        make.step("i", "i", {"IN": "X"}, {"OUT": "S"}),
        make.step("o", "o", {"IN": "S"}, {"OUT": "O"}, when=optional),
        make.step("j", "j", {"IN": "S", "MORE": "O"}, {"OUT": "T"}),
    ]
    inner = make.node("inner", SequencePlan, steps, inputs=["X"], outputs=["T", "O"])
    outer = [make.step("a", inner, {"X": "X"}, {"T": "T", "O": "O"}, retry=retry())]
    plan = make.graph(make.node("root", SequencePlan, outer, inputs=["X"], outputs=["T", "O"]))
    first = in_turn(answering(1.0, first=1), answering(2.0, second=2))
    target = models(i=first, j=in_turn(failing(), answering(3.0)))
    context = make.context()
    result = await make.run(plan, target, context=context)
    assert ["i", "o", "j", "i", "j"] == target.called()
    assert ({"T": make.tensor(3.0)}, {"second": 2}) == (result.outputs, result.parameters)
    assert "root.a=inner(i;j)" == context.trailing_metadata[0][1]


async def test_a_node_that_fails_every_time_says_so() -> None:
    """The message has the place inside and the attempts outside."""
    steps = [make.step("i", "i", {"IN": "X"}, {"OUT": "Y"})]
    inner = make.node("inner", SequencePlan, steps, inputs=["X"], outputs=["Y"])
    found = await outcome(one(retry(), inner), models(i=GONE))
    assert "UNAVAILABLE: g/1: inner/i -> i@1: gone, attempt 2 of 2 root.a=inner(i!)!" == found
