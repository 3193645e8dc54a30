"""Attention over a paged KV cache in the Triton language; semantics: ``reference.paged_attention``.

One kernel handles prompts, chunks and single tokens. A fixed number of programs takes work items in turns, which
``items_triton_kernel`` lists on the device: one key-value head and a tile of rows, the query heads of its group, token
by token. For an item a program iterates over tiles of keys and keeps a running maximum, sum and weighted values. Where
a sequence is so long that others would wait for it, its items have parts of the keys, which a second kernel merges
(flash-decoding).

Source:
    https://arxiv.org/abs/2205.14135 (the running softmax), https://crfm.stanford.edu/2023/10/12/flashdecoding.html
    (parts of the keys), https://arxiv.org/abs/2309.06180 (pages).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft_kernels.attention.items_triton_kernel import find_sequence, parts_of, rows_of, work_items
from weft_kernels.attention.launch import LaunchPlan, check_arguments, plan_launch
from weft_kernels.attention.merge_triton_kernel import LOG2_E, NOTHING, averaged, merge_stored, merged


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
    sinks: Tensor | None = None,
    max_q_len: int,
    max_ctx_len: int,
    deterministic: bool = False,
    step_cache: dict[str, Any] | None = None,
) -> Tensor:
    """``reference.paged_attention`` as Triton kernels.

    No synchronisation with the device. The launch is the same for every step of single tokens, and the same for every
    other step, so that a CUDA graph may repeat it with other lengths.

    Args:
        q: As the reference's; the last two axes contiguous.
        kv_layer: As the reference's; ``P``, ``K`` and ``D`` contiguous.
        block_tables: As the reference's, contiguous.
        q_start: As the reference's.
        ctx_len: As the reference's.
        kv_scales: As the reference's; ``P`` and ``K`` contiguous.
        scale: As the reference's.
        window: As the reference's.
        soft_cap: As the reference's.
        sinks: As the reference's, contiguous.
        max_q_len: The largest number of new tokens of a sequence; decides the size of a tile.
        max_ctx_len: Unused.
        deterministic: As the reference's: one tile shape and one length of the parts for every batch.
        step_cache: As the reference's.

    Returns:
        As the reference's.

    Raises:
        ValueError: A shape, dtype or layout is not as above; the message gives the one got.
    """
    check_arguments(q, kv_layer, kv_scales, block_tables, q_start, ctx_len, sinks)
    plan = plan_launch(q, kv_layer, max_q_len, deterministic=deterministic)
    arguments = (q, kv_layer, block_tables, q_start, ctx_len)
    return launch(
        *arguments,
        kv_scales=kv_scales,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        plan=plan,
        step_cache=step_cache,
    )


def launch(
    q: Tensor,
    kv_layer: Tensor,
    block_tables: Tensor,
    q_start: Tensor,
    ctx_len: Tensor,
    *,
    kv_scales: Tensor | None = None,
    scale: float,
    window: int,
    soft_cap: float,
    sinks: Tensor | None = None,
    plan: LaunchPlan,
    step_cache: dict[str, Any] | None = None,
) -> Tensor:
    """``paged_attention`` with the given ``plan``; the arguments are not validated."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = kv_layer.shape[3]
    num_sequences = ctx_len.shape[0]
    out = q.new_empty(q.shape)
    if not num_tokens:
        return out
    cache = {} if step_cache is None else step_cache
    key = f"attention_items of {window}"
    if key not in cache:
        cache[key] = work_items(q_start, ctx_len, plan, num_kv_heads, window)
    if "attention_parts" not in cache:
        rows = (plan.num_stored * num_kv_heads, plan.rows_per_tile)
        cache["attention_parts"] = (
            q.new_empty(*rows, head_dim, dtype=torch.float32),
            q.new_empty(*rows, dtype=torch.float32),
            q.new_empty(*rows, dtype=torch.float32),
        )
    items, parts = cache[key], cache["attention_parts"]
    sizes = {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP_SIZE": num_heads // num_kv_heads,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": max(16, triton.next_power_of_2(head_dim)),
        "ROWS": plan.rows_per_tile,
    }
    _attention[(plan.num_programs,)](
        q,
        kv_layer,
        kv_scales,
        block_tables,
        q_start,
        ctx_len,
        items,
        sinks,
        out,
        *parts,
        scale,
        soft_cap,
        window,
        num_sequences,
        plan.num_programs,
        block_tables.stride(0),
        Q_TOKEN_STRIDE=q.stride(0),
        KV_BLOCK_STRIDE=kv_layer.stride(0),
        KV_HALF_STRIDE=kv_layer.stride(1),
        SCALE_BLOCK_STRIDE=0 if kv_scales is None else kv_scales.stride(0),
        SCALE_HALF_STRIDE=0 if kv_scales is None else kv_scales.stride(1),
        BLOCK_SIZE=kv_layer.shape[2],
        KEYS=plan.keys_per_tile,
        FIXED_KEYS=plan.fixed_keys_per_part,
        DOT=plan.dot_dtype,
        HAS_WINDOW=window > 0,
        HAS_SOFT_CAP=soft_cap > 0,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        **sizes,
    )
    merge_stored[(plan.num_programs,)](
        *parts, q_start, items, sinks, out, num_sequences, plan.num_programs, num_warps=plan.num_warps, **sizes
    )
    return out


