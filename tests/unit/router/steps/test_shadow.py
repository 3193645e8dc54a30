"""Copies of requests: sent and forgotten by the request, owned by the router. See ``cases/guards.txt`` too."""

import asyncio
import gc
import random
import weakref
from typing import Any

import pytest
from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget, answering, failing
from tests.unit.router.graph_cases import compiled
from tests.unit.router.virtual_clock import VirtualClock

from weft.base.core import CallContext
from weft.base.errors import NotFoundError
from weft.base.tensors import WireTensor
from weft.router.executor import GraphExecutor
from weft.router.runtime import Runtime

SHADOWED = """node { name: "root" sequence { step { model_name: "m" }
  step { name: "s" model_name: "shadow" shadow { percent: 100 } } } }"""


class Copying:
    """An executor of a graph with a shadow, by default one of every request."""

    def __init__(self, clock: VirtualClock, target: FakeTarget, graph: str = SHADOWED, **options: Any) -> None:
        self.target = target
        self.runtime = Runtime({"model": target}, clock_ns=clock, **options)
        self.executor = GraphExecutor(compiled(graph), self.runtime)

    async def ask(self, **options: Any) -> Any:
        """Send a request, and let the copy start."""
        result = await make.run(self.executor, **options)
        await asyncio.sleep(0.001)
        return result

    def counts(self) -> tuple[int, int, int]:
        """Copies that were sent, failed and dropped."""
        events = next(counters for counters in self.runtime.step_counters if counters.path == "root/s").events
        return events["shadows_sent"], events["shadows_failed"], events["shadows_dropped"]


async def test_a_shadow_holds_up_nothing_and_is_told_that_it_is_one(virtual_clock: VirtualClock) -> None:
    """The answer comes while the copy is on its way, which is told by a header."""
    s = Copying(virtual_clock, FakeTarget(shadow=answering(9.0, after_ms=500, p=1)))
    await s.ask(context=CallContext(headers={"x-user-id": "7"}))
    assert (1.0, 1) == (virtual_clock.elapsed_ms(), s.runtime.shadows.num_inflight)
    seen = dict(zip(s.target.called(), [context.headers for context in s.target.contexts], strict=True))
    assert {"m": {"x-user-id": "7"}, "shadow": {"x-user-id": "7", "x-graph-shadow": "1"}} == seen
    await asyncio.sleep(0.6)
    assert (0, 0, [], (1, 0, 0)) == (
        s.runtime.shadows.num_inflight,
        s.target.num_open,
        s.target.cancelled,
        s.counts(),
    )


@pytest.mark.parametrize("is_defect", [False, True])
async def test_a_failing_shadow_fails_nothing(
    virtual_clock: VirtualClock, is_defect: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It is counted; a defect is logged too."""

    async def break_down(call: Any, context: Any) -> Any:
        raise ZeroDivisionError

    s = Copying(virtual_clock, FakeTarget(shadow=break_down if is_defect else failing()))
    await s.ask()
    assert (1, 1, 0) == s.counts()
    assert is_defect == any("ZeroDivisionError" in str(record.exc_info) for record in caplog.records)


async def test_a_share_of_the_requests_is_copied(virtual_clock: VirtualClock) -> None:
    """Drawn for each request."""
    graph = SHADOWED.replace("percent: 100", "percent: 5")
    s = Copying(virtual_clock, FakeTarget(), graph, generator=random.Random(7))
    for _ in range(2000):
        await make.run(s.executor)
    await asyncio.sleep(0.001)
    num_copies = s.target.called().count("shadow")
    assert (True, num_copies) == (70 < num_copies < 130, s.counts()[0])


async def test_no_more_copies_than_max_inflight_are_on_their_way(virtual_clock: VirtualClock) -> None:
    """The others are dropped and counted."""
    graph = SHADOWED.replace("percent: 100", "percent: 100 max_inflight: 2")
    s = Copying(virtual_clock, FakeTarget(shadow=answering(after_ms=500)), graph)
    for _ in range(5):
        await s.ask()
    assert (2, 0, 3) == s.counts()
    await asyncio.sleep(0.6)
    await s.ask()
    assert (3, 0, 3) == s.counts()


async def test_shadows_are_shed_first(virtual_clock: VirtualClock) -> None:
    """When the router is busy none starts; the requests go on."""
    busy = [True, False]
    s = Copying(virtual_clock, FakeTarget(), is_busy=lambda: busy.pop(0))
    await s.ask()
    await s.ask()
    assert (["m", "m", "shadow"], (1, 0, 1)) == (sorted(s.target.called()), s.counts())


@pytest.mark.parametrize(("policy", "expected_ms"), [("", 30_000), ("policy { timeout_ms: 80 }", 80)])
async def test_a_shadow_has_a_deadline_of_its_own(virtual_clock: VirtualClock, policy: str, expected_ms: int) -> None:
    """Not that of the request, which may be over long before; without a timeout it is half a minute."""
    graph = SHADOWED.replace("shadow {", f"{policy} shadow {{")
    s = Copying(virtual_clock, FakeTarget(shadow=answering(after_ms=1_000_000)), graph)
    await s.ask(context=make.context(timeout_ms=10))
    await asyncio.sleep((expected_ms - 2) / 1e3)
    assert 1 == s.runtime.shadows.num_inflight
    await asyncio.sleep(0.002)
    assert (0, (1, 1, 0)) == (s.runtime.shadows.num_inflight, s.counts())


async def test_a_closed_runtime_has_no_shadow_left(virtual_clock: VirtualClock) -> None:
    """Its call is cancelled, and none starts any more."""
    s = Copying(virtual_clock, FakeTarget(shadow=answering(after_ms=500)))
    await s.ask()
    await s.runtime.close()
    assert (["shadow"], 0, 0) == (s.target.cancelled, s.target.num_open, make.num_other_tasks())
    await s.ask()
    assert (0, 1) == (s.runtime.shadows.num_inflight, s.counts()[2])


class Data(bytearray):
    """Bytes that can be watched."""


async def test_a_shadow_holds_only_the_tensors_that_it_reads(virtual_clock: VirtualClock) -> None:
    """A copy on its way for half a minute must not keep what else the request had."""
    graph = "graph: X BIG -> Y\n" + SHADOWED.replace('"m"', '"m" input_map { key: "X" value: "BIG" }')
    s = Copying(virtual_clock, FakeTarget(shadow=answering(after_ms=500)), graph)
    data = Data(4)
    watched = weakref.ref(data)
    inputs = {"X": make.tensor(1.0), "BIG": WireTensor("FP32", (1,), data)}  # type: ignore[arg-type]
    del data
    await s.ask(inputs=inputs)
    inputs.clear()
    s.target.calls[:] = [call for call in s.target.calls if call.model_name == "shadow"]
    gc.collect()
    assert (1, None) == (s.runtime.shadows.num_inflight, watched())


async def test_a_copy_is_nothing_that_a_bandit_gets_feedback_for(virtual_clock: VirtualClock) -> None:
    """What it chooses is counted, and not remembered by the request's id."""
    graph = (
        SHADOWED.replace('model_name: "shadow"', 'node: "ab"')
        + """
    node { name: "ab" splitter { bandit { algorithm: EPSILON_GREEDY } step { model_name: "A" } } }"""
    )
    s = Copying(virtual_clock, FakeTarget(), graph)
    await s.ask(request_id="r1")
    assert [1] == [known.arm.num_pulls for known in s.runtime.bandits]
    with pytest.raises(NotFoundError, match="no request 'r1'"):
        s.runtime.bandits.reward_request("g", "r1", 1.0)
