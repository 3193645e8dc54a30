"""How many calls of a target may be repeated."""

import pytest

from weft.router.target import MAX_RETRY_TOKENS, RetryBudget


def num_repeats(budget: RetryBudget) -> int:
    count = 0
    while budget.take():
        count += 1
    return count


@pytest.mark.parametrize(
    ("percent", "own", "expected"), [(20, 0, 20), (20, 100, 100), (20, 5, 5), (50, 0, 50), (0, 0, 0), (0, 30, 30)]
)
def test_a_share_of_the_calls_may_be_repeated(percent: float, own: float, expected: int) -> None:
    """The router's, or the call's own, whichever of the two is more; once what was saved is spent."""
    budget = RetryBudget(percent)
    num_repeats(budget)
    for _ in range(100):
        budget.earn(own)
    assert expected == num_repeats(budget)


def test_as_many_as_are_saved_may_be_repeated_at_once() -> None:
    """A replica that dies with its calls; with a share of 0 there is nothing at first. What is refused is counted."""
    budget = RetryBudget()
    for _ in range(1000):
        budget.earn()
    assert (MAX_RETRY_TOKENS, 1) == (num_repeats(budget), budget.num_refused)
    assert (False, 1) == ((none := RetryBudget(0)).take(), none.num_refused)
