"""Rows of a mixture of experts on a CPU, compiled with numba, in float32 or bfloat16; see ``reference``."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft_kernels import numbers
from weft_kernels.jit import jit_with
from weft_kernels.numbers import LIKE, at, read, write


def route(logits: Tensor, num_chosen: int, *, is_normalized: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As ``reference.route``."""
    logits = logits.contiguous()
    num_rows, num_experts = logits.shape
    shares, places = torch.empty(num_rows, num_chosen), torch.empty(num_rows, num_chosen, dtype=torch.int64)
    rows, starts = (
        torch.empty(num_rows * num_chosen, dtype=torch.int64),
        torch.zeros(num_experts + 1, dtype=torch.int32),
    )
    written = (shares.numpy(), rows.numpy(), places.numpy(), starts.numpy())
    _route(LIKE[logits.dtype], logits.data_ptr(), is_normalized, *written)
    return shares, rows, places, starts


def combine(y: Tensor, places: Tensor, shares: Tensor) -> Tensor:
    """As ``reference.combine``."""
    y = y.contiguous()
    out = y.new_empty(places.shape[0], y.shape[1])
    _combine(LIKE[y.dtype], y.data_ptr(), places.numpy(), shares.numpy(), out.data_ptr(), y.shape[1])
    return out


@jit_with(numbers)
def _route(like: Any, logits: int, is_normalized: bool, shares: Any, rows: Any, places: Any, starts: Any) -> None:
    (num_rows, num_chosen), num_experts = shares.shape, starts.shape[0] - 1
    is_taken = np.empty(num_experts, np.bool_)
    for row in range(num_rows):
        scores = at(logits + row * num_experts * like.itemsize, num_experts, like)
        is_taken[:] = False
        for choice in range(num_chosen):
            best, highest = -1, np.float32(0)
            for expert in range(num_experts):
                score = read(scores, expert)
                if not is_taken[expert] and (best < 0 or score > highest):
                    best, highest = expert, score
            is_taken[best] = True
            places[row, choice], shares[row, choice] = best, highest
            starts[best + 1] += 1
        highest, total = shares[row, 0], np.float32(0)
        for expert in range(num_experts):
            score = read(scores, expert)
            if is_taken[expert] or not is_normalized or np.isnan(score):
                total += np.exp(score - highest)
        for choice in range(num_chosen):
            shares[row, choice] = np.exp(shares[row, choice] - highest) / total
    for expert in range(num_experts):
        starts[expert + 1] += starts[expert]
    free = starts.copy()
    for row in range(num_rows):
        for choice in range(num_chosen):
            expert = places[row, choice]
            places[row, choice], rows[free[expert]] = free[expert], row
            free[expert] += 1


@jit_with(numbers)
def _combine(like: Any, y: int, places: Any, shares: Any, out: int, num_columns: int) -> None:
    total = np.empty(num_columns, np.float32)
    for row in range(places.shape[0]):
        total[:] = 0
        for choice in range(places.shape[1]):
            values = at(y + places[row, choice] * num_columns * like.itemsize, num_columns, like)
            share = shares[row, choice]
            for column in range(num_columns):
                total[column] += read(values, column) * share
        result = at(out + row * num_columns * like.itemsize, num_columns, like)
        for column in range(num_columns):
            write(result, column, total[column])
