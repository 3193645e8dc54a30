"""The retry budget of a router."""

import pytest

from weft_router.budgets.retry_budget import RetryBudget


@pytest.mark.parametrize(
    ("num_requests", "percent", "expected"),
    [
        (0, 20.0, 3),
        (10, 20.0, 3),
        (15, 20.0, 3),
        (20, 20.0, 4),
        (24, 20.0, 4),
        (25, 20.0, 5),
        (100, 50.0, 50),
        (9, 0.0, 3),
    ],
)
def test_retries_are_bounded_by_the_requests_in_work(num_requests: int, percent: float, expected: int) -> None:
    """A percentage of them, but three in any case."""
    budget = RetryBudget()
    for _ in range(num_requests):
        budget.enter()
    assert expected == sum(budget.take(percent) for _ in range(200))
    assert expected == budget.num_retries


def test_a_retry_that_is_over_makes_room() -> None:
    """And so does more traffic."""
    budget = RetryBudget()
    assert [True, True, True, False] == [budget.take(20) for _ in range(4)]
    budget.give_back()
    assert [True, False] == [budget.take(20) for _ in range(2)]
    for _ in range(20):
        budget.enter()
    assert [True, False] == [budget.take(20) for _ in range(2)]
    for _ in range(20):
        budget.leave()
    budget.give_back(2)
    assert (0, 2) == (budget.num_requests, budget.num_retries)
    assert [True, False] == [budget.take(20) for _ in range(2)]
