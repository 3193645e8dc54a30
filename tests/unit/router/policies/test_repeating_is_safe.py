"""What is never called twice, where a further call goes, and at whose expense."""

import asyncio
from typing import Any

import pytest
from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget, answering
from tests.unit.router.virtual_clock import VirtualClock

from weft.base.core import CallContext, InferCall, InferResult
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


def retry(attempts: int = 3, percent: float = 20.0, *codes: str) -> RetryPlan:
    return RetryPlan(attempts, 0, frozenset(codes or ("UNAVAILABLE", "RESOURCE_EXHAUSTED")), percent)


def one(**options: Any) -> GraphPlan:
    steps = [make.step("a", "m", {"IN": "X"}, {"OUT": "Y"}, **options)]
    return make.graph(make.node("root", SEQUENCE, steps, inputs=["X"], outputs=["Y"]))


def raising(code: str = "UNAVAILABLE", **fields: Any) -> Any:
    async def fail(call: InferCall, context: CallContext) -> InferResult:
        raise RemoteError(code, "gone", **fields)

    return fail


async def test_every_attempt_knows_those_before_it() -> None:
    """Retries and hedges alike, so that each goes to another replica; another step begins with none."""
    seen: list[list[str]] = []

    async def answer(call: InferCall, context: CallContext) -> InferResult:
        seen.append(list(context.tried))
        context.tried.append(f"replica {len(seen)}")
        await asyncio.sleep(0.02)
        raise RemoteError("UNAVAILABLE", "gone")

    target = FakeTarget(m=answer)
    with pytest.raises(RemoteError):
        await make.run(one(retry=retry(2), hedge=HedgePlan(10, 1)), target)
    names = [f"replica {i}" for i in range(1, 5)]
    assert [names[:i] for i in range(4)] == seen


async def test_a_call_without_a_policy_asks_for_nothing() -> None:
    """No list is made for it."""
    target = FakeTarget()
    await make.run(one(), target)
    assert target.contexts[0].tried is None


async def test_the_budget_of_the_target_is_shared_by_all_graphs() -> None:
    """What one has spent the other does not have; hedges pay too."""
    budget = RetryBudget(1.0, max_tokens=3)
    target = FakeTarget(m=raising())
    runtime = Runtime({"model": target}, budgets={"model": budget})
    first, second = (GraphExecutor(one(retry=retry(3)), runtime) for _ in range(2))
    for executor, expected in ((first, 3), (second, 2), (first, 1)):
        before = len(target.calls)
        with pytest.raises(RemoteError):
            await make.run(executor)
        assert expected == len(target.calls) - before
    assert 2 == budget.num_refused
    slow = FakeTarget(m=answering(after_ms=100))
    runtime = Runtime({"model": slow}, budgets={"model": budget})
    await make.run(GraphExecutor(one(hedge=HedgePlan(10, 3)), runtime))
    assert 1 == len(slow.calls)


async def test_calls_that_a_dying_replica_loses_may_all_be_repeated() -> None:
    """A hundred at once, of which none was answered."""
    target = FakeTarget()
    calls = 0

    async def answer(call: InferCall, context: CallContext) -> Any:
        nonlocal calls
        calls += 1
        script = raising(is_unanswered=True) if calls <= 100 else answering()
        await asyncio.sleep(0.01)
        return await script(call, context)

    target.answers["m"] = answer
    executor = GraphExecutor(one(retry=retry(2)), Runtime({"model": target}, budgets={"model": RetryBudget()}))
    results = await asyncio.gather(*(make.run(executor) for _ in range(100)), return_exceptions=True)
    assert 200 == calls
    assert not [result for result in results if isinstance(result, Exception)]


@pytest.mark.parametrize(("percent", "least", "most"), [(0.0, 1.20, 1.22), (100.0, 2.0, 2.02), (5.0, 1.05, 1.07)])
async def test_an_overloaded_target_sees_as_many_calls_as_the_graph_says(
    percent: float, least: float, most: float
) -> None:
    """6000 requests that all fail, eight at a time, of graphs that would try each five times: nothing else limits it.

    `budget_percent: 100` lets each be repeated once; a hundred more are saved at first.
    """
    target = FakeTarget(m=raising("RESOURCE_EXHAUSTED"))
    runtime = Runtime({"model": target}, budgets={"model": RetryBudget()})
    executors = [GraphExecutor(one(retry=retry(5, percent)), runtime) for _ in range(4)]

    async def client(number: int) -> None:
        for _ in range(750):
            with pytest.raises(RemoteError):
                await make.run(executors[number % 4])

    await asyncio.gather(*map(client, range(8)))
    assert least * 6000 <= len(target.calls) <= most * 6000


async def test_the_jitter_stays_within_half_and_whole(virtual_clock: VirtualClock) -> None:
    """And is not always the same."""
    pauses = set()
    for _ in range(50):
        start_ms = virtual_clock.elapsed_ms()
        with pytest.raises(RemoteError):
            await make.run(one(retry=RetryPlan(2, 100, frozenset({"UNAVAILABLE"}), 20.0)), FakeTarget(m=raising()))
        pauses.add(virtual_clock.elapsed_ms() - start_ms)
    assert 50 <= min(pauses) < 60
    assert 90 < max(pauses) <= 100
