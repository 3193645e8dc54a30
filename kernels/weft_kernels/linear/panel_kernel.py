"""Loops of products of rows with panels of outputs on one thread, compiled for this CPU; see ``panels``."""

from typing import Any

import numpy as np

from weft_kernels.jit import jit_with
from weft_kernels.linear.panel_instructions import (
    HAS_SHORT_ROWS,
    MOST_CODE_ROWS,
    MOST_ROWS,
    MOST_WIDENED_ROWS,
    PANEL,
    SOURCES,
    WIDENS_ROWS,
    add_column,
    groups_product,
    store_row,
    widen,
    words_product,
)

#: Steps of a panel, and groups, that are multiplied with all rows before the next ones: with large vectors their
#: 80 to 128 KiB stay in the second-level cache, into which the next ones are fetched meanwhile, else 16 in the first.
_PART_STEPS, _PART_GROUPS = (512, 64) if PANEL == 64 else (128, 24)
#: Steps of 8-bit codes that are widened for all rows at once, to stay in the first-level cache; from how many rows on.
_WIDE_STEPS, _LEAST_WIDE_ROWS = 32, 4
#: Rows whose sums stay in the first-level cache.
_MOST_SUMS = 96
#: How far a single block of rows fetches ahead: more than the CPU does by itself.
_AHEAD_BYTES = 2048
_STEP_BYTES = PANEL * 4
_MAGIC = np.float32(1.5 * 2**23)  # added to a number, leaves it rounded to the nearest whole one, in the low bits
_LARGEST_BITS = np.int32(0x7F7FFFFF)  # of a finite number
_OUTLIER_BITS = np.int32(2 << 23)  # numbers above a quarter of the largest, by their exponents
_LEAST = np.float32(1e-30)  # a row below it counts as zeros: the inverse of its scale would not be finite


@jit_with(*SOURCES)
def quantize(x: Any, group: int, codes: Any, factors: Any, outliers: Any, places: Any) -> None:
    """Round the numbers of each group of a row to the nearest multiples of its largest magnitude by 127.

    Where few numbers of a row are far larger than the others, these are left out, so that the others keep their digits.

    Args:
        x: Rows, ``[T, K]``, float32, or bfloat16 as uint16. Not modified.
        group: Inputs of a group, the last one of which may be cut off.
        codes: int8 ``[T, groups * group]``. Written; 0 from K on.
        factors: float32 ``[T, groups, 2]``: the scale of each group and the sum of its rounded numbers and outliers.
            Written. Not a number if one of the group is not, or infinite.
        outliers: float32 ``[T, M]``: the numbers that were left out; M is the most, 0 where there are several groups.
            Written.
        places: int32 ``[T, M]``: their places, -1 after the last. Written.
    """
    num_rows, num_inputs = x.shape
    numbers = np.empty(group, np.float32)
    bits = numbers.view(np.int32)
    peak_bits = np.empty(1, np.int32)
    peak = peak_bits.view(np.float32)
    for row in range(num_rows):
        for place in range(factors.shape[1]):
            first = place * group
            size = min(group, num_inputs - first)
            if x.itemsize == 4:
                for at in range(size):
                    numbers[at] = x[row, first + at]
            else:
                for at in range(size):
                    bits[at] = np.int32(x[row, first + at]) << np.int32(16)
            largest = np.int32(0)
            for at in range(size):
                largest = max(largest, bits[at] & np.int32(0x7FFFFFFF))  # ordered like magnitudes, and NaN above all
            peak_bits[0] = largest
            outlier_sum, num_outliers = np.float32(0), 0
            while num_outliers < outliers.shape[1] and 0 < largest <= _LARGEST_BITS:
                limit = peak_bits[0] - _OUTLIER_BITS
                count = 0
                for at in range(size):
                    count += (bits[at] & np.int32(0x7FFFFFFF)) > limit
                if count > outliers.shape[1] - num_outliers:
                    break
                largest = np.int32(0)
                for at in range(size):
                    if (bits[at] & np.int32(0x7FFFFFFF)) > limit:
                        outliers[row, num_outliers], places[row, num_outliers] = numbers[at], at
                        outlier_sum += numbers[at]
                        numbers[at] = 0
                        num_outliers += 1
                    largest = max(largest, bits[at] & np.int32(0x7FFFFFFF))
                peak_bits[0] = largest
            if num_outliers < outliers.shape[1]:
                places[row, num_outliers] = -1
            magnitude = max(peak[0], _LEAST) if largest <= _LARGEST_BITS else np.float32(np.nan)
            factor = np.float32(127) / magnitude
            for at in range(size):
                numbers[at] = numbers[at] * factor + _MAGIC
            total = np.int32(0)
            for at in range(size):
                code = np.int8(bits[at])
                codes[row, first + at] = code
                total += np.int32(code)
            for at in range(size, group):
                codes[row, first + at] = 0
            scale = magnitude * np.float32(1 / 127)
            factors[row, place, 0] = scale
            factors[row, place, 1] = np.float32(total) * scale + outlier_sum


