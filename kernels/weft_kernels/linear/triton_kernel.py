"""Batch-invariant matrix product with a weight, in the Triton language; see ``linear``."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from weft_kernels.experts.triton_kernel import rows_of_tile

_ROWS = 128
_COLUMNS = 128
_INNER = 64
_ROW_TILES_PER_GROUP = 8
_FEW_ROWS, _MANY_ROWS = 16, 64  # of an expert
_DOT_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    deterministic: bool = False,
    starts: Tensor | None = None,
    rows: Tensor | None = None,
    num_experts: int = 1,
) -> Tensor:
    """``x @ weight.T + bias`` by the vendor's library, or with a fixed tile shape if ``deterministic``.

    Args:
        x: Rows, shape ``[T, in]``, float32, float16 or bfloat16; the last axis contiguous. Not modified.
        weight: Shape ``[out, in]``, dtype and device of ``x``, contiguous.
        bias: Shape ``[out]``, dtype and device of ``x``, contiguous; None for none.
        deterministic: A row's result is bitwise independent of the batch: every output is one program's
            sum over tiles of 64 inputs, first to last, whatever ``T`` is.
        starts, rows: Of several experts; see ``products.Product``. Their rows are taken 16 or 64 at a time.

    Returns:
        Shape ``[T, out]``, ``out`` of an expert, dtype and device of ``x``, newly allocated. Accumulated in float32.

    Raises:
        ValueError: A shape, dtype or layout is not as above; the message gives the one got.

    Source:
        https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/ (why libraries differ by batch).
    """
    if rows is not None:
        x = x.index_select(0, rows)
    if not deterministic and starts is None:
        return functional.linear(x, weight, bias)
    _check(x, weight, bias)
    num_rows, num_inner = x.shape
    num_columns = weight.shape[0] // num_experts
    out = x.new_empty(num_rows, num_columns)
    if not num_rows:
        return out
    tile = _ROWS if starts is None else rows_per_tile(num_rows, num_experts, deterministic=deterministic)
    num_tiles = triton.cdiv(num_rows, tile) if starts is None else most_tiles(num_rows, num_experts, tile)
    is_bfloat16_interpreted = x.device.type == "cpu" and x.dtype == torch.bfloat16
    _linear[(num_tiles * triton.cdiv(num_columns, _COLUMNS),)](
        x,
        weight,
        bias,
        starts,
        out,
        num_rows,
        num_tiles,
        ROW_STRIDE=x.stride(0),
        NUM_COLUMNS=num_columns,
        NUM_INNER=num_inner,
        NUM_EXPERTS=num_experts,
        ROWS=tile,
        COLUMNS=_COLUMNS,
        INNER=_INNER,
        GROUP=_ROW_TILES_PER_GROUP,
        DOT=tl.float32 if is_bfloat16_interpreted else _DOT_DTYPES[x.dtype],
        num_warps=8 if tile == _ROWS else 4,
        num_stages=2 if x.dtype == torch.float32 else 3,
    )
    return out


def rows_per_tile(num_rows: int, num_experts: int, *, deterministic: bool) -> int:
    """Rows of an expert that a program multiplies: few where most experts have few."""
    return _MANY_ROWS if deterministic or num_rows > _FEW_ROWS * num_experts else _FEW_ROWS


def most_tiles(num_rows: int, num_experts: int, rows: int) -> int:
    """Tiles of rows, however these are shared out; the host does not know how they are."""
    return num_rows // rows + min(num_experts, num_rows)


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def _linear(
    x_ptr,
    weight_ptr,
    bias_ptr,
    starts_ptr,
    out_ptr,
    num_rows,
    num_tiles,
    ROW_STRIDE: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    NUM_INNER: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
    DOT: tl.constexpr,
):
    # Neighbouring programs share a group of row tiles and a tile of columns, for L2 locality.
    NUM_COLUMN_TILES: tl.constexpr = (NUM_COLUMNS + COLUMNS - 1) // COLUMNS
    tiles_per_group = GROUP * NUM_COLUMN_TILES
    first_row_tile = tl.program_id(0) // tiles_per_group * GROUP
    group_size = tl.minimum(num_tiles - first_row_tile, GROUP)
    place = tl.program_id(0) % tiles_per_group
    tile = first_row_tile + place % group_size
    columns = place // group_size * COLUMNS + tl.arange(0, COLUMNS)
    first_row, end_row, outputs = tile * ROWS, num_rows, columns
    if starts_ptr is not None:
        expert, first_row, end_row = rows_of_tile(starts_ptr, tile, NUM_EXPERTS, ROWS)
        outputs = expert * NUM_COLUMNS + columns
        if first_row >= end_row:
            return
    rows = first_row + tl.arange(0, ROWS)
    is_row = rows < end_row
    inner = tl.arange(0, INNER)
    x_row_ptr = x_ptr + rows.to(tl.int64)[:, None] * ROW_STRIDE
    weight_row_ptr = weight_ptr + outputs.to(tl.int64)[None, :] * NUM_INNER
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in range(0, NUM_INNER, INNER):
        k = first + inner
        x = tl.load(x_row_ptr + k[None, :], mask=is_row[:, None] & (k < NUM_INNER)[None, :], other=0.0)
        weight = tl.load(
            weight_row_ptr + k[:, None], mask=(columns < NUM_COLUMNS)[None, :] & (k < NUM_INNER)[:, None], other=0.0
        )
        total = tl.dot(x.to(DOT), weight.to(DOT), total, input_precision="ieee")
    if bias_ptr is not None:
        total += tl.load(bias_ptr + outputs, mask=columns < NUM_COLUMNS, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out_ptr + rows.to(tl.int64)[:, None] * NUM_COLUMNS + columns[None, :],
        total.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & (columns < NUM_COLUMNS)[None, :],
    )


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if x.dim() != 2 or x.stride(1) != 1 or x.dtype not in _DOT_DTYPES:
        raise ValueError(
            f"x is {x.dtype} of shape {list(x.shape)} and strides {list(x.stride())}; it must be float32, float16 or "
            "bfloat16 [T, in], the last axis contiguous"
        )
    if weight.dim() != 2 or weight.shape[1] != x.shape[1] or weight.dtype != x.dtype or not weight.is_contiguous():
        raise ValueError(
            f"weight is {weight.dtype} of shape {list(weight.shape)} and strides {list(weight.stride())}; it must be "
            f"{x.dtype} [out, {x.shape[1]}], contiguous"
        )
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != x.dtype or not bias.is_contiguous()):
        raise ValueError(
            f"bias is {bias.dtype} {list(bias.shape)}; it must be {x.dtype} [{weight.shape[0]}], contiguous"
        )
