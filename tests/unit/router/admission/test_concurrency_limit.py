"""Who is admitted at a limit: priorities, clients, deadlines. The time is in the test's hands."""

import random
import tracemalloc

import pytest

from weft.base.adaptive_limit import AdaptiveLimit, Outcome
from weft.router.admission.concurrency_limit import (
    LOWEST_LEVEL,
    MAX_RETRY_MS,
    ConcurrencyLimit,
    RetrySlots,
    WaitingQueue,
)

MS = 1_000_000
S = 1000 * MS


def make_limit(maximum: int) -> ConcurrencyLimit:
    """A fixed limit."""
    return ConcurrencyLimit("graph 'g'", random.Random(1), limit=maximum, setting="'max_inflight'")


def fill(limit: ConcurrencyLimit, level: int, client: str = "", now_ns: int = 0, most: int = 1000) -> int:
    """Requests that were admitted before one was refused."""
    for count in range(most):
        limit.seen_ns[level] = now_ns
        if limit.why_refused(level, client, now_ns):
            return count
        limit.enter(client, now_ns)
    return most


@pytest.mark.parametrize("level", [1, 2, LOWEST_LEVEL])
def test_all_of_the_limit_is_there_where_one_level_is_used(level: int) -> None:
    """Also for the lowest."""
    limit = make_limit(20)
    assert 20 == fill(limit, level)
    assert "limit" == limit.why_refused(level, "", 0)


@pytest.mark.parametrize(
    ("maximum", "places"),
    [(20, [20, 18, 16, 14, 12, 10]), (4, [4, 3, 2, 2, 2, 2]), (2, [2, 1, 1, 1, 1, 1]), (1, [1] * 6)],
)
def test_a_tenth_is_kept_for_each_level_above(maximum: int, places: list[int]) -> None:
    """One place at the least, half of the limit at the most, and never so much that nothing is admitted."""
    for level, expected in enumerate(places, start=1):
        limit = make_limit(maximum)
        limit.seen_ns[1] = 0
        assert expected == fill(limit, level)


def test_a_higher_priority_gets_in_where_a_lower_one_is_refused() -> None:
    """Up to the limit."""
    limit = make_limit(10)
    limit.seen_ns[1] = 0
    assert 8 == fill(limit, 3)
    assert "priority" == limit.why_refused(3, "", 0)
    assert 1 == fill(limit, 2)
    assert 1 == fill(limit, 1)
    assert "limit" == limit.why_refused(1, "", 0)


def test_nothing_is_kept_for_a_level_that_does_not_come_any_more() -> None:
    """Ten seconds after its last request."""
    limit = make_limit(10)
    limit.seen_ns[1] = 0
    assert 9 == fill(limit, 2, now_ns=9 * S)
    assert 1 == fill(limit, 2, now_ns=10 * S)


def test_a_client_that_takes_all_it_can_leaves_room_for_others() -> None:
    """One that comes later gets as much in the end as those that were there, and one that wants little gets it."""
    limit = make_limit(90)
    assert 80 == fill(limit, 2, "hog")
    assert "client_share" == limit.why_refused(2, "hog", 0)
    assert 3 == fill(limit, 2, "small", most=3)
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


def test_callers_without_a_key_are_one_client() -> None:
    """Alone they have the whole limit; beside others they share as one."""
    limit = make_limit(90)
    assert 80 == fill(limit, 2, most=80)
    limit.enter("a", 0)
    assert "client_share" == limit.why_refused(2, "", 0)
    assert "" == limit.why_refused(2, "b", 0)


def test_random_keys_leave_nothing_behind() -> None:
    """Two hundred thousand of them: only what is in flight is remembered."""
    limit = make_limit(100)
    tracemalloc.start()
    try:
        for i in range(200_000):
            limit.enter(f"client {i}", 0)
            limit.leave(f"client {i}", MS, 0, Outcome.ANSWERED)
            if i == 1000:
                before, _ = tracemalloc.get_traced_memory()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 10_000
    assert (0, 0) == (limit.num_inflight, limit.num_named)


def test_a_deadline_is_held_against_the_median_of_the_answers() -> None:
    """Of enough of them that are not old, and only while something is in flight."""
    limit = make_limit(0)
    for i in range(15):
        limit.enter("", 0)
        limit.leave("", (20 + i) * MS, S, Outcome.ANSWERED)
    limit.enter("", 0)
    assert not limit.is_too_late(S + 1, S)
    limit.enter("", 0)
    limit.leave("", 20 * MS, S, Outcome.ANSWERED)
    assert limit.is_too_late(S + 19 * MS, S)
    assert not limit.is_too_late(S + 40 * MS, S)
    assert not limit.is_too_late(None, S)
    assert not limit.is_too_late(3 * S + 19 * MS, 3 * S)
    limit.leave("", 20 * MS, S, Outcome.FAILED)
    assert not limit.is_too_late(S + 19 * MS, S)
    assert limit.is_too_late(S, S)


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


def test_the_policy_bounds_an_adaptive_limit() -> None:
    """Also when it changes while requests are in flight."""
    limit = ConcurrencyLimit("graph 'g'", random.Random(1), limit=8, adaptive=AdaptiveLimit())
    assert 8 == fill(limit, 2)
    limit.set_maximum(4)
    assert (4, "limit") == (limit.limit, limit.why_refused(2, "", 0))
    limit.set_maximum(0)
    assert "" == ConcurrencyLimit("graph 'h'", random.Random(1)).why_refused(2, "", 0)


@pytest.mark.parametrize(
    ("limit", "num_inflight", "expected"), [(0, 1000, False), (8, 6, False), (8, 7, True), (1, 1, True)]
)
def test_it_is_busy_above_three_quarters_of_the_limit(limit: int, num_inflight: int, expected: bool) -> None:
    """Without a limit it never is."""
    limit = make_limit(limit)  # type: ignore[assignment]
    for _ in range(num_inflight):
        limit.enter("", 0)  # type: ignore[attr-defined]
    assert expected == limit.is_busy  # type: ignore[attr-defined]


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


def test_higher_levels_first_and_the_newest_of_each() -> None:
    """Whoever is removed is not served."""
    queue: WaitingQueue[str] = WaitingQueue(3)
    for level, waiter in ((2, "a"), (3, "b"), (2, "c"), (1, "d")):
        queue.add(level, waiter)
    assert queue.remove(1, "d")
    assert not queue.remove(1, "d")
    served = []
    while (waiting := queue.next()) is not None:
        served.append(waiting)
        queue.remove(*waiting)
    assert [(2, "c"), (2, "a"), (3, "b")] == served
    assert 0 == len(queue)


def test_the_one_that_gives_way_is_of_the_lowest_level_and_has_waited_longest() -> None:
    """Nobody gives way to the own level."""
    queue: WaitingQueue[str] = WaitingQueue(3)
    for level, waiter in ((2, "a"), (3, "b"), (3, "c")):
        queue.add(level, waiter)
    assert (3, "b") == queue.last_below(1)
    assert (3, "b") == queue.last_below(2)
    assert queue.last_below(3) is None
