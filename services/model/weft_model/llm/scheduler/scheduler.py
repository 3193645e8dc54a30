"""Decides what each step computes, under one token budget: ``Scheduler``. Does not depend on torch."""

import heapq
import time
from collections.abc import Callable, Collection
from typing import NamedTuple

import numpy as np

from weft_model.llm.config import EngineConfig
from weft_model.llm.scheduler.acceptance import DraftSource, num_accepted
from weft_model.llm.scheduler.admission import BlockAdmission
from weft_model.llm.scheduler.blocks import NULL_BLOCK, BlockPool
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


class _Decodes(NamedTuple):
    """Running sequences with one token to compute, with their ``num_computed_tokens`` and their last block."""

    seqs: list[Sequence]
    done: Int32
    last_blocks: Int32


def _arrays(seqs: list[Sequence]) -> _Decodes:
    done = np.array([seq.num_computed_tokens for seq in seqs], np.int32)
    return _Decodes(seqs, done, np.array([seq.block_table[-1] for seq in seqs], np.int32))


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
        self._step: list[Sequence] | None = None
        self._sampled: list[Sequence] = []
        self._num_sample_rows = 0

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
        else:
            self._allocator.wait(seq)

    def cancel(self, seq: Sequence) -> None:
        """End ``seq`` without another result and free what it owns: now, or after the step that computes it.

        Forks that wait for its prompt continue as independent sequences. No effect if it has ended.
        """
        if seq.status is SequenceStatus.ENDED:
            return
        seq.is_cancelled = True
        if not seq.num_scheduled:
            self._end(seq)

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
        if self._step is not None:
            raise RuntimeError("complete or fail the last plan before the next one is made")
        running = list(self._allocator.running)
        decodes = [seq for seq in running if len(seq.tokens) - seq.num_computed_tokens == 1]
        num_preemptions = self.num_preemptions
        step, done, last_blocks = self._schedule_decodes(decodes)
        partial = (
            [] if len(decodes) == len(running) else [seq for seq in running if seq.remaining > 1 and seq.slot >= 0]
        )
        chosen = self._prefill.schedule(partial, self._config.max_num_batched_tokens - len(step))
        if self.num_preemptions != num_preemptions:  # possibly of sequences that this step had scheduled
            chosen = [seq for seq in chosen if seq.num_scheduled]
            step, done, last_blocks = _arrays([seq for seq in step if seq.num_scheduled])
        if not step and not chosen:
            return None
        if self._draft_source is not None:
            drafted = self._add_drafts(self._draft_source, step, len(step) + sum(seq.num_scheduled for seq in chosen))
            if drafted:
                step, done, last_blocks = _arrays([seq for seq in step if not seq.drafts])
                chosen = drafted + chosen
        self._sampled = [*step, *(seq for seq in chosen if seq.num_scheduled == seq.remaining)]
        self._step = [*step, *chosen]
        allocator = self._allocator
        changed = [seq for seq in allocator.changed if seq.num_scheduled]
        for seq in changed:
            del allocator.changed[seq]
        plan = build_plan(
            self._step,
            self._sampled,
            done,
            last_blocks,
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
        if draft_ids is not None:
            _fill_in(self._sampled, draft_ids.tolist())
        block_size = self._pool.block_size
        new_tokens = token_ids.tolist()
        row = 0
        results: list[StepResult] = []
        cancelled: list[Sequence] = []
        new_result = tuple.__new__
        step = self._take_step()
        lost = self._allocator.loads.finish(failed_loads)
        for seq in step:
            if lost and seq in lost:
                row += self._recompute(seq, cancelled)
                continue
            if seq.drafts:
                num_rows = 1 + len(seq.drafts)
                result = self._accept(seq, row, new_tokens[row : row + num_rows])
                row += num_rows
                if result is None:
                    cancelled.append(seq)
                else:
                    results.append(result)
                continue
            num_computed, num_before = seq.num_scheduled, seq.num_computed_tokens
            seq.num_scheduled = 0
            seq.num_computed_tokens = num_computed_tokens = num_before + num_computed
            if num_computed_tokens % block_size < num_computed:
                self._allocator.commit(seq, num_before // block_size)
            known = seq.tokens
            is_sampled = num_computed_tokens == len(known)
            if seq.is_cancelled:
                cancelled.append(seq)
            elif is_sampled:
                token = new_tokens[row]
                if seq.penalties is None:
                    known.append(token)
                else:
                    seq.append(token)
                if seq.forks or token in seq.stop_ids or len(known) >= seq.max_len:
                    results.append(self._fork_or_finish(seq, [token], row))
                else:
                    # StepResult() without its Python-level __new__ saves 25 of 165 us for 256 sequences.
                    results.append(new_result(StepResult, (seq, [token], row, False, "")))
            row += is_sampled
        for seq in cancelled:
            self._end(seq)
        return results

    def _recompute(self, seq: Sequence, cancelled: list[Sequence]) -> int:
        """Let ``seq`` wait again, whose step was computed from invalid blocks; returns its sample rows."""
        num_rows = int(seq.num_scheduled == seq.remaining)
        seq.num_scheduled = 0
        if seq.is_cancelled:
            cancelled.append(seq)
        else:
            self._allocator.requeue(seq)
        return num_rows

    def fail(self) -> list[Sequence]:
        """End the sequences of the plan, which could not be run; all others continue.

        Returns:
            Its sequences, without those that were cancelled during the step.

        Raises:
            RuntimeError: There is no plan to fail.
        """
        step = self._take_step()
        for seq in step:
            seq.num_scheduled = 0
            seq.drafts = []
            self._end(seq)
        return [seq for seq in step if not seq.is_cancelled]

    def check(self) -> None:
        """Raise AssertionError unless slots, tables, blocks and cache agree; for tests and idle times."""
        self._allocator.check()

    def _schedule_decodes(self, decodes: list[Sequence]) -> _Decodes:
        """Schedule one token for each of ``decodes`` that has or gets a block to write it to."""
        arrays = _arrays(decodes)
        num_preemptions = self.num_preemptions
        # A sequence needs a block if its last one is full, or shared with a fork, which means copy on write.
        is_candidate = arrays.done % self._pool.block_size == 0
        if self._allocator.take_has_forked():
            is_candidate |= np.array([self._pool.is_shared(seq.block_table[-1]) for seq in decodes], np.bool_)
        for index in np.flatnonzero(is_candidate).tolist():
            seq = decodes[index]
            if seq.slot >= 0:  # not preempted by a sequence before it
                self._allocator.reserve_next_block(seq)
                arrays.last_blocks[index] = seq.block_table[-1] if seq.block_table else NULL_BLOCK
        if self.num_preemptions != num_preemptions:
            arrays = _arrays([seq for seq in decodes if seq.slot >= 0])
        for seq in arrays.seqs:
            seq.num_scheduled = 1
        return arrays

    def _take_step(self) -> list[Sequence]:
        if self._step is None:
            raise RuntimeError("there is no plan that was neither completed nor failed")
        step, self._step, self._sampled, self._num_sample_rows = self._step, None, [], 0
        self._allocator.end_step()
        return step

    def _add_drafts(self, source: DraftSource, decodes: list[Sequence], num_rows: int) -> list[Sequence]:
        """Give drafts to some of ``decodes`` from what is left of the step and of the blocks; returns these."""
        num_left = self._config.max_num_batched_tokens - num_rows
        if num_left <= 0 or not decodes:
            return []
        drafted = []
        for seq in source.propose([seq for seq in decodes if not seq.forks], num_rows, num_left):
            # With all drafts accepted there is one more token.
            num_drafts = min(len(seq.drafts), seq.max_len - len(seq.tokens) - 1)
            del seq.drafts[self._allocator.reserve_drafts(seq, num_drafts) :]
            if seq.drafts:
                seq.num_scheduled = 1 + len(seq.drafts)
                drafted.append(seq)
        return drafted

    def _accept(self, seq: Sequence, row: int, samples: list[int]) -> StepResult | None:
        """After drafts of ``seq`` were computed: append the accepted ones and one more token, up to one that ends it.

        Nothing of a rejected draft remains: neither a block, nor an entry of the cache index, nor a count.

        Returns:
            None: it was cancelled during the step, and all of its drafts count as rejected.
        """
        count = num_accepted(seq.drafts, samples)
        if self._draft_source is not None:
            self._draft_source.observe(seq, samples, count)
        num_before, seq.drafts, seq.num_scheduled = seq.num_computed_tokens, [], 0
        new_tokens: list[int] = []
        if not seq.is_cancelled:
            for token in samples[: count + 1]:
                seq.append(token)
                new_tokens.append(token)
                if _finish_reason(seq):
                    break
        # Keys and values of the newest token are not computed, those of accepted drafts before it are.
        seq.num_computed_tokens = num_before + max(len(new_tokens), 1)
        self._allocator.release_unused_blocks(seq)
        self._allocator.commit(seq, num_before // self._pool.block_size)
        return self._fork_or_finish(seq, new_tokens, row) if new_tokens else None

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


def _fill_in(sampled: list[Sequence], draft_ids: list[int]) -> None:
    """Replace the drafts of ``sampled`` by ``draft_ids``, which are in the same order."""
    start = 0
    for seq in sampled:
        if seq.drafts:
            seq.drafts = draft_ids[start : start + len(seq.drafts)]
            start += len(seq.drafts)
