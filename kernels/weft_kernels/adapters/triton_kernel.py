"""Low-rank adapters in the Triton language; semantics: ``reference.add_lora``.

Two kernels with a program for each row (and tile of outputs), which finds the matrices by the slot of its row: nothing
depends on which rows share an adapter, so that a launch can be captured, and a row's sums are always the same.

Source:
    Punica's grouped products for adapters, https://arxiv.org/abs/2310.18547.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft_kernels.adapters.reference import MAX_PARTS

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_ELEMENTS = 4096
_COLUMNS = 128


def add_lora(out: Tensor, x: Tensor, a: Tensor, b: Tensor, ends: Sequence[int], slots: Tensor) -> None:
    """As ``reference.add_lora``, with at most ``MAX_PARTS`` parts; the last axis of ``x`` contiguous; sums are float32.

    Raises:
        ValueError: A shape, dtype or layout is not as documented; the message gives the one got.
    """
    _check(out, x, a, b, ends, slots)
    num_rows, num_outputs = out.shape
    _, num_inputs, width = a.shape
    rank = b.shape[1]
    if not num_rows:
        return
    hidden = torch.empty(num_rows, width, dtype=torch.float32, device=x.device)
    columns = max(16, triton.next_power_of_2(width))
    _shrink[(num_rows,)](
        x,
        a,
        slots,
        hidden,
        ROW_STRIDE=x.stride(0),
        NUM_INNER=num_inputs,
        WIDTH=width,
        COLUMNS=columns,
        INNER=max(1, _ELEMENTS // columns),
        num_warps=4,
    )
    first_end, second_end, *_ = (*ends, num_outputs, num_outputs)
    _expand[(num_rows, triton.cdiv(num_outputs, _COLUMNS))](
        hidden,
        b,
        slots,
        out,
        NUM_COLUMNS=num_outputs,
        WIDTH=width,
        RANK=rank,
        RANKS=triton.next_power_of_2(rank),
        FIRST_END=first_end,
        SECOND_END=second_end,
        COLUMNS=_COLUMNS,
        num_warps=4,
    )


@triton.jit
def _shrink(
    x_ptr,
    a_ptr,
    slot_ptr,
    hidden_ptr,
    ROW_STRIDE: tl.constexpr,
    NUM_INNER: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    if slot >= 0:
        columns = tl.arange(0, COLUMNS)
        is_column = columns < WIDTH
        total = tl.zeros([INNER, COLUMNS], dtype=tl.float32)
        for first in range(0, NUM_INNER, INNER):
            k = first + tl.arange(0, INNER)
            x = tl.load(x_ptr + row * ROW_STRIDE + k, mask=k < NUM_INNER, other=0.0).to(tl.float32)
            place = (slot * NUM_INNER + k)[:, None] * WIDTH + columns[None, :]
            a = tl.load(a_ptr + place, mask=(k < NUM_INNER)[:, None] & is_column[None, :], other=0.0).to(tl.float32)
            total += x[:, None] * a
        tl.store(hidden_ptr + row * WIDTH + columns, tl.sum(total, 0), mask=is_column)


@triton.jit
def _expand(
    hidden_ptr,
    b_ptr,
    slot_ptr,
    out_ptr,
    NUM_COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    FIRST_END: tl.constexpr,
    SECOND_END: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    if slot >= 0:
        ranks = tl.arange(0, RANKS)
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        mask = (ranks < RANK)[:, None] & (columns < NUM_COLUMNS)[None, :]
        part = (columns >= FIRST_END).to(tl.int32) + (columns >= SECOND_END).to(tl.int32)
        hidden = tl.load(hidden_ptr + row * WIDTH + part[None, :] * RANK + ranks[:, None], mask=mask, other=0.0)
        b = tl.load(b_ptr + (slot * RANK + ranks)[:, None] * NUM_COLUMNS + columns[None, :], mask=mask, other=0.0)
        total = tl.sum(hidden * b.to(tl.float32), 0)
        place = out_ptr + row * NUM_COLUMNS + columns
        own = tl.load(place, mask=columns < NUM_COLUMNS, other=0.0).to(tl.float32)
        tl.store(place, (own + total).to(out_ptr.dtype.element_ty), mask=columns < NUM_COLUMNS)


def _check(out: Tensor, x: Tensor, a: Tensor, b: Tensor, ends: Sequence[int], slots: Tensor) -> None:
    if x.dim() != 2 or x.stride(1) != 1 or x.dtype not in _DTYPES or a.dim() != 3 or b.dim() != 3:
        raise ValueError(
            f"x is {x.dtype} of shape {list(x.shape)} and strides {list(x.stride())}, a and b have {a.dim()} and "
            f"{b.dim()} axes; x must be float32, float16 or bfloat16 [T, K], its last axis contiguous, a and b have 3"
        )
    num_parts, (num_slots, rank, num_outputs) = len(ends), b.shape
    if not 1 <= num_parts <= MAX_PARTS or ends[-1] != num_outputs:
        raise ValueError(f"ends must be 1 to {MAX_PARTS} numbers, the last {num_outputs}, got {list(ends)}")
    wanted = {
        "out": (out, (x.shape[0], num_outputs), x.dtype),
        "a": (a, (num_slots, x.shape[1], num_parts * rank), x.dtype),
        "b": (b, tuple(b.shape), x.dtype),
        "slots": (slots, x.shape[:1], torch.int32),
    }
    for name, (tensor, shape, dtype) in wanted.items():
        if tensor.shape != shape or tensor.dtype != dtype or tensor.device != x.device or not tensor.is_contiguous():
            raise ValueError(
                f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; it must be {dtype} {list(shape)} "
                f"on {x.device}, contiguous"
            )
