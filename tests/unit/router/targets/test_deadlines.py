"""Deadlines of what is awaited, by one timer for all, each at most a millisecond late."""

import asyncio
import gc
import weakref
from typing import Any

import pytest
from tests.unit.router.virtual_clock import VirtualClock

from weft.router.targets.in_process import Deadlines


class LateError(Exception):
    """It has taken too long."""


async def after(seconds: float, value: int = 7) -> int:
    await asyncio.sleep(seconds)
    return value


async def test_what_ends_in_time_is_given(virtual_clock: VirtualClock) -> None:
    """At the time when it ends; an error goes on as it is."""
    deadlines = Deadlines()
    assert 7 == await deadlines.within(after(0.02), 0.05, LateError)
    assert 20.0 == virtual_clock.elapsed_ms()

    async def fail() -> None:
        raise ValueError("own")

    with pytest.raises(ValueError, match="own"):
        await deadlines.within(fail(), 1.0, LateError)


async def test_what_takes_too_long_is_cancelled(virtual_clock: VirtualClock) -> None:
    """At its deadline, and the task that awaited it goes on."""
    deadlines, ended = Deadlines(), []

    async def slow() -> None:
        try:
            await asyncio.sleep(1)
        finally:
            ended.append(virtual_clock.elapsed_ms())

    with pytest.raises(LateError):
        await deadlines.within(slow(), 0.05, LateError)
    task: Any = asyncio.current_task()
    assert 0 == task.cancelling()
    assert pytest.approx([50.5], abs=0.5) == ended
    await asyncio.sleep(0)


async def test_each_has_its_own_deadline(virtual_clock: VirtualClock) -> None:
    """Also one that is set later and ends earlier, and those that wait behind others that have ended."""
    deadlines = Deadlines()

    async def ended_ms(left_s: float, takes_s: float) -> float:
        try:
            await deadlines.within(after(takes_s), left_s, LateError)
        except LateError:
            return -virtual_clock.elapsed_ms()
        return virtual_clock.elapsed_ms()

    times = await asyncio.gather(ended_ms(0.3, 9), ended_ms(0.1, 9), ended_ms(0.2, 0.05), ended_ms(0.05, 9))
    assert pytest.approx([-300.5, -100.5, 50.0, -50.5], abs=0.5) == times


async def test_a_cancel_from_outside_is_a_cancel(virtual_clock: VirtualClock) -> None:
    """Also in the turn of the event loop in which the time is over."""
    deadlines = Deadlines()
    for after_s in (0.01, 0.05):
        task = asyncio.ensure_future(deadlines.within(after(9), 0.05, LateError))
        asyncio.get_running_loop().call_later(after_s, task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_deadlines_may_be_nested(virtual_clock: VirtualClock) -> None:
    """The outer one ends both where it comes first."""
    deadlines = Deadlines()

    class OuterError(Exception):
        pass

    async def inner(left_s: float) -> int:
        return await deadlines.within(after(9), left_s, LateError)

    with pytest.raises(OuterError):
        await deadlines.within(inner(0.2), 0.1, OuterError)
    with pytest.raises(LateError):
        await deadlines.within(inner(0.1), 0.2, OuterError)


async def test_an_answer_at_the_last_moment_counts(virtual_clock: VirtualClock) -> None:
    """What has an answer of its own for the cancel gives it, and the task is not cancelled any more."""
    deadlines = Deadlines()

    async def stubborn() -> int:
        try:
            await asyncio.sleep(9)
        except asyncio.CancelledError:
            return 3
        return 4

    assert 3 == await deadlines.within(stubborn(), 0.05, LateError)
    task: Any = asyncio.current_task()
    assert 0 == task.cancelling()


async def test_one_timer_serves_all(virtual_clock: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand waits that end in time set one, and leave nothing behind."""
    loop, deadlines = asyncio.get_running_loop(), Deadlines()
    timers, call_at = [], loop.call_at
    monkeypatch.setattr(loop, "call_at", lambda when, *rest: timers.append(when) or call_at(when, *rest))
    for _ in range(1000):
        await deadlines.within(asyncio.sleep(0), 5.0, LateError)
    assert 1 == len(timers)
    assert not any(deadlines._queue._buckets.values())
    deadlines.close()


async def test_a_wait_that_is_over_keeps_nothing(virtual_clock: VirtualClock) -> None:
    """Neither the task nor what it awaited, though its time has not come."""
    deadlines = Deadlines()
    task = asyncio.ensure_future(deadlines.within(after(0.01), 60.0, LateError))
    await task
    gone = weakref.ref(task)
    del task
    await asyncio.sleep(0)  # the event loop holds what it runs
    gc.collect()
    assert gone() is None
    deadlines.close()
