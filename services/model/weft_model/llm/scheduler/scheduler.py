"""Decides what each step computes, under one budget of tokens: ``Scheduler``. No tensor library here."""

import heapq
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from weft_model.llm.config import EngineConfig
from weft_model.llm.scheduler.admission import BlockAdmission
from weft_model.llm.scheduler.blocks import NULL_BLOCK, BlockPool
from weft_model.llm.scheduler.plan import ForwardPlan, Int32
from weft_model.llm.scheduler.plan_builder import build_plan
from weft_model.llm.scheduler.prompt_reader import PromptReader
from weft_model.llm.scheduler.ranking import Ranking
from weft_model.llm.scheduler.seating import Seating
from weft_model.llm.scheduler.sequence import Sequence, SequenceStatus

#: Deadlines that are kept, at least, before those of sequences that have ended are dropped.
_MIN_DEADLINES = 64


class StepResult(NamedTuple):
    """What a step did for one sequence.

    Attributes:
        seq: The sequence.
        token: Its new token.
        is_finished: It ended with it, and owns nothing any more.
        finish_reason: ``""``; ``"stop"``: a token that ends it; ``"length"``: ``max_tokens`` or the context is reached.
    """

    seq: Sequence
    token: int
    is_finished: bool
    finish_reason: str


class _Ones(NamedTuple):
    """Running sequences with one token to compute, with their ``num_done`` and their last block."""

    seqs: list[Sequence]
    done: Int32
    last_blocks: Int32


def _arrays(seqs: list[Sequence]) -> _Ones:
    done = np.array([seq.num_done for seq in seqs], np.int32)
    return _Ones(seqs, done, np.array([seq.table[-1] for seq in seqs], np.int32))


