"""Batch-invariant matrix product with a weight, in the Triton language; see ``linear``."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

_ROWS = 128
_COLUMNS = 128
_INNER = 64
_ROW_TILES_PER_GROUP = 8
_DOT_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, deterministic: bool = False) -> Tensor:
    """``x @ weight.T + bias`` by the vendor's library, or with a fixed tile shape if ``deterministic``.

    Args:
        x: Rows, shape ``[T, in]``, float32, float16 or bfloat16; the last axis contiguous. Not modified.
        weight: Shape ``[out, in]``, dtype and device of ``x``, contiguous.
        bias: Shape ``[out]``, dtype and device of ``x``, contiguous; None for none.
        deterministic: A row's result is bitwise independent of the batch: every output is one program's
            sum over tiles of 64 inputs, first to last, whatever ``T`` is.

    Returns:
        Shape ``[T, out]``, dtype and device of ``x``, newly allocated. Accumulated in float32.

    Raises:
        ValueError: A shape, dtype or layout is not as above; the message gives the one got.

    Source:
        https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/ (why libraries differ by batch).
    """
    if not deterministic:
        return functional.linear(x, weight, bias)
    _check(x, weight, bias)
    num_rows, num_inner = x.shape
    num_columns = weight.shape[0]
    out = x.new_empty(num_rows, num_columns)
    if not num_rows:
        return out
    is_bfloat16_interpreted = x.device.type == "cpu" and x.dtype == torch.bfloat16
    grid = (triton.cdiv(num_rows, _ROWS) * triton.cdiv(num_columns, _COLUMNS),)
    _linear[grid](
        x,
        weight,
        bias,
        out,
        num_rows,
        ROW_STRIDE=x.stride(0),
        NUM_COLUMNS=num_columns,
        NUM_INNER=num_inner,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        INNER=_INNER,
        GROUP=_ROW_TILES_PER_GROUP,
        DOT=tl.float32 if is_bfloat16_interpreted else _DOT_DTYPES[x.dtype],
        num_warps=8,
        num_stages=2 if x.dtype == torch.float32 else 3,
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _linear(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    ROW_STRIDE: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    NUM_INNER: tl.constexpr,
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
    group_size = tl.minimum(tl.cdiv(num_rows, ROWS) - first_row_tile, GROUP)
    place = tl.program_id(0) % tiles_per_group
    rows = (first_row_tile + place % group_size) * ROWS + tl.arange(0, ROWS)
    columns = place // group_size * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, INNER)
    x_row_ptr = x_ptr + rows.to(tl.int64)[:, None] * ROW_STRIDE
    weight_row_ptr = weight_ptr + columns.to(tl.int64)[None, :] * NUM_INNER
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in range(0, NUM_INNER, INNER):
        k = first + inner
        x = tl.load(x_row_ptr + k[None, :], mask=(rows < num_rows)[:, None] & (k < NUM_INNER)[None, :], other=0.0)
        weight = tl.load(
            weight_row_ptr + k[:, None], mask=(columns < NUM_COLUMNS)[None, :] & (k < NUM_INNER)[:, None], other=0.0
        )
        total = tl.dot(x.to(DOT), weight.to(DOT), total, input_precision="ieee")
    if bias_ptr is not None:
        total += tl.load(bias_ptr + columns, mask=columns < NUM_COLUMNS, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out_ptr + rows.to(tl.int64)[:, None] * NUM_COLUMNS + columns[None, :],
        total.to(out_ptr.dtype.element_ty),
        mask=(rows < num_rows)[:, None] & (columns < NUM_COLUMNS)[None, :],
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
