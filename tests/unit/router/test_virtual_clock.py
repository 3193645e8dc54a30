"""The clock that tests of deadlines run on."""

import asyncio
from typing import Any

import pytest
from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget, answering
from tests.unit.router.virtual_clock import VirtualClock

from weft.base.errors import RemoteError
from weft.language.plan import GraphPlan
from weft.router.operators.sequence import SequencePlan


def one_step(**options: Any) -> GraphPlan:
    steps = [make.step("a", "m", {"IN": "X"}, {"OUT": "Y"}, **options)]
    return make.graph(make.node("root", SequencePlan, steps, inputs=["X"], outputs=["Y"]))


async def test_an_hour_takes_no_time(virtual_clock: VirtualClock) -> None:
    """Sleeps, timeouts and the clock agree to the nanosecond."""
    before_ns = virtual_clock()
    await asyncio.gather(asyncio.sleep(3_600), asyncio.sleep(1))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await asyncio.Event().wait()
    assert 3_600_050_000_000 == virtual_clock() - before_ns
    assert 3_600_050.0 == virtual_clock.elapsed_ms()


async def test_a_step_ends_at_its_deadline(virtual_clock: VirtualClock) -> None:
    """The earlier of the step's and the request's, as the target keeps it."""
    target = FakeTarget(m=answering(after_ms=80))
    with pytest.raises(RemoteError, match=r"root/a -> m@1: no answer of 'm' in 50 ms"):
        await make.run(one_step(timeout_ms=50), target, context=make.context(timeout_ms=60))
    assert 50.0 == virtual_clock.elapsed_ms()
    with pytest.raises(RemoteError):
        await make.run(one_step(timeout_ms=50), target, context=make.context(timeout_ms=20))
    assert 70.0 == virtual_clock.elapsed_ms()
    assert (0, 0) == (target.num_open, make.num_other_tasks())
