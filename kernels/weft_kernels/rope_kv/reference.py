"""Rotary position embedding and the store into the KV cache, in torch; see ``rope_and_store``."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft_kernels.blocks.layout import quantize


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
    """Rotate ``q`` and ``k`` by their positions, in place, and store ``k`` and ``v`` in the KV cache.

    Element ``i`` of the first half of a head is paired with element ``i`` of the second half (Hugging Face's
    "rotate_half" convention), so the head dimension is even.

    Args:
        q: Queries, shape ``[T, H, D]``. Written.
        k: Keys, shape ``[T, K, D]``, dtype of ``q``. Written.
        v: Values, shape ``[T, K, D]``, dtype of ``q``. Not modified.
        cos: Cosines by position, shape ``[max_pos, D/2]``, float32.
        sin: Sines by position, shape ``[max_pos, D/2]``, float32.
        positions: Absolute position of each token, shape ``[T]``, int32.
        slot_mapping: Cache slot of each token's key and value, ``block * P + offset``, shape ``[T]``, int64. Padding
            tokens use a slot of the null block 0.
        kv_layer: One layer of the cache, shape ``[num_blocks, 2, P, K, D]``, a strided view; dtype of ``q``, or
            that of 8-bit codes (``blocks.layout``). Written.
        kv_scales: Scales of the codes, shape ``[num_blocks, 2, P, K]``, float32, a strided view; None without codes.
            Codes and scales of a token follow from its ``k``, as rotated and rounded, and its ``v``. Written.
        step_cache: A dict shared by the layers of one step, empty before the first: what
            follows from ``cos``, ``sin``, ``positions`` and ``slot_mapping`` is computed once. None: this call alone.
    """
    cache = {} if step_cache is None else step_cache
    tokens: _Tokens | None = cache.get("rope_kv")
    if tokens is None:
        tokens = cache["rope_kv"] = _tokens(cos, sin, positions, slot_mapping, kv_layer.shape[2])
    both = _side_by_side(q, k)
    for x in (q, k) if both is None else (both,):
        _rotate(x, tokens.cos, tokens.sin)
    both = _side_by_side(k, v)
    stored = torch.stack((k, v), 1) if both is None else both.unflatten(1, (2, -1))
    slots = (tokens.blocks, tokens.offsets)
    if kv_scales is not None:
        codes, scales = quantize(stored, kv_layer.dtype)
        kv_scales.transpose(1, 2).index_put_(slots, scales)
        kv_layer, stored = kv_layer.view(torch.uint8), codes.view(torch.uint8)
    kv_layer.transpose(1, 2).index_put_(slots, stored)


class _Tokens(NamedTuple):
    """Factors and cache slots of a step's tokens.

    Attributes:
        cos: For both halves of a head, shape ``[T, 1, D]``.
        sin: Likewise, negated in the first half.
        blocks: Block of a token's key and value, shape ``[T]``, int64.
        offsets: Offset in the block, shape ``[T]``, int64.
    """

    cos: Tensor
    sin: Tensor
    blocks: Tensor
    offsets: Tensor


def _tokens(cos: Tensor, sin: Tensor, positions: Tensor, slot_mapping: Tensor, block_size: int) -> _Tokens:
    cos, sin = (table.index_select(0, positions).unsqueeze(1) for table in (cos, sin))
    blocks = torch.div(slot_mapping, block_size, rounding_mode="floor")
    return _Tokens(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1), blocks, slot_mapping % block_size)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    torch.add(x * cos, swapped * sin, out=x)  # float32 until it is stored


def _side_by_side(left: Tensor, right: Tensor) -> Tensor | None:
    """The heads of both as one tensor without a copy, if those of ``right`` follow those of ``left`` in memory.

    This is the rule, since queries, keys and values are projected by one product; one operation then handles both.
    """
    num_heads = left.shape[1]
    if (
        left.stride() != right.stride()
        or left.untyped_storage().data_ptr() != right.untyped_storage().data_ptr()
        or left.storage_offset() + num_heads * left.stride(1) != right.storage_offset()
    ):
        return None
    return left.as_strided((left.shape[0], num_heads + right.shape[1], left.shape[2]), left.stride())
