"""Decides what each step computes, under one token budget: ``Scheduler``. Does not depend on torch."""

import heapq
import time
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import NamedTuple

from weft_model.llm.config import EngineConfig
from weft_model.llm.scheduler.admission import BlockAdmission
from weft_model.llm.scheduler.blocks import BlockPool
from weft_model.llm.scheduler.plan import ForwardPlan, Int32
from weft_model.llm.scheduler.plan_builder import build_plan
from weft_model.llm.scheduler.prefill import PrefillScheduler
from weft_model.llm.scheduler.ranking import Ranking
from weft_model.llm.scheduler.sequence import Sequence, SequenceStatus
from weft_model.llm.scheduler.slot_allocator import SlotAllocator

#: Minimum size of the deadline heap before entries of ended sequences are purged.
_MIN_DEADLINES = 64


class StepResult(NamedTuple):
    """Result of a step for one sequence.

    Attributes:
        seq: The sequence.
        token: Its new token.
        is_finished: The token finished it, and it owns nothing any more.
        finish_reason: ``""``; ``"stop"``: a stop token; ``"length"``: ``max_tokens`` or the context is reached.
    """

    seq: Sequence
    token: int
    is_finished: bool
    finish_reason: str


class Scheduler:
    """Takes sequences and makes plans: ``schedule``, run the plan, then ``complete`` or ``fail``. Not thread-safe.

    Each step first gives one token to every running sequence that has one to compute, then the rest of the budget to
    prompts, running or waiting, in the order of service. A sequence is admitted when a slot and blocks for all its
    known tokens are free; it may preempt running sequences of lower priority. Nothing but deadlines depends on the
    time.

    Args:
        config: Resolved: ``max_model_len`` is set.
        pool: Owned by the scheduler.
        clock_ns: Time in nanoseconds, the clock of deadlines.

    Attributes:
        max_len: Longest sequence, prompt and output, in tokens: what both the context and the whole pool can hold.
    """

    def __init__(
        self, config: EngineConfig, pool: BlockPool, *, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.max_len = min(config.max_model_len, pool.capacity * pool.block_size)
        self._config = config
        self._pool = pool
        self._ranking = Ranking(config.aging_ns)
        self._admission = BlockAdmission(pool, self._ranking, config.watermark)
        self._allocator = SlotAllocator(pool, self._ranking, self._admission, config.max_num_seqs, clock_ns)
        self._prefill = PrefillScheduler(config, self._allocator)
        self._deadlines: list[tuple[int, int, Sequence]] = []
        self._max_deadlines = _MIN_DEADLINES
        self._decodes = self._allocator.decodes
        self._prefills: list[Sequence] | None = None  # of the current step, which has all decodes besides
        self._num_sampled = 0
        self._cancelled: list[Sequence] = []  # during the step that computes them

    @property
    def num_running(self) -> int:
        """Sequences with a slot."""
        return len(self._allocator.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a slot; forks that wait for their parent's prompt are not counted."""
        return len(self._allocator.waiting)

    @property
    def num_preemptions(self) -> int:
        """Times that a sequence lost its slot and blocks to another."""
        return self._allocator.num_preemptions

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to schedule."""
        return not self._allocator.running and not self._allocator.waiting

    def add(self, seq: Sequence) -> None:
        """Enqueue ``seq``; if it has a live parent whose prompt is not computed yet, it waits to be forked from it.

        Raises:
            ValueError: Its prompt leaves no room for a new token within ``max_len``. Nothing was changed.
        """
        if not 0 < seq.num_prompt < self.max_len:
            raise ValueError(f"a prompt must have 1 to {self.max_len - 1} tokens, got {seq.num_prompt}")
        seq.rank = self._ranking.rank(seq)
        seq.max_len = min(seq.max_len, self.max_len)
        self._track_deadline(seq)
        parent = seq.parent
        if parent is not None and parent.status is not SequenceStatus.ENDED and not parent.num_output:
            seq.status = SequenceStatus.FORKING
            parent.forks.append(seq)
            if parent.row >= 0:
                self._decodes.examine(parent)
        else:
            self._allocator.wait(seq)

    def cancel(self, seq: Sequence) -> None:
        """End ``seq`` without another result and free what it owns: now, or after the step that computes it.

        Forks that wait for its prompt continue as independent sequences. No effect if it has ended.
        """
        if seq.status is SequenceStatus.ENDED:
            return
        if self._prefills is None or not seq.num_scheduled:
            seq.is_cancelled = True
            self._end(seq)
        elif not seq.is_cancelled:
            seq.is_cancelled = True
            self._cancelled.append(seq)

    def sweep(self, now_ns: int) -> list[Sequence]:
        """Cancel sequences past their deadline; returns them in the order of their deadlines."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            seq = heapq.heappop(self._deadlines)[2]
            if seq.status is not SequenceStatus.ENDED and not seq.is_cancelled:
                self.cancel(seq)
                expired.append(seq)
        return expired

    def schedule(self) -> ForwardPlan | None:
        """Plan the next step; None if no sequence waits or runs.

        Raises:
            RuntimeError: The previous plan was neither completed nor failed.
        """
        if self._prefills is not None:
            raise RuntimeError("complete or fail the last plan before the next one is made")
        allocator, decodes = self._allocator, self._decodes
        # The last block of a sequence that has forked is shared: its next writer gets a copy.
        allocator.reserve_next_blocks(decodes.seqs[:] if allocator.has_forked else decodes.at_block_start())
        running = allocator.running
        partial = [seq for seq in running if seq.row < 0] if len(running) > len(decodes) else []
        chosen = self._prefill.schedule(partial, self._config.max_num_batched_tokens - len(decodes))
        if not decodes and not chosen:
            return None
        self._prefills = chosen
        changed = [seq for seq in allocator.changed if seq.num_scheduled]
        for seq in changed:
            del allocator.changed[seq]
        plan = build_plan(
            decodes,
            chosen,
            changed=changed,
            has_sampling_extras=allocator.num_with_sampling_extras > 0,
            block_size=self._pool.block_size,
        )
        self._num_sampled = len(plan.sample_rows)
        return plan

    def complete(self, token_ids: Int32) -> list[StepResult]:
        """Apply the result of the plan; sequences that finish own nothing afterwards.

        Args:
            token_ids: The new token of each of the plan's sample rows, ``[S]``.

        Returns:
            One result per sample row, in their order, without sequences that were cancelled during the step.

        Raises:
            RuntimeError: There is no plan to complete.
            ValueError: The number of tokens differs from that of sample rows. Nothing was changed.
        """
        if len(token_ids) != self._num_sampled:
            raise ValueError(f"{self._num_sampled} new tokens are due, got {len(token_ids)}")
        prefills = self._take_step()
        seqs = self._decodes.seqs[:]  # rows move as sequences end
        tokens = token_ids.tolist()
        may_end = self._decodes.append(token_ids[: len(seqs)])
        for seq in self._decodes.at_block_start():
            self._allocator.commit(seq, seq.num_computed_tokens // self._pool.block_size - 1)
        if self._allocator.num_with_penalties:
            for seq, token in zip(seqs, tokens, strict=False):
                if seq.penalties is not None:
                    seq.penalties.append(token)
        # StepResult() calls a Python function for each: 60 us for 256 sequences instead of 15.
        fields = zip(seqs, tokens, repeat(False), repeat(""), strict=False)
        results: list[StepResult] = list(map(tuple.__new__, repeat(StepResult), fields))
        for row in may_end:
            if not seqs[row].is_cancelled:
                results[row] = self._finish_if_ended(seqs[row], tokens[row])
        results += self._complete_prefills(prefills, iter(tokens[len(seqs) :]))
        if self._cancelled:
            results = [result for result in results if not result.seq.is_cancelled]
            self._end_cancelled()
        return results

    def fail(self) -> list[Sequence]:
        """End the sequences of the plan, which could not be run; all others continue.

        Returns:
            Its sequences, without those that were cancelled during the step.

        Raises:
            RuntimeError: There is no plan to fail.
        """
        step = [*self._decodes.seqs, *self._take_step()]
        for seq in step:
            seq.num_scheduled = 0
            self._end(seq)
        self._cancelled = []
        return [seq for seq in step if not seq.is_cancelled]

    def check(self) -> None:
        """Raise AssertionError unless slots, tables, blocks and cache agree; for tests and idle times."""
        self._allocator.check()

    def _take_step(self) -> list[Sequence]:
        """End the current step; returns its sequences other than the decodes."""
        prefills = self._prefills
        if prefills is None:
            raise RuntimeError("there is no plan that was neither completed nor failed")
        self._prefills, self._num_sampled = None, 0
        self._allocator.end_step()
        return prefills

    def _complete_prefills(self, prefills: list[Sequence], tokens: Iterator[int]) -> list[StepResult]:
        """Apply the step to ``prefills``; ``tokens`` are the new ones of those that have computed all they had."""
        results = []
        for seq in prefills:
            first = seq.num_computed_tokens // self._pool.block_size
            seq.remaining -= seq.num_scheduled
            seq.num_scheduled = 0
            self._allocator.commit(seq, first)
            if not seq.remaining:
                seq.append(next(tokens))
                if not seq.is_cancelled:
                    results.append(self._finish_if_ended(seq, seq.tokens[-1]))
            if seq.remaining == 1 and seq.slot >= 0:
                self._decodes.add(seq)
        return results

    def _finish_if_ended(self, seq: Sequence, token: int) -> StepResult:
        """After ``seq`` got ``token``: fork waiting children, and finish it if the token ends it."""
        if seq.forks:
            self._allocator.fork(seq)
        if token in seq.stop_ids and seq.num_output > seq.params.min_tokens:
            reason = "stop"
        elif len(seq.tokens) >= seq.max_len:
            reason = "length"
        else:
            return StepResult(seq, token, False, "")
        self._admission.observe_output_len(seq.num_output)
        self._end(seq)
        return StepResult(seq, token, True, reason)

    def _end_cancelled(self) -> None:
        """End the sequences that were cancelled during the step."""
        for seq in self._cancelled:
            self._end(seq)
        self._cancelled = []

    def _end(self, seq: Sequence) -> None:
        if seq.status is SequenceStatus.FORKING and seq.parent is not None:
            seq.parent.forks.remove(seq)
            seq.status = SequenceStatus.ENDED
        else:
            self._allocator.remove(seq)
        for child in seq.forks:
            self._allocator.wait(child)
        seq.forks = []

    def _track_deadline(self, seq: Sequence) -> None:
        if seq.request.deadline_ns is None:
            return
        heapq.heappush(self._deadlines, (seq.request.deadline_ns, seq.id, seq))
        if len(self._deadlines) > self._max_deadlines:  # most of their sequences may have ended already
            self._deadlines = [entry for entry in self._deadlines if entry[2].status is not SequenceStatus.ENDED]
            heapq.heapify(self._deadlines)
            self._max_deadlines = 2 * len(self._deadlines) + _MIN_DEADLINES
