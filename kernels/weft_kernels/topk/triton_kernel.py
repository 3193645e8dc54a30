"""Softmax fused with top-k; one program per tile of a row, and one more per row with several tiles.

The k best are selected one at a time: the maximum of integers that order like the scores, lowest column on ties, which
is then removed. Classifiers and log probabilities need a few columns, for which a few reductions are cheaper than a
sort.
"""

import torch
import triton
import triton.language as tl

TILE_COLUMNS = 32768
"""Longest row that one program takes alone, and the most candidates that the second stage takes."""

_STRUCK = tl.constexpr(-(1 << 31))  # less than the order of any number, minus infinity included


@triton.jit
def _order_of(x):
    """Integers that order like the float32 ``x``: its bits, inverted for negative numbers. Its own inverse."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _score_of(order):
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _softmax_of(score, peak, total, LOG: tl.constexpr):
    return score - peak - tl.log(total) if LOG else tl.exp(score - peak) / total


@triton.jit(do_not_specialize=["k"], do_not_specialize_on_alignment=["peak_ptr", "total_ptr"])
def _tile_kernel(
    x_ptr,
    value_ptr,
    id_ptr,
    peak_ptr,
    total_ptr,
    num_columns,
    num_tiles,
    k,
    IS_WHOLE_ROW: tl.constexpr,
    LOG: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the k best of a tile: probabilities if the tile is the whole row, else scores, with the tile's sums."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offs = tl.arange(0, BLOCK)
    ids = tile * BLOCK + offs
    mask = ids < num_columns
    x = tl.load(x_ptr + row * num_columns + ids, mask=mask, other=float("-inf")).to(tl.float32)
    peak = tl.max(x, axis=0)
    # Some tiles of a long row may have no finite score.
    origin = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.exp(x - origin), axis=0)
    out = (row * num_tiles + tile) * k
    if not IS_WHOLE_ROW:
        tl.store(peak_ptr + row * num_tiles + tile, peak)
        tl.store(total_ptr + row * num_tiles + tile, total)
    order = tl.where(mask, _order_of(x), _STRUCK)
    for rank in range(0, k):
        best, index = tl.max(order, axis=0, return_indices=True)
        value = _score_of(best)
        if IS_WHOLE_ROW:
            value = _softmax_of(value, origin, total, LOG)
        else:
            value = tl.where(best == _STRUCK, float("-inf"), value)
        tl.store(value_ptr + out + rank, value)
        tl.store(id_ptr + out + rank, tile * BLOCK + index)
        order = tl.where(offs == index, _STRUCK, order)


@triton.jit(do_not_specialize=["k"], do_not_specialize_on_alignment=["peak_ptr", "total_ptr"])
def _merge_kernel(
    tile_value_ptr,
    tile_id_ptr,
    peak_ptr,
    total_ptr,
    value_ptr,
    id_ptr,
    num_tiles,
    k,
    LOG: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Select the k best of a row from those of its tiles; candidates are in the order of tiles, which keeps ties."""
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, BLOCK_TILES)
    is_tile = tiles < num_tiles
    peaks = tl.load(peak_ptr + row * num_tiles + tiles, mask=is_tile, other=float("-inf"))
    totals = tl.load(total_ptr + row * num_tiles + tiles, mask=is_tile, other=0.0)
    peak = tl.max(peaks, axis=0)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(totals * tl.exp(peaks - peak), axis=0)
    offs = tl.arange(0, BLOCK)
    start = row * num_tiles * k
    mask = offs < num_tiles * k
    order = tl.where(mask, _order_of(tl.load(tile_value_ptr + start + offs, mask=mask, other=0.0)), _STRUCK)
    for rank in range(0, k):
        best, index = tl.max(order, axis=0, return_indices=True)
        tl.store(value_ptr + row * k + rank, _softmax_of(_score_of(best), peak, total, LOG))
        tl.store(id_ptr + row * k + rank, tl.load(tile_id_ptr + start + index))
        order = tl.where(offs == index, _STRUCK, order)


def softmax_topk(
    x: torch.Tensor, k: int, *, log: bool = False, tile_columns: int = TILE_COLUMNS
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest probabilities of each row, best first, and their columns; the lower column on ties.

    Args:
        x: Scores, shape ``[N, V]``, float32, float16 or bfloat16, contiguous. Not modified.
        k: How many, 1 to V.
        log: Whether to return log-probabilities instead.
        tile_columns: Columns that a program takes, a power of two up to `TILE_COLUMNS`; longer rows take two launches.

    Returns:
        ``(probs, ids)`` as `weft_kernels.topk.reference.softmax_topk`.

    Raises:
        ValueError: A shape does not fit, ``k`` is out of range, or the row is so long that its tiles give more than
            `TILE_COLUMNS` candidates.
    """
    if x.ndim != 2 or not x.is_contiguous():
        raise ValueError(f"x must be a contiguous [N, V]; got shape {tuple(x.shape)}, strides {x.stride()}")
    num_rows, num_columns = x.shape
    if not 1 <= k <= num_columns:
        raise ValueError(f"k must be from 1 to the number of columns, {num_columns}; got {k}")
    block = min(triton.next_power_of_2(num_columns), tile_columns)
    num_tiles = triton.cdiv(num_columns, block)
    k_of_tile = min(k, block)
    if num_tiles > 1 and num_tiles * k_of_tile > TILE_COLUMNS:
        raise ValueError(
            f"{num_tiles} tiles of {block} columns with k={k} give {num_tiles * k_of_tile} candidates a row; "
            f"the limit is {TILE_COLUMNS}: ask for k of at most {TILE_COLUMNS // num_tiles}"
        )
    values = torch.empty((num_rows, num_tiles, k_of_tile), dtype=torch.float32, device=x.device)
    ids = torch.empty((num_rows, num_tiles, k_of_tile), dtype=torch.int32, device=x.device)
    sums = torch.empty((2, num_rows, num_tiles), dtype=torch.float32, device=x.device)
    if num_rows == 0:
        return values.view(0, k), ids.view(0, k)
    _tile_kernel[(num_rows, num_tiles)](
        x,
        values,
        ids,
        sums[0],
        sums[1],
        num_columns,
        num_tiles,
        k_of_tile,
        IS_WHOLE_ROW=num_tiles == 1,
        LOG=log,
        BLOCK=block,
        num_warps=min(max(block // 1024, 1), 32),
    )
    if num_tiles == 1:
        return values.view(num_rows, k), ids.view(num_rows, k)
    probs = torch.empty((num_rows, k), dtype=torch.float32, device=x.device)
    columns = torch.empty((num_rows, k), dtype=torch.int32, device=x.device)
    candidates = triton.next_power_of_2(num_tiles * k_of_tile)
    _merge_kernel[(num_rows,)](
        values,
        ids,
        sums[0],
        sums[1],
        probs,
        columns,
        num_tiles,
        k,
        LOG=log,
        BLOCK_TILES=triton.next_power_of_2(num_tiles),
        BLOCK=candidates,
        num_warps=min(max(candidates // 1024, 1), 32),
    )
    return probs, columns
