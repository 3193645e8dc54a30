"""Rotary position embedding and the store into the KV cache, in torch; see ``rope_and_store``."""

from typing import Any, NamedTuple

import torch
from torch import Tensor


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
    step_cache: dict[str, Any] | None = None,
) -> None:
    """``q`` and ``k`` are rotated by their positions, in place, and ``k`` and ``v`` stand in the cache.

    A pair is made of element ``i`` of the first half of a head and element ``i`` of the second half (Hugging Face's
    "rotate_half" convention), so a head dimension is even.

    Args:
        q: Queries, shape ``[T, H, D]``. Written.
        k: Keys, shape ``[T, K, D]``, dtype of ``q``. Written.
        v: Values, shape ``[T, K, D]``, dtype of ``q``. Not modified.
        cos: Cosines by position, shape ``[max_pos, D/2]``, float32.
        sin: Sines by position, shape ``[max_pos, D/2]``, float32.
        positions: Absolute position of each token, shape ``[T]``, int32.
        slot_mapping: Where each token's key and value go, ``block * P + offset``, shape ``[T]``, int64. Padding tokens
            name a slot of the null block 0.
        kv_layer: One layer of the cache, shape ``[num_blocks, 2, P, K, D]``, a strided view. Written.
        step_cache: A dict, empty before the first layer, that the layers of one step pass one after the other: what
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
    kv_layer.transpose(1, 2).index_put_((tokens.blocks, tokens.offsets), stored)


class _Tokens(NamedTuple):
    """The factors and the places of a step's tokens.

    Attributes:
        cos: Of both halves of a head, shape ``[T, 1, D]``.
        sin: The same, negative in the first half.
        blocks: Block that a token's key and value go to, shape ``[T]``, int64.
        offsets: Where in the block, shape ``[T]``, int64.
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
    """The heads of both as one tensor, no copy, where those of ``right`` follow in memory on those of ``left``.

    Projections to queries, keys and values are one product, so that this is the rule; one operation then does for two.
    """
    num_heads = left.shape[1]
    if (
        left.stride() != right.stride()
        or left.untyped_storage().data_ptr() != right.untyped_storage().data_ptr()
        or left.storage_offset() + num_heads * left.stride(1) != right.storage_offset()
    ):
        return None
    return left.as_strided((left.shape[0], num_heads + right.shape[1], left.shape[2]), left.stride())
