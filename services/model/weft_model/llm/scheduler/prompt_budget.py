"""How many of a step's tokens go to which prompt: ``PromptBudget``."""

from weft_model.llm.config import EngineConfig

#: Part of a step that is kept for short prompts while long ones wait before them.
_SHORT_SHARE = 0.25


class PromptBudget:
    """Tokens of one step that are left for sequences with more than one to compute, given out in the order of service.

    A long prompt has more to compute than ``long_prefill_token_threshold``. It gets no more than that, not what short
    prompts behind it can use of their share, and nothing once ``max_long_prefills`` others went on.

    A step that is full with running sequences has no free seat either, so whoever comes in replaces one of them: its
    token is lent in advance.

    Args:
        config: The engine's.
        num_left: Tokens left.

    Attributes:
        num_left: Likewise, now; with the one that is lent.
    """

    def __init__(self, config: EngineConfig, num_left: int) -> None:
        self._num_lent = int(num_left == 0)
        self.num_left = num_left + self._num_lent
        self._block_size = config.block_size
        self._threshold = config.long_prefill_token_threshold
        self._max_long = config.max_long_prefills
        self._num_kept = int(config.max_num_batched_tokens * _SHORT_SHARE)
        self._num_long = 0
        self._is_first = True

    def is_long(self, num_remaining: int) -> bool:
        """Whether a prompt with so much to compute is a long one."""
        return num_remaining > self._threshold

    def has_no_turn(self, num_remaining: int) -> bool:
        """Whether a prompt with so much to compute is a long one, and as many as may have gone on."""
        return self._num_long >= self._max_long and self.is_long(num_remaining)

    def chunk(self, num_done: int, num_remaining: int, num_short_behind: int) -> int:
        """Tokens that a sequence may compute now; it ends at a block's end unless the sequence's last token is in it.

        Args:
            num_done: Tokens that it has computed.
            num_remaining: Tokens that it still has to.
            num_short_behind: Tokens that short prompts behind it have to; counts only for a long one.
        """
        limit = self.num_left
        if self.has_no_turn(num_remaining):
            return 0
        if self.is_long(num_remaining):
            limit = min(limit - min(self._num_kept, num_short_behind), self._threshold)
        if self._is_first:  # whatever is kept, the first of all goes on, so that none waits for ever
            limit = max(limit, min(self._block_size, self._threshold, self.num_left))
        if limit >= num_remaining:
            return num_remaining
        rounded = (num_done + limit) // self._block_size * self._block_size - num_done
        return rounded if rounded > 0 else max(limit, 0) if self._is_first else 0

    def take(self, num_tokens: int, num_remaining: int) -> None:
        """A sequence with ``num_remaining`` tokens to compute computes ``num_tokens`` of them."""
        self.num_left -= num_tokens
        self._num_long += self.is_long(num_remaining)
        self._is_first = False

    def give_back(self, num_tokens: int) -> None:
        """A sequence that was to compute ``num_tokens`` does not."""
        self.num_left += num_tokens - self._num_lent
        self._num_lent = 0