@jit_with(*SOURCES)
def multiply_words(
    like: Any, x: int, x_stride: int, starts: Any, num_steps: int, panels: Any, first: int, last: int, bias: Any,
    out: int, num_outputs: int,
) -> None:  # fmt: skip
    """``x @ weight.T + bias`` for the outputs of the panels ``first`` to ``last`` of each expert.

    Args:
        like: An array of the type of the weight and of ``out``: float32, or uint16 for bfloat16.
        x: Address of the rows, of 4 * ``num_steps`` bytes; twice as many where rows of bfloat16 are float32.
        x_stride: Bytes from a row to the next.
        starts: First row of each expert, which has the rows up to that of the next, and T, ``[experts + 1]``.
        num_steps: Words of an output.
        panels: uint8, each of ``num_steps`` times ``PANEL`` words, one expert after another.
        first: First panel.
        last: The one after the last.
        bias: float32 ``[panels, PANEL]``, as the panels.
        out: Address of ``[T, N]``, contiguous. Written.
        num_outputs: N, of an expert.
    """
    sums = np.empty((_MOST_SUMS, PANEL), np.float32)
    is_widened = WIDENS_ROWS and like.itemsize == 2
    row_bytes, most_rows = (8, MOST_WIDENED_ROWS) if is_widened else (4, MOST_ROWS)
    num_panels = -(-num_outputs // PANEL)
    for expert in range(starts.shape[0] - 1):
        for start in range(starts[expert], starts[expert + 1], _MOST_SUMS):
            num_rows = min(_MOST_SUMS, starts[expert + 1] - start)
            for panel in range(first, last):
                index = expert * num_panels + panel
                sums[:num_rows] = 0
                place = panels.ctypes.data + index * num_steps * _STEP_BYTES
                _add_panel(
                    like, row_bytes, most_rows, x + start * x_stride, x_stride, num_rows, num_steps, place, 0, sums
                )
                _store_rows(like, out, start, num_rows, panel, num_outputs, sums, bias[index])


@jit_with(*SOURCES)
def multiply_codes(
    codes: Any, factors: Any, outliers: Any, places: Any, starts: Any, panels: Any, first: int, last: int,
    weight_scales: Any, weight_zeros: Any, bias: Any, like: Any, out: int, num_outputs: int,
) -> None:  # fmt: skip
    """As ``multiply_words`` with rows of ``quantize`` and 8-bit weights with one scale for each output.

    Args:
        codes: int8 ``[T, K]``, K a multiple of 4.
        factors: float32 ``[T, 1, 2]``.
        outliers: float32 ``[T, M]``: numbers that the codes lack.
        places: int32 ``[T, M]``: their columns, -1 after the last.
        starts: As of ``multiply_words``.
        panels: uint8, each of ``K`` times ``PANEL`` bytes.
        first: First panel.
        last: The one after the last.
        weight_scales: float32 ``[panels, PANEL]``.
        weight_zeros: What a code of a weight is less, float32 ``[panels, PANEL]``.
        bias: float32 ``[panels, PANEL]``.
        like: An array of the type of ``out``.
        out: Address of ``[T, N]``, contiguous. Written.
        num_outputs: N.
    """
    num_steps = codes.shape[1] // 4
    sums = np.empty((_MOST_SUMS, PANEL), np.int32)
    numbers = sums.view(np.float32)
    apart = np.empty(PANEL, np.float32)
    widened = np.empty((2 * _WIDE_STEPS if HAS_SHORT_ROWS else 0, PANEL), np.int32)
    x, x_stride = codes.ctypes.data, codes.strides[0]
    num_panels = -(-num_outputs // PANEL)
    for expert in range(starts.shape[0] - 1):
        for start in range(starts[expert], starts[expert + 1], _MOST_SUMS):
            num_rows = min(_MOST_SUMS, starts[expert + 1] - start)
            for panel in range(first, last):
                index = expert * num_panels + panel
                sums[:num_rows] = 0
                place = panels.ctypes.data + index * num_steps * _STEP_BYTES
                _add_codes(codes, x + start * x_stride, x_stride, num_rows, num_steps, place, widened, sums)
                for row in range(num_rows):
                    scale, total = factors[start + row, 0, 0], factors[start + row, 0, 1]
                    apart[:] = 0
                    for each in range(outliers.shape[1]):
                        column = places[start + row, each]
                        if column < 0:
                            break
                        word = place + column // 4 * _STEP_BYTES
                        add_column(word, column % 4 * 8, outliers[start + row, each], apart.ctypes.data)
                    for at in range(PANEL):
                        product = np.float32(sums[row, at]) * scale + apart[at] - weight_zeros[index, at] * total
                        numbers[row, at] = product * weight_scales[index, at]
                _store_rows(like, out, start, num_rows, panel, num_outputs, sums, bias[index])


@jit_with(*SOURCES)
def multiply_groups(
    codes: Any, factors: Any, starts: Any, panels: Any, first: int, last: int, panel_bytes: int, table: Any,
    bias: Any, like: Any, out: int, num_outputs: int,
) -> None:  # fmt: skip
    """As ``multiply_codes`` with a scale for each group of 32 or 16 inputs of each output.

    Args:
        codes: int8 ``[T, K]``.
        factors: float32 ``[T, groups, 2]``.
        starts: As of ``multiply_words``.
        panels: uint8, each of ``panel_bytes``.
        first: First panel.
        last: The one after the last.
        panel_bytes: Those of its groups.
        table: uint8; as for ``groups_product``.
        bias: float32 ``[panels, PANEL]``.
        like: An array of the type of ``out``.
        out: Address of ``[T, N]``, contiguous. Written.
        num_outputs: N.
    """
    num_groups = factors.shape[1]
    size = codes.shape[1] // num_groups
    group_bytes = panel_bytes // num_groups
    sums = np.empty((_MOST_SUMS, PANEL), np.float32)
    x_stride, factors_stride = codes.strides[0], factors.strides[0]
    num_panels = -(-num_outputs // PANEL)
    for expert in range(starts.shape[0] - 1):
        for start in range(starts[expert], starts[expert + 1], _MOST_SUMS):
            num_rows = min(_MOST_SUMS, starts[expert + 1] - start)
            x, own = codes.ctypes.data + start * x_stride, factors.ctypes.data + start * factors_stride
            num_blocks = -(-num_rows // MOST_CODE_ROWS)
            for panel in range(first, last):
                index = expert * num_panels + panel
                sums[:num_rows] = 0
                for at in range(0, num_groups, _PART_GROUPS):
                    here = panels.ctypes.data + index * panel_bytes + at * group_bytes
                    count = min(_PART_GROUPS, num_groups - at)
                    for block in range(num_blocks):
                        row, end = block * num_rows // num_blocks, (block + 1) * num_rows // num_blocks
                        ahead = here + (_AHEAD_BYTES if num_blocks == 1 else count * group_bytes + block % 2 * 128)
                        groups_product(
                            table, end - row, x + row * x_stride + at * size * codes.itemsize, x_stride, here, count,
                            sums.ctypes.data + row * _STEP_BYTES, ahead,
                            own + row * factors_stride + at * 8, factors_stride,
                        )  # fmt: skip
                _store_rows(like, out, start, num_rows, panel, num_outputs, sums, bias[index])


@jit_with(*SOURCES)
def _add_codes(
    like: Any, x: int, x_stride: int, num_rows: int, num_steps: int, panel: int, widened: Any, sums: Any
) -> None:
    """``_add_panel`` of 8-bit codes; those of a panel that several rows take become ``widened`` before."""
    if not HAS_SHORT_ROWS or num_rows < _LEAST_WIDE_ROWS:
        _add_panel(like, 4 * like.itemsize, MOST_CODE_ROWS, x, x_stride, num_rows, num_steps, panel, 0, sums)
        return
    wide = widened.ctypes.data
    for at in range(0, num_steps, _WIDE_STEPS):
        here, count = panel + at * _STEP_BYTES, min(_WIDE_STEPS, num_steps - at)
        following = here + count * _STEP_BYTES
        widen(here, count, wide)
        _add_panel(widened, 4, MOST_CODE_ROWS, x + at * 8, x_stride, num_rows, 2 * count, wide, following, sums)


@jit_with(*SOURCES)
def _store_rows(
    like: Any, out: int, start: int, num_rows: int, panel: int, num_outputs: int, sums: Any, bias: Any
) -> None:
    """Write the sums and the bias of a panel as outputs of the rows from ``start`` on."""
    place = out + (start * num_outputs + panel * PANEL) * like.itemsize
    for row in range(num_rows):
        target, source = place + row * num_outputs * like.itemsize, sums.ctypes.data + row * _STEP_BYTES
        store_row(like, target, source, bias.ctypes.data, num_outputs - panel * PANEL)


@jit_with(*SOURCES)
def _add_panel(
    like: Any, row_bytes: int, most_rows: int, x: int, x_stride: int, num_rows: int, num_steps: int, panel: int,
    following: int, sums: Any,
) -> None:  # fmt: skip
    """Add the products of the rows and a panel, part by part, to ``sums``; fetch the next part, or ``following``."""
    num_blocks = -(-num_rows // most_rows)
    for at in range(0, num_steps, _PART_STEPS):
        here, count = panel + at * _STEP_BYTES, min(_PART_STEPS, num_steps - at)
        for block in range(num_blocks):
            row, end = block * num_rows // num_blocks, (block + 1) * num_rows // num_blocks
            ahead = following or here + (_AHEAD_BYTES if num_blocks == 1 else count * _STEP_BYTES)
            words_product(
                like, end - row, x + row * x_stride + at * row_bytes, x_stride, here, count,
                sums.ctypes.data + row * _STEP_BYTES, ahead + block % 2 * (_STEP_BYTES // 2),
            )  # fmt: skip