@triton.jit(do_not_specialize=["window", "num_sequences", "num_programs", "table_stride"])
def _attention(
    q_ptr,
    kv_ptr,
    scale_ptr,
    table_ptr,
    q_start_ptr,
    ctx_len_ptr,
    items_ptr,
    sinks_ptr,
    out_ptr,
    parts_ptr,
    part_max_ptr,
    part_sum_ptr,
    scale,
    soft_cap,
    window,
    num_sequences,
    num_programs,
    table_stride,
    Q_TOKEN_STRIDE: tl.constexpr,
    KV_BLOCK_STRIDE: tl.constexpr,
    KV_HALF_STRIDE: tl.constexpr,
    SCALE_BLOCK_STRIDE: tl.constexpr,
    SCALE_HALF_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    FIXED_KEYS: tl.constexpr,
    DOT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
):
    TOKENS: tl.constexpr = ROWS // GROUP_SIZE
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP_SIZE
    dims = tl.arange(0, PADDED_DIM)
    num_items = tl.load(items_ptr + num_sequences) * NUM_KV_HEADS
    for item in range(tl.program_id(0), num_items, num_programs):
        kv_head = item % NUM_KV_HEADS
        sequence = find_sequence(items_ptr, item // NUM_KV_HEADS, num_sequences)
        begin, q_len, num_parts = parts_of(q_start_ptr, items_ptr, sequence, TOKENS)
        index = item // NUM_KV_HEADS - tl.load(items_ptr + sequence)
        first_token = index // num_parts * TOKENS
        ctx_len = tl.load(ctx_len_ptr + sequence)

        rows, token, row_of_out, is_row = rows_of(
            kv_head, begin, q_len, first_token, NUM_HEADS, GROUP_SIZE, TOKENS, ROWS
        )
        is_element = is_row[:, None] & (dims < HEAD_DIM)[None, :]
        head = row_of_out % NUM_HEADS
        q = tl.load(
            q_ptr + row_of_out[:, None] // NUM_HEADS * Q_TOKEN_STRIDE + head[:, None] * HEAD_DIM + dims[None, :],
            mask=is_element,
            other=0.0,
        ).to(DOT)
        position = ctx_len - q_len + token
        low, high = _keys_of_part(
            ctx_len,
            ctx_len - q_len + first_token,
            window,
            index % num_parts,
            num_parts,
            TOKENS,
            KEYS,
            FIXED_KEYS,
            HAS_WINDOW,
        )
        values = tl.zeros([ROWS, PADDED_DIM], dtype=tl.float32)
        row_max = tl.full([ROWS], NOTHING, dtype=tl.float32)
        row_sum = tl.zeros([ROWS], dtype=tl.float32)
        kv_head_ptr = kv_ptr + kv_head * HEAD_DIM
        scale_head_ptr = None
        if scale_ptr is not None:
            scale_head_ptr = scale_ptr + kv_head
        table_row_ptr = table_ptr + sequence.to(tl.int64) * table_stride
        if FIXED_KEYS:
            for start in range(low // FIXED_KEYS * FIXED_KEYS, high, FIXED_KEYS):
                part_values, part_max, part_sum = _walk(
                    q,
                    kv_head_ptr,
                    scale_head_ptr,
                    table_row_ptr,
                    tl.maximum(low, start),
                    tl.minimum(high, start + FIXED_KEYS),
                    ctx_len,
                    position,
                    scale,
                    soft_cap,
                    window,
                    KV_BLOCK_STRIDE,
                    KV_HALF_STRIDE,
                    SCALE_BLOCK_STRIDE,
                    SCALE_HALF_STRIDE,
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
                row_max, shrink, part_shrink = merged(row_max, part_max)
                row_sum = tl.fma(row_sum, shrink, part_sum * part_shrink)
                values = tl.fma(values, shrink[:, None], part_values * part_shrink[:, None])
        else:
            values, row_max, row_sum = _walk(
                q,
                kv_head_ptr,
                scale_head_ptr,
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
                SCALE_BLOCK_STRIDE,
                SCALE_HALF_STRIDE,
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

        if num_parts > 1:
            stored = tl.load(items_ptr + num_sequences + 1 + sequence) + index
            row_of_part = (stored.to(tl.int64) * NUM_KV_HEADS + kv_head) * ROWS + rows
            tl.store(part_max_ptr + row_of_part, row_max, mask=is_row)
            tl.store(part_sum_ptr + row_of_part, row_sum, mask=is_row)
            if low < high:  # the values of a part without keys are left unwritten; its sum of 0 says so
                tl.store(parts_ptr + row_of_part[:, None] * HEAD_DIM + dims[None, :], values, mask=is_element)
        else:
            values = averaged(values, row_max, row_sum, sinks_ptr, head, is_row)
            tl.store(
                out_ptr + row_of_out[:, None] * HEAD_DIM + dims[None, :],
                values.to(out_ptr.dtype.element_ty),
                mask=is_element,
            )


@triton.jit
def _keys_of_part(
    ctx_len,
    first_position,
    window,
    part,
    num_parts,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    FIXED_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """The keys ``[low, high)`` of a part of those that some row of a tile sees; ``low`` begins a tile of keys."""
    high = tl.minimum(ctx_len, first_position + TOKENS)
    low = high * 0
    if HAS_WINDOW:
        low = tl.maximum(0, first_position + 1 - window) // KEYS * KEYS
    if num_parts > 1:
        origin = low
        size = tl.cdiv(tl.cdiv(high - low, num_parts), KEYS) * KEYS
        if FIXED_KEYS:
            origin = low // FIXED_KEYS * FIXED_KEYS
            size = high * 0 + FIXED_KEYS
        low = tl.maximum(low, origin + part * size)
        high = tl.minimum(high, origin + (part + 1) * size)
    return low, high


@triton.jit
def _walk(
    q,
    kv_head_ptr,
    scale_head_ptr,
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
    SCALE_BLOCK_STRIDE: tl.constexpr,
    SCALE_HALF_STRIDE: tl.constexpr,
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
    row_max = tl.full([ROWS], NOTHING, dtype=tl.float32)
    row_sum = tl.zeros([ROWS], dtype=tl.float32)
    dims = tl.arange(0, PADDED_DIM)
    is_dim = dims < HEAD_DIM
    oldest = low
    if HAS_WINDOW:  # blocks behind what the first row sees may be another sequence's by now
        oldest = tl.min(position, 0) - window + 1
    for first in range(low, high, KEYS):
        keys = first + tl.arange(0, KEYS)
        is_key = (keys >= oldest) & (keys < ctx_len)
        block = tl.load(table_row_ptr + keys // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        offset = block * KV_BLOCK_STRIDE + (keys % BLOCK_SIZE) * (NUM_KV_HEADS * HEAD_DIM)
        k = tl.load(
            kv_head_ptr + offset[None, :] + dims[:, None], mask=is_dim[:, None] & is_key[None, :], other=0.0
        ).to(DOT)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if scale_head_ptr is not None:  # of 8-bit codes: a factor on scores and weights, not on each element
            row = scale_head_ptr + block * SCALE_BLOCK_STRIDE + keys % BLOCK_SIZE * NUM_KV_HEADS
            scores *= tl.load(row, mask=is_key, other=0.0)[None, :]
        if HAS_SOFT_CAP:
            scores = soft_cap * (2.0 * tl.sigmoid(2.0 * scores / soft_cap) - 1.0)  # tanh
        is_visible = keys[None, :] <= position[:, None]
        if HAS_WINDOW:
            is_visible = is_visible & (keys[None, :] > position[:, None] - window)
        scores = tl.where(is_visible, scores * LOG2_E, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)
        row_max = new_max
        row_sum = row_sum * shrink + tl.sum(weights, 1)
        if scale_head_ptr is not None:
            weights *= tl.load(row + SCALE_HALF_STRIDE, mask=is_key, other=0.0)[None, :]
        v = tl.load(
            kv_head_ptr + KV_HALF_STRIDE + offset[:, None] + dims[None, :],
            mask=is_key[:, None] & is_dim[None, :],
            other=0.0,
        ).to(DOT)
        values = tl.dot(weights.to(DOT), v, values * shrink[:, None], input_precision="ieee")
    return values, row_max, row_sum
