"""How a KV cache lies in memory: one tensor, block by block, and the views of it that each layer reads and writes.

A cache of floating-point numbers is ``[num_blocks, num_layers, 2, P, K, D]``, keys before values. With 8-bit codes, one
of a layer's halves of a block (keys or values) is ``P * K * D`` codes and behind them ``P * K`` float32 scales, one for
each token and head: ``[num_blocks, num_layers, 2, P * K * (D + 4)]`` bytes. So whatever moves a block moves its scales.
"""

from typing import NamedTuple

import torch
from torch import Tensor

#: Types of 8-bit codes, and the code that the largest number of a token and head becomes.
MAX_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_SCALE_BYTES = torch.float32.itemsize


class KVLayer(NamedTuple):
    """Views of one layer of a KV cache.

    Attributes:
        kv: Keys (0) and values (1), shape ``[num_blocks, 2, P, K, D]``; each half of a block is contiguous.
        scales: Of 8-bit codes: the number is code times scale. Shape ``[num_blocks, 2, P, K]``, float32; each half of a
            block is contiguous. None for floating-point numbers.
    """

    kv: Tensor
    scales: Tensor | None


def bytes_per_head(head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of the key, or of the value, of one token and head in one layer."""
    return int(head_dim * dtype.itemsize) + (_SCALE_BYTES if dtype in MAX_CODE else 0)


def cache_shape(
    num_blocks: int, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[int, ...]:
    """Shape of a contiguous cache of the type.

    Args:
        num_blocks: Blocks, the null block counted.
        num_layers: Layers.
        block_size: Tokens in a block, ``P``, a multiple of 4.
        num_kv_heads: Key-value heads, ``K``.
        head_dim: Size of a head, ``D``.
        dtype: A floating-point type, or one of ``MAX_CODE``.
    """
    if dtype in MAX_CODE:
        return (num_blocks, num_layers, 2, block_size * num_kv_heads * bytes_per_head(head_dim, dtype))
    return (num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim)


def split_layers(kv: Tensor, num_kv_heads: int, head_dim: int) -> list[KVLayer]:
    """The layers of a cache of ``cache_shape``, as views."""
    if kv.dtype not in MAX_CODE:
        return [KVLayer(layer, None) for layer in kv.unbind(1)]
    num_tokens = kv.shape[3] // bytes_per_head(head_dim, kv.dtype)  # times heads
    codes = kv[..., : num_tokens * head_dim].unflatten(-1, (-1, num_kv_heads, head_dim))
    scales = kv[..., num_tokens * head_dim :].view(torch.float32).unflatten(-1, (-1, num_kv_heads))
    return [KVLayer(*layer) for layer in zip(codes.unbind(1), scales.unbind(1), strict=True)]


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """8-bit codes and scales, symmetric: ``x`` is about ``codes * scales``.

    Args:
        x: Numbers, shape ``[..., D]``, floating point. Not modified.
        dtype: One of ``MAX_CODE``.

    Returns:
        Codes ``[..., D]`` of the type: ``x / scale``, to the nearest, ties to even. Scales ``[...]``, float32: the
        largest magnitude, at least 1e-30, divided by ``MAX_CODE``; NaN where ``x`` has a NaN.
    """
    exact = x.float()
    scales = exact.abs().amax(-1).clamp_min_(1e-30).div_(MAX_CODE[dtype])
    quotients = exact / scales.unsqueeze(-1)
    return (quotients.round_() if dtype == torch.int8 else quotients).to(dtype), scales


def check_cache_dtype(x: Tensor, kv_layer: Tensor, kv_scales: Tensor | None) -> None:
    """Validate that the cache has the type of ``x`` and no scales, or codes and their scales.

    Raises:
        ValueError: It has not; the message gives what it has.
    """
    if kv_scales is None:
        if kv_layer.dtype != x.dtype:
            raise ValueError(f"kv_layer is {kv_layer.dtype}; without scales it must be {x.dtype}")
        return
    if kv_layer.dtype not in MAX_CODE:
        raise ValueError(f"kv_layer is {kv_layer.dtype}; with scales it must be one of {', '.join(map(str, MAX_CODE))}")
    shape = kv_layer.shape[:4]
    if kv_scales.dtype != torch.float32 or kv_scales.shape != shape or not kv_scales[0, 0].is_contiguous():
        raise ValueError(
            f"kv_scales is {kv_scales.dtype} {list(kv_scales.shape)} with strides {list(kv_scales.stride())}; it must "
            f"be float32 {list(shape)}, the last two contiguous"
        )


def gather_half(kv_layer: Tensor, kv_scales: Tensor | None, half: int, blocks: Tensor) -> Tensor:
    """Keys (``half`` 0) or values (1) of the blocks, copied.

    Args:
        kv_layer: As ``KVLayer.kv``.
        kv_scales: As ``KVLayer.scales``.
        half: 0 or 1.
        blocks: Block ids, shape ``[n]``, int32.

    Returns:
        Shape ``[n, P, K, D]``; of the type of ``kv_layer``, or float32 where that is of codes.
    """
    if kv_scales is None:
        return kv_layer[:, half].index_select(0, blocks)
    codes = kv_layer.view(torch.uint8)[:, half].index_select(0, blocks).view(kv_layer.dtype)
    return codes.float().mul_(kv_scales[:, half].index_select(0, blocks).unsqueeze(-1))
