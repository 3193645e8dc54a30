"""Products with weights of 4 and 8 bits in the Triton language; semantics: ``quantized.linear``.

A few rows read more weight than they compute, so codes become numbers in registers and nothing larger is read. Many
rows compute more than they read: there the weight is written out once, and the vendor's library multiplies.

| rows | product | programs |
|---|---|---|
| 1 | sums of elements | columns by parts of the inputs |
| 2 to 64 | tensor cores, 16, 32 or 64 rows at a time | the same |
| more | weight dequantised, then the vendor's library | - |
| any, deterministic | tensor cores, 64 rows at a time | the same, by 64 rows |

Parts of the inputs are written side by side and summed by a second kernel, first to last: atomic sums would come in any
order. How many there are follows from the weight, never from the rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft_kernels.linear import triton_kernel
from weft_kernels.linear.codes_triton_kernel import dequantize, numbers_of
from weft_kernels.linear.quantized import QuantizedWeight
from weft_kernels.processors import num_processors

_DOT_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_MAX_INNER = 128
_COLUMNS, _ROW_COLUMNS = 64, 256
_MOST_ROWS = 64
_PROGRAMS_PER_PROCESSOR = 4
_MIN_TILES_PER_PART = 2
_ELEMENTS = 1024


def linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None, *, deterministic: bool = False) -> Tensor:
    """``x @ weight.T + bias``.

    Args:
        x: Rows, shape ``[T, K]``, float32, float16 or bfloat16; the last axis contiguous. Not modified.
        weight: Shape ``(N, K)``, on the device of ``x``, its tensors contiguous.
        bias: Shape ``[N]``, dtype and device of ``x``, contiguous; None for none.
        deterministic: A row's result is bitwise independent of the batch: one shape of tiles and one number of parts,
            whatever ``T`` is.

    Returns:
        Shape ``[T, N]``, dtype and device of ``x``, newly allocated. Accumulated in float32; codes less than the middle
        are exact in every type, entries of a table are rounded to that of ``x``.

    Raises:
        ValueError: A shape, dtype or layout is not as above; the message gives the one got.
    """
    _check(x, weight, bias)
    num_rows = x.shape[0]
    inner = inputs_per_tile(weight)
    if not num_rows:
        return x.new_empty(0, weight.shape[0])
    if inner and (num_rows <= _MOST_ROWS or deterministic):
        return _product(x, weight, bias, inner, deterministic=deterministic)
    numbers = dequantize(weight, x.dtype)
    if deterministic:
        return triton_kernel.linear(x, numbers.t().contiguous(), bias, deterministic=True)
    return x @ numbers if bias is None else torch.addmm(bias, x, numbers)


def inputs_per_tile(weight: QuantizedWeight) -> int:
    """Inputs that a program multiplies at a time, a power of two: all of one group. 0: groups are too odd for that."""
    least = 32 if weight.num_bits == 4 else 16  # a product on tensor cores has 16 inputs at least
    if weight.group_size == weight.shape[1]:
        return max(least, min(_MAX_INNER, int(triton.next_power_of_2(weight.shape[1]))))
    power = weight.group_size & -weight.group_size
    return 0 if power < least else min(power, _MAX_INNER)


def num_parts(weight: QuantizedWeight, columns_per_tile: int, inner: int) -> int:
    """Parts of the inputs, so that there are programs for every processor."""
    num_outputs, num_inputs = weight.shape
    wanted = _PROGRAMS_PER_PROCESSOR * num_processors(weight.device) // triton.cdiv(num_outputs, columns_per_tile)
    return max(1, int(min(wanted, triton.cdiv(num_inputs, inner) // _MIN_TILES_PER_PART)))


def _product(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, inner: int, *, deterministic: bool) -> Tensor:
    num_rows = x.shape[0]
    num_outputs, num_inputs = weight.shape
    is_one_row = num_rows == 1 and not deterministic
    columns = _ROW_COLUMNS if is_one_row else _COLUMNS
    rows = _MOST_ROWS if deterministic else 1 if is_one_row else max(16, triton.next_power_of_2(num_rows))
    parts = num_parts(weight, columns, inner)
    tiles_per_part = triton.cdiv(triton.cdiv(num_inputs, inner), parts)
    out = x.new_empty(num_rows, num_outputs)
    target = out if parts == 1 else x.new_empty(parts, num_rows, num_outputs, dtype=torch.float32)
    kernel = _multiply_row if is_one_row else _multiply
    sizes = {} if is_one_row else {"ROW_STRIDE": x.stride(0), "ROWS": rows, "DOT": _dot_dtype(x)}
    kernel[(triton.cdiv(num_outputs, columns), parts, triton.cdiv(num_rows, rows))](
        x,
        weight.codes,
        weight.scales,
        weight.zeros,
        weight.lookup,
        weight.permutation,
        bias if parts == 1 else None,
        target,
        num_rows,
        NUM_COLUMNS=num_outputs,
        NUM_INNER=num_inputs,
        NUM_BITS=weight.num_bits,
        GROUP_SIZE=weight.group_size,
        COLUMNS=columns,
        INNER=inner,
        TILES=tiles_per_part,
        num_warps=4,
        num_stages=3,
        **sizes,
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
    out_ptr,
    num_rows,
    ROW_STRIDE: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    NUM_INNER: tl.constexpr,
    NUM_BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    TILES: tl.constexpr,
    DOT: tl.constexpr,
):
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_row = rows < num_rows
    is_column = columns < NUM_COLUMNS
    x_row_ptr = x_ptr + rows.to(tl.int64)[:, None] * ROW_STRIDE
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    first = tl.program_id(1) * TILES * INNER
    for start in range(first, tl.minimum(first + TILES * INNER, NUM_INNER), INNER):
        row, even, odd, low, high = _tile(
            codes_ptr, lookup_ptr, permutation_ptr, start, columns, is_column, NUM_COLUMNS, NUM_INNER, NUM_BITS, INNER
        )
        x = tl.load(x_row_ptr + even[None, :], mask=is_row[:, None] & (row < NUM_INNER)[None, :], other=0.0)
        product = tl.dot(x.to(DOT), low.to(DOT), input_precision="ieee")
        x_sum = tl.sum(x.to(tl.float32), 1)
        if NUM_BITS == 4:
            x = tl.load(x_row_ptr + odd[None, :], mask=is_row[:, None] & (row < NUM_INNER)[None, :], other=0.0)
            product = tl.dot(x.to(DOT), high.to(DOT), product, input_precision="ieee")
            x_sum += tl.sum(x.to(tl.float32), 1)
        scale_row = start // GROUP_SIZE * NUM_COLUMNS + columns
        if zero_ptr is not None:
            zero = tl.load(zero_ptr + scale_row, mask=is_column, other=0.0).to(tl.float32)
            product -= x_sum[:, None] * (zero - 2 ** (NUM_BITS - 1))[None, :]
        total += product * tl.load(scale_ptr + scale_row, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    out_row = tl.program_id(1).to(tl.int64) * num_rows + rows
    tl.store(
        out_ptr + out_row[:, None] * NUM_COLUMNS + columns[None, :],
        total.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & is_column[None, :],
    )


@triton.jit(do_not_specialize=["num_rows"])
def _multiply_row(
    x_ptr,
    codes_ptr,
    scale_ptr,
    zero_ptr,
    lookup_ptr,
    permutation_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    NUM_COLUMNS: tl.constexpr,
    NUM_INNER: tl.constexpr,
    NUM_BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    TILES: tl.constexpr,
):
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < NUM_COLUMNS
    total = tl.zeros([COLUMNS], dtype=tl.float32)
    first = tl.program_id(1) * TILES * INNER
    for start in range(first, tl.minimum(first + TILES * INNER, NUM_INNER), INNER):
        row, even, odd, low, high = _tile(
            codes_ptr, lookup_ptr, permutation_ptr, start, columns, is_column, NUM_COLUMNS, NUM_INNER, NUM_BITS, INNER
        )
        x = tl.load(x_ptr + even, mask=row < NUM_INNER, other=0.0).to(tl.float32)
        products = x[:, None] * low
        if NUM_BITS == 4:
            x_odd = tl.load(x_ptr + odd, mask=row < NUM_INNER, other=0.0).to(tl.float32)
            products += x_odd[:, None] * high
            x += x_odd
        product = tl.sum(products, 0)
        scale_row = start // GROUP_SIZE * NUM_COLUMNS + columns
        if zero_ptr is not None:
            zero = tl.load(zero_ptr + scale_row, mask=is_column, other=0.0).to(tl.float32)
            product -= tl.sum(x, 0) * (zero - 2 ** (NUM_BITS - 1))
        total += product * tl.load(scale_ptr + scale_row, mask=is_column, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out_ptr + tl.program_id(1) * NUM_COLUMNS + columns, total.to(out_ptr.dtype.element_ty), mask=is_column)


@triton.jit
def _tile(
    codes_ptr,
    lookup_ptr,
    permutation_ptr,
    start,
    columns,
    is_column,
    NUM_COLUMNS: tl.constexpr,
    NUM_INNER: tl.constexpr,
    NUM_BITS: tl.constexpr,
    INNER: tl.constexpr,
):
    """A tile of a weight without its scales.

    Returns, for each row of codes: its first row of the weight, the inputs that its low and high halves stand for, and
    their numbers, float32 ``[rows, COLUMNS]``. With 8 bits there is one half.
    """
    PER_BYTE: tl.constexpr = 8 // NUM_BITS
    index = start // PER_BYTE + tl.arange(0, INNER // PER_BYTE)
    row = index * PER_BYTE
    is_inner = row < NUM_INNER
    codes = tl.load(
        codes_ptr + index.to(tl.int64)[:, None] * NUM_COLUMNS + columns[None, :],
        mask=is_inner[:, None] & is_column[None, :],
        other=0,
    ).to(tl.int32)
    even = row
    odd = row + PER_BYTE - 1
    if permutation_ptr is not None:
        even = tl.load(permutation_ptr + even, mask=is_inner, other=0)
        odd = tl.load(permutation_ptr + odd, mask=is_inner, other=0)
    low = numbers_of(codes & (2**NUM_BITS - 1), lookup_ptr, NUM_BITS)
    high = low
    if NUM_BITS == 4:
        high = numbers_of(codes >> 4, lookup_ptr, NUM_BITS)
    return row, even, odd, low, high


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
