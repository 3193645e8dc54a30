"""Decides what each step computes, under one token budget: ``Scheduler``. Does not depend on torch."""

import heapq
import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import islice, repeat
from typing import NamedTuple, Protocol

from weft.llm.config import EngineConfig
from weft.llm.request import NO_SPECULATION, StepLogprobs
from weft.llm.scheduler.admission import BlockAdmission, Ranking
from weft.llm.scheduler.blocks import BlockPool
from weft.llm.scheduler.decodes import build_plan
from weft.llm.scheduler.plan import UNKNOWN_TOKEN, ForwardPlan, Int32, num_accepted
from weft.llm.scheduler.prefill import PrefillScheduler
from weft.llm.scheduler.sequence import Sequence, SequenceStatus
from weft.llm.scheduler.slot_allocator import SlotAllocator

#: Minimum size of the deadline heap before entries of ended sequences are purged.
_MIN_DEADLINES = 64


class DraftSource(Protocol):
    """Chooses which sequences of a step get drafts, and the drafts."""

    def propose(self, seqs: Seq[Sequence], num_rows: int, num_left: int) -> list[Sequence]:
        """Set ``drafts`` of some of ``seqs``.

        Args:
            seqs: Sequences with one token to compute in this step, in any order. Must not be changed.
            num_rows: Tokens that the step computes without drafts.
            num_left: Most drafts of all of them together.

        Returns:
            Those with drafts, the first in service first. The scheduler may drop the last drafts of each, or all.
        """

    def observe(self, seq: Sequence, count: int) -> None:
        """Report that ``seq.drafts`` were computed, and ``count`` of them accepted."""

    def end_step(self) -> None:
        """Report that the step of the last ``propose`` is complete."""


