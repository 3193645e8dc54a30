"""Chunked prefill: gives the rest of a step's budget to prompts in the order of service. ``PrefillScheduler``."""

import heapq
from enum import Enum, auto
from itertools import chain

from weft.llm.config import EngineConfig
from weft.llm.scheduler.sequence import Sequence
from weft.llm.scheduler.slot_allocator import SlotAllocator

#: Share of a step that is reserved for short prompts behind long ones.
_SHORT_SHARE = 0.25
#: Waiting sequences considered per step; those beyond wait for the next one.
_MAX_WAITING_CONSIDERED = 256
#: How many of them may be skipped because they await another's prefix or exceed the limit of long prompts.
_MAX_SKIPPED = 64


class PrefillBudget:
    """Remaining tokens of one step for sequences with more than one token to compute, in the order of service.

    A long prompt has more tokens left than ``long_prefill_token_threshold``. It gets at most that many per step, leaves
    short prompts behind it their share, and gets nothing once ``max_long_prefills`` others progress in the step.

    A step full of running sequences has no free slot either, so an admitted sequence replaces one of them: the budget
    lends it that sequence's token in advance.

    Args:
        candidates: Sequences that may get some, running or waiting.
    """

    def __init__(self, config: EngineConfig, num_left: int, *candidates: list[Sequence]) -> None:
        self._num_lent = int(num_left == 0)
        self.num_left = num_left + self._num_lent
        self._candidates = candidates
        self._block_size = config.block_size
        self._threshold = config.long_prefill_token_threshold
        self._max_long = config.max_long_prefills
        self._num_reserved = int(config.max_num_batched_tokens * _SHORT_SHARE)
        self._num_long = 0
        self._is_first = True

    def is_long(self, num_remaining: int) -> bool:
        """Whether a prompt with ``num_remaining`` tokens left is long."""
        return num_remaining > self._threshold

    def must_defer(self, num_remaining: int) -> bool:
        """Whether a prompt with ``num_remaining`` tokens left is long and the limit of long prompts is reached."""
        return self._num_long >= self._max_long and self.is_long(num_remaining)

    def chunk(self, seq: Sequence, num_computed_tokens: int) -> int:
        """Tokens that ``seq`` may compute now; unless they complete it, they end on a block boundary."""
        num_remaining = len(seq.tokens) - num_computed_tokens
        limit = self.num_left
        if self.must_defer(num_remaining):
            return 0
        if self.is_long(num_remaining):
            limit = min(limit - self._num_short_behind(seq), self._threshold)
        if self._is_first:  # the first always progresses, whatever is reserved, so that none starves
            limit = max(limit, min(self._block_size, self._threshold, self.num_left))
        if limit >= num_remaining:
            return num_remaining
        rounded = (num_computed_tokens + limit) // self._block_size * self._block_size - num_computed_tokens
        return rounded if rounded > 0 else max(limit, 0) if self._is_first else 0

    def take(self, seq: Sequence, num_tokens: int) -> None:
        """Schedule ``num_tokens`` of ``seq``."""
        self.num_left -= num_tokens
        self._num_long += self.is_long(seq.remaining)
        self._is_first = False
        seq.num_scheduled = num_tokens

    def give_back(self, victims: list[Sequence]) -> None:
        """Return the tokens of preempted sequences."""
        for victim in victims:
            if victim.num_scheduled:
                self.num_left += victim.num_scheduled - self._num_lent
                self._num_lent = 0
                victim.num_scheduled = 0

    def _num_short_behind(self, seq: Sequence) -> int:
        """Tokens that short prompts behind ``seq`` have left, at most those reserved for them."""
        num_short = 0
        for other in chain(*self._candidates):
            if other.rank > seq.rank and not self.is_long(other.remaining):
                num_short += other.remaining
                if num_short >= self._num_reserved:
                    return self._num_reserved
        return num_short


class _Outcome(Enum):
    ADMITTED = auto()
    #: It waits, but sequences behind it may be admitted.
    SKIPPED = auto()
    #: It waits, and so does every sequence behind it.
    BLOCKED = auto()


class PrefillScheduler:
    """Chooses prompt chunks and admits waiting sequences.

    A sequence that waits for blocks or a slot is not overtaken; one that waits for another's prefix, or because of the
    limit of long prompts, may be.
    """

    def __init__(self, config: EngineConfig, allocator: SlotAllocator) -> None:
        self._config = config
        self._allocator = allocator

    def schedule(self, partial: list[Sequence], num_left: int) -> list[Sequence]:
        """Choose the sequences that compute part of their tokens in this step, and set their ``num_scheduled``.

        Args:
            partial: Running sequences with more than one token to compute, in the order of service.
            num_left: Tokens left in the step.
        """
        waiting = self._allocator.next_waiting(_MAX_WAITING_CONSIDERED)
        budget = PrefillBudget(self._config, num_left, partial, waiting)
        chosen: list[Sequence] = []
        num_skips_left = _MAX_SKIPPED
        running = set(partial)
        for seq in heapq.merge(partial, waiting, key=lambda seq: seq.rank) if partial else waiting:
            if budget.num_left <= 0 or not (num_skips_left or partial):
                break
            if seq in running:
                # A sequence without a slot was preempted by one before it, or ranks worst and makes room itself.
                chunk = budget.chunk(seq, seq.num_computed_tokens) if seq.slot >= 0 else 0
                if chunk:
                    budget.give_back(self._allocator.reserve_chunk(seq, chunk))
                    if seq.slot >= 0:
                        budget.take(seq, chunk)
                        chosen.append(seq)
            elif num_skips_left:
                outcome = self._try_admit(seq, budget)
                if outcome is _Outcome.ADMITTED:
                    chosen.append(seq)
                num_skips_left = 0 if outcome is _Outcome.BLOCKED else num_skips_left - (outcome is _Outcome.SKIPPED)
        return chosen

    def _try_admit(self, seq: Sequence, budget: PrefillBudget) -> _Outcome:
        allocator = self._allocator
        if not allocator.has_slot_for(seq):
            return _Outcome.BLOCKED
        if budget.must_defer(allocator.min_remaining(seq)):
            return _Outcome.SKIPPED
        cached = allocator.cached_blocks(seq)
        if cached is None:
            return _Outcome.SKIPPED
        num_computed_tokens = len(cached) * self._config.block_size
        chunk = budget.chunk(seq, num_computed_tokens)
        if not chunk:
            return _Outcome.SKIPPED if budget.is_long(len(seq.tokens) - num_computed_tokens) else _Outcome.BLOCKED
        victims = allocator.admit(seq, cached)
        if victims is None:
            return _Outcome.BLOCKED
        budget.give_back(victims)
        budget.take(seq, chunk)
        return _Outcome.ADMITTED
