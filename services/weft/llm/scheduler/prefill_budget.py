"""Distribution of a step's remaining tokens among prompts: ``PrefillBudget``."""

from weft.llm.config import EngineConfig

#: Share of a step that is reserved for short prompts behind long ones.
_SHORT_SHARE = 0.25


class PrefillBudget:
    """Remaining tokens of one step for sequences with more than one token to compute, in the order of service.

    A long prompt has more tokens left than ``long_prefill_token_threshold``. It gets no more than that per step, leaves
    short prompts behind it their share, and gets nothing once ``max_long_prefills`` others progress in the step.

    A step that is full of running sequences has no free slot either, so an admitted sequence replaces one of them: the
    budget lends it that sequence's token in advance.

    Args:
        config: The engine's.
        num_left: Tokens left in the step.

    Attributes:
        num_left: Tokens left now, including the lent one.
        num_reserved: Most tokens that short prompts are left.
    """

    def __init__(self, config: EngineConfig, num_left: int) -> None:
        self._num_lent = int(num_left == 0)
        self.num_left = num_left + self._num_lent
        self._block_size = config.block_size
        self._threshold = config.long_prefill_token_threshold
        self._max_long = config.max_long_prefills
        self.num_reserved = int(config.max_num_batched_tokens * _SHORT_SHARE)
        self._num_long = 0
        self._is_first = True

    def is_long(self, num_remaining: int) -> bool:
        """Whether a prompt with ``num_remaining`` tokens left is long."""
        return num_remaining > self._threshold

    def must_defer(self, num_remaining: int) -> bool:
        """Whether a prompt with ``num_remaining`` tokens left is long and the limit of long prompts is reached."""
        return self._num_long >= self._max_long and self.is_long(num_remaining)

    def chunk(self, num_computed_tokens: int, num_remaining: int, num_short_behind: int) -> int:
        """Tokens that a sequence may compute now; unless they complete it, they end on a block boundary.

        Args:
            num_computed_tokens: Tokens that it has computed.
            num_remaining: Tokens that it has left.
            num_short_behind: For a long one, tokens that short prompts behind it have left; those beyond
                ``num_reserved`` need not be counted.
        """
        limit = self.num_left
        if self.must_defer(num_remaining):
            return 0
        if self.is_long(num_remaining):
            limit = min(limit - min(self.num_reserved, num_short_behind), self._threshold)
        if self._is_first:  # the first always progresses, whatever is reserved, so that none starves
            limit = max(limit, min(self._block_size, self._threshold, self.num_left))
        if limit >= num_remaining:
            return num_remaining
        rounded = (num_computed_tokens + limit) // self._block_size * self._block_size - num_computed_tokens
        return rounded if rounded > 0 else max(limit, 0) if self._is_first else 0

    def take(self, num_tokens: int, num_remaining: int) -> None:
        """Charge ``num_tokens`` to a sequence with ``num_remaining`` tokens left."""
        self.num_left -= num_tokens
        self._num_long += self.is_long(num_remaining)
        self._is_first = False

    def give_back(self, num_tokens: int) -> None:
        """Return the ``num_tokens`` of a preempted sequence."""
        self.num_left += num_tokens - self._num_lent
        self._num_lent = 0
