"""Cuts a step's attention into work items on the device: ``work_items``.

A launch that is frozen in a CUDA graph has the same number of programs whatever the contexts are. So the programs stay,
and read what to do from a table that this kernel writes once in a step, from lengths that lie on the device.

An item is a tile of rows of one sequence with all or one part of the keys it sees. A sequence is cut into parts if its
context is longer than what one program has to do anyway; each sequence is decided on its own, so that one long decode
beside a prompt is cut and the prompt is not.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft_kernels.attention.launch import LaunchPlan

_SEQUENCES = 256


def work_items(q_start: Tensor, ctx_len: Tensor, plan: LaunchPlan, num_kv_heads: int, window: int) -> Tensor:
    """Work items of a step of ``B`` sequences.

    Args:
        q_start: First token of each sequence, and the number of tokens, shape ``[B + 1]``, int32.
        ctx_len: Tokens of each sequence after the step, shape ``[B]``, int32.
        plan: Of the launch that reads them.
        num_kv_heads: Key-value heads; an item is done once for each.
        window: Tokens that a token sees; 0: all.

    Returns:
        Shape ``[3, B + 1]``, int32: running sums over the sequences of items, of stored parts, and of the tiles of rows
        whose keys are in parts. A sequence's parts are its items divided by its tiles. Once the sum of stored parts
        exceeds ``plan.num_stored``, this sequence and all others are left whole.
    """
    num_sequences = ctx_len.shape[0]
    items = torch.empty(3, num_sequences + 1, dtype=torch.int32, device=ctx_len.device)
    _work_items[(1,)](
        q_start,
        ctx_len,
        items,
        num_sequences,
        window,
        plan.num_programs,
        plan.num_stored,
        plan.min_keys_per_part,
        TOKENS=plan.tokens_per_tile,
        KEYS=plan.keys_per_tile,
        NUM_KV_HEADS=num_kv_heads,
        FIXED_KEYS=plan.fixed_keys_per_part,
        HAS_WINDOW=window > 0,
        SEQUENCES=_SEQUENCES,
        num_warps=4,
    )
    return items


@triton.jit(
    do_not_specialize=["num_sequences", "window", "num_programs", "num_stored", "min_keys"],
)
def _work_items(
    q_start_ptr,
    ctx_len_ptr,
    items_ptr,
    num_sequences,
    window,
    num_programs,
    num_stored,
    min_keys,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    FIXED_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    work = tl.zeros([SEQUENCES], dtype=tl.int64)
    for first in range(0, num_sequences, SEQUENCES):
        tiles, span = _extent(
            q_start_ptr, ctx_len_ptr, first, num_sequences, window, TOKENS, KEYS, HAS_WINDOW, SEQUENCES
        )
        work += tiles.to(tl.int64) * tl.cdiv(span, KEYS)
    share = tl.cdiv(tl.sum(work, 0) * NUM_KV_HEADS, num_programs) * KEYS
    share = tl.minimum(tl.maximum(share, min_keys), 1 << 30).to(tl.int32)  # keys of a program
    keys_per_part = share
    if FIXED_KEYS:
        keys_per_part = share * 0 + FIXED_KEYS
        share = tl.maximum(share, FIXED_KEYS)
    num_items = share * 0
    num_parts = share * 0
    num_split = share * 0
    row = num_sequences + 1
    for first in range(0, num_sequences, SEQUENCES):
        sequence = first + tl.arange(0, SEQUENCES)
        is_sequence = sequence < num_sequences
        tiles, span = _extent(
            q_start_ptr, ctx_len_ptr, first, num_sequences, window, TOKENS, KEYS, HAS_WINDOW, SEQUENCES
        )
        # a quarter more than its share is not worth a merge
        parts = tl.where(span > share + share // 4, tl.cdiv(span, keys_per_part), 1)
        if FIXED_KEYS and HAS_WINDOW:
            parts += tl.where(
                parts > 1, 1, 0
            )  # parts are counted from position 0, so that a window lies across one more
        stored = tl.where(parts > 1, tiles * parts, 0)
        after = num_parts + tl.cumsum(stored, 0)
        parts = tl.where(after <= num_stored, parts, 1)
        items = tiles * parts
        split = tl.where(parts > 1, tiles, 0)
        tl.store(items_ptr + sequence, num_items + tl.cumsum(items, 0) - items, mask=is_sequence)
        tl.store(items_ptr + row + sequence, after - stored, mask=is_sequence)
        tl.store(items_ptr + 2 * row + sequence, num_split + tl.cumsum(split, 0) - split, mask=is_sequence)
        num_items += tl.sum(items, 0)
        num_parts += tl.sum(stored, 0)
        num_split += tl.sum(split, 0)
    tl.store(items_ptr + num_sequences, num_items)
    tl.store(items_ptr + row + num_sequences, num_parts)
    tl.store(items_ptr + 2 * row + num_sequences, num_split)


@triton.jit
def _extent(
    q_start_ptr,
    ctx_len_ptr,
    first,
    num_sequences,
    window,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    """Tiles of rows of each sequence, and the most keys that one of them sees."""
    sequence = first + tl.arange(0, SEQUENCES)
    is_sequence = sequence < num_sequences
    begin = tl.load(q_start_ptr + sequence, mask=is_sequence, other=0)
    end = tl.load(q_start_ptr + sequence + 1, mask=is_sequence, other=0)
    span = tl.load(ctx_len_ptr + sequence, mask=is_sequence, other=0)
    if HAS_WINDOW:
        span = tl.minimum(span, window + TOKENS + KEYS)
    return tl.cdiv(end - begin, TOKENS), span


@triton.jit
def find_sequence(sums_ptr, index, num_sequences):
    """The sequence to which ``index`` belongs, by running sums over the sequences."""
    low = index * 0
    high = low + num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        is_at_or_after = tl.load(sums_ptr + middle) <= index
        low = tl.where(is_at_or_after, middle, low)
        high = tl.where(is_at_or_after, high, middle)
    return low


@triton.jit
def parts_of(q_start_ptr, items_ptr, sequence, TOKENS: tl.constexpr):
    """First token of a sequence, its number of tokens, and the parts of its keys."""
    begin = tl.load(q_start_ptr + sequence)
    q_len = tl.load(q_start_ptr + sequence + 1) - begin
    num_items = tl.load(items_ptr + sequence + 1) - tl.load(items_ptr + sequence)
    return begin, q_len, num_items // tl.cdiv(q_len, TOKENS)


@triton.jit
def rows_of(
    kv_head,
    begin,
    q_len,
    first_token,
    NUM_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Rows of a tile: numbers, tokens in the sequence, rows ``[T * H]`` of the result, whether they exist."""
    rows = tl.arange(0, ROWS)
    token = first_token + rows // GROUP_SIZE
    head = kv_head * GROUP_SIZE + rows % GROUP_SIZE
    is_row = (rows < TOKENS * GROUP_SIZE) & (token < q_len)
    return rows, token, (begin + token).to(tl.int64) * NUM_HEADS + head, is_row
