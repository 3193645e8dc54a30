"""Rows of a mixture of experts in the Triton language; see ``reference``."""

import triton
import triton.language as tl
from torch import Tensor

from weft_kernels.experts import reference
from weft_kernels.topk.triton_kernel import softmax_topk

_COLUMNS = 1024


def route(logits: Tensor, num_chosen: int, *, is_normalized: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As ``reference.route``; torch sorts the choices."""
    shares, ids = softmax_topk(logits, num_chosen)
    return reference.sorted_by_expert(shares, ids, logits.shape[1], is_normalized=is_normalized)


def combine(y: Tensor, places: Tensor, shares: Tensor) -> Tensor:
    """As ``reference.combine``; all contiguous, on one device."""
    (num_rows, num_chosen), num_columns = places.shape, y.shape[1]
    out = y.new_empty(num_rows, num_columns)
    if num_rows:
        grid = (num_rows, triton.cdiv(num_columns, _COLUMNS))
        _combine[grid](y, places, shares, out, num_columns, NUM_CHOSEN=num_chosen, COLUMNS=_COLUMNS, num_warps=4)
    return out


@triton.jit
def _combine(y_ptr, place_ptr, share_ptr, out_ptr, num_columns, NUM_CHOSEN: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], dtype=tl.float32)
    for choice in range(NUM_CHOSEN):
        place = tl.load(place_ptr + row * NUM_CHOSEN + choice)
        y = tl.load(y_ptr + place * num_columns + columns, mask=columns < num_columns, other=0.0)
        total += y.to(tl.float32) * tl.load(share_ptr + row * NUM_CHOSEN + choice)
    tl.store(out_ptr + row * num_columns + columns, total.to(out_ptr.dtype.element_ty), mask=columns < num_columns)


@triton.jit
def rows_of_tile(starts_ptr, tile, NUM_EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Expert, first row and last row's next of a tile of rows of one expert; beyond the last tile there are no rows."""
    experts = tl.arange(0, triton.next_power_of_2(NUM_EXPERTS))
    is_expert = experts < NUM_EXPERTS
    first = tl.load(starts_ptr + experts, mask=is_expert, other=0)
    end = tl.load(starts_ptr + experts + 1, mask=is_expert, other=0)
    num_tiles = (end - first + ROWS - 1) // ROWS
    tile_ends = tl.cumsum(num_tiles, 0)
    is_own = (tile_ends > tile) & (tile_ends - num_tiles <= tile)
    expert = tl.sum(tl.where(is_own, experts, 0), 0)
    row = tl.sum(tl.where(is_own, first + (tile - tile_ends + num_tiles) * ROWS, 0), 0)
    return expert, row, tl.sum(tl.where(is_own, end, 0), 0)
