"""Further attempts after a failure: when, how often, how late, and at whose expense."""

import asyncio
import json
import random
from typing import Any

import pytest
from tests.unit.router import make
from tests.unit.router.fake_condition import FakeCondition
from tests.unit.router.fake_target import FakeTarget, answering, failing, in_turn
from tests.unit.router.virtual_clock import VirtualClock

from weft.base.core import CallContext
from weft.base.errors import RemoteError
from weft.language.plan import GraphPlan
from weft.router.executor import GraphExecutor
from weft.router.operators.sequence import SequencePlan
from weft.router.policies.retry import RetryPlan
from weft.router.runtime import Runtime
from weft.router.target import RetryBudget

SEQUENCE = SequencePlan
pytestmark = pytest.mark.usefixtures("virtual_clock")


def retry(attempts: int = 2, backoff_ms: int = 0, codes: tuple[str, ...] = ("UNAVAILABLE",)) -> RetryPlan:
    return RetryPlan(attempts, backoff_ms, frozenset(codes), 20.0)


def one(plan: RetryPlan, **options: Any) -> GraphPlan:
    steps = [make.step("a", "m", {"IN": "X"}, {"OUT": "Y"}, retry=plan, **options)]
    return make.graph(make.node("root", SEQUENCE, steps, inputs=["X"], outputs=["Y"]))


class Halves(random.Random):
    """Chance that always falls in the middle."""

    def uniform(self, a: float, b: float) -> float:
        return (a + b) / 2


async def test_a_failure_that_is_listed_is_tried_again() -> None:
    """The second answer counts, and the trace tells how many attempts there were."""
    target = FakeTarget(m=in_turn(failing(), answering(5.0, p=1)))
    context = CallContext()
    result = await make.run(one(retry()), target, context=context, parameters={"graph_trace": True})
    assert (make.tensor(5.0), 1, 2) == (result.outputs["Y"], result.parameters["p"], len(target.calls))
    entry = json.loads(str(result.parameters["graph_trace"]))[0]
    assert (2, "OK", "root.a") == (entry["attempts"], entry["status"], context.trailing_metadata[0][1])


async def test_a_failure_that_is_not_listed_is_not_tried_again() -> None:
    """It stands as it is; after a listed one, the attempt is named."""
    target = FakeTarget(m=failing("INVALID_ARGUMENT", "wrong"))
    with pytest.raises(RemoteError, match=r"^g/1: root/a -> m@1: wrong$"):
        await make.run(one(retry(5)), target)
    assert 1 == len(target.calls)
    target = FakeTarget(m=in_turn(failing(), failing("INVALID_ARGUMENT", "wrong")))
    with pytest.raises(RemoteError, match=r"^g/1: root/a -> m@1: wrong, attempt 2 of 5$"):
        await make.run(one(retry(5)), target)


async def test_the_last_error_says_how_many_attempts_there_were() -> None:
    """And has the status of the last."""
    codes = ("UNAVAILABLE", "INTERNAL")
    target = FakeTarget(m=in_turn(failing(), failing(), failing("INTERNAL", "boom")))
    with pytest.raises(RemoteError) as caught:
        await make.run(one(retry(3, codes=codes)), target)
    assert ("INTERNAL", "g/1: root/a -> m@1: boom, attempt 3 of 3") == (caught.value.code, caught.value.message)
    assert 3 == len(target.calls)


async def test_the_pause_doubles(virtual_clock: VirtualClock) -> None:
    """Between half and the whole of it is waited."""
    target = FakeTarget(m=failing())
    with pytest.raises(RemoteError):
        await make.run(one(retry(4, backoff_ms=100)), target, generator=Halves())
    assert 75.0 + 150 + 300 == virtual_clock.elapsed_ms()


async def test_the_jitter_stays_within_half_and_whole(virtual_clock: VirtualClock) -> None:
    """And is not always the same."""
    pauses = set()
    for _ in range(50):
        start_ms = virtual_clock.elapsed_ms()
        with pytest.raises(RemoteError):
            await make.run(one(retry(2, backoff_ms=100)), FakeTarget(m=failing()))
        pauses.add(virtual_clock.elapsed_ms() - start_ms)
    assert 50 <= min(pauses) < 60
    assert 90 < max(pauses) <= 100


async def test_a_pause_has_a_longest_length(virtual_clock: VirtualClock) -> None:
    """However often it doubled."""
    with pytest.raises(RemoteError):
        await make.run(one(retry(60, backoff_ms=40_000)), FakeTarget(m=failing()), generator=Halves())
    assert 30_000 + 58 * 45_000 == virtual_clock.elapsed_ms()


async def test_one_timeout_holds_for_all_attempts(virtual_clock: VirtualClock) -> None:
    """Each attempt has what is left of it."""
    target = FakeTarget(m=in_turn(failing(after_ms=30), answering(after_ms=30)))
    with pytest.raises(RemoteError, match=r"no answer of 'm' in 20 ms, attempt 2 of 2$") as caught:
        await make.run(one(retry(2), timeout_ms=50), target)
    assert ("DEADLINE_EXCEEDED", 50.0) == (caught.value.code, virtual_clock.elapsed_ms())


