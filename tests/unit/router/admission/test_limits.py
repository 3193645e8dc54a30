"""Limits on requests in flight: what holds of many requests, and of what they take and leave."""

import asyncio
import random
import tracemalloc

import pytest

from weft.base.core import CallContext
from weft.base.errors import DeadlineExceededError, ResourceExhaustedError, WeftError
from weft.base.limits import Outcome
from weft.router.admission.concurrency_limit import MAX_RETRY_MS, ConcurrencyLimit, InflightLimit, RetrySlots
from weft.router.admission.controller import MAX_LIMITS, AdmissionController, AdmissionSettings, outcome_of

MS = 1_000_000
S = 1000 * MS


def make_limit(maximum: int) -> ConcurrencyLimit:
    """A fixed limit."""
    return ConcurrencyLimit("graph 'g'", random.Random(1), limit=maximum, setting="'max_inflight'")


def test_a_client_that_takes_all_it_can_leaves_room_for_others() -> None:
    """One that comes later gets as much in the end as those that were there."""
    limit = make_limit(90)
    limit.seen_ns[2] = 0
    for _ in range(80):
        limit.enter("hog", 0)
    draw = random.Random(1)
    inside = ["hog"] * 80
    for _ in range(4000):
        limit.leave(inside.pop(draw.randrange(len(inside))), MS, 0, Outcome.ANSWERED)
        for client in ("hog", "other"):
            if not limit.why_refused(2, client, 0):
                limit.enter(client, 0)
                inside.append(client)
    assert limit.num_of("hog") == pytest.approx(limit.num_of("other"), abs=6)
    assert limit.num_inflight > 80


def test_random_keys_leave_nothing_behind() -> None:
    """Twenty thousand of them: only what is in flight is remembered."""
    limit = make_limit(100)
    tracemalloc.start()
    try:
        for i in range(20_000):
            limit.enter(f"client {i}", 0)
            limit.leave(f"client {i}", MS, 0, Outcome.ANSWERED)
            if i == 1000:
                before, _ = tracemalloc.get_traced_memory()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 10_000
    assert (0, 0) == (limit.num_inflight, limit.num_named)


def test_the_median_follows_the_latency_and_ignores_what_failed() -> None:
    """Both ways, within a few percent; errors and cancelled requests do not count."""
    limit = make_limit(0)
    draw = random.Random(1)
    for mean_ms in (20, 200, 20):
        for _ in range(300):
            limit.enter("", 0)
            limit.leave("", int(draw.uniform(0.5, 1.5) * mean_ms * MS), S, Outcome.ANSWERED)
            limit.enter("", 0)
            limit.leave("", 1, S, Outcome.FAILED)
        assert limit.median_ns == pytest.approx(mean_ms * MS, rel=0.25)


def test_the_refused_are_sent_back_as_fast_as_places_become_free() -> None:
    """A request ends every 20 ms: of 50 that are refused at one moment, about one comes back every 20 ms."""
    slots = RetrySlots(random.Random(1))
    for i in range(1, 100):
        slots.ended(i * 20 * MS)
    hints_ms = [slots.retry_after_ms(2000 * MS) for _ in range(50)]
    assert 15 <= hints_ms[0] <= 25
    assert all(0.7 * 20 * i <= hint <= 1.3 * 20 * i for i, hint in enumerate(hints_ms, start=1))
    assert len(set(hints_ms)) > 40


def test_hints_are_bounded_and_never_all_the_same() -> None:
    """Between 10 ms and 5 s, however many are refused, and also before anything is known."""
    slots = RetrySlots(random.Random(1))
    assert 10 == slots.retry_after_ms(0)
    slots.ended(1)
    slots.ended(10_000 * MS)
    hints_ms = [slots.retry_after_ms(10_000 * MS) for _ in range(1000)]
    assert 10 <= min(hints_ms) <= max(hints_ms) <= MAX_RETRY_MS
    assert len(set(hints_ms[-100:])) > 50


def test_the_hint_is_short_again_when_the_rush_is_over() -> None:
    """What was promised lies in the past then."""
    slots = RetrySlots(random.Random(1))
    for i in range(1, 100):
        slots.ended(i * 20 * MS)
    for _ in range(100):
        slots.retry_after_ms(2000 * MS)
    assert slots.retry_after_ms(10_000 * MS) <= 25


async def test_a_place_that_is_given_to_one_that_gives_up_meanwhile_is_free_again() -> None:
    """It is cancelled after it was admitted and before it has noticed."""
    admission = AdmissionController(AdmissionSettings(is_adaptive=True), clock_ns=lambda: S)
    limit = admission.limit("graph", "g", 1)
    inside = admission.admit(limit, 2, "", CallContext(arrival_ns=S))

    async def request() -> None:
        with admission.admit(limit, 2, "", CallContext(arrival_ns=S)) as permit:
            await permit.wait()

    task = asyncio.create_task(request())
    await asyncio.sleep(0)
    with inside:
        pass
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (0, 0) == (limit.num_inflight, admission.router.num_inflight)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (asyncio.CancelledError(), Outcome.WITHDRAWN),
        (GeneratorExit(), Outcome.WITHDRAWN),
        (DeadlineExceededError("late"), Outcome.WITHDRAWN),
        (ResourceExhaustedError("full"), Outcome.REFUSED),
        (WeftError("?"), Outcome.FAILED),
        (ValueError("?"), Outcome.FAILED),
    ],
)
def test_what_an_error_says_of_the_load(error: BaseException, outcome: Outcome) -> None:
    """Only what was refused behind, and what would have taken longer, says anything."""
    assert outcome is outcome_of(error)


def test_unused_limits_are_forgotten() -> None:
    """When there are too many; those with requests in flight stay."""
    admission = AdmissionController(AdmissionSettings())
    used = admission.limit("model", "used")
    used.enter("", 0)
    for i in range(3 * MAX_LIMITS):
        admission.limit("model", str(i))
    assert len(admission.limits) <= MAX_LIMITS
    assert used is admission.limit("model", "used")


def test_the_request_beyond_the_limit_is_refused() -> None:
    """The message has both numbers and the setting; nothing is counted for it."""
    admission = InflightLimit("graph 'g'", 2, "'max_inflight'")
    admission.enter()
    admission.enter()
    with pytest.raises(ResourceExhaustedError) as caught:
        admission.enter()
    assert "graph 'g' has 2 requests in flight, and 'max_inflight' allows 2; try again in 10 ms" == caught.value.message
    assert 2 == admission.num_inflight


def test_a_request_that_leaves_makes_room() -> None:
    """The place is free at once."""
    admission = InflightLimit("x", 1, "y")
    admission.enter()
    admission.leave(1_000)
    admission.enter()
    assert 1 == admission.num_inflight


def test_the_retry_hint_follows_the_duration_of_requests() -> None:
    """It is the mean duration in milliseconds, within bounds."""
    admission = InflightLimit("x", 1, "y")
    for duration_ms, expected in ((200, 200), (200, 200), (10**9, 5_000)):
        admission.enter()
        admission.leave(duration_ms * 1_000_000)
        admission.enter()
        with pytest.raises(ResourceExhaustedError) as caught:
            admission.enter()
        assert expected == caught.value.retry_after_ms
        admission.leave(duration_ms * 1_000_000)


def test_without_a_limit_nothing_is_refused() -> None:
    """0 means no limit."""
    admission = InflightLimit("x", 0, "y")
    for _ in range(10_000):
        admission.enter()
    assert 10_000 == admission.num_inflight
