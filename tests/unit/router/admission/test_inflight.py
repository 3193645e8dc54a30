"""Limits on requests in flight."""

import pytest

from weft.base.errors import ResourceExhaustedError
from weft.router.admission.concurrency_limit import InflightLimit


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
