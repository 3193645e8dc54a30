"""``ForwardPlan``: one step as plain arrays, so that the runner needs no request objects; and its drafts."""

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.llm.grammar import GrammarRows

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt8 = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]

#: Columns of ``ForwardPlan.new_params``; fields of ``SamplingParams``.
PARAM_COLUMNS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
#: Token id of a draft that a proposer on the device fills in, and of a token that the step in flight samples.
UNKNOWN_TOKEN = -1
NO_INT32 = np.empty(0, np.int32)


class BlockTransfers(NamedTuple):
    """Copies of blocks to and from the second tier of the KV cache; the saves come first, then the loads.

    Attributes:
        saves: ``[n, 2]`` block and the slot of the tier to save it in; no slot comes twice.
        save_keys: ``[n, 16]`` hash of each.
        loads: ``[n, 2]`` slot of the tier and the block to load it into; no block comes twice.
        load_keys: ``[n, 16]`` hash that each must have been saved with.
    """

    saves: Int32
    save_keys: UInt8
    loads: Int32
    load_keys: UInt8


class GrammarMasks(NamedTuple):
    """``GrammarRows`` whose masks are written already, as another process gets them.

    Attributes:
        rows: The sample rows, int32 ``[M]``, ascending.
        masks: A bit for each token, 1 if it may follow, int32 ``[M, ceil(V / 32)]``.
    """

    rows: Int32
    masks: Int32

    @classmethod
    def of(cls, grammar: GrammarRows, vocab_size: int) -> "GrammarMasks":
        """The masks of sequences whose drafts the plan knows."""
        masks = np.empty((len(grammar.rows), -(-vocab_size // 32)), np.int32)
        grammar.fill(masks, None)
        return cls(grammar.rows, masks)

    def part(self, samples: Int64) -> "GrammarMasks | None":
        """See ``GrammarRows.part``."""
        is_own = np.isin(self.rows, samples)
        rows = np.searchsorted(samples, self.rows[is_own]).astype(np.int32)
        return GrammarMasks(rows, self.masks[is_own]) if len(rows) else None

    def fill(self, masks: Int32, draft_ids: Int32 | None) -> None:
        """See ``GrammarRows.fill``; the drafts are those that the masks were written for."""
        masks[:] = self.masks


class ForwardPlan(NamedTuple):
    """One step over ``B`` sequences, ``T`` tokens and ``S`` sampled rows; the receiver owns the arrays.

    A sequence's *slot* is its row in the runner's tables and does not change while it runs. A token's slot in the KV
    cache is ``block * block_size + offset``. The runner applies ``transfers``, then
    ``table_delta`` and ``new_*``, before the forward pass.

    Attributes:
        slots: ``[B]`` slot of each sequence; decodes of one token come first.
        q_start: ``[B+1]`` start of each sequence's tokens in the ``T`` tokens.
        ctx_len: ``[B]`` tokens of each sequence with keys and values after the step, drafts included.
        num_drafts: ``[B]`` how many of its tokens in this step, the last ones, are drafts.
        positions: ``[T]`` position of each token in its sequence.
        token_ids: ``[T]`` the tokens; ``UNKNOWN_TOKEN``: a draft that a proposer on the device fills in, or, in a plan
            without drafts, the token that was sampled last for the slot.
        slot_mapping: ``[T]`` slot in the KV cache for each token's keys and values.
        sample_rows: ``[S]`` rows of ``T`` after which a new token is sampled: the last known token of a sequence and
            each of its drafts, in order.
        sample_slots: ``[S]`` slot of the sequence of each of these.
        sample_positions: ``[S]`` position of the new token.
        num_logprobs: ``[S]`` most likely tokens to report with it; -1: no log probabilities at all.
        table_delta: ``[n, 3]`` changes of block tables: slot, index in the table, block.
        new_slots: ``[n]`` slots that a new sequence takes from this step on.
        new_params: ``[n, 6]`` its sampling parameters, ``PARAM_COLUMNS``.
        new_top_k: ``[n]`` its ``top_k``, 0 for off.
        new_seeds: ``[n]`` its seed.
        penalty_start: ``[S+1]`` start of each sampled row's entries among the ``L`` penalty entries.
        penalty_tokens: ``[L]`` token ids, unique within a row; empty if no row has penalties.
        penalty_counts: ``[L]`` occurrences of the token in the output; 0: in the prompt only; -1: in neither.
        penalty_bias: ``[L]`` added to the token's logit; minus infinity forbids it.
        max_q_len: Most tokens of a sequence in this step.
        max_ctx_len: Largest of ``ctx_len``.
        transfers: Copies to and from the second tier; None: there are none.
        grammar: The sampled rows whose tokens follow a grammar; None: there are none.
        new_adapters: ``[n]`` slot of the adapter of each of ``new_slots``, -1 for none; empty: none of them has one.
        score_rows: ``[P]`` rows of ``T`` after which the log probability of a token of the prompt is asked for.
        score_token_ids: ``[P]`` these tokens.
        num_score_logprobs: Most likely tokens to report with each of them.
    """

    slots: Int32
    q_start: Int32
    ctx_len: Int32
    num_drafts: Int32
    positions: Int32
    token_ids: Int32
    slot_mapping: Int64
    sample_rows: Int32
    sample_slots: Int32
    sample_positions: Int32
    num_logprobs: Int32
    table_delta: Int32
    new_slots: Int32
    new_params: Float32
    new_top_k: Int32
    new_seeds: Int64
    penalty_start: Int32
    penalty_tokens: Int32
    penalty_counts: Int32
    penalty_bias: Float32
    max_q_len: int
    max_ctx_len: int
    transfers: BlockTransfers | None = None
    grammar: GrammarRows | GrammarMasks | None = None
    new_adapters: Int32 = NO_INT32
    score_rows: Int32 = NO_INT32
    score_token_ids: Int32 = NO_INT32
    num_score_logprobs: int = 0


def num_accepted(drafts: Seq[int], samples: Seq[int]) -> int:
    """How many leading ``drafts`` equal the tokens sampled at their positions, the first of ``samples``.

    The noise of sampling is keyed by seed, position and token, so a sampled token does not depend on drafts behind its
    position, and the output is the same with any drafts or none, at any temperature.

    Source:
        Gumbel-max coupling as in https://arxiv.org/abs/2408.07978, with the draft's noise equal to the target's.
    """
    count = 0
    for draft, sample in zip(drafts, samples, strict=False):
        if draft != sample:
            break
        count += 1
    return count


def draft_rows(plan: ForwardPlan) -> Int32:
    """Rows of the plan's tokens that are drafts, in order."""
    if not plan.num_drafts.any():
        return NO_INT32
    ends = np.cumsum(plan.num_drafts, dtype=np.int32)
    return np.repeat(plan.q_start[1:] - ends, plan.num_drafts) + np.arange(ends[-1], dtype=np.int32)


def accepted_counts(plan: ForwardPlan, draft_ids: Int32, token_ids: Int32) -> Int32:
    """Accepted drafts of each sequence, ``[B]``, given the tokens at ``draft_rows`` and at the sample rows."""
    counts = np.zeros(len(plan.num_drafts), np.int32)
    start = 0
    for index in np.flatnonzero(plan.num_drafts).tolist():
        num = int(plan.num_drafts[index])
        first = int(np.searchsorted(plan.sample_rows, plan.q_start[index + 1] - 1 - num))
        counts[index] = num_accepted(draft_ids[start : start + num].tolist(), token_ids[first : first + num].tolist())
        start += num
    return counts


def count_drafts(plan: ForwardPlan, draft_ids: Int32) -> ForwardPlan:
    """Count the drafts at ``draft_rows`` in the penalties of the sample rows behind them.

    Entries for sequences without penalties have no effect: their factors are neutral.
    """
    by_row = dict(zip(draft_rows(plan).tolist(), draft_ids.tolist(), strict=True))
    tokens: list[int] = []
    counts: list[int] = []
    biases: list[float] = []
    starts = [0]
    drafts: list[int] = []  # of the row's sequence, before the row
    for index, row in enumerate(plan.sample_rows.tolist()):
        # The sample rows of a sequence are consecutive, so a row that is a draft follows that of the one before it.
        drafts = [*drafts, by_row[row]] if row in by_row else []
        entries = slice(int(plan.penalty_start[index]), int(plan.penalty_start[index + 1]))
        places = {token: place for place, token in enumerate(plan.penalty_tokens[entries].tolist())}
        row_counts, row_biases = plan.penalty_counts[entries].tolist(), plan.penalty_bias[entries].tolist()
        for draft in drafts if places else ():
            place = places.setdefault(draft, len(row_counts))
            if place == len(row_counts):
                row_counts.append(0)
                row_biases.append(0.0)
            row_counts[place] = max(row_counts[place], 0) + 1
        tokens += places
        counts += row_counts
        biases += row_biases
        starts.append(len(tokens))
    return plan._replace(
        penalty_start=np.array(starts, np.int32),
        penalty_tokens=np.array(tokens, np.int32),
        penalty_counts=np.array(counts, np.int32),
        penalty_bias=np.array(biases, np.float32),
    )
