"""Rotary position embedding and the store into the KV cache in one kernel; see ``reference.rope_and_store``."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft_kernels.blocks.layout import MAX_CODE, check_cache_dtype

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def rope_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    kv_layer: Tensor,
    *,
    kv_scales: Tensor | None = None,
    step_cache: dict[str, Any] | None = None,
) -> None:
    """``reference.rope_and_store`` in one pass over ``q``, ``k`` and ``v``; one program per token.

    Args:
        q: As the reference's; heads and elements contiguous, so it may be a part of a wider row.
        k: As ``q``.
        v: As ``q``.
        cos: As the reference's, contiguous.
        sin: As the reference's, contiguous.
        positions: As the reference's.
        slot_mapping: As the reference's.
        kv_layer: As the reference's; ``P``, ``K`` and ``D`` contiguous.
        kv_scales: As the reference's; ``P`` and ``K`` contiguous.
        step_cache: Unused.

    Raises:
        ValueError: A shape, dtype or layout is not as above; the message gives the one got.
    """
    _check(q, k, v, cos, sin, positions, slot_mapping, kv_layer, kv_scales)
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    if not num_tokens:
        return
    _rope_and_store[(num_tokens,)](
        q,
        k,
        v,
        cos,
        sin,
        positions,
        slot_mapping,
        kv_layer,
        kv_scales,
        Q_TOKEN_STRIDE=q.stride(0),
        K_TOKEN_STRIDE=k.stride(0),
        V_TOKEN_STRIDE=v.stride(0),
        KV_BLOCK_STRIDE=kv_layer.stride(0),
        KV_HALF_STRIDE=kv_layer.stride(1),
        SCALE_BLOCK_STRIDE=0 if kv_scales is None else kv_scales.stride(0),
        SCALE_HALF_STRIDE=0 if kv_scales is None else kv_scales.stride(1),
        MAX=MAX_CODE.get(kv_layer.dtype, 0.0),
        BLOCK_SIZE=kv_layer.shape[2],
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        PADDED_HEADS=triton.next_power_of_2(num_heads),
        PADDED_KV_HEADS=triton.next_power_of_2(num_kv_heads),
        PADDED_HALF=triton.next_power_of_2(head_dim // 2),
        num_warps=4,
    )


@triton.jit
def _rope_and_store(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    slot_ptr,
    kv_ptr,
    scale_ptr,
    Q_TOKEN_STRIDE: tl.constexpr,
    K_TOKEN_STRIDE: tl.constexpr,
    V_TOKEN_STRIDE: tl.constexpr,
    KV_BLOCK_STRIDE: tl.constexpr,
    KV_HALF_STRIDE: tl.constexpr,
    SCALE_BLOCK_STRIDE: tl.constexpr,
    SCALE_HALF_STRIDE: tl.constexpr,
    MAX: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PADDED_KV_HEADS: tl.constexpr,
    PADDED_HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    pairs = tl.arange(0, PADDED_HALF)
    angle = tl.load(position_ptr + token).to(tl.int64) * HALF + pairs
    cos = tl.load(cos_ptr + angle, mask=pairs < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + angle, mask=pairs < HALF, other=0.0)[None, :]

    heads = tl.arange(0, PADDED_HEADS)
    is_pair = (heads < NUM_HEADS)[:, None] & (pairs < HALF)[None, :]
    first_ptr = q_ptr + token * Q_TOKEN_STRIDE + heads[:, None] * (2 * HALF) + pairs[None, :]
    first, second = _rotated(first_ptr, cos, sin, is_pair, HALF)
    tl.store(first_ptr, first, mask=is_pair)
    tl.store(first_ptr + HALF, second, mask=is_pair)

    slot = tl.load(slot_ptr + token)
    kv_slot_ptr = kv_ptr + slot // BLOCK_SIZE * KV_BLOCK_STRIDE + slot % BLOCK_SIZE * (NUM_KV_HEADS * 2 * HALF)
    heads = tl.arange(0, PADDED_KV_HEADS)
    is_head = heads < NUM_KV_HEADS
    is_pair = is_head[:, None] & (pairs < HALF)[None, :]
    offset = heads[:, None] * (2 * HALF) + pairs[None, :]
    first_ptr = k_ptr + token * K_TOKEN_STRIDE + offset
    first, second = _rotated(first_ptr, cos, sin, is_pair, HALF)
    tl.store(first_ptr, first, mask=is_pair)
    tl.store(first_ptr + HALF, second, mask=is_pair)
    v_first_ptr = v_ptr + token * V_TOKEN_STRIDE + offset
    v_first = tl.load(v_first_ptr, mask=is_pair, other=0.0)
    v_second = tl.load(v_first_ptr + HALF, mask=is_pair, other=0.0)
    if scale_ptr is not None:
        scale_slot_ptr = scale_ptr + slot // BLOCK_SIZE * SCALE_BLOCK_STRIDE + slot % BLOCK_SIZE * NUM_KV_HEADS + heads
        first, second, scale = _codes(first, second, MAX, kv_ptr.dtype.element_ty)
        v_first, v_second, v_scale = _codes(v_first, v_second, MAX, kv_ptr.dtype.element_ty)
        tl.store(scale_slot_ptr, scale, mask=is_head)
        tl.store(scale_slot_ptr + SCALE_HALF_STRIDE, v_scale, mask=is_head)
    tl.store(kv_slot_ptr + offset, first, mask=is_pair)
    tl.store(kv_slot_ptr + offset + HALF, second, mask=is_pair)
    tl.store(kv_slot_ptr + KV_HALF_STRIDE + offset, v_first, mask=is_pair)
    tl.store(kv_slot_ptr + KV_HALF_STRIDE + offset + HALF, v_second, mask=is_pair)


@triton.jit
def _codes(first, second, MAX: tl.constexpr, CODE: tl.constexpr):
    """8-bit codes of both halves of each head, and the scale of each head, as ``blocks.layout.quantize``."""
    first = first.to(tl.float32)
    second = second.to(tl.float32)
    largest = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), 1)
    is_nan = tl.max(((first != first) | (second != second)).to(tl.int32), 1) > 0  # noqa: PLR0124  # a maximum drops NaN
    scale = tl.maximum(largest, 1e-30) / MAX
    factor = tl.where(is_nan, 1.0, scale)[:, None]
    first = tl.where(is_nan[:, None], 0.0, first) / factor
    second = tl.where(is_nan[:, None], 0.0, second) / factor
    if tl.int8 == CODE:
        first = _rounded(first)
        second = _rounded(second)
    return first.to(CODE), second.to(CODE), tl.where(is_nan, float("nan"), scale)


@triton.jit
def _rounded(x):
    """To the nearest whole number, ties to even, for magnitudes below ``2 ** 22``."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _rotated(first_ptr, cos, sin, is_pair, HALF: tl.constexpr):
    """Both halves of the heads at ``first_ptr`` after the rotation, in their storage dtype."""
    first = tl.load(first_ptr, mask=is_pair, other=0.0).to(tl.float32)
    second = tl.load(first_ptr + HALF, mask=is_pair, other=0.0).to(tl.float32)
    dtype = first_ptr.dtype.element_ty
    return (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    kv_layer: Tensor,
    kv_scales: Tensor | None,
) -> None:
    num_tokens, num_kv_heads, head_dim = k.shape
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3 or x.stride(2) != 1 or x.stride(1) != x.shape[2] or x.shape[::2] != (num_tokens, head_dim):
            raise ValueError(
                f"{name} has shape {list(x.shape)} and strides {list(x.stride())}; it must be "
                f"[{num_tokens}, heads, {head_dim}], heads and elements contiguous"
            )
        if x.dtype not in _DTYPES or x.dtype != q.dtype:
            raise ValueError(f"{name} is {x.dtype}; q, k and v must be of one of float32, float16, bfloat16")
    if v.shape != k.shape or head_dim % 2:
        raise ValueError(f"k is {list(k.shape)} and v {list(v.shape)}; they must be equal, the last size even")
    if kv_layer.shape[1:2] + kv_layer.shape[3:] != (2, num_kv_heads, head_dim) or not kv_layer[0, 0].is_contiguous():
        raise ValueError(
            f"kv_layer has shape {list(kv_layer.shape)} and strides {list(kv_layer.stride())}; it must be "
            f"[num_blocks, 2, P, {num_kv_heads}, {head_dim}], the last three contiguous"
        )
    check_cache_dtype(q, kv_layer, kv_scales)
    for name, table in (("cos", cos), ("sin", sin)):
        if table.dtype != torch.float32 or table.shape[1:] != (head_dim // 2,) or not table.is_contiguous():
            raise ValueError(
                f"{name} is {table.dtype} {list(table.shape)}; it must be float32 [max_pos, {head_dim // 2}], "
                "contiguous"
            )
    if positions.dtype != torch.int32 or slot_mapping.dtype != torch.int64:
        raise ValueError(
            f"positions is {positions.dtype}, slot_mapping {slot_mapping.dtype}; they must be int32 and int64"
        )
    if positions.shape != (num_tokens,) or slot_mapping.shape != (num_tokens,):
        raise ValueError(
            f"positions is {list(positions.shape)}, slot_mapping {list(slot_mapping.shape)}; must be [{num_tokens}]"
        )