class StepResult(NamedTuple):
    """Result of a step for one sequence.

    Attributes:
        token_ids: Its new tokens: one, and as many as drafts were accepted; none of a sequence without output.
        row: Sample row of the first of them; the others follow.
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
    known tokens are free; it may preempt running sequences of lower priority. Only deadlines depend on the time.

    Args:
        drafts: Decides about speculation; None: there is none.

    Attributes:
        max_len: Longest sequence, prompt and output, in tokens: the smaller of context length and pool; with a sliding
            window the pool need only hold the window.
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
        self._steps: list[_Step] = []  # in flight, oldest first: one, or two where a step is planned ahead

    @property
    def num_running(self) -> int:
        """Sequences with a slot."""
        return len(self._allocator.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a slot; forks that wait for their parent's prompt are not counted."""
        return len(self._allocator.waiting)

    @property
    def adapters_in_use(self) -> tuple[set[str], set[str]]:
        """Names of the adapters of sequences with a slot, and of those that wait for one. Any thread."""
        allocator = self._allocator
        running, waiting = (
            {seq.request.params.lora_name for seq in list(seqs)} - {""}
            for seqs in (allocator.running, allocator.waiting)
        )
        return running, waiting

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
        most = self.max_len - min(seq.params.max_tokens, 1)
        if not 0 < seq.num_prompt <= most:
            raise ValueError(f"a prompt must have 1 to {most} tokens, got {seq.num_prompt}")
        seq.rank = self._ranking.rank(seq)
        seq.max_len = min(seq.max_len, self.max_len)
        self._track_deadline(seq)
        parent = seq.parent
        is_computed = parent is None or parent.num_output > 0 or parent.row >= 0
        if parent is not None and not is_computed and parent.status is not SequenceStatus.ENDED:
            seq.status = SequenceStatus.FORKING
            parent.forks.append(seq)
        else:
            self._allocator.wait(seq)

    def cancel(self, seq: Sequence) -> None:
        """End ``seq`` without another result and free what it owns: now, or after the last step in flight if it runs.

        Forks that wait for its prompt continue as independent sequences. No effect if it has ended.
        """
        if seq.status is SequenceStatus.ENDED or seq.is_cancelled:
            return
        seq.is_cancelled = True
        if self._steps and seq.status is SequenceStatus.RUNNING:
            self._steps[-1].cancelled.append(seq)
        else:
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
        if self._steps:
            raise RuntimeError("complete or fail the last plan before the next one is made")
        self._allocator.reserve_next_blocks()
        return self._plan()

    def schedule_ahead(self) -> ForwardPlan | None:
        """Plan the step after the one in flight, whose tokens are not known yet: -1 stands for them.

        A sequence that ends with a token of the step in flight is still in the next one; its sample there is dropped,
        and it keeps its slot and blocks until that step is completed. Nothing is preempted: if that may be necessary,
        or if the next step depends on the tokens, there is no plan before ``complete``.

        Returns:
            None: complete the step in flight first.
        """
        if len(self._steps) != 1 or not self._may_plan_ahead():
            return None
        if not self._steps[0].is_advanced:
            self._advance(self._steps[0])
        if not self._allocator.try_reserve_next_blocks():
            return None
        self._allocator.is_ahead = True
        try:
            return self._plan()
        finally:
            self._allocator.is_ahead = False

    def complete(
        self,
        token_ids: Int32,
        draft_ids: Int32 | None = None,
        failed_loads: Collection[int] = (),
        scores: StepLogprobs | None = None,
    ) -> list[StepResult]:
        """Apply the result of the oldest plan; sequences that finish free everything once no step in flight has them.

        Args:
            token_ids: The token sampled at each of the plan's sample rows, ``[S]``.
            draft_ids: The plan's drafts, including those that were unknown; None: it had none of these.
            failed_loads: Blocks whose load failed; the sequences that own them wait again, and compute what they lost.
            scores: Of the plan's score rows, for ``Sequence.scores``.

        Returns:
            One result per sequence that sampled, in the order of the plan, without those that were cancelled during the
            step or wait again.

        Raises:
            ValueError: The number of tokens differs from that of sample rows. Nothing was changed.
        """
        num_due = self._steps[0].num_sample_rows if self._steps else 0
        if len(token_ids) != num_due:
            raise ValueError(f"{num_due} new tokens are due, got {len(token_ids)}")
        cancelled = self._cancelled()
        step = self._take_step()
        if draft_ids is not None:
            drafts = iter(draft_ids.tolist())
            for seq in step.prefills:
                seq.drafts = list(islice(drafts, len(seq.drafts)))
        step.lost = self._allocator.finish_loads(failed_loads)
        start = 0
        for seq, count in step.scored:
            if scores is not None and seq.scores is not None and seq not in step.lost:
                seq.scores.append(scores.part(start, start + count))
                seq.num_scored += count
            start += count
        num_decodes = len(step.decodes)
        if step.is_advanced:
            self._decodes.set_tokens(step.decodes, token_ids[:num_decodes])
        else:
            self._advance(step, token_ids[:num_decodes])
        tokens: list[int] = token_ids.tolist()
        may_end = {*step.held, *self._decodes.append(step.decodes, token_ids[:num_decodes])}
        for row in step.held:
            step.decodes[row].remaining = 1
        if self._allocator.num_with_history:
            for seq, token in zip(step.decodes, tokens, strict=False):
                seq.observe(token)
        row = num_decodes
        sampled: list[tuple[Sequence, list[int], int]] = []
        for seq, (first_block, num_rows) in zip(step.prefills, step.progress, strict=True):
            if step.lost and seq in step.lost:  # computed from invalid blocks
                seq.num_scheduled = 0
                if not seq.is_cancelled:
                    self._allocator.requeue(seq)
            else:
                new_tokens = self._complete_prefill(seq, tokens[row : row + num_rows], first_block)
                sampled += [(seq, new_tokens, row)] if num_rows else ()
            row += num_rows
        self._commit(step)
        # StepResult() calls a Python function for each: 60 us for 256 sequences instead of 15.
        singles = [[token] for token in tokens[:num_decodes]]
        fields = zip(step.decodes, singles, range(num_decodes), repeat(False), repeat(""), strict=False)
        results: list[StepResult] = list(map(tuple.__new__, repeat(StepResult), fields))
        for row in sorted(may_end):
            if step.decodes[row] not in cancelled:
                results[row] = self._fork_or_finish(step.decodes[row], [tokens[row]], row)
        results += [self._fork_or_finish(*each) for each in sampled if each[0] not in cancelled]
        if cancelled:
            results = [result for result in results if result.seq not in cancelled]
        for seq in step.cancelled:
            self._end(seq)
        if self._draft_source is not None:
            self._draft_source.end_step()
        return results

    def fail(self) -> list[Sequence]:
        """End the sequences of the oldest plan, whose step failed; all others continue.

        A later plan is void, whether it ran or not. Returns the ended sequences, without those cancelled during the
        step.
        """
        cancelled = self._cancelled()
        step = self._take_step()
        failed = dict.fromkeys((*step.decodes, *step.prefills))
        for later in self._steps:
            for seq in later.prefills:
                seq.num_scheduled = 0
            for seq in (*later.decodes, *later.prefills):
                if seq not in failed:
                    self._allocator.upload_again(seq)
        self._steps.clear()
        for seq in (*failed, *(seq for seq in cancelled if seq not in failed)):
            seq.num_scheduled = 0
            seq.drafts = []
            seq.remaining = len(seq.tokens)  # whatever was applied of the step is void
            self._end(seq)
        return [seq for seq in failed if seq not in cancelled]

    def retry(self) -> None:
        """See ``SlotAllocator.retry``."""
        self._allocator.retry()

    def check(self) -> None:
        """Raise AssertionError unless slots, tables, blocks and cache agree; for tests and idle times."""
        self._allocator.check()

    def _plan(self) -> ForwardPlan | None:
        allocator, decodes, running = self._allocator, self._decodes, self._allocator.running
        partial = []
        if len(running) > len(decodes):
            partial = [seq for seq in running if seq.row < 0 and seq.remaining and not seq.is_cancelled]
        prefills = self._prefill.schedule(partial, self._config.max_num_batched_tokens - len(decodes))
        prefills = [seq for seq in prefills if seq.num_scheduled]  # others were preempted by those behind them
        if not decodes and not prefills:
            return None
        if self._draft_source is not None or allocator.num_with_history:
            prefills = self._add_drafts(sum(seq.num_scheduled for seq in prefills)) + prefills
        changed = [seq for seq in allocator.changed if seq.num_scheduled]
        for seq in changed:
            del allocator.changed[seq]
        plan = build_plan(
            decodes,
            prefills,
            changed=changed,
            has_sampling_extras=allocator.num_with_sampling_extras > 0,
            block_size=self._pool.block_size,
        )
        scored = [(seq, len(span)) for seq in prefills if (span := seq.to_score)]
        self._steps.append(_Step(decodes.seqs[:], prefills, len(plan.sample_rows), scored))
        transfers = self._pool.tier.take()
        return plan if transfers is None else plan._replace(transfers=transfers)

    def _may_plan_ahead(self) -> bool:
        allocator = self._allocator
        return not (
            self._draft_source is not None
            or allocator.num_with_history
            or self._pool.window.num_tokens
            or self._pool.tier.num_slots
            or allocator.may_preempt()
        )

    def _take_step(self) -> "_Step":
        if not self._steps:
            raise RuntimeError("there is no plan that was neither completed nor failed")
        return self._steps.pop(0)

    def _cancelled(self) -> set[Sequence]:
        """Running sequences to end, without another result, after a step in flight."""
        return {seq for step in self._steps for seq in step.cancelled}

    def _advance(self, step: "_Step", token_ids: Int32 | None = None) -> None:
        """Apply a step to its sequences, except its tokens; ``token_ids`` are those of its decodes, if known."""
        step.is_advanced = True
        step.held = self._decodes.advance(len(step.decodes), token_ids)
        for seq in step.prefills:
            step.progress.append(
                (seq.num_computed_tokens // self._pool.block_size, seq.is_sampled * (1 + len(seq.drafts)))
            )
            if seq.drafts or seq in step.lost:
                continue  # how far it gets depends on the tokens, or it waits again
            seq.remaining -= seq.num_scheduled
            seq.num_scheduled = 0
            if not seq.remaining and not seq.forks and len(seq.tokens) + 1 < seq.max_len:
                self._decodes.add(seq, is_known=False)
        for seq in step.cancelled:
            if seq.row >= 0:
                self._decodes.remove(seq)
                seq.num_scheduled = seq.remaining = 0

    def _commit(self, step: "_Step") -> None:
        """Add the blocks filled by the decodes of ``step`` to the prefix cache."""
        self._allocator.commit_decodes()
        for row in step.held:
            seq = step.decodes[row]
            if seq.num_computed_tokens % self._pool.block_size == 0:
                self._allocator.commit(seq, seq.num_computed_tokens // self._pool.block_size - 1)

    def _add_drafts(self, num_others: int) -> list[Sequence]:
        """Give drafts to some decodes from the step's remaining tokens and blocks; returns these, now prefills."""
        num_rows = len(self._decodes) + num_others
        num_left = self._config.max_num_batched_tokens - num_rows
        if num_left <= 0 or not self._decodes:
            return []
        forced = self._forced_drafts(num_left)
        proposed: list[Sequence] = []
        if self._draft_source is not None:
            num_forced = sum(len(seq.drafts) for seq in forced)
            others = [seq for seq in self._decodes.seqs if not seq.drafts] if forced else self._decodes.seqs
            proposed = self._draft_source.propose(others, num_rows + num_forced, num_left - num_forced)
            for seq in proposed:
                if seq.matcher is not None and seq.drafts[:1] != [UNKNOWN_TOKEN]:
                    del seq.drafts[seq.matcher.num_valid(seq.drafts) :]
        drafted = []
        for seq in (*forced, *proposed):
            num_drafts = min(len(seq.drafts), seq.max_len - len(seq.tokens) - 1)  # all accepted bring one more
            del seq.drafts[self._allocator.reserve_drafts(seq, num_drafts) :]
            if seq.drafts:
                self._decodes.remove(seq)
                seq.num_scheduled = 1 + len(seq.drafts)
                drafted.append(seq)
        return drafted

    def _forced_drafts(self, num_left: int) -> list[Sequence]:
        """Make the tokens that grammars force the drafts of their sequences, at most ``num_left`` in all."""
        forced = []
        for seq in self._decodes.seqs:
            if seq.matcher is None or seq.params.speculation == NO_SPECULATION:
                continue
            seq.drafts = seq.matcher.forced(min(num_left, seq.max_len - len(seq.tokens) - 1))
            seq.matcher.is_forced = bool(seq.drafts)
            if seq.drafts:
                num_left -= len(seq.drafts)
                forced.append(seq)
        return forced

    def _complete_prefill(self, seq: Sequence, samples: list[int], first_block: int) -> list[int]:
        """Apply the tokens of a step to ``seq``, which was not among its decodes; returns its new tokens.

        Of drafts the accepted ones and one more token are appended, up to one that ends the sequence. Nothing of a
        rejected draft remains: neither a block, nor an entry of the cache index, nor a count. ``samples`` are none if
        some of its known tokens are still to be computed, else one more than it has drafts; ``first_block`` is the
        first that the step wrote to.
        """
        count = num_accepted(seq.drafts, samples)
        if seq.drafts and seq.matcher is not None and seq.matcher.is_forced:
            seq.matcher.observe(count)
        elif seq.drafts and self._draft_source is not None:
            self._draft_source.observe(seq, count)
        num_drafts, seq.drafts = len(seq.drafts), []
        new_tokens: list[int] = []
        for token in samples[: count + 1] if len(seq.tokens) < seq.max_len else ():  # else it ends with its prompt
            seq.append(token)
            new_tokens.append(token)
            if _finish_reason(seq):
                break
        if samples:
            # Keys and values of the newest token are not computed, those of accepted drafts before it are.
            seq.remaining = min(len(new_tokens), 1)
        if num_drafts:
            seq.num_scheduled = 0
            self._allocator.release_unused_blocks(seq)
        if seq.row >= 0:
            self._decodes.set_token(seq)
        self._allocator.commit(seq, first_block)
        return new_tokens

    def _fork_or_finish(self, seq: Sequence, token_ids: list[int], row: int) -> StepResult:
        """After ``seq`` got ``token_ids``: fork waiting children, and finish it if the last token ends it."""
        if seq.forks:
            self._allocator.fork(seq)
        reason = _finish_reason(seq)
        if reason:
            self._admission.observe_output_len(seq.num_output)
            if self._steps and seq.row >= 0:  # the next step, in flight, has it too
                self.cancel(seq)
            else:
                self._end(seq)
        elif seq.row < 0:
            self._decodes.add(seq)
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


@dataclass(slots=True)
class _Step:
    """A plan that is neither completed nor failed.

    Attributes:
        decodes: Sequences of its first rows, which compute one token each and sample the next.
        prefills: Its other sequences.
        scored: Those whose prompts it scores, with the number of tokens.
        cancelled: Running sequences to end after it.
        held: Indices of ``decodes`` without a row among the decodes since then: their token may end them.
        lost: Those of ``prefills`` that were computed from invalid blocks.
        progress: Of each of ``prefills``, the first block written to, and how many tokens are sampled for it.
    """

    decodes: list[Sequence]
    prefills: list[Sequence]
    num_sample_rows: int
    scored: list[tuple[Sequence, int]] = field(default_factory=list)
    cancelled: list[Sequence] = field(default_factory=list)
    is_advanced: bool = False
    held: list[int] = field(default_factory=list)
    lost: list[Sequence] = field(default_factory=list)
    progress: list[tuple[int, int]] = field(default_factory=list)


def _finish_reason(seq: Sequence) -> str:
    """Finish reason after the last token of ``seq``: "stop", "length", or "" if it continues."""
    if seq.tokens[-1] in seq.stop_ids and seq.num_output > seq.params.min_tokens:
        return "stop"
    return "length" if len(seq.tokens) >= seq.max_len else ""
