"""How many calls of a target may be repeated, all graphs together: what fails is not to be called twice as often."""

#: Tokens that each call of the target earns; so many of a hundred calls may be repeated in the long run.
TOKENS_PER_CALL = 0.1
#: Most that are saved: so many calls may be repeated at once, as when a replica dies with its calls.
MAX_TOKENS = 100.0


class RetryThrottle:
    """A token bucket: each call earns a part of a token, each retry or hedge costs a whole one.

    Attributes:
        num_refused: Retries and hedges that there was no token for.
    """

    def __init__(self, *, tokens_per_call: float = TOKENS_PER_CALL, max_tokens: float = MAX_TOKENS) -> None:
        self._tokens_per_call = tokens_per_call
        self._max_tokens = self._tokens = max_tokens
        self.num_refused = 0

    def earn(self) -> None:
        """A call was made."""
        if self._tokens < self._max_tokens:
            self._tokens = min(self._tokens + self._tokens_per_call, self._max_tokens)

    def take(self) -> bool:
        """Whether one more call may be repeated, which costs a token."""
        if self._tokens < 1:
            self.num_refused += 1
            return False
        self._tokens -= 1
        return True
