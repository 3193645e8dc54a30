"""Root-mean-square normalisation on a CPU, compiled with numba; see ``reference``."""

from typing import Any

import numpy as np
import torch

from weft_kernels import numbers
from weft_kernels.jit import jit_with
from weft_kernels.norm import reference
from weft_kernels.numbers import LIKE, at, read, write

_LANES = 16


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``reference.rms_norm``, in float32 or bfloat16.

    7 us in place of 19 for one row of 768 numbers, for which torch runs ten operations.
    """
    x, weight = x.contiguous(), weight.contiguous()
    if weight.dtype not in LIKE:
        return reference.rms_norm(x, weight, eps, residual)
    out = torch.empty_like(x)
    total, other = x, 0
    if residual is not None:
        residual = residual.contiguous()
        total, other = torch.empty_like(x), residual.data_ptr()
    _rms_norm(
        LIKE[x.dtype], LIKE[weight.dtype], x.data_ptr(), other, total.data_ptr(), weight.data_ptr(), out.data_ptr(),
        *x.shape, float(eps),
    )  # fmt: skip
    return out, total


@jit_with(numbers)
def _rms_norm(
    like: Any, like_gain: Any, x: int, residual: int, total: int, weight: int, out: int,
    num_rows: int, size: int, eps: float,
) -> None:  # fmt: skip
    gains = at(weight, size, like_gain)
    squares = np.empty(_LANES, np.float32)
    num_whole = size - size % _LANES
    for row in range(num_rows):
        offset = row * size * like.itemsize
        own = at(total + offset, size, like)
        if residual:
            left, right = at(x + offset, size, like), at(residual + offset, size, like)
            for place in range(size):
                write(own, place, read(left, place) + read(right, place))
        squares[:] = 0
        for first in range(0, num_whole, _LANES):
            part = at(total + offset + first * like.itemsize, _LANES, like)
            for lane in range(_LANES):
                number = read(part, lane)
                squares[lane] += number * number
        for place in range(num_whole, size):
            number = read(own, place)
            squares[place - num_whole] += number * number
        mean = np.float32(0)
        for lane in range(_LANES):
            mean += squares[lane]
        factor = np.float32(1) / np.sqrt(mean / np.float32(size) + np.float32(eps))
        result = at(out + offset, size, like)
        for place in range(size):
            write(result, place, read(own, place) * factor * read(gains, place))
