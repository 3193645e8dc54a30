"""A served model that knows how long it takes."""

import asyncio
import time

import pytest
from tests.unit.serving.builders import make_call
from tests.unit.serving.fake_backends import Echo, Raises

from weft.base.core import CallContext
from weft.base.errors import DeadlineExceededError
from weft.serving.scheduler.admission import MIN_MEASUREMENTS

MS = 1_000_000


def _within(milliseconds):
    return CallContext(deadline_ns=time.monotonic_ns() + int(milliseconds * MS))


@pytest.fixture
def slow():
    """A backend that takes 20 ms and counts its executions."""

    class Slow(Echo):
        num_executed = 0

        def execute(self, batch):
            time.sleep(0.02)
            type(self).num_executed += 1
            return super().execute(batch)

    return Slow


async def _measured(serve, backend, **settings):
    model = await serve(backend, is_batching=True, **settings)
    for _ in range(MIN_MEASUREMENTS):
        await model.infer(make_call(), CallContext())
    return model


async def test_refused_at_the_door(serve, slow):
    """What cannot finish in time by the measured median is refused at once, counted as REJECTED, and never executed."""
    model = await _measured(serve, slow)
    context = _within(10)
    with pytest.raises(DeadlineExceededError, match=r"^cannot finish inside its deadline: "):
        await model.infer(make_call(), context)
    assert time.monotonic_ns() < context.deadline_ns
    await model.infer(make_call(), _within(10_000))
    assert (MIN_MEASUREMENTS + 1, {"REJECTED": 1}) == (slow.num_executed, model.statistics.failures_by_reason)


async def test_not_refused_before_it_is_measured(serve, slow):
    """The first requests are executed, however short their deadline is."""
    model = await serve(slow, is_batching=True)
    await model.infer(make_call(), _within(10))
    assert 1 == slow.num_executed


async def test_failures_are_no_measurements(serve):
    """Executions that answered nobody do not count as fast ones."""
    model = await serve(Raises)
    outcomes = [model.infer(make_call(), CallContext()) for _ in range(MIN_MEASUREMENTS)]
    await asyncio.gather(*outcomes, return_exceptions=True)
    assert 0 == model._deadlines._times.median_ns(1, time.monotonic_ns())


async def test_delay_ends_before_the_deadline(serve):
    """A batch that would wait for a minute goes while its member can still be answered in time."""
    model = await serve(Echo, is_batching=True, max_queue_delay_us=60_000_000)
    context = _within(500)
    await model.infer(make_call(), context)
    assert time.monotonic_ns() < context.deadline_ns
