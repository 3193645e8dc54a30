"""Equal requests that come while one of them is in work."""

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.router import make
from tests.unit.router.virtual_clock import VirtualClock

from weft.base.caching import SingleFlight
from weft.base.errors import DeadlineExceededError, RemoteError, RequestCancelledError

pytestmark = pytest.mark.usefixtures("virtual_clock")


class Work:
    """Takes a while, then gives its number, or fails; knows how often it was begun and how many are running."""

    def __init__(self, *, duration_s: float = 1.0, error: Exception | None = None) -> None:
        self.duration_s = duration_s
        self.error = error
        self.num_begun = 0
        self.num_running = 0
        self.num_cancelled = 0

    async def __call__(self) -> int:
        self.num_begun += 1
        number = self.num_begun
        self.num_running += 1
        try:
            await asyncio.sleep(self.duration_s)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1
        if self.error is not None:
            raise self.error
        return number


async def test_equal_requests_share_the_work(virtual_clock: VirtualClock) -> None:
    """One does it; those that come later begin anew."""
    flights: SingleFlight[int] = SingleFlight(virtual_clock)
    work = Work()
    results = await asyncio.gather(*(flights.run(b"k", work, None) for _ in range(3)))
    assert [(1, True), (1, False), (1, False)] == results
    assert (2, True) == await flights.run(b"k", work, None)
    assert 0 == flights.num_flights


async def test_other_requests_do_their_own_work(virtual_clock: VirtualClock) -> None:
    """At the same time."""
    flights: SingleFlight[int] = SingleFlight(virtual_clock)
    work = Work()
    assert [(1, True), (2, True)] == await asyncio.gather(*(flights.run(k, work, None) for k in (b"k", b"l")))
    assert 1000.0 == virtual_clock.elapsed_ms()


async def test_the_first_one_may_be_cancelled(virtual_clock: VirtualClock) -> None:
    """The work goes on for the others."""
    flights: SingleFlight[int] = SingleFlight(virtual_clock)
    work = Work()
    first, second = (asyncio.create_task(flights.run(b"k", work, None)) for _ in range(2))
    await asyncio.sleep(0.5)
    first.cancel()
    assert (1, False) == await second
    assert (True, 1, 1000.0) == (first.cancelled(), work.num_begun, virtual_clock.elapsed_ms())


@pytest.mark.parametrize("num_cancels", [1, 3])
async def test_no_work_is_left_when_all_have_gone(virtual_clock: VirtualClock, num_cancels: int) -> None:
    """The last one cancels it and sees it end; one who comes then begins anew."""
    flights: SingleFlight[int] = SingleFlight(virtual_clock)
    work = Work()
    requests = [asyncio.create_task(flights.run(b"k", work, None)) for _ in range(3)]
    await asyncio.sleep(0.5)
    for _ in range(num_cancels):
        for request in requests:
            request.cancel()
        await asyncio.sleep(0)
    await asyncio.wait(requests)
    assert (0, 1, 0, 0) == (work.num_running, work.num_cancelled, flights.num_flights, make.num_other_tasks())
    assert [True] * 3 == [request.cancelled() for request in requests]
    assert (2, True) == await flights.run(b"k", work, None)


async def test_an_error_is_shared_but_not_kept(virtual_clock: VirtualClock) -> None:
    """Each gets one of its own; the next one who comes begins anew."""
    flights: SingleFlight[int] = SingleFlight(virtual_clock)
    work = Work(error=RemoteError("UNAVAILABLE", "gone"))
    errors = await asyncio.gather(*(flights.run(b"k", work, None) for _ in range(2)), return_exceptions=True)
    assert ["gone", "gone"] == [error.message for error in errors if isinstance(error, RemoteError)]
    assert errors[0] is not errors[1]
    work.error = None
    assert (2, True) == await flights.run(b"k", work, None)


async def test_the_deadline_of_the_first_one_fails_nobody_else(virtual_clock: VirtualClock) -> None:
    """One of those who have time left begins anew, and the others wait for that."""
    flights: SingleFlight[int] = SingleFlight(virtual_clock)
    hurried = Work(duration_s=0.2, error=DeadlineExceededError("200 ms"))
    patient = Work()
    requests = [asyncio.create_task(flights.run(b"k", hurried, virtual_clock.at_ms(200)))]
    await asyncio.sleep(0.1)
    requests += [asyncio.create_task(flights.run(b"k", patient, virtual_clock.at_ms(5000))) for _ in range(2)]
    await asyncio.wait(requests)
    assert isinstance(requests[0].exception(), DeadlineExceededError)
    assert [(1, True), (1, False)] == [request.result() for request in requests[1:]]
    assert (1, 1200.0) == (patient.num_begun, virtual_clock.elapsed_ms())


async def test_late_work_is_not_done_again_for_each(virtual_clock: VirtualClock) -> None:
    """A service that says by itself that it is too late says so to all who wait."""
    flights: SingleFlight[int] = SingleFlight(virtual_clock)
    work = Work(duration_s=0.2, error=DeadlineExceededError("its queue is too long"))
    outcomes = await asyncio.gather(
        *(flights.run(b"k", work, virtual_clock.at_ms(1000 + ms)) for ms in range(3)), return_exceptions=True
    )
    assert [DeadlineExceededError] * 3 == [type(outcome) for outcome in outcomes]
    assert 1 == work.num_begun


async def test_who_waits_for_another_keeps_its_own_deadline(virtual_clock: VirtualClock) -> None:
    """It ends on time, and the work goes on."""
    flights: SingleFlight[int] = SingleFlight(virtual_clock)
    work = Work()
    first = asyncio.create_task(flights.run(b"k", work, None))
    await asyncio.sleep(0.1)
    with pytest.raises(DeadlineExceededError, match="an equal request was still in work"):
        await flights.run(b"k", work, virtual_clock.at_ms(300))
    assert 300.0 == virtual_clock.elapsed_ms()
    assert (1, True) == await first


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
    work = Work(error=ZeroDivisionError())
    outcomes = await asyncio.gather(*(flights.run(b"k", work, None) for _ in range(2)), return_exceptions=True)
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


async def test_who_comes_while_abandoned_work_goes_away_begins_anew(virtual_clock: VirtualClock) -> None:
    """It is over for those who left, so nobody joins it."""
    flights: SingleFlight[int] = SingleFlight(virtual_clock)

    async def slow_to_leave() -> int:
        try:
            await asyncio.sleep(1_000)
        finally:
            await asyncio.sleep(0.1)
        return 0

    first = asyncio.create_task(flights.run(b"k", slow_to_leave, None))
    await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.sleep(0.01)
    assert (1, True) == await flights.run(b"k", Work(duration_s=0.5), None)
    assert (True, 0) == (first.cancelled(), flights.num_flights)


@pytest.mark.parametrize(("fails_at_ms", "num_begun"), [(996, 2), (990, 1)])
async def test_a_transport_may_give_up_just_before_the_deadline(
    virtual_clock: VirtualClock, fails_at_ms: int, num_begun: int
) -> None:
    """Who has more time does the work again; an error long before the deadline is about the work, not the time."""
    flights: SingleFlight[int] = SingleFlight(virtual_clock)
    work = Work(duration_s=fails_at_ms / 1e3, error=DeadlineExceededError("late"))
    mine = flights.run(b"k", work, virtual_clock.at_ms(1_000))
    outcomes = await asyncio.gather(mine, flights.run(b"k", work, virtual_clock.at_ms(9_000)), return_exceptions=True)
    assert [DeadlineExceededError] * 2 == [type(outcome) for outcome in outcomes]
    assert num_begun == work.num_begun
