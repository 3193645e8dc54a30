"""The drafts of a plan as arrays, for the runner."""

import numpy as np

from weft.llm.scheduler.acceptance import num_accepted
from weft.llm.scheduler.plan import ForwardPlan, Int32

_NO_ROWS = np.empty(0, np.int32)


def draft_rows(plan: ForwardPlan) -> Int32:
    """Rows of the plan's tokens that are drafts, in order."""
    if not plan.num_drafts.any():
        return _NO_ROWS
    ends = np.cumsum(plan.num_drafts, dtype=np.int32)
    return np.repeat(plan.q_start[1:] - ends, plan.num_drafts) + np.arange(ends[-1], dtype=np.int32)


def accepted_counts(plan: ForwardPlan, draft_ids: Int32, token_ids: Int32) -> Int32:
    """Accepted drafts of each sequence, ``[B]``.

    Args:
        plan: The step.
        draft_ids: The tokens at ``draft_rows``.
        token_ids: The token sampled at each sample row.
    """
    counts = np.zeros(len(plan.num_drafts), np.int32)
    start = 0
    for index in np.flatnonzero(plan.num_drafts).tolist():
        num = int(plan.num_drafts[index])
        first = int(np.searchsorted(plan.sample_rows, plan.q_start[index + 1] - 1 - num))
        counts[index] = num_accepted(draft_ids[start : start + num].tolist(), token_ids[first : first + num].tolist())
        start += num
    return counts


def count_drafts(plan: ForwardPlan, draft_ids: Int32) -> ForwardPlan:
    """The plan with drafts that were unknown counted in the penalties of the sample rows behind them.

    Entries for sequences without penalties have no effect: their factors are neutral.

    Args:
        plan: The step; its penalties count known tokens alone.
        draft_ids: The tokens at ``draft_rows``.
    """
    tokens: list[int] = []
    counts: list[int] = []
    biases: list[float] = []
    starts = [0]
    behind = _drafts_before_rows(plan, draft_ids)
    for row, drafts in enumerate(behind):
        entries = slice(int(plan.penalty_start[row]), int(plan.penalty_start[row + 1]))
        own = dict(zip(plan.penalty_tokens[entries].tolist(), range(entries.start, entries.stop), strict=True))
        row_counts, row_biases = plan.penalty_counts[entries].tolist(), plan.penalty_bias[entries].tolist()
        for draft in drafts if own else ():
            place = own.setdefault(draft, entries.start + len(row_counts)) - entries.start
            if place == len(row_counts):
                row_counts.append(0)
                row_biases.append(0.0)
            row_counts[place] = max(row_counts[place], 0) + 1
        tokens += own
        counts += row_counts
        biases += row_biases
        starts.append(len(tokens))
    return plan._replace(
        penalty_start=np.array(starts, np.int32),
        penalty_tokens=np.array(tokens, np.int32),
        penalty_counts=np.array(counts, np.int32),
        penalty_bias=np.array(biases, np.float32),
    )


def _drafts_before_rows(plan: ForwardPlan, draft_ids: Int32) -> list[list[int]]:
    """For each sample row, the drafts of its sequence before it."""
    by_row = dict(zip(draft_rows(plan).tolist(), draft_ids.tolist(), strict=True))
    result: list[list[int]] = []
    for row in plan.sample_rows.tolist():
        # The sample rows of a sequence are consecutive, so a row that is a draft follows that of the one before it.
        result.append([*result[-1], by_row[row]] if row in by_row else [])
    return result
