"""Chunked prefill: gives the rest of a step's budget to prompts in the order of service. ``PrefillScheduler``."""

import heapq
from enum import Enum, auto
from itertools import chain

from weft.llm.config import EngineConfig
from weft.llm.scheduler.prefill_budget import PrefillBudget
from weft.llm.scheduler.sequence import Sequence
from weft.llm.scheduler.slot_allocator import SlotAllocator

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
