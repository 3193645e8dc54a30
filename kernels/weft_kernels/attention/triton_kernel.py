"""Attention over a paged KV cache in the Triton language; semantics: ``reference.paged_attention``.

One kernel handles prompts, chunks and single tokens. A program takes one key-value head and a tile of rows: the query
heads of its group, token by token. It iterates over tiles of keys from position 0 and keeps a running maximum,
sum and weighted values. If that gives too few programs for the device, each takes one split of fixed length and a
second kernel merges the splits (flash-decoding).

Source:
    https://arxiv.org/abs/2205.14135 (the running softmax), https://crfm.stanford.edu/2023/10/12/flashdecoding.html
    (parts of the keys), https://arxiv.org/abs/2309.06180 (pages).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft_kernels.attention.launch import LaunchPlan, check_arguments, plan_launch

# Finite substitute for minus infinity: avoids NaN when the maximum of an empty row is subtracted.
_NOTHING = tl.constexpr(-1e30)
_LOG2_E = tl.constexpr(1.4426950408889634)


def paged_attention(
    q: Tensor,
    kv_layer: Tensor,
    block_tables: Tensor,
    q_start: Tensor,
    ctx_len: Tensor,
    *,
    kv_scales: Tensor | None = None,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    max_q_len: int,
    max_ctx_len: int,
    deterministic: bool = False,
    step_cache: dict[str, Any] | None = None,
) -> Tensor:
    """``reference.paged_attention`` as Triton kernels.

    No synchronisation with the device: launch shapes depend only on host arguments.

    Args:
        q: As the reference's; the last two axes contiguous.
        kv_layer: As the reference's; ``P``, ``K`` and ``D`` contiguous.
        block_tables: As the reference's, contiguous.
        q_start: As the reference's.
        ctx_len: As the reference's.
        kv_scales: None; codes are not supported.
        scale: As the reference's.
        window: As the reference's.
        soft_cap: As the reference's.
        max_q_len: The largest number of new tokens of a sequence; results are wrong if it is exceeded.
        max_ctx_len: The largest ``ctx_len``; keys beyond it are ignored.
        deterministic: As the reference's: one tile shape and one length of the parts for every batch.
        step_cache: Unused.

    Returns:
        As the reference's.

    Raises:
        ValueError: A shape, dtype or layout is not as above; the message gives the one got.
    """
    if kv_scales is not None:
        raise ValueError(f"kv_layer is {kv_layer.dtype}; kernels read floating-point caches alone")
    check_arguments(q, kv_layer, block_tables, q_start, ctx_len)
    plan = plan_launch(q, kv_layer, ctx_len.shape[0], max_q_len, max_ctx_len, deterministic=deterministic)
    return launch(q, kv_layer, block_tables, q_start, ctx_len, scale=scale, window=window, soft_cap=soft_cap, plan=plan)


def launch(
    q: Tensor,
    kv_layer: Tensor,
    block_tables: Tensor,
    q_start: Tensor,
    ctx_len: Tensor,
    *,
    scale: float,
    window: int,
    soft_cap: float,
    plan: LaunchPlan,
) -> Tensor:
    """``paged_attention`` with the given ``plan``; the arguments are not validated."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = kv_layer.shape[3]
    out = q.new_empty(q.shape)
    if not num_tokens:
        return out
    parts, part_max, part_sum = out, out, out  # placeholders, unused without splits
    if plan.num_parts > 1:
        parts = q.new_empty(plan.num_parts, *q.shape, dtype=torch.float32)
        part_max, part_sum = parts.new_empty(2, plan.num_parts, num_tokens, num_heads)
    padded_dim = max(16, triton.next_power_of_2(head_dim))
    _attention[(plan.num_row_tiles, num_kv_heads, plan.num_parts)](
        q,
        kv_layer,
        block_tables,
        q_start,
        ctx_len,
        out,
        parts,
        part_max,
        part_sum,
        scale,
        soft_cap,
        window,
        ctx_len.shape[0],
        num_tokens,
        block_tables.stride(0),
        plan.keys_per_part,
        Q_TOKEN_STRIDE=q.stride(0),
        KV_BLOCK_STRIDE=kv_layer.stride(0),
        KV_HALF_STRIDE=kv_layer.stride(1),
        BLOCK_SIZE=kv_layer.shape[2],
        NUM_KV_HEADS=num_kv_heads,
        GROUP_SIZE=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim,
        ROWS=plan.rows_per_tile,
        KEYS=plan.keys_per_tile,
        DOT=plan.dot_dtype,
        ONE_TOKEN=plan.is_one_token,
        HAS_WINDOW=window > 0,
        HAS_SOFT_CAP=soft_cap > 0,
        STORE_PARTS=plan.num_parts > 1,
        MERGE_PARTS=plan.merges_parts,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
    )
    if plan.num_parts > 1:
        _merge_stored[(num_tokens, num_heads)](
            parts,
            part_max,
            part_sum,
            out,
            num_tokens,
            plan.num_parts,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            PADDED_DIM=padded_dim,
            num_warps=1,
        )
    return out


