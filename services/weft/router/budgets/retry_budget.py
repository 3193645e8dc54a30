"""How many calls of a target may be repeated, all graphs together: what fails is not to be called twice as often."""

#: Of the calls, where neither the graph nor the command line says another share.
DEFAULT_PERCENT = 20.0
#: Most repeats that are saved: so many calls may be repeated at once, as when a replica dies with its calls.
MAX_TOKENS = 100.0


class RetryBudget:
    """A token bucket: each call earns a part of a token, each repeat of one, by whoever, costs a whole one.

    Retries and hedges of graphs and calls that a replica had not begun are repeats; they earn nothing themselves.

    Args:
        percent: Of a hundred calls so many may be repeated in the long run, where the call does not say it; with 0
            there is nothing in the bucket at first either.
        max_tokens: Most that are saved; as many are there at first.

    Attributes:
        num_refused: Repeats that there was no token for.
    """

    def __init__(self, percent: float = DEFAULT_PERCENT, *, max_tokens: float = MAX_TOKENS) -> None:
        self._percent = percent
        self._max_tokens = max_tokens
        self._tokens = max_tokens if percent else 0.0
        self.num_refused = 0

    def earn(self, percent: float = 0.0) -> None:
        """A call is made for the first time; ``percent`` is its own share, 0 the router's."""
        if self._tokens < self._max_tokens:
            self._tokens = min(self._tokens + (percent or self._percent) / 100, self._max_tokens)

    def take(self) -> bool:
        """Whether one more call may be repeated, which costs a token."""
        # Sums of hundredths fall short of 1 by rounding.
        if self._tokens < 1 - 1e-9:
            self.num_refused += 1
            return False
        self._tokens = max(self._tokens - 1, 0.0)
        return True
