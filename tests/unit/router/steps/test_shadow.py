"""Copies of requests: sent and forgotten by the request, owned by the router."""

import asyncio
import gc
import random
import weakref
from collections.abc import Mapping
from typing import Any

import pytest
from tests.unit.router import make
from tests.unit.router.fake_condition import FakeCondition
from tests.unit.router.fake_target import FakeTarget, answering, failing
from tests.unit.router.virtual_clock import VirtualClock

from weft.base.core import CallContext
from weft.base.errors import InvalidArgumentError, NotFoundError
from weft.base.tensors import WireTensor
from weft.language.bandit_algorithms import ALGORITHMS, BanditPlan
from weft.language.plan import GraphPlan, ShadowPlan
from weft.router.executor import GraphExecutor
from weft.router.operators.sequence import SequencePlan
from weft.router.operators.splitter import SplitterPlan
from weft.router.operators.switch import SwitchPlan
from weft.router.reporting.counters import StepCounters
from weft.router.runtime import Runtime

SEQUENCE = SequencePlan
pytestmark = pytest.mark.usefixtures("virtual_clock")


def shadowed(shadow: ShadowPlan, **options: Any) -> GraphPlan:
    """X -> a (model m) -> Y, and X -> s (model shadow) -> nowhere."""
    steps = [
        make.step("s", "shadow", {"IN": "X"}, {}, shadow=shadow, **options),
        make.step("a", "m", {"IN": "X"}, {"OUT": "Y"}),
    ]
    return make.graph(make.node("root", SEQUENCE, steps, inputs=["X"], outputs=["Y"]))


class Data(bytearray):
    """Bytes that can be watched."""


def counters_of(runtime: Runtime, path: str = "root/s") -> StepCounters:
    return next(counters for counters in runtime.step_counters if counters.path == path)


async def test_a_shadow_holds_up_nothing(virtual_clock: VirtualClock) -> None:
    """The answer comes while the copy is on its way; neither path nor answer shows it."""
    target = FakeTarget(shadow=answering(9.0, after_ms=500, p=1))
    runtime = Runtime({"model": target}, clock_ns=virtual_clock)
    executor = GraphExecutor(shadowed(ShadowPlan(100.0, 0)), runtime)
    context = CallContext(headers={"x-user-id": "7"})
    result = await make.run(executor, context=context)
    assert ({"Y": make.tensor(1.0)}, {}, 0.0) == (result.outputs, result.parameters, virtual_clock.elapsed_ms())
    assert "root.a" == context.trailing_metadata[0][1]
    assert 1 == runtime.shadows.num_inflight
    await asyncio.sleep(0.6)
    assert (0, 0, []) == (runtime.shadows.num_inflight, target.num_open, target.cancelled)
    index = target.called().index("shadow")
    assert make.tensor(1.0) == target.calls[index].inputs["IN"]
    assert {"x-user-id": "7", "x-graph-shadow": "1"} == target.contexts[index].headers
    assert {"x-user-id": "7"} == target.contexts[1 - index].headers
    counters = counters_of(runtime)
    assert (1, 0, 0) == (
        counters.events["shadows_sent"],
        counters.events["shadows_failed"],
        counters.events["shadows_dropped"],
    )


