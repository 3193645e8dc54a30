"""Low-rank adapters on a CPU, compiled with numba; see ``reference``."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from weft_kernels import numbers
from weft_kernels.jit import jit_with
from weft_kernels.numbers import LIKE, at, read, write


def add_lora(
    out: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, ends: Sequence[int], slots: torch.Tensor
) -> None:
    """As ``reference.add_lora``, in float32 or bfloat16; sums are float32."""
    x = x.contiguous()
    _add_lora(
        LIKE[x.dtype], out.data_ptr(), x.data_ptr(), a.data_ptr(), b.data_ptr(), np.array(ends), slots.numpy(),
        *a.shape, *b.shape[1:],
    )  # fmt: skip


@jit_with(numbers)
def _accumulate(like: Any, total: Any, factors: Any, matrix: int, stride: int) -> None:
    """Add ``factors @ matrix`` to ``total``, four rows of the matrix at a time."""
    num_rows, size = len(factors), len(total)
    num_whole = num_rows - num_rows % 4
    for row in range(0, num_whole, 4):
        first = matrix + row * stride * like.itemsize
        row_0, row_1 = at(first, size, like), at(first + stride * like.itemsize, size, like)
        row_2 = at(first + 2 * stride * like.itemsize, size, like)
        row_3 = at(first + 3 * stride * like.itemsize, size, like)
        factor_0, factor_1, factor_2, factor_3 = factors[row], factors[row + 1], factors[row + 2], factors[row + 3]
        for place in range(size):
            total[place] += (factor_0 * read(row_0, place) + factor_1 * read(row_1, place)) + (
                factor_2 * read(row_2, place) + factor_3 * read(row_3, place)
            )
    for row in range(num_whole, num_rows):
        row_0 = at(matrix + row * stride * like.itemsize, size, like)
        for place in range(size):
            total[place] += factors[row] * read(row_0, place)


@jit_with(numbers)
def _add_lora(
    like: Any, out: int, x: int, a: int, b: int, ends: Any, slots: Any,
    num_slots: int, num_inputs: int, width: int, rank: int, num_outputs: int,
) -> None:  # fmt: skip
    row, hidden = np.empty(num_inputs, np.float32), np.empty(width, np.float32)
    sums = np.empty(num_outputs, np.float32)
    for slot in range(num_slots):  # the rows of an adapter one after another, while the caches have its matrices
        for index in range(len(slots)):
            if slots[index] != slot:
                continue
            given = at(x + index * num_inputs * like.itemsize, num_inputs, like)
            for place in range(num_inputs):
                row[place] = read(given, place)
            hidden[:] = 0
            _accumulate(like, hidden, row, a + slot * num_inputs * width * like.itemsize, width)
            sums[:] = 0
            first = 0
            for part in range(len(ends)):
                columns = b + (slot * rank * num_outputs + first) * like.itemsize
                own = hidden[part * rank : (part + 1) * rank]
                _accumulate(like, sums[first : ends[part]], own, columns, num_outputs)
                first = ends[part]
            result = at(out + index * num_outputs * like.itemsize, num_outputs, like)
            for place in range(num_outputs):
                write(result, place, read(result, place) + sums[place])
