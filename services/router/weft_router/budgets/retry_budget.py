"""How many further calls may be in work: a failing service must not be called more often than a healthy one."""

#: So many retries may be in work however few requests are.
MIN_RETRIES = 3
#: Of requests in work, where the plan has no retry to say it (hedges).
DEFAULT_PERCENT = 20.0


class RetryBudget:
    """Counts requests of the router in work, and retries and hedges of them.

    Attributes:
        num_requests: Requests in work.
        num_retries: Further calls in work; the pause before one is part of it.
    """

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_retries = 0

    def enter(self) -> None:
        """One more request is in work; ``leave`` must follow."""
        self.num_requests += 1

    def leave(self) -> None:
        """A request is over."""
        self.num_requests -= 1

    def take(self, percent: float) -> bool:
        """Whether one more call may start; if so ``give_back`` must follow when it is over.

        Args:
            percent: Of the requests in work may have a further call in work; ``MIN_RETRIES`` always may.
        """
        if self.num_retries + 1 > max(MIN_RETRIES, percent / 100 * self.num_requests):
            return False
        self.num_retries += 1
        return True

    def give_back(self, count: int = 1) -> None:
        """So many further calls are over."""
        self.num_retries -= count
