"""Converts the sequences of a step into arrays: ``build_plan``."""

from array import array
from collections.abc import Sequence as Seq
from itertools import accumulate

import numpy as np

from weft_model.llm.scheduler.blocks import NULL_BLOCK
from weft_model.llm.scheduler.plan import PARAM_COLUMNS, Float32, ForwardPlan, Int32, Int64
from weft_model.llm.scheduler.sequence import Sequence

_NO_INT32 = np.empty(0, np.int32)
_NO_FLOAT32 = np.empty(0, np.float32)
_NO_ROWS = (_NO_INT32, np.empty((0, len(PARAM_COLUMNS)), np.float32), _NO_INT32, np.empty(0, np.int64))


def build_plan(
    step: Seq[Sequence],
    sampled: Seq[Sequence],
    done: Int32,
    last_blocks: Int32,
    *,
    changed: Seq[Sequence],
    has_sampling_extras: bool,
    block_size: int,
) -> ForwardPlan:
    """Build the plan of a step, and mark the block tables and slots of its sequences as uploaded.

    Args:
        step: Sequences with ``num_scheduled`` tokens, drafts included, to compute and blocks for them.
        sampled: Those of ``step``, in its order, that compute their last known token; all that have drafts do.
        done: ``num_computed_tokens`` of the decodes, which come first in ``step`` and compute one token each.
        last_blocks: The last block of each decode.
        changed: Those of ``step`` whose block table or slot is not uploaded.
        has_sampling_extras: Some sequences need log probabilities or penalties.
        block_size: Tokens of a block.
    """
    num_decodes = len(done)
    prefills = step[num_decodes:]
    counts = [1] * num_decodes + [seq.num_scheduled for seq in prefills]
    q_start = np.array([0, *accumulate(counts)], np.int32)
    ctx_len = np.concatenate(
        [done + 1, np.array([seq.num_computed_tokens + seq.num_scheduled for seq in prefills], np.int32)]
    )
    slots = np.array([seq.slot for seq in step], np.int32)
    positions, token_ids, slot_mapping = (np.empty(q_start[-1], dtype) for dtype in (np.int32, np.int32, np.int64))
    positions[:num_decodes] = done
    token_ids[:num_decodes] = [seq.tokens[-1] for seq in step[:num_decodes]]
    slot_mapping[:num_decodes] = last_blocks.astype(np.int64) * block_size + done % block_size
    for seq, start in zip(prefills, q_start[num_decodes:-1].tolist(), strict=True):
        rows = slice(start, start + seq.num_scheduled)
        positions[rows], token_ids[rows], slot_mapping[rows] = _chunk(seq, block_size)
    num_drafts = np.array([0] * num_decodes + [len(seq.drafts) for seq in prefills], np.int32)
    if len(sampled) == len(step) and not num_drafts.any():
        sample_rows, sample_slots, sample_positions = q_start[1:] - 1, slots, ctx_len
    else:
        is_sampled = np.array([seq.num_scheduled == seq.remaining for seq in step], np.int32)
        num_rows = is_sampled * (1 + num_drafts)
        ends = np.cumsum(num_rows, dtype=np.int32)
        first_rows = q_start[1:] - ends  # minus the rows of sequences before it
        sample_rows = np.repeat(first_rows, num_rows) + np.arange(ends[-1], dtype=np.int32)
        sample_slots, sample_positions = np.repeat(slots, num_rows), positions[sample_rows] + 1
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
        _num_logprobs(sampled if has_sampling_extras else (), len(sample_rows)),
        table_delta,
        copies,
        new_slots,
        new_params,
        new_top_k,
        new_seeds,
        *_penalties(sampled if has_sampling_extras else (), len(sample_rows)),
        max(counts),
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
    entries: list[tuple[int, int, int]] = []
    copies: list[tuple[int, int]] = []
    for seq in changed:
        first = max(seq.num_uploaded_blocks, 0)
        newly_behind = range(seq.num_uploaded_behind, min(seq.num_behind, first))
        entries += [(seq.slot, index, NULL_BLOCK) for index in newly_behind]
        entries += [(seq.slot, index, seq.block_table[index]) for index in range(first, len(seq.block_table))]
        if seq.copy_source >= 0:
            copies.append((seq.copy_source, seq.block_table[seq.num_computed_tokens // block_size]))
    return np.array(entries, np.int32).reshape(-1, 3), np.array(copies, np.int32).reshape(-1, 2)


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
