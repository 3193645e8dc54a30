"""Products with a weight on a CPU: which of those that this CPU has is taken, by measurement where it is a choice."""

import logging
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Protocol

import torch
from torch import Tensor

from weft_kernels import jit
from weft_kernels.linear import onednn, reference
from weft_kernels.linear.quantized import QuantizedWeight
from weft_kernels.linear.quantizers import quantize_linear

_log = logging.getLogger("weft.kernels")

#: Rows of the products that are measured: of a single stream, of a batch.
_MEASURED_ROWS = (1, 32)
#: Outputs of a weight that is measured, at most: enough for its time to count, few enough to be copied.
_MOST_OUTPUTS = 4096
_GROUP_SIZE = 32


class Product(Protocol):
    """``x @ weight.T + bias``: ``[T, in]`` to ``[T, out]``, newly allocated, of the type of ``x``."""

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply rows; ``x`` is not modified."""


def linear(
    weight: Tensor | QuantizedWeight,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    deterministic: bool = False,
    num_bits: int = 0,
) -> Product:
    """The fastest product with the weight ``[out, in]`` that this CPU has; the weight is not needed any more.

    Args:
        weight: Numbers, or codes. Codes for which there are no instructions, or whose groups are not of a multiple of
            32 inputs, become numbers of ``dtype``, and the log says so.
        bias: ``[out]``; None for none.
        dtype: Type of rows and results, and of a weight of numbers.
        deterministic: A row's result is bitwise independent of the other rows. So is that of codes in any case.
        num_bits: Bits that a weight of numbers is rounded to, 8 with a scale for each output, or 4 with a scale for
            each 32 inputs of an output, asymmetric; 0: none.
    """
    if isinstance(weight, Tensor) and num_bits:
        return _rounded(weight, bias, num_bits)
    if isinstance(weight, QuantizedWeight):
        product = _of_codes(weight, bias)
        if product is not None:
            return product
        weight = weight.dequantize(dtype)
    if _is_in_panels(weight.dtype, (weight.shape[0], weight.shape[1]), deterministic):
        from weft_kernels.linear.panels import PanelLinear  # noqa: PLC0415  # needs numba

        return PanelLinear(weight, bias)
    if onednn.is_native(weight.dtype):
        return onednn.PackedLinear(weight, bias, deterministic=deterministic)
    return partial(reference.linear, weight=weight.contiguous(), bias=bias, deterministic=deterministic)


def product_ns(shape: tuple[int, int], dtype: torch.dtype, num_rows: int) -> int:
    """CPU time of one product of ``num_rows`` rows with a weight ``[out, in]``, in nanoseconds; the least of five."""
    return _least_ns(linear(torch.zeros(shape, dtype=dtype)), shape[1], dtype, num_rows)


def has_panels(dtype: torch.dtype) -> bool:
    """Whether this CPU has the kernels of ``panels`` for numbers of the type; ``torch.int8``: for codes."""
    if not jit.is_available():
        return False
    from weft_kernels.linear import panels  # noqa: PLC0415  # needs numba

    return panels.is_native(dtype)


def _rounded(weight: Tensor, bias: Tensor | None, num_bits: int) -> Product:
    if num_bits == 8:
        if not has_panels(torch.int8):
            if not onednn.is_native(torch.float32):  # this torch has no oneDNN
                return linear(quantize_linear(weight, 8), bias, dtype=weight.dtype)
            return onednn.Int8Linear(weight, bias)
        from weft_kernels.linear.panels import PanelInt8Linear  # noqa: PLC0415  # needs numba

        return PanelInt8Linear(weight, bias)
    if weight.shape[1] % _GROUP_SIZE:
        _say_once(f"weights of {weight.shape[1]} inputs, no multiple of {_GROUP_SIZE}, have 8 bits instead of 4")
        return _rounded(weight, bias, 8)
    codes = quantize_linear(weight, num_bits, _GROUP_SIZE, is_symmetric=False, scales_dtype=torch.float16)
    return linear(codes, bias, dtype=weight.dtype)


def _of_codes(weight: QuantizedWeight, bias: Tensor | None) -> Product | None:
    """A product with the codes as they are, or None."""
    if not has_panels(torch.int8):
        _say_once("weights of 4 and 8 bits become numbers: this CPU has no AVX-512 VNNI, or numba is not installed")
        return None
    from weft_kernels.linear import panels  # noqa: PLC0415  # needs numba

    if weight.num_bits == 8 and weight.group_size == weight.shape[1] and weight.permutation is None:
        return panels.PanelInt8Linear(weight, bias)
    if panels.is_grouped(weight):
        return panels.PanelGroupsLinear(weight, bias)
    _say_once(f"weights in groups of {weight.group_size} become numbers: no multiple of 32 inputs")
    return None


@cache
def _say_once(message: str) -> None:
    _log.info(message)


def _is_in_panels(dtype: torch.dtype, shape: tuple[int, int], deterministic: bool) -> bool:
    """Whether a weight of numbers goes in panels.

    In deterministic mode no measurement decides, so that results are bitwise the same from one process to the next.
    """
    if not has_panels(dtype) or (dtype == torch.bfloat16 and shape[1] % 2):
        return False
    return (
        deterministic
        or not onednn.is_native(dtype)
        or _are_panels_faster(dtype, (min(shape[0], _MOST_OUTPUTS), shape[1]))
    )


@cache
def _are_panels_faster(dtype: torch.dtype, shape: tuple[int, int]) -> bool:
    from weft_kernels.linear.panels import PanelLinear  # noqa: PLC0415  # needs numba

    weight = torch.zeros(shape, dtype=dtype)
    products: tuple[Callable[[Tensor], Tensor], ...] = (PanelLinear(weight), onednn.PackedLinear(weight))
    times_ns = [[_least_ns(product, shape[1], dtype, rows) for rows in _MEASURED_ROWS] for product in products]
    shares: list[float] = [own / other for own, other in zip(*times_ns, strict=True)]
    is_faster = sum(shares) <= len(shares)
    _log.info(
        "products with %s weights of %d inputs are those of %s: with %s rows its time is %s of that of the other",
        str(dtype).removeprefix("torch."),
        shape[1],
        "panels" if is_faster else "oneDNN",
        " and ".join(map(str, _MEASURED_ROWS)),
        " and ".join(f"{share if is_faster else 1 / share:.2f}" for share in shares),
    )
    return is_faster


def _least_ns(product: Callable[[Tensor], Tensor], num_inputs: int, dtype: torch.dtype, num_rows: int) -> int:
    rows = torch.zeros(num_rows, num_inputs, dtype=dtype)
    product(rows)
    times_ns = []
    for _ in range(5):
        start_ns = time.thread_time_ns()
        product(rows)
        times_ns.append(time.thread_time_ns() - start_ns)
    return min(times_ns)