@pytest.mark.parametrize("is_defect", [False, True])
async def test_a_failing_shadow_fails_nothing(
    virtual_clock: VirtualClock, is_defect: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It is counted; a defect is logged too."""

    async def break_down(call: Any, context: Any) -> Any:
        raise ZeroDivisionError

    target = FakeTarget(shadow=break_down if is_defect else failing())
    runtime = Runtime({"model": target}, clock_ns=virtual_clock)
    executor = GraphExecutor(shadowed(ShadowPlan(100.0, 0)), runtime)
    await make.run(executor)
    await asyncio.sleep(0.001)
    assert (1, 1) == (
        counters_of(runtime).events["shadows_sent"],
        counters_of(runtime).events["shadows_failed"],
    )
    assert is_defect == any("ZeroDivisionError" in str(record.exc_info) for record in caplog.records)


async def test_a_share_of_the_requests_is_copied(virtual_clock: VirtualClock) -> None:
    """Drawn for each request."""
    target = FakeTarget()
    runtime = Runtime({"model": target}, clock_ns=virtual_clock, generator=random.Random(7))
    executor = GraphExecutor(shadowed(ShadowPlan(5.0, 0)), runtime)
    for _ in range(2000):
        await make.run(executor)
    await asyncio.sleep(0.001)
    assert 70 < target.called().count("shadow") < 130
    assert target.called().count("shadow") == counters_of(runtime).events["shadows_sent"]


async def test_no_more_copies_than_max_inflight_are_on_their_way(virtual_clock: VirtualClock) -> None:
    """The others are dropped and counted."""
    target = FakeTarget(shadow=answering(after_ms=500))
    runtime = Runtime({"model": target}, clock_ns=virtual_clock)
    executor = GraphExecutor(shadowed(ShadowPlan(100.0, 2)), runtime)
    for _ in range(5):
        await make.run(executor)
    counters = counters_of(runtime)
    assert (2, 3) == (counters.events["shadows_sent"], counters.events["shadows_dropped"])
    await asyncio.sleep(0.6)
    await make.run(executor)
    assert 3 == counters.events["shadows_sent"]


async def test_shadows_are_shed_first(virtual_clock: VirtualClock) -> None:
    """When the router is busy none starts; the requests go on."""
    is_busy = True
    target = FakeTarget()
    runtime = Runtime({"model": target}, clock_ns=virtual_clock, is_busy=lambda: is_busy)
    executor = GraphExecutor(shadowed(ShadowPlan(100.0, 0)), runtime)
    await make.run(executor)
    is_busy = False
    await make.run(executor)
    await asyncio.sleep(0.001)
    assert 1 == target.called().count("shadow")
    assert (1, 1) == (
        counters_of(runtime).events["shadows_sent"],
        counters_of(runtime).events["shadows_dropped"],
    )


@pytest.mark.parametrize(("timeout_ms", "expected_ms"), [(0, 30_000), (80, 80)])
async def test_a_shadow_has_a_deadline_of_its_own(
    virtual_clock: VirtualClock, timeout_ms: int, expected_ms: int
) -> None:
    """Not that of the request, which may be over long before; without a timeout it is half a minute."""
    target = FakeTarget(shadow=answering(after_ms=1_000_000))
    runtime = Runtime({"model": target}, clock_ns=virtual_clock)
    executor = GraphExecutor(shadowed(ShadowPlan(100.0, 0), timeout_ms=timeout_ms), runtime)
    await make.run(executor, context=make.context(timeout_ms=10))
    await asyncio.sleep((expected_ms - 1) / 1e3)
    assert 1 == runtime.shadows.num_inflight
    await asyncio.sleep(0.002)
    assert (0, 1) == (runtime.shadows.num_inflight, counters_of(runtime).events["shadows_failed"])


async def test_a_cancelled_request_leaves_its_shadow_alone(virtual_clock: VirtualClock) -> None:
    """The copy is not the client's."""
    target = FakeTarget(m=answering(after_ms=100), shadow=answering(after_ms=200))
    runtime = Runtime({"model": target}, clock_ns=virtual_clock)
    request = asyncio.create_task(make.run(GraphExecutor(shadowed(ShadowPlan(100.0, 0)), runtime)))
    await asyncio.sleep(0.05)
    request.cancel()
    await asyncio.wait((request,))
    assert (["m"], 1) == (target.cancelled, runtime.shadows.num_inflight)
    await asyncio.sleep(0.2)
    assert (["m"], 0) == (target.cancelled, runtime.shadows.num_inflight)


async def test_a_closed_runtime_has_no_shadow_left(virtual_clock: VirtualClock) -> None:
    """Its call is cancelled, and none starts any more."""
    target = FakeTarget(shadow=answering(after_ms=500))
    runtime = Runtime({"model": target}, clock_ns=virtual_clock)
    executor = GraphExecutor(shadowed(ShadowPlan(100.0, 0)), runtime)
    await make.run(executor)
    await asyncio.sleep(0.001)
    await runtime.close()
    assert (["shadow"], 0, 0) == (target.cancelled, target.num_open, make.num_other_tasks())
    await make.run(executor)
    assert (0, 1) == (runtime.shadows.num_inflight, counters_of(runtime).events["shadows_dropped"])


async def test_a_shadow_of_alternatives_sees_the_inputs_of_the_node(virtual_clock: VirtualClock) -> None:
    """It starts with the node, whichever branch is taken."""
    branches = [make.step("b", "m", {"IN": "X"}, {"OUT": "Y"}, is_otherwise=True)]
    shadow = make.step("s", "shadow", {"IN": "X"}, {}, shadow=ShadowPlan(100.0, 0))
    with_shadow = make.node("sw", SwitchPlan, [*branches, shadow], inputs=["X"], outputs=["Y"])
    plan = make.graph(make.node("sw", SwitchPlan, branches, inputs=["X"], outputs=["Y"], shadows=with_shadow.steps[1:]))
    target = FakeTarget()
    context = CallContext()
    await make.run(plan, target, context=context)
    await asyncio.sleep(0.001)
    assert (["m", "shadow"], "sw[b]") == (target.called(), context.trailing_metadata[0][1])


async def test_a_shadow_may_have_a_condition(virtual_clock: VirtualClock) -> None:
    """It is looked at behind the request's back: what it raises fails nothing."""

    def is_large(request: Any, tensors: Mapping[str, Any]) -> bool:
        if tensors["X"][0] == 1:
            raise InvalidArgumentError("neither large nor small")
        return bool(tensors["X"][0] > 1)

    large = FakeCondition(is_large, names=("X",))
    target = FakeTarget()
    runtime = Runtime({"model": target}, clock_ns=virtual_clock)
    executor = GraphExecutor(shadowed(ShadowPlan(100.0, 0), when=large), runtime)
    for value in (0.0, 1.0, 2.0):
        await make.run(executor, inputs={"X": make.tensor(value)})
        await asyncio.sleep(0.001)
    assert [make.tensor(2.0)] == [call.inputs["IN"] for call in target.calls if call.model_name == "shadow"]


async def test_a_shadow_holds_only_the_tensors_that_it_reads(virtual_clock: VirtualClock) -> None:
    """A copy on its way for half a minute must not keep what else the request had."""
    steps = [
        make.step("s", "shadow", {"IN": "X"}, {}, shadow=ShadowPlan(100.0, 0)),
        make.step("a", "m", {"IN": "BIG"}, {"OUT": "Y"}),
    ]
    plan = make.graph(make.node("root", SEQUENCE, steps, inputs=["X", "BIG"], outputs=["Y"]))
    target = FakeTarget(shadow=answering(after_ms=500))
    runtime = Runtime({"model": target}, clock_ns=virtual_clock)

    data = Data(4)
    watched = weakref.ref(data)
    inputs = {"X": make.tensor(1.0), "BIG": WireTensor("FP32", (1,), data)}  # type: ignore[arg-type]
    del data
    await make.run(GraphExecutor(plan, runtime), inputs=inputs)
    inputs.clear()
    target.calls.clear()
    gc.collect()
    await asyncio.sleep(0.001)
    target.calls[:] = [call for call in target.calls if call.model_name == "shadow"]
    assert (1, None) == (runtime.shadows.num_inflight, watched())


async def test_a_copy_is_nothing_that_a_bandit_gets_feedback_for(virtual_clock: VirtualClock) -> None:
    """What it chooses is counted, and not remembered by the request's id."""
    bandit = BanditPlan(ALGORITHMS["EPSILON_GREEDY"], 0.1, 0)
    steps = [make.step("A", "shadow", {"IN": "X"}, {})]
    ab = make.node("ab", SplitterPlan, steps, inputs=["X"], outputs=[], bandit=bandit)
    copy = make.step("s", ab, {"X": "X"}, {}, shadow=ShadowPlan(100.0, 0))
    answer = make.step("a", "m", {"IN": "X"}, {"OUT": "Y"})
    plan = make.graph(make.node("root", SEQUENCE, [copy, answer], inputs=["X"], outputs=["Y"]))
    runtime = Runtime({"model": FakeTarget()}, clock_ns=virtual_clock)
    await make.run(GraphExecutor(plan, runtime), request_id="r1")
    await asyncio.sleep(0.001)
    assert [1] == [known.arm.num_pulls for known in runtime.bandits]
    with pytest.raises(NotFoundError, match="no request 'r1'"):
        runtime.bandits.reward_request("g", "r1", 1.0)