# The sums of the parts are halves of one tensor, and where the second begins depends on the number of tokens.
_SUMS = ["part_max_ptr", "part_sum_ptr"]


@triton.jit(
    do_not_specialize=["window", "num_sequences", "num_tokens", "table_stride", "keys_per_part"],
    do_not_specialize_on_alignment=_SUMS,
)
def _attention(
    q_ptr,
    kv_ptr,
    table_ptr,
    q_start_ptr,
    ctx_len_ptr,
    out_ptr,
    parts_ptr,
    part_max_ptr,
    part_sum_ptr,
    scale,
    soft_cap,
    window,
    num_sequences,
    num_tokens,
    table_stride,
    keys_per_part,
    Q_TOKEN_STRIDE: tl.constexpr,
    KV_BLOCK_STRIDE: tl.constexpr,
    KV_HALF_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DOT: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    STORE_PARTS: tl.constexpr,
    MERGE_PARTS: tl.constexpr,
):
    TOKENS: tl.constexpr = ROWS // GROUP_SIZE
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP_SIZE
    row_tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = row_tile
    first_token = 0
    if not ONE_TOKEN:
        sequence, first_token = _find_rows(row_tile, q_start_ptr, num_sequences, TOKENS)
    begin = tl.load(q_start_ptr + sequence)
    q_len = tl.load(q_start_ptr + sequence + 1) - begin
    if first_token >= q_len:
        return
    ctx_len = tl.load(ctx_len_ptr + sequence)

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED_DIM)
    token = first_token + rows // GROUP_SIZE
    head = kv_head * GROUP_SIZE + rows % GROUP_SIZE
    is_row = (rows < TOKENS * GROUP_SIZE) & (token < q_len)
    is_element = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    token_of_step = (begin + token).to(tl.int64)
    q = tl.load(
        q_ptr + token_of_step[:, None] * Q_TOKEN_STRIDE + head[:, None] * HEAD_DIM + dims[None, :],
        mask=is_element,
        other=0.0,
    ).to(DOT)
    position = ctx_len - q_len + token
    # The keys that some row of this tile sees: [low, high).
    high = tl.minimum(ctx_len, ctx_len - q_len + first_token + TOKENS)
    low = 0
    if HAS_WINDOW:
        low = tl.maximum(0, ctx_len - q_len + first_token + 1 - window) // KEYS * KEYS

    values = tl.zeros([ROWS, PADDED_DIM], dtype=tl.float32)
    row_max = tl.full([ROWS], _NOTHING, dtype=tl.float32)
    row_sum = tl.zeros([ROWS], dtype=tl.float32)
    kv_head_ptr = kv_ptr + kv_head * HEAD_DIM
    table_row_ptr = table_ptr + sequence.to(tl.int64) * table_stride
    if STORE_PARTS:
        low = tl.maximum(low, tl.program_id(2) * keys_per_part)
        high = tl.minimum(high, (tl.program_id(2) + 1) * keys_per_part)
    if MERGE_PARTS:
        for start in range(low // keys_per_part * keys_per_part, high, keys_per_part):
            part_values, part_max, part_sum = _walk(
                q,
                kv_head_ptr,
                table_row_ptr,
                tl.maximum(low, start),
                tl.minimum(high, start + keys_per_part),
                ctx_len,
                position,
                scale,
                soft_cap,
                window,
                KV_BLOCK_STRIDE,
                KV_HALF_STRIDE,
                BLOCK_SIZE,
                NUM_KV_HEADS,
                HEAD_DIM,
                PADDED_DIM,
                ROWS,
                KEYS,
                DOT,
                HAS_WINDOW,
                HAS_SOFT_CAP,
            )
            row_max, shrink, part_shrink = _shrinks(row_max, part_max)
            row_sum = tl.fma(row_sum, shrink, part_sum * part_shrink)
            values = tl.fma(values, shrink[:, None], part_values * part_shrink[:, None])
    else:
        values, row_max, row_sum = _walk(
            q,
            kv_head_ptr,
            table_row_ptr,
            low,
            high,
            ctx_len,
            position,
            scale,
            soft_cap,
            window,
            KV_BLOCK_STRIDE,
            KV_HALF_STRIDE,
            BLOCK_SIZE,
            NUM_KV_HEADS,
            HEAD_DIM,
            PADDED_DIM,
            ROWS,
            KEYS,
            DOT,
            HAS_WINDOW,
            HAS_SOFT_CAP,
        )

    row_of_out = token_of_step * NUM_HEADS + head
    if STORE_PARTS:
        row_of_part = tl.program_id(2).to(tl.int64) * num_tokens * NUM_HEADS + row_of_out
        tl.store(part_max_ptr + row_of_part, row_max, mask=is_row)
        tl.store(part_sum_ptr + row_of_part, row_sum, mask=is_row)
        if low < high:  # the values of a part without keys are left unwritten; its sum of 0 says so
            tl.store(parts_ptr + row_of_part[:, None] * HEAD_DIM + dims[None, :], values, mask=is_element)
    else:
        values = values / tl.where(is_row, row_sum, 1.0)[:, None]
        tl.store(
            out_ptr + row_of_out[:, None] * HEAD_DIM + dims[None, :],
            values.to(out_ptr.dtype.element_ty),
            mask=is_element,
        )


@triton.jit
def _find_rows(row_tile, q_start_ptr, num_sequences, TOKENS: tl.constexpr):
    """The sequence of a tile of rows, and the first of its tokens in the tile.

    Sequence ``b`` owns the tiles from ``q_start[b] // TOKENS + b``: as many as it needs, sometimes one more.
    """
    low = 0
    high = num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        is_at_or_after = tl.load(q_start_ptr + middle) // TOKENS + middle <= row_tile
        low = tl.where(is_at_or_after, middle, low)
        high = tl.where(is_at_or_after, high, middle)
    return low, (row_tile - tl.load(q_start_ptr + low) // TOKENS - low) * TOKENS


@triton.jit
def _walk(
    q,
    kv_head_ptr,
    table_row_ptr,
    low,
    high,
    ctx_len,
    position,
    scale,
    soft_cap,
    window,
    KV_BLOCK_STRIDE: tl.constexpr,
    KV_HALF_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DOT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
):
    """Weighted values, maximum (in powers of two) and sum of weights of each row over the keys ``[low, high)``."""
    values = tl.zeros([ROWS, PADDED_DIM], dtype=tl.float32)
    row_max = tl.full([ROWS], _NOTHING, dtype=tl.float32)
    row_sum = tl.zeros([ROWS], dtype=tl.float32)
    dims = tl.arange(0, PADDED_DIM)
    is_dim = dims < HEAD_DIM
    for first in range(low, high, KEYS):
        keys = first + tl.arange(0, KEYS)
        is_key = keys < ctx_len
        block = tl.load(table_row_ptr + keys // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        offset = block * KV_BLOCK_STRIDE + (keys % BLOCK_SIZE) * (NUM_KV_HEADS * HEAD_DIM)
        k = tl.load(
            kv_head_ptr + offset[None, :] + dims[:, None], mask=is_dim[:, None] & is_key[None, :], other=0.0
        ).to(DOT)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if HAS_SOFT_CAP:
            scores = soft_cap * (2.0 * tl.sigmoid(2.0 * scores / soft_cap) - 1.0)  # tanh
        is_visible = keys[None, :] <= position[:, None]
        if HAS_WINDOW:
            is_visible = is_visible & (keys[None, :] > position[:, None] - window)
        scores = tl.where(is_visible, scores * _LOG2_E, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)
        row_max = new_max
        row_sum = row_sum * shrink + tl.sum(weights, 1)
        v = tl.load(
            kv_head_ptr + KV_HALF_STRIDE + offset[:, None] + dims[None, :],
            mask=is_key[:, None] & is_dim[None, :],
            other=0.0,
        ).to(DOT)
        values = tl.dot(weights.to(DOT), v, values * shrink[:, None], input_precision="ieee")
    return values, row_max, row_sum


@triton.jit
def _shrinks(row_max, part_max):
    """The maximum of both, and what sums up to each must be multiplied by to be relative to it."""
    new_max = tl.maximum(row_max, part_max)
    return new_max, tl.exp2(row_max - new_max), tl.exp2(part_max - new_max)


@triton.jit(do_not_specialize=["num_tokens", "num_parts"], do_not_specialize_on_alignment=_SUMS)
def _merge_stored(
    parts_ptr,
    part_max_ptr,
    part_sum_ptr,
    out_ptr,
    num_tokens,
    num_parts,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """One row's parts, first to last, with the arithmetic of a program that merges its own."""
    row = tl.program_id(0).to(tl.int64) * NUM_HEADS + tl.program_id(1)
    dims = tl.arange(0, PADDED_DIM)
    one = tl.arange(0, 1)
    values = tl.zeros([PADDED_DIM], dtype=tl.float32)
    row_max = tl.full([1], _NOTHING, dtype=tl.float32)
    row_sum = tl.zeros([1], dtype=tl.float32)
    row_of_part = row
    for _ in range(num_parts):
        part_max = tl.load(part_max_ptr + row_of_part + one)
        part_sum = tl.load(part_sum_ptr + row_of_part + one)
        part_values = tl.load(
            parts_ptr + row_of_part * HEAD_DIM + dims, mask=(dims < HEAD_DIM) & (part_sum > 0.0), other=0.0
        )
        row_max, shrink, part_shrink = _shrinks(row_max, part_max)
        row_sum = tl.fma(row_sum, shrink, part_sum * part_shrink)
        values = tl.fma(values, shrink, part_values * part_shrink)
        row_of_part += num_tokens.to(tl.int64) * NUM_HEADS
    tl.store(out_ptr + row * HEAD_DIM + dims, (values / row_sum).to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)
