"""Stored codes of quantised weights, made into tensors."""

from typing import TypeAlias

import torch

from weft_kernels.linear.quantized import QuantizedWeight

#: A weight ``[out, in]`` as numbers or as codes.
ReadWeight: TypeAlias = torch.Tensor | QuantizedWeight


def scales_of(tensor: torch.Tensor) -> torch.Tensor:
    """Scales as ``QuantizedWeight`` has them: float16 as they are, others as float32."""
    return tensor.contiguous() if tensor.dtype == torch.float16 else tensor.float().contiguous()


def bytes_of(words: torch.Tensor) -> torch.Tensor:
    """uint8 ``[rows, columns, 4]`` of int32 ``[rows, columns]``, the least significant byte first."""
    rows, columns = words.shape
    return words.contiguous().view(torch.uint8).view(rows, columns, 4)


def halves_of(packed: torch.Tensor) -> torch.Tensor:
    """Codes of 4 bits, low half first, along a new last axis of twice the length: ``[..., n]`` to ``[..., 2 n]``."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
