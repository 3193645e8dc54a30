"""Matrix products on CPUs with AVX-512, AVX2 or NEON by kernels of this package: numbers, 8 and 4 bits.

A weight lies in panels of 64 or 32 outputs, in the order in which a product reads it, so that one row takes little more
than reading the memory once. Of a row each output is summed in one order whatever the number of rows: products are
batch-invariant, at no cost.

Milliseconds of CPU time of all products of a step of a Llama of 134 million parameters, one thread of an EPYC 9005
(Zen 5), torch 2.13:

| rows | float32, oneDNN | panels | bfloat16, oneDNN | panels | int8, oneDNN | panels |
|---|---|---|---|---|---|---|
| 1 | 14.0 | 11.2 | 7.5 | 5.9 | 5.0 | 3.1 |
| 8 | 19.6 | 17.0 | 10.4 | 8.7 | 6.5 | 4.8 |
| 32 | 41.7 | 33.3 | 21.6 | 18.0 | 12.5 | 9.7 |

The same of an EPYC 9004 (Zen 4) held to AVX2, 4 bits with an LM head of 8; other work ran beside it (2026-11-27):

| rows | float32 | bfloat16 | int8 | int4 |
|---|---|---|---|---|
| 1 | 15.6 | 9.0 | 5.8 | 4.6 |
| 8 | 24.2 | 20.9 | 15.1 | 16.1 |
| 32 | 73.7 | 72.9 | 50.2 | 48.0 |
| 256 | 556 | 566 | 378 | 364 |

A loop of the instructions with all numbers in registers does 55 to 58 thousand million products a second in float32 and
bfloat16, 88 in int8 and 167 in int4: 256 rows are at 87, 90, 84 and, beside the LM head, 50 % of that.
"""

import itertools
import mmap
import os
from collections.abc import Callable, Sized
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft_kernels.linear import instruction_sets
from weft_kernels.linear import panel_kernel as kernel
from weft_kernels.linear.panel_instructions import (
    CODES_STEP,
    GROUP,
    HAS_SHORT_ROWS,
    HAS_SIGNED_CODES,
    PANEL,
    SMALL_GROUP,
    WIDENS_ROWS,
    bytes_of_group,
)
from weft_kernels.linear.quantized import QuantizedWeight
from weft_kernels.numbers import LIKE

_WORDS = {torch.float32: 1, torch.bfloat16: 2}  # inputs of a word
_HUGE_BYTES = 1 << 21
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
_MOST_OUTLIERS = 8
#: Panels of a thread at least.
_LEAST_PANELS = 512 // PANEL

_Bytes = npt.NDArray[np.uint8]


def is_native(dtype: torch.dtype) -> bool:
    """Whether this CPU has kernels for numbers of the type; ``torch.int8``: for codes of 8 and 4 bits."""
    return instruction_sets.is_native(str(dtype).removeprefix("torch."))


