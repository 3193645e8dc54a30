"""Decides what each step computes, under one token budget: ``Scheduler``. Does not depend on torch."""

import heapq
import time
from collections.abc import Callable, Collection
from itertools import repeat
from typing import NamedTuple

from weft_model.llm.config import EngineConfig
from weft_model.llm.scheduler.acceptance import DraftSource, num_accepted
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
        token_ids: Its new tokens: one, and as many as drafts were accepted.
        row: Sample row of the first of them; the others follow.
        is_finished: The last token finished it, and it owns nothing any more.
        finish_reason: ``""``; ``"stop"``: a stop token; ``"length"``: ``max_tokens`` or the context is reached.
    """

    seq: Sequence
    token_ids: list[int]
    row: int
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
        drafts: Decides about speculation; None: there is none.

    Attributes:
        max_len: Longest sequence, prompt and output, in tokens: what both the context and the whole pool can hold; of a
            model with a sliding window the pool holds the window alone.
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        drafts: DraftSource | None = None,
    ) -> None:
        self.max_len = pool.window.max_len(config.max_model_len, pool.capacity)
        self._config = config
        self._pool = pool
        self._draft_source = drafts
        self._ranking = Ranking(config.aging_ns)
        self._admission = BlockAdmission(pool, self._ranking, config.watermark)
        self._allocator = SlotAllocator(pool, self._ranking, self._admission, config.max_num_seqs, clock_ns)
        self._prefill = PrefillScheduler(config, self._allocator)
        self._deadlines: list[tuple[int, int, Sequence]] = []
        self._max_deadlines = _MIN_DEADLINES
        self._decodes = self._allocator.decodes
        self._chunks: list[Sequence] | None = None  # of the current step, which has all decodes besides
        self._num_sample_rows = 0
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
        if self._chunks is None or not seq.num_scheduled:
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
        if self._chunks is not None:
            raise RuntimeError("complete or fail the last plan before the next one is made")
        allocator, decodes = self._allocator, self._decodes
        # The last block of a sequence that has forked is shared: its next writer gets a copy.
        allocator.reserve_next_blocks(decodes.seqs[:] if allocator.has_forked else decodes.at_block_start())
        running = allocator.running
        partial = [seq for seq in running if seq.row < 0] if len(running) > len(decodes) else []
        chunks = self._prefill.schedule(partial, self._config.max_num_batched_tokens - len(decodes))
        chunks = [seq for seq in chunks if seq.num_scheduled]  # others were preempted by those behind them
        if not decodes and not chunks:
            return None
        if self._draft_source is not None:
            chunks = self._add_drafts(self._draft_source, sum(seq.num_scheduled for seq in chunks)) + chunks
        self._chunks = chunks
        changed = [seq for seq in allocator.changed if seq.num_scheduled]
        for seq in changed:
            del allocator.changed[seq]
        plan = build_plan(
            decodes,
            chunks,
            changed=changed,
            has_sampling_extras=allocator.num_with_sampling_extras > 0,
            block_size=self._pool.block_size,
        )
        self._num_sample_rows = len(plan.sample_rows)
        transfers = self._pool.tier.take()
        return plan if transfers is None else plan._replace(transfers=transfers)

    def complete(
        self, token_ids: Int32, draft_ids: Int32 | None = None, failed_loads: Collection[int] = ()
    ) -> list[StepResult]:
        """Apply the result of the plan; sequences that finish own nothing afterwards.

        Args:
            token_ids: The token sampled at each of the plan's sample rows, ``[S]``.
            draft_ids: The plan's drafts, those included that were unknown; None: it had none of these.
            failed_loads: Blocks that the plan was to load and that hold nothing valid; sequences that own them wait
                again, and compute what they lost.

        Returns:
            One result per sequence that sampled, in the order of the plan, without those that were cancelled during the
            step or wait again.

        Raises:
            RuntimeError: There is no plan to complete.
            ValueError: The number of tokens differs from that of sample rows. Nothing was changed.
        """
        if len(token_ids) != self._num_sample_rows:
            raise ValueError(f"{self._num_sample_rows} new tokens are due, got {len(token_ids)}")
        chunks = self._take_step()
        tokens = token_ids.tolist()
        seqs = self._decodes.seqs[:]  # rows move as sequences end
        results = self._complete_decodes(seqs, tokens[: len(seqs)], token_ids[: len(seqs)])
        if draft_ids is not None:
            _fill_in(chunks, draft_ids.tolist())
        lost = self._allocator.loads.finish(failed_loads)
        row = len(seqs)
        for seq in chunks:
            num_rows = 1 + len(seq.drafts) if seq.is_sampled else 0
            if lost and seq in lost:
                row += num_rows
                self._recompute(seq)
                continue
            new_tokens = self._complete_chunk(seq, tokens[row : row + num_rows])
            if new_tokens and not seq.is_cancelled:
                results.append(self._fork_or_finish(seq, new_tokens, row))
            if seq.remaining == 1 and seq.slot >= 0:
                self._decodes.add(seq)
            row += num_rows
        if self._cancelled:
            results = [result for result in results if not result.seq.is_cancelled]
            for seq in self._cancelled:
                self._end(seq)
            self._cancelled = []
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
            seq.drafts = []
            self._end(seq)
        self._cancelled = []
        return [seq for seq in step if not seq.is_cancelled]

    def check(self) -> None:
        """Raise AssertionError unless slots, tables, blocks and cache agree; for tests and idle times."""
        self._allocator.check()

    def _take_step(self) -> list[Sequence]:
        """End the current step; returns its sequences other than the decodes."""
        chunks = self._chunks
        if chunks is None:
            raise RuntimeError("there is no plan that was neither completed nor failed")
        self._chunks, self._num_sample_rows = None, 0
        self._allocator.end_step()
        return chunks

    def _complete_decodes(self, seqs: list[Sequence], tokens: list[int], token_ids: Int32) -> list[StepResult]:
        """Apply the step to all decodes, which are ``seqs``; ``tokens`` and ``token_ids`` are their new tokens."""
        may_end = self._decodes.append(token_ids)
        self._allocator.commit_decodes()
        if self._allocator.num_with_penalties:
            for seq, token in zip(seqs, tokens, strict=True):
                if seq.penalties is not None:
                    seq.penalties.append(token)
        # StepResult() calls a Python function for each: 60 us for 256 sequences instead of 15.
        fields = zip(seqs, [[token] for token in tokens], range(len(seqs)), repeat(False), repeat(""), strict=False)
        results: list[StepResult] = list(map(tuple.__new__, repeat(StepResult), fields))
        for row in may_end:
            if not seqs[row].is_cancelled:
                results[row] = self._fork_or_finish(seqs[row], [tokens[row]], row)
        return results

    def _add_drafts(self, source: DraftSource, num_others: int) -> list[Sequence]:
        """Give drafts to some decodes from what is left of the step and of the blocks; returns these, now chunks."""
        num_rows = len(self._decodes) + num_others
        num_left = self._config.max_num_batched_tokens - num_rows
        if num_left <= 0 or not self._decodes:
            return []
        drafted = []
        for seq in source.propose(self._decodes.seqs, num_rows, num_left):
            # With all drafts accepted there is one more token. Forks share the blocks of the prompt, and no others.
            num_drafts = 0 if seq.forks else min(len(seq.drafts), seq.max_len - len(seq.tokens) - 1)
            del seq.drafts[self._allocator.reserve_drafts(seq, num_drafts) :]
            if seq.drafts:
                self._decodes.remove(seq)
                seq.num_scheduled = 1 + len(seq.drafts)
                drafted.append(seq)
        return drafted

    def _complete_chunk(self, seq: Sequence, samples: list[int]) -> list[int]:
        """Apply the step to ``seq``, which is not among the decodes; returns its new tokens.

        Of drafts the accepted ones and one more token are appended, up to one that ends the sequence. Nothing of a
        rejected draft remains: neither a block, nor an entry of the cache index, nor a count.

        Args:
            seq: The sequence.
            samples: The tokens sampled: none if some of its known tokens are still to be computed, else one more than
                it has drafts.
        """
        num_before = seq.num_computed_tokens
        count = num_accepted(seq.drafts, samples)
        if seq.drafts and self._draft_source is not None:
            self._draft_source.observe(seq, samples, count)
        num_drafts, seq.drafts = len(seq.drafts), []
        seq.remaining -= seq.num_scheduled - num_drafts
        seq.num_scheduled = 0
        new_tokens: list[int] = []
        for token in samples[: count + 1]:
            seq.append(token)
            new_tokens.append(token)
            if _finish_reason(seq):
                break
        if num_drafts:
            # Keys and values of the newest token are not computed, those of accepted drafts before it are.
            seq.remaining = 1
            self._allocator.release_unused_blocks(seq)
        self._allocator.commit(seq, num_before // self._pool.block_size)
        return new_tokens

    def _recompute(self, seq: Sequence) -> None:
        """Let ``seq`` wait again, whose step was computed from invalid blocks."""
        seq.num_scheduled = 0
        if not seq.is_cancelled:
            self._allocator.requeue(seq)

    def _fork_or_finish(self, seq: Sequence, token_ids: list[int], row: int) -> StepResult:
        """After ``seq`` got ``token_ids``: fork waiting children, and finish it if the last token ends it."""
        if seq.forks:
            self._allocator.fork(seq)
        reason = _finish_reason(seq)
        if reason:
            self._admission.observe_output_len(seq.num_output)
            self._end(seq)
        return StepResult(seq, token_ids, row, bool(reason), reason)

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


def _finish_reason(seq: Sequence) -> str:
    """What the last token of ``seq`` ends it with: "stop", "length", or "" if it goes on."""
    if seq.tokens[-1] in seq.stop_ids and seq.num_output > seq.params.min_tokens:
        return "stop"
    return "length" if len(seq.tokens) >= seq.max_len else ""


def _fill_in(seqs: list[Sequence], draft_ids: list[int]) -> None:
    """Replace the drafts of ``seqs`` by ``draft_ids``, which are in the same order."""
    start = 0
    for seq in seqs:
        if seq.drafts:
            seq.drafts = draft_ids[start : start + len(seq.drafts)]
            start += len(seq.drafts)
