"""Matrix product with a weight, in torch; see ``linear``."""

import torch
from torch import Tensor
from torch.nn import functional

ROWS_PER_TILE = 16


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, deterministic: bool = False) -> Tensor:
    """``x @ weight.T + bias``.

    Args:
        x: Rows, shape ``[T, in]``. Not modified.
        weight: Shape ``[out, in]``, dtype and device of ``x``.
        bias: Shape ``[out]``, dtype and device of ``x``; None for none.
        deterministic: A row's result is bitwise independent of the batch. BLAS orders its sums by the
            number of rows, so the rows are taken 16 at a time, the last tile padded with zeros: up to 4 times slower
            for a single row, free from 16 rows on.

    Returns:
        Shape ``[T, out]``, dtype and device of ``x``, newly allocated.
    """
    if not deterministic:
        return functional.linear(x, weight, bias)
    num_rows = x.shape[0]
    num_whole = num_rows - num_rows % ROWS_PER_TILE
    out = x.new_empty(num_rows, weight.shape[0])
    transposed = weight.t()
    for start in range(0, num_whole, ROWS_PER_TILE):
        torch.mm(x[start : start + ROWS_PER_TILE], transposed, out=out[start : start + ROWS_PER_TILE])
    if num_whole < num_rows:
        tile = x.new_zeros(ROWS_PER_TILE, x.shape[1])
        tile[: num_rows - num_whole] = x[num_whole:]
        out[num_whole:] = torch.mm(tile, transposed)[: num_rows - num_whole]
    return out if bias is None else out.add_(bias)
