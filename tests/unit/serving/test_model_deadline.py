"""A served model that knows how long it takes."""

import asyncio
import sys
import time

import pytest
import uvloop
from tests.unit.serving.builders import make_call
from tests.unit.serving.fake_backends import Echo, Raises

from weft.base.core import CallContext
from weft.base.errors import DeadlineExceededError
from weft.serving.runtime.dispatcher import Alarm
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
    assert 0 == model.times.median_ns(1, time.monotonic_ns())


async def test_delay_ends_before_the_deadline(serve):
    """A batch that would wait for a minute goes while its member can still be answered in time."""
    model = await serve(Echo, is_batching=True, max_queue_delay_us=60_000_000)
    context = _within(500)
    await model.infer(make_call(), context)
    assert time.monotonic_ns() < context.deadline_ns


def _run(new_loop, main):
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def new_loop(request):
    """Maker of an event loop of each kind."""
    return request.param


@pytest.fixture(params=["timerfd", "call_later"])
def _kind(request, monkeypatch):
    """Runs a test with each kind of timer."""
    if request.param == "call_later":
        monkeypatch.setattr(sys, "platform", "other")
    elif sys.platform != "linux":
        pytest.skip("timerfd is Linux's")


@pytest.mark.usefixtures("_kind")
def test_rings_at_the_earliest_time(new_loop):
    """Of several times the earliest counts; after it rang it can be set again, also to a time that has passed."""

    async def main():
        rings = asyncio.Queue()
        alarm = Alarm(asyncio.get_running_loop(), lambda: rings.put_nowait(time.monotonic_ns()))
        now_ns = time.monotonic_ns()
        for at_ms in (10_000, 5, 7_000):
            alarm.set(now_ns + at_ms * MS, now_ns)
        assert await asyncio.wait_for(rings.get(), 5) - now_ns >= 4 * MS
        for at_ms in (12, 0):
            alarm.set(now_ns + at_ms * MS, time.monotonic_ns())
            await asyncio.wait_for(rings.get(), 5)
        assert rings.empty()
        alarm.close()

    _run(new_loop, main)


@pytest.mark.usefixtures("_kind")
def test_closed_alarm_is_silent(new_loop):
    """A closed alarm does not ring, and can be closed again."""

    async def main():
        loop = asyncio.get_running_loop()
        rings, later = [], asyncio.Event()
        alarm = Alarm(loop, lambda: rings.append(1))
        now_ns = time.monotonic_ns()
        alarm.set(now_ns + 2 * MS, now_ns)
        alarm.close()
        alarm.close()
        loop.call_later(0.01, later.set)
        await later.wait()
        assert [] == rings

    _run(new_loop, main)
