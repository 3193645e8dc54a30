"""What Prometheus is told of steps."""

import asyncio
import gc

import pytest
from prometheus_client import CollectorRegistry
from tests.unit.router import make
from tests.unit.router.fake_condition import FakeCondition
from tests.unit.router.fake_target import FakeTarget, answering, failing, in_turn
from tests.unit.router.virtual_clock import VirtualClock

from weft.router.executor import GraphExecutor
from weft.router.metrics import StepCollector
from weft.router.operators.sequence import SequencePlan
from weft.router.policies.cache import CachePlan
from weft.router.policies.retry import RetryPlan
from weft.router.runtime import Runtime

pytestmark = pytest.mark.usefixtures("virtual_clock")


async def test_steps_are_counted_by_status(virtual_clock: VirtualClock) -> None:
    """Skipped, softly failed, cancelled and answered runs, of nodes and of calls, with the latency of the answers."""
    wants = FakeCondition(lambda request, frame: request.parameters.get("more", False))
    inner = make.node(
        "inner", SequencePlan, [make.step("i", "i", {"IN": "X"}, {"OUT": "T"})], inputs=["X"], outputs=["T"]
    )
    steps = [
        make.step("a", inner, {"X": "X"}, {"T": "T"}, is_soft=True, when=wants),
        make.step("b", "b", {"IN": "X"}, {"OUT": "Y"}),
    ]
    plan = make.graph(make.node("root", SequencePlan, steps, inputs=["X"], outputs=["Y"]), name="pipe")
    target = FakeTarget(i=in_turn(failing(), answering()), b=answering(after_ms=30))
    runtime = Runtime({"model": target}, clock_ns=virtual_clock)
    executor = GraphExecutor(plan, runtime)
    await make.run(executor)
    await make.run(executor, parameters={"more": True})
    await make.run(executor, parameters={"more": True})
    request = asyncio.create_task(make.run(executor))
    await asyncio.sleep(0.01)
    request.cancel()
    await asyncio.wait((request,))
    registry = CollectorRegistry()
    registry.register(StepCollector(lambda: runtime.step_counters))

    def count(step: str, status: str) -> float | None:
        labels = {"graph": "pipe", "version": "1", "step": step, "status": status}
        return registry.get_sample_value("weft_graph_step_requests_total", labels)

    assert [1, 1, 2] == [count("root/a", status) for status in ("OK", "UNAVAILABLE", "SKIPPED")]
    assert [1, 1] == [count("inner/i", status) for status in ("OK", "UNAVAILABLE")]
    assert [3, 1, 0] == [count("root/b", status) for status in ("OK", "CANCELLED", "UNAVAILABLE")]
    labels = {"graph": "pipe", "version": "1", "step": "root/b"}
    assert 3 == registry.get_sample_value("weft_graph_step_latency_seconds_count", labels)
    assert pytest.approx(0.09) == registry.get_sample_value("weft_graph_step_latency_seconds_sum", labels)
    assert [0, 3] == [
        registry.get_sample_value("weft_graph_step_latency_seconds_bucket", labels | {"le": le})
        for le in ("0.025", "0.05")
    ]


async def test_policies_have_figures_where_they_were_used(virtual_clock: VirtualClock) -> None:
    """And a graph that is loaded again goes on where it was."""
    retry = RetryPlan(2, 0, frozenset({"UNAVAILABLE"}), 20.0)
    steps = [
        make.step("a", "a", {"IN": "X"}, {"OUT": "T"}, retry=retry, cache=CachePlan(0, 1 << 20)),
        make.step("b", "b", {"IN": "T"}, {"OUT": "Y"}),
    ]
    plan = make.graph(make.node("root", SequencePlan, steps, inputs=["X"], outputs=["Y"]), name="pipe")
    target = FakeTarget(a=in_turn(failing(), answering()))
    runtime = Runtime({"model": target}, clock_ns=virtual_clock)
    executor = GraphExecutor(plan, runtime)
    for _ in range(3):
        await make.run(executor)
    await make.run(GraphExecutor(plan, runtime))
    registry = CollectorRegistry()
    registry.register(StepCollector(lambda: runtime.step_counters))

    def figures(step: str) -> list[float | None]:
        labels = {"graph": "pipe", "version": "1", "step": step}
        names = ("retries", "cache_hits", "cache_misses", "hedges")
        return [registry.get_sample_value(f"weft_graph_step_{name}_total", labels) for name in names]

    assert [1, 2, 2, None] == figures("root/a")
    assert [None] * 4 == figures("root/b")


async def test_counters_live_as_long_as_a_graph_that_uses_them(virtual_clock: VirtualClock) -> None:
    """So that versions and steps that come and go leave nothing behind."""
    runtime = Runtime({"model": FakeTarget()}, clock_ns=virtual_clock)

    def made(step: str) -> GraphExecutor:
        root = make.node(
            "root", SequencePlan, [make.step(step, "m", {"IN": "X"}, {"OUT": "Y"})], inputs=["X"], outputs=["Y"]
        )
        return GraphExecutor(make.graph(root), runtime)

    executor = made("a")
    for step in "bcd":
        executor = made(step)
        gc.collect()
        assert [f"root/{step}"] == [counters.path for counters in runtime.step_counters]
    await make.run(executor)
    again = made("d")
    del executor
    gc.collect()
    assert [1] == [sum(counters.latency.counts) for counters in runtime.step_counters]
    assert again.plan.root.steps[0].name == "d"
