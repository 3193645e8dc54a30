"""Weights of a few bits in one packed layout, whatever format they come from.

K is the input axis of a product and N its output axis, as in ``x[T, K] @ weight[N, K].T``. Codes lie ``[K, N]``, so
that neighbouring outputs are neighbouring bytes, as their scales are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from weft_kernels.linear import reference

#: Bits of a code that a layout exists for.
NUM_BITS = (4, 8)
#: Elements that are dequantised at once: what the numbers take beside the result.
_NUM_AT_ONCE = 2**22


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A weight ``[N, K]`` as codes of 4 or 8 bits, with a scale for each group of inputs of each output.

    An element is ``(code - zero) * scale``, or ``lookup[code] * scale`` where there is a table. Group ``i`` has the
    rows ``i * group_size`` up to ``(i + 1) * group_size`` of the codes.

    Attributes:
        codes: uint8. 8 bits: ``[K, N]``. 4 bits: ``[K / 2, N]``, row ``i`` has input ``2 i`` in the low half of each
            byte and input ``2 i + 1`` in the high half.
        scales: float32 or float16 ``[K / group_size, N]``. May be negative or 0.
        group_size: Inputs that share a scale; divides K. K: a scale for each output.
        shape: ``(N, K)``.
        num_bits: 4 or 8.
        zeros: In units of codes, not always whole numbers, shape and dtype of ``scales``. None: ``2 ** (num_bits - 1)``
            everywhere, or a table.
        lookup: float32 ``[16]``: the value of each code, for 4 bits alone. None: codes are linear.
        permutation: int64 ``[K]``: the input that each row of the codes stands for, so that
            ``x[:, permutation] @ codes`` is the product. None: in order.

    Raises:
        ValueError: A tensor has another shape or type, or sizes do not divide one another.
    """

    codes: Tensor
    scales: Tensor
    group_size: int
    shape: tuple[int, int]
    num_bits: int
    zeros: Tensor | None = None
    lookup: Tensor | None = None
    permutation: Tensor | None = None

    def __post_init__(self) -> None:
        num_outputs, num_inputs = self.shape
        if self.num_bits not in NUM_BITS:
            raise ValueError(f"num_bits must be one of {NUM_BITS}, got {self.num_bits}")
        if self.group_size < 1 or num_inputs % self.group_size:
            raise ValueError(f"group_size must divide the {num_inputs} inputs, got {self.group_size}")
        if self.num_bits == 4 and self.group_size % 2:
            raise ValueError(f"4-bit codes need groups of even size, got {self.group_size}")
        rows, groups = num_inputs * self.num_bits // 8, num_inputs // self.group_size
        _check("codes", self.codes, (rows, num_outputs), (torch.uint8,))
        _check("scales", self.scales, (groups, num_outputs), (torch.float32, torch.float16))
        if self.zeros is not None:
            _check("zeros", self.zeros, (groups, num_outputs), (self.scales.dtype,))
        if self.lookup is not None:
            if self.num_bits != 4 or self.zeros is not None:
                raise ValueError(f"a table is for 4 bits without zeros, got {self.num_bits} bits")
            _check("lookup", self.lookup, (16,), (torch.float32,))
        if self.permutation is not None:
            _check("permutation", self.permutation, (num_inputs,), (torch.int64,))

    @property
    def num_bytes(self) -> int:
        """Memory of all its tensors."""
        tensors = (self.codes, self.scales, self.zeros, self.lookup, self.permutation)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @property
    def device(self) -> torch.device:
        """Device of its tensors."""
        return self.codes.device

    def to(self, device: torch.device | str) -> Self:
        """A copy on the device; itself where it is there already."""
        if self.codes.device == torch.device(device):
            return self
        moved = {
            name: tensor if tensor is None else tensor.to(device)
            for name, tensor in (
                ("codes", self.codes),
                ("scales", self.scales),
                ("zeros", self.zeros),
                ("lookup", self.lookup),
                ("permutation", self.permutation),
            )
        }
        return replace(self, **moved)  # type: ignore[arg-type]

    def outputs(self, first: int, end: int) -> Self:
        """The weight of the outputs ``first`` up to ``end``."""
        scales, zeros = (
            None if each is None else each[:, first:end].contiguous() for each in (self.scales, self.zeros)
        )
        codes, shape = self.codes[:, first:end].contiguous(), (end - first, self.shape[1])
        return replace(self, codes=codes, scales=scales, zeros=zeros, shape=shape)

    def unpacked(self) -> Tensor:
        """The codes one per byte, uint8 ``[K, N]``, in the order of the rows; the codes themselves where that is so."""
        return _unpacked(self.codes, self.num_bits)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight as numbers, ``[N, K]``, contiguous, computed in float32 and rounded to ``dtype``."""
        result = torch.empty(self.shape, dtype=dtype, device=self.device)
        num_outputs, num_inputs = self.shape
        at_once = max(1, _NUM_AT_ONCE // (num_outputs * self.group_size))
        for first in range(0, num_inputs // self.group_size, at_once):
            values = self._numbers(first, first + at_once)
            rows = slice(first * self.group_size, first * self.group_size + values.shape[0])
            result.t()[rows if self.permutation is None else self.permutation[rows]] = values.to(dtype)
        return result

    def _numbers(self, first: int, end: int) -> Tensor:
        """The numbers of groups ``first`` to ``end``, float32 ``[K', N]``."""
        num_outputs, codes_per_byte = self.shape[0], 8 // self.num_bits
        packed = self.codes[first * self.group_size // codes_per_byte : end * self.group_size // codes_per_byte]
        codes = _unpacked(packed, self.num_bits)
        if self.lookup is not None:
            values = self.lookup[codes.int()].view(-1, self.group_size, num_outputs)
        else:
            zeros = 2 ** (self.num_bits - 1) if self.zeros is None else self.zeros[first:end].float().unsqueeze(1)
            values = codes.float().view(-1, self.group_size, num_outputs).sub_(zeros)
        return values.mul_(self.scales[first:end].float().unsqueeze(1)).view(-1, num_outputs)


def pack(codes: Tensor, num_bits: int) -> Tensor:
    """``QuantizedWeight.codes`` of codes one per element, ``[K, N]`` of any integer type, below ``2 ** num_bits``."""
    narrow = codes.to(torch.uint8)
    return (narrow[::2] | narrow[1::2] << 4).contiguous() if num_bits == 4 else narrow.contiguous()


def concatenate(weights: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """The weights of one input as one, outputs one after another; None where their layouts differ.

    They have to agree in bits, group size, table and permutation. Of one with zeros and one without, the result has
    zeros.

    Args:
        weights: At least one, on one device, with the same number of inputs. Not modified.
    """
    first = weights[0]
    if len(weights) == 1:
        return first
    if not all(_is_alike(first, other) for other in weights[1:]):
        return None
    scales = torch.cat([weight.scales.float() for weight in weights], 1)
    if all(weight.scales.dtype == first.scales.dtype for weight in weights):
        scales = scales.to(first.scales.dtype)
    zeros = None
    if any(weight.zeros is not None for weight in weights):
        center = 2 ** (first.num_bits - 1)
        zeros = torch.cat(
            [
                torch.full_like(weight.scales, center, dtype=scales.dtype)
                if weight.zeros is None
                else weight.zeros.to(scales.dtype)
                for weight in weights
            ],
            1,
        )
    return replace(
        first,
        codes=torch.cat([weight.codes for weight in weights], 1),
        scales=scales,
        zeros=zeros,
        shape=(sum(weight.shape[0] for weight in weights), first.shape[1]),
    )


def linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None, *, deterministic: bool = False) -> Tensor:
    """``x @ weight.T + bias`` by way of the dequantised weight: what every faster product is compared with.

    Args:
        x: Rows, shape ``[T, K]``, floating point, on the device of the weight. Not modified.
        weight: Shape ``(N, K)``.
        bias: Shape ``[N]``; None for none.
        deterministic: A row's result is bitwise independent of the batch.

    Returns:
        Shape ``[T, N]``, dtype of ``x``, newly allocated.
    """
    return reference.linear(x, weight.dequantize(x.dtype), bias, deterministic=deterministic)


def _unpacked(codes: Tensor, num_bits: int) -> Tensor:
    return codes if num_bits == 8 else torch.stack((codes & 15, codes >> 4), 1).flatten(0, 1)


def _is_alike(first: QuantizedWeight, other: QuantizedWeight) -> bool:
    return (
        (first.num_bits, first.group_size, first.shape[1]) == (other.num_bits, other.group_size, other.shape[1])
        and _is_equal(first.lookup, other.lookup)
        and _is_equal(first.permutation, other.permutation)
    )


def _is_equal(first: Tensor | None, other: Tensor | None) -> bool:
    return first is other or (first is not None and other is not None and torch.equal(first, other))


def _check(name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
        raise ValueError(
            f"{name} must have shape {list(shape)} and type {' or '.join(map(str, dtypes))}, got "
            f"{list(tensor.shape)} of {tensor.dtype}"
        )
