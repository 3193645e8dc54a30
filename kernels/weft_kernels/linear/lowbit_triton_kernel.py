"""Products with weights of 4 and 8 bits in the Triton language; semantics: ``quantized.linear``.

A few rows read more weight than they compute, so codes become numbers in registers and nothing larger is read. Many
rows compute more than they read: there the weight is written out once, and the vendor's library multiplies.

| rows | product | programs |
|---|---|---|
| 1 to 64 | tensor cores, 16, 32 or 64 rows at a time | columns by parts of the inputs |
| more | weight dequantised, then the vendor's library | - |
| any, deterministic | tensor cores, 64 rows at a time | the same, by 64 rows |

Parts of the inputs are written side by side and summed by a second kernel, first to last: atomic sums would come in any
order. How many there are follows from the weight, never from the rows.

Sizes of tiles are those that took least on an H200 for [T, 4096] x [4096, 28672] in bfloat16 (2026-11-27). A kernel of
sums of elements for one row took as long as a tile of 16.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft_kernels.experts.triton_kernel import rows_of_tile
from weft_kernels.linear import triton_kernel
from weft_kernels.linear.codes_triton_kernel import dequantize, numbers_of
from weft_kernels.linear.quantized import QuantizedWeight
from weft_kernels.processors import num_processors

_DOT_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_INNER, _MANY_INNER = 64, 128
_FEW_COLUMNS, _COLUMNS = 128, 64
_MOST_ROWS = 64
_PROGRAMS_PER_PROCESSOR = 4
_MIN_TILES_PER_PART = 2
_ELEMENTS = 1024


def linear(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None = None,
    *,
    deterministic: bool = False,
    starts: Tensor | None = None,
    rows: Tensor | None = None,
    num_experts: int = 1,
) -> Tensor:
    """``x @ weight.T + bias``.

    Args:
        x: Rows, shape ``[T, K]``, float32, float16 or bfloat16; the last axis contiguous. Not modified.
        weight: Shape ``(N, K)``, on the device of ``x``, its tensors contiguous.
        bias: Shape ``[N]``, dtype and device of ``x``, contiguous; None for none.
        deterministic: A row's result is bitwise independent of the batch: one shape of tiles and one number of parts,
            whatever ``T`` is.
        starts, rows: Of several experts; see ``products.Product``.

    Returns:
        Shape ``[T, N]``, ``N`` of an expert, dtype and device of ``x``, newly allocated. Accumulated in float32; the
        numbers of the weight are rounded to the type of ``x``.

    Raises:
        ValueError: A shape, dtype or layout is not as above; the message gives the one got.
    """
    if rows is not None:
        x = x.index_select(0, rows)
    _check(x, weight, bias)
    num_rows = x.shape[0]
    if not num_rows:
        return x.new_empty(0, weight.shape[0] // num_experts)
    if num_rows <= _MOST_ROWS or deterministic or starts is not None:
        tile = _MOST_ROWS if deterministic else max(16, triton.next_power_of_2(num_rows))
        if starts is not None:
            tile = triton_kernel.rows_per_tile(num_rows, num_experts, deterministic=deterministic)
        inner = inputs_per_tile(weight, _MANY_INNER if weight.num_bits == 4 and tile > 16 else _INNER)
        if inner:
            return _product(x, weight, bias, tile, inner, starts, num_experts)
    numbers = dequantize(weight, x.dtype)
    if deterministic or starts is not None:
        return triton_kernel.linear(
            x, numbers.t().contiguous(), bias, deterministic=deterministic, starts=starts, num_experts=num_experts
        )
    return x @ numbers if bias is None else torch.addmm(bias, x, numbers)


def inputs_per_tile(weight: QuantizedWeight, most: int) -> int:
    """Inputs that a program multiplies at a time, a power of two up to ``most``, of one group or of several whole ones.

    0: groups are too odd for that.
    """
    least = 32 if weight.num_bits == 4 else 16  # a product on tensor cores has 16 inputs at least
    group, num_inputs = weight.group_size, weight.shape[1]
    if group == num_inputs:
        return max(least, min(most, int(triton.next_power_of_2(num_inputs))))
    power = group & -group
    if power < least:
        return 0
    return most if power == group else min(power, most)


def num_parts(weight: QuantizedWeight, columns_per_tile: int, inner: int, num_experts: int = 1) -> int:
    """Parts of the inputs, so that there are programs for every processor, if at least 8 experts have rows."""
    num_outputs, num_inputs = weight.shape[0] * min(num_experts, 8) // num_experts, weight.shape[1]
    wanted = _PROGRAMS_PER_PROCESSOR * num_processors(weight.device) // triton.cdiv(num_outputs, columns_per_tile)
    return max(1, int(min(wanted, triton.cdiv(num_inputs, inner) // _MIN_TILES_PER_PART)))


def _product(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None,
    rows: int,
    inner: int,
    starts: Tensor | None,
    num_experts: int,
) -> Tensor:
    num_rows = x.shape[0]
    num_outputs, num_inputs = weight.shape[0] // num_experts, weight.shape[1]
    columns = _FEW_COLUMNS if rows == 16 else _COLUMNS
    parts = 1 if starts is not None and bias is not None else num_parts(weight, columns, inner, num_experts)
    num_tiles = triton.cdiv(num_rows, rows) if starts is None else triton_kernel.most_tiles(num_rows, num_experts, rows)
    tiles_per_part = triton.cdiv(triton.cdiv(num_inputs, inner), parts)
    out = x.new_empty(num_rows, num_outputs)
    target = out if parts == 1 else x.new_empty(parts, num_rows, num_outputs, dtype=torch.float32)
    stages = 2 if x.dtype == torch.float32 else 4
    _multiply[(triton.cdiv(num_outputs, columns), parts, num_tiles)](
        x,
        weight.codes,
        weight.scales,
        weight.zeros,
        weight.lookup,
        weight.permutation,
        bias if parts == 1 else None,
        starts,
        target,
        num_rows,
        ROW_STRIDE=x.stride(0),
        NUM_COLUMNS=num_outputs,
        NUM_INNER=num_inputs,
        NUM_BITS=weight.num_bits,
        GROUP_SIZE=weight.group_size,
        NUM_EXPERTS=num_experts,
        ROWS=rows,
        COLUMNS=columns,
        INNER=inner,
        TILES=tiles_per_part,
        STAGES=stages,
        DOT=_dot_dtype(x),
        num_warps=4,
        num_stages=stages,
    )
    if parts > 1:
        num_elements = num_rows * num_outputs
        _sum_parts[(triton.cdiv(num_elements, _ELEMENTS),)](
            target, bias, out, num_elements, NUM_COLUMNS=num_outputs, PARTS=parts, ELEMENTS=_ELEMENTS, num_warps=4
        )
    return out


def _dot_dtype(x: Tensor) -> tl.dtype:
    is_bfloat16_interpreted = x.device.type == "cpu" and x.dtype == torch.bfloat16
    return tl.float32 if is_bfloat16_interpreted else _DOT_DTYPES[x.dtype]


@triton.jit(do_not_specialize=["num_rows"])
def _multiply(
    x_ptr,
    codes_ptr,
    scale_ptr,
    zero_ptr,
    lookup_ptr,
    permutation_ptr,
    bias_ptr,
    starts_ptr,
    out_ptr,
    num_rows,
    ROW_STRIDE: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    NUM_INNER: tl.constexpr,
    NUM_BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    DOT: tl.constexpr,
):
    PER_BYTE: tl.constexpr = 8 // NUM_BITS
    BYTES: tl.constexpr = INNER // PER_BYTE
    GROUPS: tl.constexpr = INNER // GROUP_SIZE if GROUP_SIZE < INNER and GROUP_SIZE < NUM_INNER else 1
    IS_SCALED_LAST: tl.constexpr = GROUP_SIZE == NUM_INNER and zero_ptr is None
    ALL_COLUMNS: tl.constexpr = NUM_COLUMNS * NUM_EXPERTS
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < NUM_COLUMNS
    first_row, end_row, outputs = tl.program_id(2) * ROWS, num_rows, columns
    if starts_ptr is not None:
        expert, first_row, end_row = rows_of_tile(starts_ptr, tl.program_id(2), NUM_EXPERTS, ROWS)
        outputs = expert * NUM_COLUMNS + columns
        if first_row >= end_row:
            return
    rows = first_row + tl.arange(0, ROWS)
    is_row = rows < end_row
    x_row_ptr = x_ptr + rows.to(tl.int64)[:, None] * ROW_STRIDE
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    first = tl.program_id(1) * TILES * INNER
    for start in tl.range(first, tl.minimum(first + TILES * INNER, NUM_INNER), INNER, num_stages=STAGES):
        byte = start // PER_BYTE + tl.arange(0, BYTES)
        codes = tl.load(
            codes_ptr + byte.to(tl.int64)[:, None] * ALL_COLUMNS + outputs[None, :],
            mask=(byte * PER_BYTE < NUM_INNER)[:, None] & is_column[None, :],
            other=0,
        ).to(tl.int32)
        inputs = start + tl.arange(0, INNER)
        is_input = inputs < NUM_INNER
        if permutation_ptr is not None:
            inputs = tl.load(permutation_ptr + inputs, mask=is_input, other=0)
        x = tl.load(x_row_ptr + inputs[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0).to(DOT)
        scale = tl.full([1, COLUMNS], 1.0, tl.float32)
        offset = tl.zeros([1, COLUMNS], tl.float32)
        if not IS_SCALED_LAST:
            group = start // GROUP_SIZE + tl.arange(0, GROUPS)
            row = group[:, None] * ALL_COLUMNS + outputs[None, :]
            is_scale = (group * GROUP_SIZE < NUM_INNER)[:, None] & is_column[None, :]
            scale = tl.load(scale_ptr + row, mask=is_scale, other=0.0).to(tl.float32)
            if zero_ptr is not None:
                zero = tl.load(zero_ptr + row, mask=is_scale, other=0.0).to(tl.float32)
                offset = _of_each_byte((2 ** (NUM_BITS - 1) - zero) * scale, BYTES, GROUPS, COLUMNS)
            scale = _of_each_byte(scale, BYTES, GROUPS, COLUMNS)
        low = tl.fma(numbers_of(codes & (2**NUM_BITS - 1), lookup_ptr, NUM_BITS), scale, offset).to(DOT)
        if NUM_BITS == 4:
            high = tl.fma(numbers_of(codes >> 4, lookup_ptr, NUM_BITS), scale, offset).to(DOT)
            x, odd = tl.split(tl.reshape(x, [ROWS, BYTES, 2]))
            total = tl.dot(odd, high, total, input_precision="ieee")
        total = tl.dot(x, low, total, input_precision="ieee")
    if IS_SCALED_LAST:
        total *= tl.load(scale_ptr + outputs, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + outputs, mask=is_column, other=0.0).to(tl.float32)[None, :]
    out_row = tl.program_id(1).to(tl.int64) * num_rows + rows
    tl.store(
        out_ptr + out_row[:, None] * NUM_COLUMNS + columns[None, :],
        total.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & is_column[None, :],
    )


@triton.jit
def _of_each_byte(values, BYTES: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr):
    """A value for each group, ``[GROUPS, COLUMNS]``, for each of their bytes; of one group as it is."""
    if GROUPS > 1:
        values = tl.broadcast_to(values[:, None, :], [GROUPS, BYTES // GROUPS, COLUMNS])
        values = tl.reshape(values, [BYTES, COLUMNS])
    return values


@triton.jit(do_not_specialize=["num_elements"])
def _sum_parts(
    parts_ptr,
    bias_ptr,
    out_ptr,
    num_elements,
    NUM_COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    element = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    is_element = element < num_elements
    total = tl.zeros([ELEMENTS], dtype=tl.float32)
    for part in range(PARTS):
        total += tl.load(parts_ptr + part * num_elements.to(tl.int64) + element, mask=is_element, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + element % NUM_COLUMNS, mask=is_element, other=0.0).to(tl.float32)
    tl.store(out_ptr + element, total.to(out_ptr.dtype.element_ty), mask=is_element)


def _check(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> None:
    num_outputs, num_inputs = weight.shape
    if x.dim() != 2 or x.shape[1] != num_inputs or x.stride(1) != 1 or x.dtype not in _DOT_DTYPES:
        raise ValueError(
            f"x is {x.dtype} of shape {list(x.shape)} and strides {list(x.stride())}; it must be float32, float16 or "
            f"bfloat16 [T, {num_inputs}], the last axis contiguous"
        )
    for name in ("codes", "scales", "zeros", "lookup", "permutation"):
        tensor = getattr(weight, name)
        if tensor is not None and (tensor.device != x.device or not tensor.is_contiguous()):
            raise ValueError(
                f"{name} of the weight is on {tensor.device} with strides {list(tensor.stride())}; it must be on "
                f"{x.device}, contiguous"
            )
    if bias is not None and (bias.shape != (num_outputs,) or bias.dtype != x.dtype or not bias.is_contiguous()):
        raise ValueError(f"bias is {bias.dtype} {list(bias.shape)}; it must be {x.dtype} [{num_outputs}], contiguous")
