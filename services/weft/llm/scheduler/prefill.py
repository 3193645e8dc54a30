"""Chunked prefill: gives the rest of a step's budget to prompts in the order of service. ``PrefillScheduler``."""

import heapq
from enum import Enum, auto
from itertools import chain

from weft.llm.config import EngineConfig
from weft.llm.scheduler.sequence import Sequence
from weft.llm.scheduler.slot_allocator import SlotAllocator

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


#: Waiting sequences considered per step; those beyond wait for the next one.
_MAX_WAITING_CONSIDERED = 256
#: How many of them may be skipped because they await another's prefix or exceed the limit of long prompts.
_MAX_SKIPPED = 64


#: Running and waiting sequences, each in the order of service.
_Queues = tuple[list[Sequence], list[Sequence]]


class _Outcome(Enum):
    """Result of an admission attempt."""

    ADMITTED = auto()
    #: It waits, but sequences behind it may be admitted.
    SKIPPED = auto()
    #: It waits, and so does every sequence behind it.
    BLOCKED = auto()


class PrefillScheduler:
    """Chooses prompt chunks and admits waiting sequences.

    A sequence that waits for blocks or a slot is not overtaken; one that waits for another's prefix, or because of the
    limit of long prompts, may be.

    Args:
        config: The engine's.
        allocator: Running and waiting sequences.
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
        budget = PrefillBudget(self._config, num_left)
        waiting = self._allocator.next_waiting(_MAX_WAITING_CONSIDERED)
        chosen: list[Sequence] = []
        num_skips_left = _MAX_SKIPPED
        running = set(partial)
        for seq in heapq.merge(partial, waiting, key=lambda seq: seq.rank) if partial else waiting:
            if budget.num_left <= 0 or not (num_skips_left or partial):
                break
            if seq in running:
                # A sequence without a slot was preempted by one before it.
                chunk = self._chunk(seq, seq.num_computed_tokens, (partial, waiting), budget) if seq.slot >= 0 else 0
                if chunk and self._reserve(seq, chunk, budget):
                    _take(seq, chunk, budget)
                    chosen.append(seq)
            elif num_skips_left:
                outcome = self._try_admit(seq, (partial, waiting), budget)
                if outcome is _Outcome.ADMITTED:
                    chosen.append(seq)
                num_skips_left = 0 if outcome is _Outcome.BLOCKED else num_skips_left - (outcome is _Outcome.SKIPPED)
        return chosen

    def _try_admit(self, seq: Sequence, candidates: _Queues, budget: PrefillBudget) -> _Outcome:
        """Admit the waiting ``seq`` and charge its chunk to the budget, if possible."""
        allocator = self._allocator
        if not allocator.has_slot_for(seq):
            return _Outcome.BLOCKED
        if budget.must_defer(allocator.min_remaining(seq)):
            return _Outcome.SKIPPED
        cached = allocator.cached_blocks(seq)
        if cached is None:
            return _Outcome.SKIPPED
        num_computed_tokens = len(cached) * self._config.block_size
        chunk = self._chunk(seq, num_computed_tokens, candidates, budget)
        if not chunk:
            return _Outcome.SKIPPED if budget.is_long(len(seq.tokens) - num_computed_tokens) else _Outcome.BLOCKED
        victims = allocator.admit(seq, cached)
        if victims is None:
            return _Outcome.BLOCKED
        _unschedule(victims, budget)
        _take(seq, chunk, budget)
        return _Outcome.ADMITTED

    def _reserve(self, seq: Sequence, chunk: int, budget: PrefillBudget) -> bool:
        """Give the running ``seq`` blocks for ``chunk`` tokens; False: it ranks worst and was preempted itself."""
        victims = self._allocator.reserve_chunk(seq, chunk)
        _unschedule(victims, budget)
        return seq.slot >= 0

    def _chunk(self, seq: Sequence, num_computed_tokens: int, candidates: _Queues, budget: PrefillBudget) -> int:
        num_remaining = len(seq.tokens) - num_computed_tokens
        num_short = 0
        if budget.is_long(num_remaining) and not budget.must_defer(num_remaining):
            for other in chain(*candidates):
                if other.rank > seq.rank and not budget.is_long(other.remaining):
                    num_short += other.remaining
                    if num_short >= budget.num_reserved:
                        break
        return budget.chunk(num_computed_tokens, num_remaining, num_short)


def _unschedule(victims: list[Sequence], budget: PrefillBudget) -> None:
    for victim in victims:
        if victim.num_scheduled:
            budget.give_back(victim.num_scheduled)
            victim.num_scheduled = 0


def _take(seq: Sequence, chunk: int, budget: PrefillBudget) -> None:
    budget.take(chunk, seq.remaining)
    seq.num_scheduled = chunk
