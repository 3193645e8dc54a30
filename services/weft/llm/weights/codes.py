"""Stored codes of quantised weights, made into tensors."""

from typing import TypeAlias

import torch

from weft.llm.weights.parts import Piece
from weft_kernels.linear.quantized import QuantizedWeight, concatenate

#: A weight ``[out, in]`` as numbers or as codes.
ReadWeight: TypeAlias = torch.Tensor | QuantizedWeight


def cut(weight: ReadWeight, piece: Piece) -> ReadWeight:
    """The piece of a whole weight; of codes, only rows can be cut.

    Raises:
        ValueError: The piece has not all columns of a weight with codes, whose groups of inputs it might split.
    """
    if not piece.cuts:
        return weight
    if isinstance(weight, torch.Tensor):
        return torch.cat([weight[(rows, piece.columns)[: weight.dim()]] for rows in piece.rows])
    found = concatenate([weight.outputs(rows.start, rows.stop) for rows in piece.rows])
    if found is None or found.shape != piece.shape:
        raise ValueError(f"a weight with codes is cut by its outputs, got columns {piece.columns}")
    return found


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
