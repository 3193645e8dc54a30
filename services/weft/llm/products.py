"""Matrix products of a model: the fastest that the device has for a weight, whatever it is stored as."""

from functools import partial
from typing import Any, TypeAlias

import torch

from weft.llm import ops
from weft_kernels.linear import cpu
from weft_kernels.linear.quantized import QuantizedWeight
from weft_kernels.linear.quantizers import quantize, quantized_bytes

#: A weight ``[out, in]``: numbers, codes, or where its parts have different codes, the parts one after another.
Matrix: TypeAlias = torch.Tensor | QuantizedWeight | tuple[torch.Tensor | QuantizedWeight, ...]


def linear(
    weight: Matrix,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    deterministic: bool = False,
    num_bits: int = 0,
) -> ops.Linear:
    """The fastest product with the weight ``[out, in]`` that its device has; it need not keep the weight itself.

    Args:
        weight: On the device of the product. Codes without a product of their own become numbers.
        bias: ``[out]``; None for none.
        dtype: Type of rows and results, which a weight of numbers has.
        deterministic: A row's result is bitwise independent of the other rows.
        num_bits: 8 or 4: a weight of numbers is rounded to so many bits. 0: it is not.
    """
    if isinstance(weight, tuple):
        sizes = [part.shape[0] for part in weight]
        biases = [None] * len(weight) if bias is None else bias.split(sizes)
        options: dict[str, Any] = {"dtype": dtype, "deterministic": deterministic, "num_bits": num_bits}
        return _Joined([linear(part, own, **options) for part, own in zip(weight, biases, strict=True)])
    if not ops.ARE_KERNELS_FORCED and weight.device.type == "cpu":
        return cpu.linear(weight, bias, dtype=dtype, deterministic=deterministic, num_bits=num_bits)
    if isinstance(weight, torch.Tensor) and num_bits:
        weight = quantize(weight, num_bits)
    if isinstance(weight, QuantizedWeight):
        from weft_kernels.linear import lowbit_triton_kernel  # noqa: PLC0415  # needs triton

        return partial(lowbit_triton_kernel.linear, weight=weight, bias=bias, deterministic=deterministic)
    from weft_kernels.linear import triton_kernel  # noqa: PLC0415  # needs triton

    return partial(triton_kernel.linear, weight=weight.contiguous(), bias=bias, deterministic=deterministic)


def matrix_bytes(weight: Matrix, dtype: torch.dtype, num_bits: int = 0) -> int:
    """Bytes that a product with the weight reads, by the arguments of ``linear``; paddings are not counted."""
    if isinstance(weight, tuple):
        return sum(matrix_bytes(part, dtype, num_bits) for part in weight)
    if isinstance(weight, QuantizedWeight):
        return weight.num_bytes
    if not num_bits:
        return int(weight.numel() * dtype.itemsize)
    return quantized_bytes((weight.shape[0], weight.shape[1]), num_bits)


class _Joined:
    """Products of one input with several weights, side by side."""

    def __init__(self, products: list[ops.Linear]) -> None:
        self._products = products

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([multiply(x) for multiply in self._products], 1)


def faster_dtype(dtype: torch.dtype, shape: tuple[int, int]) -> torch.dtype:
    """``dtype``, or float32 where that is faster on this CPU, by products with a weight ``[out, in]`` of the shape.

    Without instructions for 16-bit numbers a CPU converts them. Few and many rows are measured, as decoding and prompts
    have; float32 has to win by 10 % in one of them.
    """
    if dtype == torch.float32:
        return torch.float32
    pairs = [[cpu.product_ns(shape, each, num_rows) for each in (dtype, torch.float32)] for num_rows in (1, 32)]
    return dtype if all(own_ns <= 1.1 * float_ns for own_ns, float_ns in pairs) else torch.float32