async def test_no_pause_ends_after_the_deadline(virtual_clock: VirtualClock) -> None:
    """The error comes at once, not after a wait for nothing."""
    target = FakeTarget(m=failing(after_ms=10))
    with pytest.raises(RemoteError, match=r"gone, attempt 1 of 2, no time for another$"):
        await make.run(one(retry(2, backoff_ms=1000), timeout_ms=100), target)
    assert (10.0, 1) == (virtual_clock.elapsed_ms(), len(target.calls))


async def test_a_pause_up_to_the_deadline_is_one_for_nothing(virtual_clock: VirtualClock) -> None:
    """40 ms and three quarters of 80 make the 100 that there are."""
    target = FakeTarget(m=failing(after_ms=40))
    with pytest.raises(RemoteError, match="no time for another"):
        await make.run(one(retry(2, backoff_ms=80), timeout_ms=100), target, generator=Halves())
    assert (40.0, 1) == (virtual_clock.elapsed_ms(), len(target.calls))


async def test_an_empty_budget_leaves_the_first_error(virtual_clock: VirtualClock) -> None:
    """Retries are for few failures; when all fail they would make it worse."""
    target = FakeTarget(m=failing(after_ms=10))
    runtime = Runtime({"model": target}, clock_ns=virtual_clock, budgets={"model": RetryBudget(max_tokens=8)})
    executor = GraphExecutor(one(retry(3)), runtime)
    errors = await asyncio.gather(*(make.run(executor) for _ in range(20)), return_exceptions=True)
    refused = [error for error in errors if error.message.endswith(", retry budget exhausted")]
    assert (20, 20 + 8) == (len(refused), len(target.calls))
    (counters,) = runtime.step_counters
    assert (8, 20, {"UNAVAILABLE": 20}) == (
        counters.events["retries"],
        counters.events["retries_refused"],
        counters.failures,
    )


@pytest.mark.parametrize("at_ms", [5, 50])
async def test_a_cancel_leaves_nothing(virtual_clock: VirtualClock, at_ms: int) -> None:
    """During the call and during the pause."""
    target = FakeTarget(m=failing(after_ms=10))
    runtime = Runtime({"model": target}, clock_ns=virtual_clock)
    request = asyncio.create_task(make.run(GraphExecutor(one(retry(3, backoff_ms=100)), runtime)))
    await asyncio.sleep(at_ms / 1e3)
    request.cancel()
    await asyncio.wait((request,))
    assert (True, 0, 0) == (request.cancelled(), target.num_open, make.num_other_tasks())


async def test_a_node_is_run_again_as_a_whole() -> None:
    """In a frame of its own: nothing of the failed attempt is in the answer, and the path shows the last attempt."""
    optional = FakeCondition(lambda request, frame: len(target.calls) == 1)
    inner = make.node(
        "inner",
        SEQUENCE,
        [
            make.step("i", "i", {"IN": "X"}, {"OUT": "S"}),
            make.step("o", "o", {"IN": "S"}, {"OUT": "O"}, when=optional),
            make.step("j", "j", {"IN": "S", "MORE": "O"}, {"OUT": "T"}),
        ],
        inputs=["X"],
        outputs=["T", "O"],
    )
    steps = [make.step("a", inner, {"X": "X"}, {"T": "T", "O": "O"}, retry=retry())]
    plan = make.graph(make.node("root", SEQUENCE, steps, inputs=["X"], outputs=["T", "O"]))
    target = FakeTarget(
        i=in_turn(answering(1.0, first=1), answering(2.0, second=2)),
        j=in_turn(failing(), answering(3.0)),
    )
    context = CallContext()
    result = await make.run(plan, target, context=context)
    assert ["i", "o", "j", "i", "j"] == target.called()
    assert ({"T": make.tensor(3.0)}, {"second": 2}) == (result.outputs, result.parameters)
    assert "root.a=inner(i;j)" == context.trailing_metadata[0][1]


async def test_a_node_that_fails_every_time_says_so() -> None:
    """The message has the place inside and the attempts outside."""
    inner = make.node("inner", SEQUENCE, [make.step("i", "i", {"IN": "X"}, {"OUT": "T"})], inputs=["X"], outputs=["T"])
    steps = [make.step("a", inner, {"X": "X"}, {"T": "T"}, retry=retry())]
    plan = make.graph(make.node("root", SEQUENCE, steps, inputs=["X"], outputs=["T"]))
    context = CallContext()
    with pytest.raises(RemoteError, match=r"^g/1: inner/i -> i@1: gone, attempt 2 of 2$"):
        await make.run(plan, FakeTarget(i=failing()), context=context)
    assert "root.a=inner(i!)!" == context.trailing_metadata[0][1]


async def test_attempts_come_before_the_fallback() -> None:
    """The text tells both."""
    target = FakeTarget(m=failing(), spare=failing("INTERNAL", "boom"))
    plan = one(retry(2), fallback=make.step("spare", "spare", {"IN": "X"}, {"OUT": "Y"}))
    with pytest.raises(RemoteError) as caught:
        await make.run(plan, target)
    assert ["m", "m", "spare"] == target.called()
    assert (
        "g/1: root/a -> m@1: gone, attempt 2 of 2 (UNAVAILABLE); fallback spare: INTERNAL: boom" == caught.value.message
    )
