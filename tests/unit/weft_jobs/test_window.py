"""The window of a job's requests."""

import asyncio

from weft_jobs.window import Window


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
