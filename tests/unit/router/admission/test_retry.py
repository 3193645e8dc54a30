"""When the refused come back."""

import random

from weft.router.admission.retry import MAX_RETRY_MS, RetrySlots

MS = 1_000_000


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
