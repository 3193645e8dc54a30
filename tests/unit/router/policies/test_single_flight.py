"""Equal requests that come while one of them is in work."""

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.router.virtual_clock import VirtualClock

from weft.base.caching import SingleFlight
from weft.base.errors import RemoteError, RequestCancelledError

pytestmark = pytest.mark.usefixtures("virtual_clock")


async def test_work_that_something_else_cancels_is_an_error(virtual_clock: VirtualClock) -> None:
    """Nobody waits for ever, and nobody is cancelled in turn."""
    flights: SingleFlight[int] = SingleFlight(virtual_clock)

    async def give_up() -> int:
        raise asyncio.CancelledError

    with pytest.raises(RequestCancelledError):
        await flights.run(b"k", give_up, None)


async def test_a_defect_reaches_everyone(virtual_clock: VirtualClock) -> None:
    """As it is."""
    flights: SingleFlight[int] = SingleFlight(virtual_clock)

    async def fail() -> int:
        await asyncio.sleep(1)
        raise ZeroDivisionError

    outcomes = await asyncio.gather(*(flights.run(b"k", fail, None) for _ in range(2)), return_exceptions=True)
    assert [ZeroDivisionError] * 2 == [type(outcome) for outcome in outcomes]


class Data:
    """Something that can be watched."""


@pytest.mark.parametrize("fails", [False, True])
async def test_what_the_work_held_is_freed_with_it(virtual_clock: VirtualClock, fails: bool) -> None:
    """Without the collector of reference cycles."""
    flights: SingleFlight[Any] = SingleFlight(virtual_clock)
    gc.collect()
    gc.disable()
    try:

        async def use(data: Data) -> Data:
            await asyncio.sleep(1)
            if fails:
                raise RemoteError("UNAVAILABLE", "gone")
            return data

        async def ask() -> weakref.ref[Data]:
            data = Data()
            watched = weakref.ref(data)
            work: Callable[[], Any] = lambda: use(data)  # noqa: E731
            with contextlib.suppress(RemoteError):
                await asyncio.gather(*(flights.run(b"k", work, None) for _ in range(2)))
            return watched

        watched = await ask()
        await asyncio.sleep(0)
        assert watched() is None
    finally:
        gc.enable()
