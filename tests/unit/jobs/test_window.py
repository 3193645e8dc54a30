"""The window of a job's requests."""

import asyncio
import time

from weft.jobs.window import Window


async def test_no_more_requests_than_the_window_are_in_flight() -> None:
    """With a maximum of 3, ten requests run three at a time, in their order."""
    window = Window(3, lambda: 0)
    most = now = 0
    order: list[int] = []

    async def request(number: int) -> None:
        nonlocal most, now
        async with window.place():
            order.append(number)
            now += 1
            most = max(most, now)
            await asyncio.sleep(0)
            now -= 1

    async with asyncio.TaskGroup() as group:
        for number in range(10):
            group.create_task(request(number))
    assert (most, order) == (3, list(range(10)))


async def test_a_cancelled_wait_takes_no_place() -> None:
    """Whoever waits behind one that is cancelled gets the place, also when it was just given to that."""
    window = Window(2, lambda: 0)
    leave = asyncio.Event()

    async def hold() -> None:
        async with window.place():
            await leave.wait()

    holders = [asyncio.create_task(hold()) for _ in range(2)]
    await asyncio.sleep(0)
    first, second = asyncio.create_task(hold()), asyncio.create_task(hold())
    await asyncio.sleep(0)
    leave.set()
    await asyncio.gather(*holders)
    first.cancel()
    await asyncio.wait_for(second, 10)


async def test_a_place_is_given_up_when_the_window_gets_smaller() -> None:
    """While the server refuses all, those with a place wait for another, and none is lost."""
    now_ns = 0

    def clock_ns() -> int:
        nonlocal now_ns
        now_ns += 1_000_000
        return now_ns

    window = Window(16, clock_ns)
    num_inflight = num_answered = num_refused = 0
    inflight: list[int] = []

    async def work() -> None:
        nonlocal num_inflight, num_answered, num_refused
        async with window.place() as place:
            for _ in range(100):
                await place.begin()
                num_inflight += 1
                inflight.append(num_inflight)
                await asyncio.sleep(0)
                if num_refused < 800:
                    num_refused += 1
                    place.refused()
                    await asyncio.sleep(0)
                num_inflight -= 1
                place.end()
                num_answered += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(16):
            group.create_task(work())
    assert max(inflight) >= 8
    assert max(inflight[600:800]) <= 2
    assert num_answered == 16 * 100


async def test_a_wait_for_another_place_that_is_cancelled_takes_none() -> None:
    """Whoever gave a place up and is cancelled before the next does not give up a second one."""
    window = Window(2, time.monotonic_ns)
    first, second = window.place(), window.place()
    await first.__aenter__()
    await second.__aenter__()
    window._limit.limit = 1

    async def next_request() -> None:
        await first.begin()

    waiting = asyncio.create_task(next_request())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await first.__aexit__()
    assert not window.is_too_full
    async with asyncio.timeout(10):
        await second.__aexit__()
        async with window.place():
            entering = asyncio.create_task(window.enter())
            await asyncio.sleep(0)
            assert not entering.done()
            entering.cancel()
