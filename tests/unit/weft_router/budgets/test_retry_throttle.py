"""How many calls of a target may be repeated."""

from weft_router.budgets.retry_throttle import RetryThrottle


def test_a_tenth_of_the_calls_may_be_repeated_in_the_long_run() -> None:
    """Beside what is saved for a replica that dies with all its calls."""
    throttle = RetryThrottle()
    assert 100 == sum(throttle.take() for _ in range(1000))
    num_repeated = 0
    for _ in range(1000):
        throttle.earn()
        num_repeated += throttle.take()
    assert 99 <= num_repeated <= 100
    assert 1800 <= throttle.num_refused <= 1801


def test_no_more_is_saved_than_allowed() -> None:
    """A quiet week does not pay for a storm."""
    throttle = RetryThrottle(max_tokens=2)
    for _ in range(1000):
        throttle.earn()
    assert [True, True, False] == [throttle.take() for _ in range(3)]
