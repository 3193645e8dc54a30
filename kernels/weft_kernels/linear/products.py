"""Products with a weight, whatever it is stored as: ``PRODUCTS`` says which one a device has for it."""

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from weft_kernels import jit
from weft_kernels.linear import onednn, reference
from weft_kernels.linear.quantized import QuantizedWeight
from weft_kernels.linear.quantizers import GROUP_SIZE, quantize, quantized_bytes

_log = logging.getLogger("weft.kernels")

#: A weight ``[out, in]``: numbers, codes, or where its parts have different codes, the parts one after another.
Matrix: TypeAlias = Tensor | QuantizedWeight | tuple[Tensor | QuantizedWeight, ...]

#: Rows of the products that are measured: of a single stream, of a batch.
_MEASURED_ROWS = (1, 32)
#: Outputs of a weight that is measured, at most: enough for its time to count, few enough to be copied.
_MOST_OUTPUTS = 4096


class Product(Protocol):
    """``x @ weight.T + bias``: ``[T, in]`` to ``[T, out]``, newly allocated, of the type of ``x``.

    Of ``num_experts`` weights it takes more by name, on the device of ``x``: ``starts``, int32 ``[num_experts + 1]``,
    so that expert ``e`` multiplies the rows ``starts[e]`` up to ``starts[e + 1]``; what is outside is undefined in the
    result; and ``rows``, int64 ``[R]``, if these are ``x[rows]``. ``starts`` is not checked.
    """

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply rows; ``x`` is not modified."""


def linear(
    weight: Matrix,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    deterministic: bool = False,
    num_bits: int = 0,
    has_kernels: bool = False,
    num_experts: int = 1,
) -> Product:
    """The fastest product with the weight ``[out, in]`` that its device has; the weight is not needed any more.

    Args:
        weight: Numbers or codes, on the device of the product. Codes for which a CPU has no instructions, or whose
            groups are not of a multiple of 32 inputs, or of 16 with 8 bits, become numbers of ``dtype``, which the log
            says.
        bias: ``[out]``; None for none.
        dtype: Type of rows and results, and of a weight of numbers.
        deterministic: A row's result is bitwise independent of the other rows. So is that of codes in any case.
        num_bits: Bits that a weight of numbers is rounded to, 8 with a scale for each output, or 4 with a scale for
            each 32 inputs of an output, asymmetric; 0: none. On a CPU rows are rounded to 8 bits too.
        has_kernels: On a CPU take Triton's kernels too, in the interpreter.
        num_experts: Weights of one shape that lie one after another in ``weight``; see ``Product``.
    """
    options: dict[str, Any] = {"dtype": dtype, "deterministic": deterministic, "num_bits": num_bits}
    if isinstance(weight, tuple):
        if num_experts > 1:
            return _of_experts(weight, bias, num_experts, has_kernels=has_kernels, **options)
        biases = [None] * len(weight) if bias is None else bias.split([part.shape[0] for part in weight])
        parts = zip(weight, biases, strict=True)
        return _Joined([linear(part, own, has_kernels=has_kernels, **options) for part, own in parts])
    is_rounded = isinstance(weight, Tensor) and num_bits > 0
    is_for_kernels = has_kernels or weight.device.type != "cpu"
    case = _Case(weight, bias, dtype, deterministic, is_rounded, is_for_kernels, num_experts)
    if is_rounded and (case.has_kernels or (num_bits == 4 and weight.shape[1] % GROUP_SIZE == 0)):
        case = replace(case, weight=quantize(weight, num_bits), is_rounded=False)
    elif is_rounded and num_bits == 4:
        _say_once(f"weights of {weight.shape[1]} inputs, no multiple of {GROUP_SIZE}, have 8 bits instead of 4")
    found = next((row for row in PRODUCTS if row.takes(case)), None)
    if found is None:  # a CPU without a product for these codes
        if case.is_rounded:
            case = replace(case, weight=quantize(case.numbers, 8), is_rounded=False)
        case = replace(case, weight=case.codes.dequantize(dtype))
        found = next(row for row in PRODUCTS if row.takes(case))
    if num_experts > 1 and not found.takes_experts:
        return _of_experts(case.weight, bias, num_experts, has_kernels=has_kernels, **options)
    return found.make(case)


def _of_experts(weight: Matrix, bias: Tensor | None, num_experts: int, *, has_kernels: bool, **options: Any) -> Product:
    """A product for each expert, where the device has none for all; on a GPU they become numbers, which it has."""
    parts: Sequence[Tensor | QuantizedWeight] = weight if isinstance(weight, tuple) else _split(weight, num_experts)
    if has_kernels or parts[0].device.type != "cpu":
        _say_once("experts become numbers: their codes differ in layout")
        numbers = [part.dequantize(options["dtype"]) if isinstance(part, QuantizedWeight) else part for part in parts]
        options["num_bits"] = 0
        return linear(torch.cat(numbers), bias, has_kernels=has_kernels, num_experts=num_experts, **options)
    biases = [None] * num_experts if bias is None else bias.chunk(num_experts)
    each = len(parts) // num_experts
    own = [tuple(parts[first : first + each]) for first in range(0, len(parts), each)]
    pairs = zip(own, biases, strict=True)
    return _Apart([linear(one[0] if each == 1 else one, its_bias, **options) for one, its_bias in pairs])


def _split(weight: Tensor | QuantizedWeight, num_experts: int) -> list[Tensor | QuantizedWeight]:
    if isinstance(weight, Tensor):
        return list(weight.chunk(num_experts))
    size = weight.shape[0] // num_experts
    return [weight.outputs(first, first + size) for first in range(0, weight.shape[0], size)]


def matrix_bytes(weight: Matrix, dtype: torch.dtype, num_bits: int = 0) -> int:
    """Bytes that a product with the weight reads, by the arguments of ``linear``; paddings are not counted."""
    if isinstance(weight, tuple):
        return sum(matrix_bytes(part, dtype, num_bits) for part in weight)
    if isinstance(weight, QuantizedWeight):
        return weight.num_bytes
    if not num_bits:
        return int(weight.numel() * dtype.itemsize)
    return quantized_bytes((weight.shape[0], weight.shape[1]), num_bits)


def faster_dtype(dtype: torch.dtype, shape: tuple[int, int]) -> torch.dtype:
    """``dtype``, or float32 where that is faster on this CPU, by products with a weight ``[out, in]`` of the shape.

    Without instructions for 16-bit numbers a CPU converts them. Few and many rows are measured, as decoding and prompts
    have; float32 has to win by 10 % in one of them.
    """
    if dtype == torch.float32:
        return torch.float32
    pairs = [[product_ns(shape, each, num_rows) for each in (dtype, torch.float32)] for num_rows in _MEASURED_ROWS]
    return dtype if all(own_ns <= 1.1 * float_ns for own_ns, float_ns in pairs) else torch.float32


def product_ns(shape: tuple[int, int], dtype: torch.dtype, num_rows: int) -> int:
    """CPU time of one product of ``num_rows`` rows with a weight ``[out, in]``, in nanoseconds; the least of five."""
    return _least_ns(linear(torch.zeros(shape, dtype=dtype)), shape[1], dtype, num_rows)


def has_panels(dtype: torch.dtype) -> bool:
    """Whether this CPU has the kernels of ``panels`` for numbers of the type; ``torch.int8``: for codes."""
    return jit.is_available() and bool(_panels().is_native(dtype))


@dataclass(frozen=True)
class _Case:
    """Arguments of ``linear``; ``is_rounded``: a weight of numbers is to have 8 bits."""

    weight: Tensor | QuantizedWeight
    bias: Tensor | None
    dtype: torch.dtype
    deterministic: bool
    is_rounded: bool
    has_kernels: bool
    num_experts: int

    @property
    def options(self) -> dict[str, Any]:
        """Those of a kernel for a GPU."""
        return {"bias": self.bias, "deterministic": self.deterministic, "num_experts": self.num_experts}

    @property
    def has_codes(self) -> bool:
        return isinstance(self.weight, QuantizedWeight)

    @property
    def codes(self) -> QuantizedWeight:
        assert isinstance(self.weight, QuantizedWeight)  # noqa: S101  # as ``has_codes`` says
        return self.weight

    @property
    def numbers(self) -> Tensor:
        assert isinstance(self.weight, Tensor)  # noqa: S101  # same
        return self.weight


class _Row(NamedTuple):
    """A product: which cases it is for, if those above are not, how it is made, and whether of several experts."""

    takes: Callable[[_Case], bool]
    make: Callable[[_Case], Product]
    takes_experts: bool = False


def _is_in_codes_panels(case: _Case) -> bool:
    """8 bits with a scale for each output, or groups of a multiple of 32 inputs, where this CPU has kernels."""
    if not (case.has_codes or case.is_rounded):
        return False
    if not has_panels(torch.int8):
        if case.has_codes:
            text = "this CPU has none of AVX-512 VNNI, AVX2 and NEON, or numba is not installed"
            _say_once(f"weights of 4 and 8 bits become numbers: {text}")
        return False
    if case.is_rounded or _has_scale_by_output(case.codes) or _panels().is_grouped(case.codes):
        return True
    _say_once(
        f"weights in groups of {case.codes.group_size} become numbers: no multiple of 32 inputs, or of 16 with 8 bits"
    )
    return False


def _has_scale_by_output(codes: QuantizedWeight) -> bool:
    return codes.num_bits == 8 and codes.group_size == codes.shape[1] and codes.permutation is None


def _codes_panels(case: _Case) -> Product:
    is_whole = case.is_rounded or _has_scale_by_output(case.codes)
    kind = _panels().PanelInt8Linear if is_whole else _panels().PanelGroupsLinear
    product: Product = kind(case.weight, case.bias, case.num_experts)
    return product


def _is_in_panels(case: _Case) -> bool:
    """Numbers for which panels are faster; in deterministic mode without measurement, so that it is always the same."""
    if case.has_codes or case.is_rounded:
        return False
    dtype, (num_outputs, num_inputs) = case.numbers.dtype, case.numbers.shape
    if not has_panels(dtype) or (dtype == torch.bfloat16 and num_inputs % 2):
        return False
    is_alone = case.deterministic or case.num_experts > 1 or not onednn.is_native(dtype)
    return is_alone or _are_panels_faster(dtype, (min(num_outputs, _MOST_OUTPUTS), num_inputs))


def _on_gpu(case: _Case) -> Product:
    if case.has_codes:
        from weft_kernels.linear import lowbit_triton_kernel  # noqa: PLC0415  # needs triton

        return partial(lowbit_triton_kernel.linear, weight=case.codes, **case.options)
    from weft_kernels.linear import triton_kernel  # noqa: PLC0415  # needs triton

    weight = case.numbers.contiguous()
    return partial(triton_kernel.linear, weight=weight, **case.options)


def _in_rows(case: _Case) -> Product:
    weight = case.numbers.contiguous()
    return partial(reference.linear, weight=weight, bias=case.bias, deterministic=case.deterministic)


#: The first that takes a weight is its product; codes that none takes become numbers.
PRODUCTS = (
    _Row(lambda case: case.has_kernels, _on_gpu, takes_experts=True),
    _Row(_is_in_codes_panels, _codes_panels, takes_experts=True),
    _Row(
        lambda case: case.is_rounded and onednn.is_native(torch.float32),
        lambda case: onednn.Int8Linear(case.numbers, case.bias),
    ),
    _Row(
        _is_in_panels,
        lambda case: _panels().PanelLinear(case.numbers, case.bias, case.num_experts),
        takes_experts=True,
    ),
    _Row(
        lambda case: not (case.has_codes or case.is_rounded) and onednn.is_native(case.numbers.dtype),
        lambda case: onednn.PackedLinear(case.numbers, case.bias, deterministic=case.deterministic),
    ),
    _Row(lambda case: not (case.has_codes or case.is_rounded), _in_rows),
)


class _Joined:
    """Products of one input with several weights, side by side."""

    def __init__(self, products: list[Product]) -> None:
        self._products = products

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([multiply(x) for multiply in self._products], 1)


class _Apart:
    """Products of rows sorted by expert, each with its own weight."""

    def __init__(self, products: list[Product]) -> None:
        self._products = products

    def __call__(self, x: Tensor, starts: Tensor | None = None, rows: Tensor | None = None) -> Tensor:
        x = x if rows is None else x.index_select(0, rows)
        edges = [0, len(x)] if starts is None else starts.tolist()
        pairs = zip(self._products, itertools.pairwise(edges), strict=True)
        own = [multiply(x[first:end]) for multiply, (first, end) in pairs if first < end]
        found = torch.cat(own) if own else self._products[0](x[:0])
        outside = edges[0], len(x) - edges[-1]
        return torch.nn.functional.pad(found, (0, 0, *outside)) if any(outside) else found


def _panels() -> Any:
    from weft_kernels.linear import panels  # noqa: PLC0415  # needs numba

    return panels


@cache
def _say_once(message: str) -> None:
    _log.info(message)


@cache
def _are_panels_faster(dtype: torch.dtype, shape: tuple[int, int]) -> bool:
    weight = torch.zeros(shape, dtype=dtype)
    products: tuple[Product, ...] = (_panels().PanelLinear(weight), onednn.PackedLinear(weight))
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


def _least_ns(product: Product, num_inputs: int, dtype: torch.dtype, num_rows: int) -> int:
    rows = torch.zeros(num_rows, num_inputs, dtype=dtype)
    product(rows)
    times_ns = []
    for _ in range(5):
        start_ns = time.thread_time_ns()
        product(rows)
        times_ns.append(time.thread_time_ns() - start_ns)
    return min(times_ns)
