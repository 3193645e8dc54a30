"""Converts the sequences of a step into arrays: ``build_plan``."""

from array import array
from collections.abc import Sequence as Seq
from itertools import accumulate

import numpy as np

from weft.llm.scheduler.blocks import NULL_BLOCK
from weft.llm.scheduler.decodes import Decodes
from weft.llm.scheduler.plan import PARAM_COLUMNS, Float32, ForwardPlan, Int32, Int64
from weft.llm.scheduler.sequence import Sequence

_NO_INT32 = np.empty(0, np.int32)
_NO_FLOAT32 = np.empty(0, np.float32)
_NO_ROWS = (_NO_INT32, np.empty((0, len(PARAM_COLUMNS)), np.float32), _NO_INT32, np.empty(0, np.int64))


def build_plan(
    decodes: Decodes,
    prefills: Seq[Sequence],
    *,
    changed: Seq[Sequence],
    has_sampling_extras: bool,
    block_size: int,
) -> ForwardPlan:
    """Build the plan of a step, and mark the block tables and slots of its sequences as uploaded.

    Args:
        decodes: Each computes its one token and samples the next.
        prefills: Other sequences with ``num_scheduled`` tokens, drafts included, to compute and blocks for them; those
            that compute all they have sample after the last known token and after each draft.
        changed: Those of both whose block table or slot is not uploaded.
        has_sampling_extras: Some sequences need log probabilities or penalties.
        block_size: Tokens of a block.
    """
    num_decodes = len(decodes)
    counts = [seq.num_scheduled for seq in prefills]
    q_start = np.arange(num_decodes + len(prefills) + 1, dtype=np.int32)
    q_start[num_decodes + 1 :] = [num_decodes + end for end in accumulate(counts)]
    slots, ctx_len = (np.empty(len(q_start) - 1, np.int32) for _ in range(2))
    positions, token_ids, slot_mapping = (np.empty(q_start[-1], dtype) for dtype in (np.int32, np.int32, np.int64))
    num_drafts, num_samples = np.zeros(len(slots), np.int32), np.ones(len(slots), np.int32)
    slots[:num_decodes], token_ids[:num_decodes] = decodes.slots, decodes.tokens
    positions[:num_decodes], ctx_len[:num_decodes] = decodes.positions, decodes.positions + 1
    slot_mapping[:num_decodes] = decodes.last_blocks.astype(np.int64) * block_size + decodes.positions % block_size
    for row, seq in enumerate(prefills, num_decodes):
        slots[row], ctx_len[row] = seq.slot, seq.num_computed_tokens + seq.num_scheduled
        num_drafts[row], num_samples[row] = len(seq.drafts), 1 + len(seq.drafts) if seq.is_sampled else 0
        tokens = slice(q_start[row], q_start[row + 1])
        positions[tokens], token_ids[tokens], slot_mapping[tokens] = _chunk(seq, block_size)
    sample_rows, sample_slots, sample_positions = q_start[1:] - 1, slots, ctx_len
    if prefills and (num_samples != 1).any():
        ends = np.cumsum(num_samples, dtype=np.int32)
        first_rows = q_start[1:] - ends  # minus the rows of sequences before it
        sample_rows = np.repeat(first_rows, num_samples) + np.arange(ends[-1], dtype=np.int32)
        sample_slots, sample_positions = np.repeat(slots, num_samples), positions[sample_rows] + 1
    asking = [*decodes.seqs, *(seq for seq in prefills if seq.is_sampled)] if has_sampling_extras else []
    table_delta, copies = _table_changes(changed, block_size)
    new_slots, new_params, new_top_k, new_seeds = _new_rows([seq for seq in changed if seq.num_uploaded_blocks < 0])
    for seq in changed:
        seq.num_uploaded_blocks = len(seq.block_table)
        seq.num_uploaded_behind = seq.num_behind
        seq.copy_source = -1
    return ForwardPlan(
        slots,
        q_start,
        ctx_len,
        num_drafts,
        positions,
        token_ids,
        slot_mapping,
        sample_rows,
        sample_slots,
        sample_positions,
        _num_logprobs(asking, len(sample_rows)),
        table_delta,
        copies,
        new_slots,
        new_params,
        new_top_k,
        new_seeds,
        *_penalties(asking, len(sample_rows)),
        max(counts, default=1),
        int(ctx_len.max()),
    )


