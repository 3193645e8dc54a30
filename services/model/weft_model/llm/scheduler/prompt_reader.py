"""Gives what a step has left to prompts, in the order of service: ``PromptReader``."""

import heapq
from enum import Enum, auto
from itertools import chain

from weft_model.llm.config import EngineConfig
from weft_model.llm.scheduler.prompt_budget import PromptBudget
from weft_model.llm.scheduler.seating import Seating
from weft_model.llm.scheduler.sequence import Sequence

#: Waiting sequences that are looked at in a step; those beyond are not admitted in it even if they could be.
_NUM_CONSIDERED = 256
#: Of which so many may be passed over, because they wait for another's prefix or are one long prompt too many.
_MAX_PASSED_OVER = 64


#: Those that run and those that wait, each in the order of service.
_Lines = tuple[list[Sequence], list[Sequence]]


class _Outcome(Enum):
    """What became of a waiting sequence in a step."""

    STARTED = auto()
    #: It waits, but those behind it may be admitted.
    PASSED_OVER = auto()
    #: It waits, and all those behind it.
    REFUSED = auto()


class PromptReader:
    """Chooses who computes how much of its prompt, and admits who waits.

    One who must wait for blocks or a seat is not overtaken by those behind it; one who must wait for another's prefix,
    or because long prompts take turns, is.

    Args:
        config: The engine's.
        seating: Who runs and who waits.
    """

    def __init__(self, config: EngineConfig, seating: Seating) -> None:
        self._config = config
        self._seating = seating

    def read(self, partial: list[Sequence], num_left: int) -> list[Sequence]:
        """Sequences that compute a part of their tokens in this step, in ``num_scheduled``.

        Args:
            partial: Running sequences with more than one token to compute, in the order of service.
            num_left: Tokens of the step that nobody has yet.
        """
        budget = PromptBudget(self._config, num_left)
        waiting = self._seating.next_waiting(_NUM_CONSIDERED)
        chosen: list[Sequence] = []
        patience = _MAX_PASSED_OVER
        # No two ranks are equal, so the merge compares nothing else.
        lines = (((seq.rank, True, seq) for seq in partial), ((seq.rank, False, seq) for seq in waiting))
        for _, is_running, seq in heapq.merge(*lines):
            if budget.num_left <= 0 or not (patience or partial):
                break
            if is_running:
                # One without a seat was preempted for one before it.
                chunk = self._chunk(seq, seq.num_done, (partial, waiting), budget) if seq.slot >= 0 else 0
                if chunk:
                    _take(seq, chunk, budget)
                    chosen.append(seq)
            elif patience:
                outcome = self._start(seq, (partial, waiting), budget)
                if outcome is _Outcome.STARTED:
                    chosen.append(seq)
                patience = 0 if outcome is _Outcome.REFUSED else patience - (outcome is _Outcome.PASSED_OVER)
        return chosen

    def _start(self, seq: Sequence, candidates: _Lines, budget: PromptBudget) -> _Outcome:
        """The waiting ``seq`` is admitted and takes its part of the budget, if it may."""
        seating = self._seating
        if not seating.has_place(seq):
            return _Outcome.REFUSED
        if budget.has_no_turn(seating.least_remaining(seq)):
            return _Outcome.PASSED_OVER
        cached = seating.cached_blocks(seq)
        if cached is None:
            return _Outcome.PASSED_OVER
        num_done = len(cached) * self._config.block_size
        chunk = self._chunk(seq, num_done, candidates, budget)
        if not chunk:
            return _Outcome.PASSED_OVER if budget.is_long(len(seq.tokens) - num_done) else _Outcome.REFUSED
        victims = seating.admit(seq, cached)
        if victims is None:
            return _Outcome.REFUSED
        for victim in victims:
            budget.give_back(victim.num_scheduled)
            victim.num_scheduled = 0
        _take(seq, chunk, budget)
        return _Outcome.STARTED

    def _chunk(self, seq: Sequence, num_done: int, candidates: _Lines, budget: PromptBudget) -> int:
        num_remaining = len(seq.tokens) - num_done
        num_short = 0
        if budget.is_long(num_remaining) and not budget.has_no_turn(num_remaining):
            behind = (other.remaining for other in chain(*candidates) if other.rank > seq.rank)
            num_short = sum(remaining for remaining in behind if not budget.is_long(remaining))
        return budget.chunk(num_done, num_remaining, num_short)


def _take(seq: Sequence, chunk: int, budget: PromptBudget) -> None:
    budget.take(chunk, seq.remaining)
    seq.num_scheduled = chunk
