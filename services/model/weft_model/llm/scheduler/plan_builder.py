"""Converts the sequences of a step into arrays: ``build_plan``."""

from array import array
from collections.abc import Sequence as Seq
from itertools import accumulate

import numpy as np

from weft_model.llm.scheduler.decodes import Decodes
from weft_model.llm.scheduler.plan import PARAM_COLUMNS, Float32, ForwardPlan, Int32, Int64
from weft_model.llm.scheduler.sequence import Sequence

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
        prefills: Other sequences with ``num_scheduled`` tokens to compute and blocks for them; those that compute their
            last known token sample one.
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
    is_sampled = np.ones(len(slots), np.bool_)
    slots[:num_decodes], token_ids[:num_decodes] = decodes.slots, decodes.tokens
    positions[:num_decodes], ctx_len[:num_decodes] = decodes.positions, decodes.positions + 1
    slot_mapping[:num_decodes] = decodes.last_blocks.astype(np.int64) * block_size + decodes.positions % block_size
    for row, (seq, count) in enumerate(zip(prefills, counts, strict=True), num_decodes):
        slots[row], ctx_len[row] = seq.slot, seq.num_computed_tokens + count
        is_sampled[row] = count == seq.remaining
        tokens = slice(q_start[row], q_start[row + 1])
        positions[tokens], token_ids[tokens], slot_mapping[tokens] = _chunk(seq, block_size)
    sample_rows, sample_slots, sample_positions = q_start[1:] - 1, slots, ctx_len
    if not is_sampled.all():
        sample_rows, sample_slots, sample_positions = (a[is_sampled] for a in (sample_rows, slots, ctx_len))
    asking: list[Sequence] = []
    if has_sampling_extras:
        asking = [*decodes.seqs, *(seq for seq in prefills if seq.num_scheduled == seq.remaining)]
    table_delta, copies = _table_changes(changed, block_size)
    new_slots, new_params, new_top_k, new_seeds = _new_rows([seq for seq in changed if seq.num_uploaded_blocks < 0])
    for seq in changed:
        seq.num_uploaded_blocks = len(seq.block_table)
        seq.copy_source = -1
    return ForwardPlan(
        slots,
        q_start,
        ctx_len,
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
    """Positions, token ids and cache slots of the tokens that ``seq`` computes."""
    first, end = seq.num_computed_tokens, seq.num_computed_tokens + seq.num_scheduled
    positions = np.arange(first, end, dtype=np.int64)
    first_index = first // block_size
    blocks = np.array(seq.block_table[first_index : (end - 1) // block_size + 1], np.int64)
    slot_mapping = blocks[positions // block_size - first_index] * block_size + positions % block_size
    return positions, seq.tokens[first:end], slot_mapping


def _table_changes(changed: Seq[Sequence], block_size: int) -> tuple[Int32, Int32]:
    entries: list[tuple[int, int, int]] = []
    copies: list[tuple[int, int]] = []
    for seq in changed:
        first = max(seq.num_uploaded_blocks, 0)
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


def _num_logprobs(asking: Seq[Sequence], num_sampled: int) -> Int32:
    return np.array([seq.num_logprobs for seq in asking], np.int32) if asking else np.full(num_sampled, -1, np.int32)


def _penalties(asking: Seq[Sequence], num_sampled: int) -> tuple[Int32, Int32, Int32, Float32]:
    rows = [seq.penalties for seq in asking]
    present = [row for row in rows if row is not None]
    if not present:
        return np.zeros(num_sampled + 1, np.int32), _NO_INT32, _NO_INT32, _NO_FLOAT32
    # array.array concatenates by memcpy; 256 NumPy views would cost a millisecond.
    tokens, counts, biases = array("i"), array("i"), array("f")
    for row in present:
        tokens += row.tokens
        counts += row.counts
        biases += row.biases
    return (
        np.array([0, *accumulate(0 if row is None else len(row.tokens) for row in rows)], np.int32),
        np.array(tokens, np.int32),
        np.array(counts, np.int32),
        np.array(biases, np.float32),
    )