def _chunk(seq: Sequence, block_size: int) -> tuple[Int64, "array[int]", Int64]:
    """Positions, token ids and cache slots of the tokens and drafts that ``seq`` computes."""
    first, end = seq.num_computed_tokens, seq.num_computed_tokens + seq.num_scheduled
    positions = np.arange(first, end, dtype=np.int64)
    first_index = first // block_size
    blocks = np.array(seq.block_table[first_index : (end - 1) // block_size + 1], np.int64)
    slot_mapping = blocks[positions // block_size - first_index] * block_size + positions % block_size
    tokens = seq.tokens[first:end]
    tokens.extend(seq.drafts)
    return positions, tokens, slot_mapping


def _table_changes(changed: Seq[Sequence], block_size: int) -> tuple[Int32, Int32]:
    # Columns: a tuple for each of the 6,250 blocks of a prompt of 100,000 tokens would cost a millisecond.
    slots: list[int] = []
    indices: list[int] = []
    blocks: list[int] = []
    copies: list[tuple[int, int]] = []
    for seq in changed:
        table = seq.block_table
        first = max(seq.num_uploaded_blocks, 0)
        if seq.num_uploaded_behind < seq.num_behind:
            newly_behind = range(seq.num_uploaded_behind, min(seq.num_behind, first))
            indices += newly_behind
            blocks += [NULL_BLOCK] * len(newly_behind)
        indices += range(first, len(table))
        blocks += table[first:]
        slots += [seq.slot] * (len(indices) - len(slots))
        if seq.copy_source >= 0:
            copies.append((seq.copy_source, table[seq.num_computed_tokens // block_size]))
    table_delta = np.empty((len(slots), 3), np.int32)
    table_delta[:, 0], table_delta[:, 1], table_delta[:, 2] = slots, indices, blocks
    return table_delta, np.array(copies, np.int32).reshape(-1, 2)


def _new_rows(seqs: Seq[Sequence]) -> tuple[Int32, Float32, Int32, Int64]:
    if not seqs:
        return _NO_ROWS
    params = [seq.params for seq in seqs]
    rows = [
        (p.temperature, p.top_p, p.min_p, p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in params
    ]
    return (
        np.array([seq.slot for seq in seqs], np.int32),
        np.array(rows, np.float32).reshape(-1, len(PARAM_COLUMNS)),
        np.array([p.top_k for p in params], np.int32),
        np.array([seq.seed for seq in seqs], np.int64),
    )


def _num_logprobs(asking: Seq[Sequence], num_rows: int) -> Int32:
    if not asking:
        return np.full(num_rows, -1, np.int32)
    return np.repeat(np.array([seq.num_logprobs for seq in asking], np.int32), [1 + len(seq.drafts) for seq in asking])


def _penalties(asking: Seq[Sequence], num_rows: int) -> tuple[Int32, Int32, Int32, Float32]:
    if all(seq.penalties is None for seq in asking):
        return np.zeros(num_rows + 1, np.int32), _NO_INT32, _NO_INT32, _NO_FLOAT32
    # array.array concatenates by memcpy; 256 NumPy views would cost a millisecond.
    tokens, counts, biases = array("i"), array("i"), array("f")
    starts = [0]
    for seq in asking:
        if seq.penalties is None:
            starts += [starts[-1]] * (1 + len(seq.drafts))
            continue
        if not seq.drafts:
            tokens += seq.penalties.tokens
            counts += seq.penalties.counts
            biases += seq.penalties.biases
            starts.append(len(tokens))
            continue
        for row in seq.penalties.rows(seq.drafts):
            tokens += row[0]
            counts += row[1]
            biases += row[2]
            starts.append(len(tokens))
    return (
        np.array(starts, np.int32),
        np.array(tokens, np.int32),
        np.array(counts, np.int32),
        np.array(biases, np.float32),
    )