class Scheduler:
    """Sequences in, plans out: ``schedule``, run the plan, then ``complete`` or ``fail``. One thread owns it.

    Each step first gives one token to every running sequence that has one to compute, then the rest of the budget to
    those that have more, running or waiting, in the order of service. A sequence is admitted when a seat and blocks for
    all its known tokens are there; one that is strictly better than a running one may take its place. Nothing but
    deadlines depends on the time.

    Args:
        config: Resolved: ``max_model_len`` is set.
        pool: Belongs to the scheduler from then on.
        clock_ns: Time in nanoseconds, the one of deadlines.

    Attributes:
        max_len: Longest sequence, prompt and answer, in tokens: what the context and the whole pool can hold.
    """

    def __init__(
        self, config: EngineConfig, pool: BlockPool, *, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.max_len = min(config.max_model_len, pool.capacity * pool.block_size)
        self._config = config
        self._pool = pool
        self._ranking = Ranking(config.aging_ns)
        self._admission = BlockAdmission(pool, self._ranking, config.watermark)
        self._seating = Seating(pool, self._ranking, self._admission, config.max_num_seqs, clock_ns)
        self._reader = PromptReader(config, self._seating)
        self._deadlines: list[tuple[int, int, Sequence]] = []
        self._max_deadlines = _MIN_DEADLINES
        self._step: list[Sequence] | None = None
        self._sampled: list[Sequence] = []

    @property
    def num_running(self) -> int:
        """Sequences with a seat."""
        return len(self._seating.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a seat; copies that wait for their parent's prompt are not counted."""
        return len(self._seating.waiting)

    @property
    def num_preemptions(self) -> int:
        """Times that a sequence lost its seat or its blocks to another."""
        return self._seating.num_preemptions

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to schedule."""
        return not self._seating.running and not self._seating.waiting

    def add(self, seq: Sequence) -> None:
        """``seq`` waits for its turn; one with a living parent, whose prompt is not computed yet, for that.

        Raises:
            ValueError: Its prompt leaves no room for a new token within ``max_len``. Nothing was changed.
        """
        if not 0 < seq.num_prompt < self.max_len:
            raise ValueError(f"a prompt must have 1 to {self.max_len - 1} tokens, got {seq.num_prompt}")
        seq.rank = self._ranking.rank(seq)
        seq.max_len = min(seq.max_len, self.max_len)
        self._watch(seq)
        parent = seq.parent
        if parent is not None and parent.status is not SequenceStatus.ENDED and not parent.num_output:
            seq.status = SequenceStatus.FORKING
            parent.forks.append(seq)
        else:
            self._seating.wait(seq)

    def cancel(self, seq: Sequence) -> None:
        """``seq`` ends without another result and frees what it owns: now, or with the step that computes it.

        Copies that wait for its prompt go on as sequences of their own. Ended already: nothing happens.
        """
        if seq.status is SequenceStatus.ENDED:
            return
        seq.is_cancelled = True
        if not seq.num_scheduled:
            self._end(seq)

    def sweep(self, now_ns: int) -> list[Sequence]:
        """Sequences whose deadline has passed are cancelled, and returned in the order of their deadlines."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            seq = heapq.heappop(self._deadlines)[2]
            if seq.status is not SequenceStatus.ENDED and not seq.is_cancelled:
                self.cancel(seq)
                expired.append(seq)
        return expired

    def schedule(self) -> ForwardPlan | None:
        """What to compute next; None if nothing waits or runs.

        Raises:
            RuntimeError: The plan before has neither been completed nor failed.
        """
        if self._step is not None:
            raise RuntimeError("complete or fail the last plan before the next one is made")
        running = list(self._seating.running)
        ones = [seq for seq in running if len(seq.tokens) - seq.num_done == 1]
        num_preemptions = self.num_preemptions
        step, done, last_blocks = self._continue(ones)
        partial = [] if len(ones) == len(running) else [seq for seq in running if seq.remaining > 1 and seq.slot >= 0]
        chosen = self._reader.read(partial, self._config.max_num_batched_tokens - len(step))
        if self.num_preemptions != num_preemptions:  # maybe of some that were in the step already
            chosen = [seq for seq in chosen if seq.num_scheduled]
            step, done, last_blocks = _arrays([seq for seq in step if seq.num_scheduled])
        if not step and not chosen:
            return None
        self._sampled = [*step, *(seq for seq in chosen if seq.num_scheduled == seq.remaining)]
        self._step = [*step, *chosen]
        seating = self._seating
        changed = [seq for seq in seating.changed if seq.num_scheduled]
        for seq in changed:
            del seating.changed[seq]
        return build_plan(
            self._step,
            self._sampled,
            done,
            last_blocks,
            changed=changed,
            is_any_asking=seating.num_asking > 0,
            block_size=self._pool.block_size,
        )

    def complete(self, token_ids: Int32) -> list[StepResult]:
        """The plan was run: what it computed counts, and sequences that have ended own nothing.

        Args:
            token_ids: The new token of each of the plan's sample rows, ``[S]``.

        Returns:
            One for each sample row, in their order, but for sequences that were cancelled meanwhile.

        Raises:
            RuntimeError: There is no plan to complete.
            ValueError: There are not as many tokens as sample rows. Nothing was changed.
        """
        if len(token_ids) != len(self._sampled):
            raise ValueError(f"{len(self._sampled)} new tokens are due, got {len(token_ids)}")
        block_size = self._pool.block_size
        new_tokens = iter(token_ids.tolist())
        results: list[StepResult] = []
        cancelled: list[Sequence] = []
        new_result = tuple.__new__
        for seq in self._take_step():
            num_computed, num_before = seq.num_scheduled, seq.num_done
            seq.num_scheduled = 0
            seq.num_done = num_done = num_before + num_computed
            if num_done % block_size < num_computed:
                self._seating.commit(seq, num_before // block_size)
            known = seq.tokens
            token = next(new_tokens) if num_done == len(known) else None
            if seq.is_cancelled:
                cancelled.append(seq)
            elif token is not None:
                if seq.penalties is None:
                    known.append(token)
                else:
                    seq.append(token)
                if seq.forks or token in seq.stop_ids or len(known) >= seq.max_len:
                    results.append(self._turn(seq, token))
                else:
                    # What StepResult() does, without its call in Python: 25 us of 165 for 256 sequences.
                    results.append(new_result(StepResult, (seq, token, False, "")))
        for seq in cancelled:
            self._end(seq)
        return results

    def fail(self) -> list[Sequence]:
        """The plan could not be run: its sequences have ended and own nothing; all others go on.

        Returns:
            Its sequences, but for those that were cancelled meanwhile.

        Raises:
            RuntimeError: There is no plan to fail.
        """
        step = self._take_step()
        for seq in step:
            seq.num_scheduled = 0
            self._end(seq)
        return [seq for seq in step if not seq.is_cancelled]

    def check(self) -> None:
        """Raise AssertionError unless seats, tables, blocks and cache agree; for tests and idle times."""
        self._seating.check()

    def _continue(self, ones: list[Sequence]) -> _Ones:
        """Those of ``ones``, running sequences with one token to compute, that have a block to write it to."""
        arrays = _arrays(ones)
        num_preemptions = self.num_preemptions
        # A block is needed where the last one is full, or must be copied: by forks and their parent, before they write.
        is_candidate = arrays.done % self._pool.block_size == 0
        if self._seating.take_forked():
            is_candidate |= np.array([self._pool.is_shared(seq.table[-1]) for seq in ones], np.bool_)
        for index in np.flatnonzero(is_candidate).tolist():
            seq = ones[index]
            if seq.slot >= 0:  # not preempted by one before it
                self._seating.make_room(seq)
                arrays.last_blocks[index] = seq.table[-1] if seq.table else NULL_BLOCK
        if self.num_preemptions != num_preemptions:
            arrays = _arrays([seq for seq in ones if seq.slot >= 0])
        for seq in arrays.seqs:
            seq.num_scheduled = 1
        return arrays

    def _take_step(self) -> list[Sequence]:
        if self._step is None:
            raise RuntimeError("there is no plan that was neither completed nor failed")
        step, self._step, self._sampled = self._step, None, []
        self._seating.end_step()
        return step

    def _turn(self, seq: Sequence, token: int) -> StepResult:
        """``seq``, which just got ``token``, has forked if others wait for that, and ended if it has to."""
        if seq.forks:
            self._seating.fork(seq)
        if token in seq.stop_ids and seq.num_output > seq.params.min_tokens:
            reason = "stop"
        elif len(seq.tokens) >= seq.max_len:
            reason = "length"
        else:
            return StepResult(seq, token, False, "")
        self._admission.learn(seq.num_output)
        self._end(seq)
        return StepResult(seq, token, True, reason)

    def _end(self, seq: Sequence) -> None:
        if seq.status is SequenceStatus.FORKING and seq.parent is not None:
            seq.parent.forks.remove(seq)
            seq.status = SequenceStatus.ENDED
        else:
            self._seating.leave(seq)
        for child in seq.forks:
            self._seating.wait(child)
        seq.forks = []

    def _watch(self, seq: Sequence) -> None:
        if seq.request.deadline_ns is None:
            return
        heapq.heappush(self._deadlines, (seq.request.deadline_ns, seq.id, seq))
        if len(self._deadlines) > self._max_deadlines:  # most of them may have ended long before their deadline
            self._deadlines = [entry for entry in self._deadlines if entry[2].status is not SequenceStatus.ENDED]
            heapq.heapify(self._deadlines)
            self._max_deadlines = 2 * len(self._deadlines) + _MIN_DEADLINES