class PanelLinear:
    """``x @ weight.T + bias`` in float32 or bfloat16, which is summed in float32 and rounded once.

    Args:
        weight: Shape ``[out, in]``, on a CPU, of a type that ``is_native``; bfloat16: ``in`` even. Copied.
        bias: Shape ``[out]``; None for none. Copied.
        num_experts: Weights that lie one after another in the one given: rows say which they are multiplied with.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, num_experts: int = 1) -> None:
        self.shape = (weight.shape[0] // num_experts, weight.shape[1])
        inputs = _WORDS[weight.dtype]
        if weight.shape[1] % inputs:
            raise ValueError(f"a weight in {weight.dtype} must have an even number of inputs, got {weight.shape[1]}")
        self._num_steps = weight.shape[1] // inputs
        self._dtype = weight.dtype
        self._bias = _by_panel(bias, self.shape[0], num_experts)
        self._panels = _in_panels(weight, inputs, num_experts)

    def __call__(self, x: Tensor, starts: Tensor | None = None, rows: Tensor | None = None) -> Tensor:
        """Multiply.

        Args:
            x: Rows, shape ``[T, in]``, of the weight's type. Not modified.
            starts, rows: Of several experts; see ``products.Product``.

        Returns:
            Shape ``[T, out]``, or ``[R, out]``, newly allocated. A row is bitwise the same whatever the others are.

        Raises:
            ValueError: ``x`` has another type or number of columns.
        """
        if x.dtype != self._dtype or x.shape[1] != self.shape[1]:
            raise ValueError(f"x must be {self._dtype} [T, {self.shape[1]}], got {x.dtype} {list(x.shape)}")
        if rows is not None:
            x = x.index_select(0, rows)
        if x.stride(1) != 1:
            x = x.contiguous()
        num_rows, num_outputs = x.shape[0], self.shape[0]
        out = x.new_empty(num_rows, num_outputs)
        if WIDENS_ROWS:
            x = x.float()
        like, address, place = LIKE[self._dtype], x.data_ptr(), out.data_ptr()
        stride, firsts = x.stride(0) * x.itemsize, _firsts(x, starts)

        def work(first: int, last: int) -> None:
            kernel.multiply_words(
                like, address, stride, firsts, self._num_steps, self._panels, first, last, self._bias, place,
                num_outputs,
            )  # fmt: skip

        _share(work, num_outputs, firsts)
        return out


class PanelInt8Linear:
    """``x @ weight.T + bias`` with 8-bit weights, one scale for each output, and rows rounded to 8 bits, each alone.

    The relative error of a product of normal numbers is 1.1 % (Frobenius norm). Up to 8 numbers of a row that are more
    than four times as large as all others are multiplied as they are, as in LLM.int8() (Dettmers et al., 2022,
    https://arxiv.org/abs/2208.07339), but for each row by itself.

    Args:
        weight: Shape ``[out, in]``, on a CPU, floating point, or 8-bit codes with a scale for each output. Copied.
        bias: Shape ``[out]``; None for none. Copied.
        num_experts: As of ``PanelLinear``.
    """

    def __init__(self, weight: Tensor | QuantizedWeight, bias: Tensor | None = None, num_experts: int = 1) -> None:
        self.shape = (weight.shape[0] // num_experts, weight.shape[1])
        if isinstance(weight, QuantizedWeight):
            if weight.num_bits != 8 or weight.group_size != self.shape[1] or weight.permutation is not None:
                raise ValueError(
                    f"a weight must have 8-bit codes in order and a scale for each output, got {weight.num_bits} bits "
                    f"in groups of {weight.group_size}"
                )
            codes = weight.codes.t()
            scales = weight.scales[0]
            zeros = torch.full_like(scales, 128.0) if weight.zeros is None else weight.zeros[0]
        else:
            exact = weight.float()
            scales = exact.abs().amax(1).clamp_min_(torch.finfo(torch.float32).tiny) / 127
            codes = (exact / scales.unsqueeze(1)).round_().add_(128).to(torch.uint8)
            zeros = torch.full_like(scales, 128.0)
        if HAS_SIGNED_CODES:
            codes, zeros = codes ^ 128, zeros - 128
        self._scales, self._zeros, self._bias = (
            _by_panel(each, self.shape[0], num_experts) for each in (scales, zeros, bias)
        )
        self._num_columns = -(-self.shape[1] // CODES_STEP) * CODES_STEP
        padded = torch.nn.functional.pad(codes, (0, self._num_columns - self.shape[1]))
        self._panels = _in_panels(padded, 4, num_experts)

    def __call__(self, x: Tensor, starts: Tensor | None = None, rows: Tensor | None = None) -> Tensor:
        """Multiply.

        Args:
            x: Rows, shape ``[T, in]``, floating point. Not modified.
            starts, rows: As of ``PanelLinear``.

        Returns:
            Shape ``[T, out]`` of the type of ``x``, newly allocated. A row is bitwise the same whatever the others are.

        Raises:
            ValueError: ``x`` has another number of columns.
        """
        num_outliers = min(self.shape[1] // 64, _MOST_OUTLIERS)
        codes, factors, outliers, places = _rounded(x, rows, self.shape[1], 1, self._num_columns, num_outliers)
        out, firsts = _out_for(x, len(codes), self.shape[0]), _firsts(codes, starts)
        like, place = LIKE[out.dtype], out.data_ptr()

        def work(first: int, last: int) -> None:
            kernel.multiply_codes(
                codes, factors, outliers, places, firsts, self._panels, first, last, self._scales, self._zeros,
                self._bias, like, place, self.shape[0],
            )  # fmt: skip

        _share(work, self.shape[0], firsts)
        return out.to(x.dtype)


class PanelGroupsLinear:
    """``x @ weight.T + bias`` with codes of 4 or 8 bits in groups, and rows rounded to 8 bits in groups of 32, or 16.

    Scales are rounded to float16. A table's values are rounded to 8 bits: 0.2 % of its largest.

    Args:
        weight: On a CPU, in groups of a multiple of 32 inputs, or of 16 with 8 bits. Copied.
        bias: Shape ``[out]``; None for none. Copied.
        num_experts: As of ``PanelLinear``.
    """

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None = None, num_experts: int = 1) -> None:
        if not is_grouped(weight):
            raise ValueError(f"group_size must be a multiple of {GROUP}, or {SMALL_GROUP}, got {weight.group_size}")
        self.shape = (weight.shape[0] // num_experts, weight.shape[1])
        self._bias = _by_panel(bias, self.shape[0], num_experts)
        self._permutation = weight.permutation
        scales = weight.scales.float()
        zeros = torch.full_like(scales, 2.0 ** (weight.num_bits - 1)) if weight.zeros is None else weight.zeros.float()
        self._group = SMALL_GROUP if weight.group_size % GROUP else GROUP
        num_axes = 2 if weight.num_bits == 4 else 1 if self._group == GROUP else 4
        table: npt.NDArray[np.uint8] = np.empty((0,) * num_axes, np.uint8)
        if weight.lookup is not None:
            largest = float(weight.lookup.abs().max())
            values = (weight.lookup / largest * 127).round().add(128).to(torch.uint8)
            scales, zeros = scales * (largest / 127), torch.full_like(scales, 128.0)
            if HAS_SIGNED_CODES:
                values, zeros = values ^ 128, zeros - 128
            table = values.view(1, 1, 16).numpy()
        elif HAS_SIGNED_CODES and weight.num_bits == 8:
            zeros = zeros - 128
        self._table = table
        self._panel_bytes = self.shape[1] // self._group * bytes_of_group(weight.num_bits, self._group)
        self._panels = _in_grouped_panels(weight, self._group, scales, -zeros * scales, num_experts)

    def __call__(self, x: Tensor, starts: Tensor | None = None, rows: Tensor | None = None) -> Tensor:
        """As ``PanelInt8Linear``."""
        if self._permutation is not None:
            x = x.index_select(1, self._permutation)
        is_short = HAS_SHORT_ROWS and self._table.ndim != 2
        num_groups = self.shape[1] // self._group
        codes, factors, *_ = _rounded(x, rows, self.shape[1], num_groups, self._group, is_short=is_short)
        out, firsts = _out_for(x, len(codes), self.shape[0]), _firsts(codes, starts)
        like, place = LIKE[out.dtype], out.data_ptr()

        def work(first: int, last: int) -> None:
            kernel.multiply_groups(
                codes, factors, firsts, self._panels, first, last, self._panel_bytes, self._table, self._bias, like,
                place, self.shape[0],
            )  # fmt: skip

        _share(work, self.shape[0], firsts)
        return out.to(x.dtype)


def is_grouped(weight: QuantizedWeight) -> bool:
    """Whether ``PanelGroupsLinear`` takes the weight."""
    return weight.group_size % (GROUP if weight.num_bits == 4 else SMALL_GROUP) == 0


def _rounded(
    x: Tensor,
    rows: Tensor | None,
    num_inputs: int,
    num_groups: int,
    group: int,
    num_outliers: int = 0,
    *,
    is_short: bool = HAS_SHORT_ROWS,
) -> tuple[npt.NDArray[np.int8 | np.int16], npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    """Codes, factors and outliers with their places, see ``panel_kernel.quantize``; of ``x[rows]`` if there are."""
    if x.shape[1] != num_inputs:
        raise ValueError(f"x must have shape [T, {num_inputs}], got {list(x.shape)}")
    numbers = _as_array(x)
    codes = np.empty((len(numbers), num_groups * group), np.int16 if is_short else np.int8)
    factors = np.empty((len(numbers), num_groups, 2), np.float32)
    outliers = np.empty((len(numbers), num_outliers), np.float32)
    places = np.empty((len(numbers), num_outliers), np.int32)
    kernel.quantize(numbers, group, codes, factors, outliers, places)
    if rows is None:
        return codes, factors, outliers, places
    order = rows.numpy()
    return codes[order], factors[order], outliers[order], places[order]


def _out_for(x: Tensor, num_rows: int, num_outputs: int) -> Tensor:
    dtype = x.dtype if x.dtype in _WORDS else torch.float32
    return torch.empty(num_rows, num_outputs, dtype=dtype)


def _as_array(x: Tensor) -> npt.NDArray[Any]:
    """Rows as the kernels take them, with contiguous columns; bfloat16 as uint16."""
    if x.dtype not in _WORDS:
        x = x.float()
    if x.stride(1) != 1:
        x = x.contiguous()
    array: npt.NDArray[Any] = x.view(torch.uint16).numpy() if x.dtype == torch.bfloat16 else x.numpy()
    return array


def _firsts(rows: Sized, starts: Tensor | None) -> npt.NDArray[np.int32]:
    """First row of each expert, and the number of rows."""
    return np.array([0, len(rows)], np.int32) if starts is None else starts.numpy()


def _by_panel(x: Tensor | None, num_outputs: int, num_experts: int) -> npt.NDArray[np.float32]:
    """A number for each output, ``[panels, PANEL]``; zeros for None and where there is no output."""
    num_panels = -(-num_outputs // PANEL)
    numbers = np.zeros((num_experts * num_panels, PANEL), np.float32)
    if x is not None:
        numbers.reshape(num_experts, -1)[:, :num_outputs] = x.float().view(num_experts, -1).numpy()
    return numbers


def _outputs_of_panels(num_all_outputs: int, num_experts: int) -> list[range]:
    """Outputs of each panel; those of an expert begin with a panel."""
    num_outputs = num_all_outputs // num_experts
    edges = ((first, first + num_outputs) for first in range(0, num_all_outputs, num_outputs))
    return [range(place, min(place + PANEL, end)) for first, end in edges for place in range(first, end, PANEL)]


def _in_panels(weight: Tensor, inputs: int, num_experts: int) -> _Bytes:
    """``[out, in]`` as ``[panel, word, output, input of the word]``; outputs that are none are zeros."""
    outputs, num_inputs = _outputs_of_panels(weight.shape[0], num_experts), weight.shape[1]
    panels = _memory(len(outputs) * PANEL * num_inputs * weight.element_size())
    view = torch.from_numpy(panels).view(weight.dtype).view(len(outputs), num_inputs // inputs, PANEL, inputs)
    for panel, own in enumerate(outputs):
        rows = weight[own.start : own.stop]
        view[panel, :, : len(rows)] = rows.reshape(len(rows), -1, inputs).transpose(0, 1)
    return panels


def _in_grouped_panels(weight: QuantizedWeight, size: int, scales: Tensor, offsets: Tensor, num_experts: int) -> _Bytes:
    """Panels of groups of so many inputs: codes, scales, offsets."""
    outputs, num_inputs = _outputs_of_panels(weight.shape[0], num_experts), weight.shape[1]
    num_panels, num_groups = len(outputs), num_inputs // size
    group_bytes = bytes_of_group(weight.num_bits, size)
    code_bytes = group_bytes - 4 * PANEL
    panels = _memory(num_panels * num_groups * group_bytes)
    view = torch.from_numpy(panels).view(num_panels, num_groups, group_bytes)
    repeated = weight.group_size // size
    codes = weight.unpacked()
    if HAS_SIGNED_CODES and weight.num_bits == 8:
        codes = codes ^ 128
    for panel, own in enumerate(outputs):
        columns, width = slice(own.start, own.stop), len(own)
        words = torch.zeros(num_groups, size // 4, PANEL, 4, dtype=torch.uint8)
        words[:, :, :width] = codes[:, columns].reshape(num_groups, size // 4, 4, width).transpose(2, 3)
        if weight.num_bits == 4:
            words = words[:, ::2] | words[:, 1::2] << 4
        view[panel, :, :code_bytes] = words.reshape(num_groups, -1)
        for start, numbers in ((code_bytes, scales), (code_bytes + 2 * PANEL, offsets)):
            halves = numbers[:, columns].half().repeat_interleave(repeated, 0).contiguous().view(torch.uint8)
            view[panel, :, start : start + 2 * width] = halves
    return panels


def _memory(num_bytes: int) -> _Bytes:
    """Zeros at the start of a page; large ones in huge pages, where the system has them.

    They are private, since Linux by default makes no huge pages of shared memory, which is what mmap gives unasked:
    products of 1 and 32 rows take 8 to 18 % more without them (float32, 30 to 200 MiB of weights, EPYC 9005).
    """
    memory = mmap.mmap(-1, max(num_bytes, 1), **_PRIVATE)
    if num_bytes >= _HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)[:num_bytes]


def _share(work: Callable[[int, int], None], num_outputs: int, firsts: npt.NDArray[np.int32]) -> None:
    """``work(first, last)`` for all panels of an expert, on as many threads as torch has."""
    num_panels = -(-num_outputs // PANEL)
    num_threads = torch.get_num_threads()
    if num_threads > 1:
        num_used = np.count_nonzero(np.diff(firsts))
        num_threads = min(num_threads, num_panels, num_panels * num_used // _LEAST_PANELS)
    if num_threads <= 1:
        work(0, num_panels)
        return
    edges = [num_panels * thread // num_threads for thread in range(num_threads + 1)]
    others = [_threads(num_threads).submit(work, first, last) for first, last in itertools.pairwise(edges[1:])]
    work(0, edges[1])
    for other in others:
        other.result()


@cache
def _threads(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads - 1, "weft-linear")


if hasattr(os, "register_at_fork"):  # a child has none of its parent's threads
    os.register_at_fork(after_in_child=_threads.cache_clear)
