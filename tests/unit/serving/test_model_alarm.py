"""The alarm that ends batch delays and timeouts."""

import asyncio
import sys
import time

import pytest
import uvloop

from weft.serving.runtime.dispatcher import Alarm

MS = 1_000_000


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
