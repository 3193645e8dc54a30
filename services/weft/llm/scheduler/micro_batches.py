"""A step as parts, each of which another stage of a pipeline computes at a time: ``split``."""

from typing import NamedTuple

import numpy as np

from weft.llm.scheduler.plan import ForwardPlan, Int32, Int64


class MicroBatch(NamedTuple):
    """Some sequences of a step, or some tokens of a sequence, as a step of its own.

    Attributes:
        samples: Its sample rows among those of the step, ascending.
        scores: Its score rows among those of the step, ascending.
    """

    plan: ForwardPlan
    samples: Int64 = np.empty(0, np.int64)
    scores: Int64 = np.empty(0, np.int64)


def split(plan: ForwardPlan, count: int) -> list[MicroBatch]:
    """Divide a step into at most ``count`` parts of like numbers of tokens, in the order in which they must run.

    A decode goes by its slot, so that its next token, of the next step, is in the same part, which needs to wait for
    no other. Prompts fill the parts up, and are cut for that.
    """
    lengths = np.diff(plan.q_start).astype(np.int64)
    is_cut = (lengths > 1) & (plan.num_drafts == 0)
    part_of, others = plan.slots % count, np.where(is_cut, 0, lengths)
    room = -(-lengths.sum() // count) - np.bincount(part_of, others, count).astype(np.int64)
    ends = np.cumsum(np.maximum(room, 0))
    ends[-1] = lengths.sum()
    before = np.cumsum(lengths - others) - (lengths - others)  # tokens of prompts before those of each sequence
    parts = []
    for index, (first, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        firsts = np.where(is_cut, np.clip(first - before, 0, lengths), 0)
        counts = np.where(is_cut, np.clip(end - before, 0, lengths) - firsts, others * (part_of == index))
        if counts.any():
            parts.append(_part(plan, np.flatnonzero(counts), firsts, counts))
    return parts


def _part(plan: ForwardPlan, seqs: Int64, firsts: Int64, counts: Int64) -> MicroBatch:
    """Of each of ``seqs`` so many tokens from its first of them on."""
    starts = (plan.q_start[seqs] + firsts[seqs]).astype(np.int64)
    rows, q_start = _ranges(starts, counts[seqs])
    ctx_len = plan.ctx_len[seqs] - (plan.q_start[seqs + 1] - starts - counts[seqs]).astype(np.int32)
    samples, scores = (np.flatnonzero(np.isin(each, rows)) for each in (plan.sample_rows, plan.score_rows))
    penalties = plan.penalty_start.astype(np.int64)
    entries, penalty_start = _ranges(penalties[samples], np.diff(penalties)[samples])
    part = plan._replace(
        slots=plan.slots[seqs],
        q_start=q_start,
        ctx_len=ctx_len,
        num_drafts=plan.num_drafts[seqs],
        positions=plan.positions[rows],
        token_ids=plan.token_ids[rows],
        slot_mapping=plan.slot_mapping[rows],
        sample_rows=np.searchsorted(rows, plan.sample_rows[samples]).astype(np.int32),
        sample_slots=plan.sample_slots[samples],
        sample_positions=plan.sample_positions[samples],
        # What is reported for one row is for all, so that the parts' results have equal shapes.
        num_logprobs=np.full_like(plan.num_logprobs[samples], plan.num_logprobs.max(initial=-1)),
        penalty_start=penalty_start,
        penalty_tokens=plan.penalty_tokens[entries],
        penalty_counts=plan.penalty_counts[entries],
        penalty_bias=plan.penalty_bias[entries],
        max_q_len=int(counts.max()),
        max_ctx_len=int(ctx_len.max()),
        grammar=None if plan.grammar is None else plan.grammar.part(samples),
        score_rows=np.searchsorted(rows, plan.score_rows[scores]).astype(np.int32),
        score_token_ids=plan.score_token_ids[scores],
    )
    return MicroBatch(part, samples, scores)


def _ranges(starts: Int64, counts: Int64) -> tuple[Int64, Int32]:
    """The numbers of ranges that begin at ``starts``, and where each range begins among them, and their count."""
    ends = np.cumsum(counts)
    numbers = np.repeat(starts - ends + counts, counts) + np.arange(counts.sum())
    return numbers, np.append(0, ends).astype(np.int32)
