"""Codes of 4 and 8 bits as numbers, in the Triton language: ``dequantize``."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft_kernels.linear.quantized import QuantizedWeight

_BYTE_ROWS, _BYTE_COLUMNS = 16, 128


def dequantize(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """The transpose of ``weight.dequantize(dtype)``, ``[K, N]``, in one pass over the codes."""
    num_outputs, num_inputs = weight.shape
    numbers = torch.empty(num_inputs, num_outputs, dtype=dtype, device=weight.device)
    rows = triton.cdiv(num_inputs * weight.num_bits // 8, _BYTE_ROWS)
    _dequantize[(rows, triton.cdiv(num_outputs, _BYTE_COLUMNS))](
        weight.codes,
        weight.scales,
        weight.zeros,
        weight.lookup,
        weight.permutation,
        numbers,
        NUM_COLUMNS=num_outputs,
        NUM_INNER=num_inputs,
        NUM_BITS=weight.num_bits,
        GROUP_SIZE=weight.group_size,
        ROWS=_BYTE_ROWS,
        COLUMNS=_BYTE_COLUMNS,
        num_warps=4,
    )
    return numbers


@triton.jit
def numbers_of(codes, lookup_ptr, NUM_BITS: tl.constexpr):
    """Entries of the table, or codes less the middle, as float32."""
    if lookup_ptr is None:  # the lowest bits of a float of 2 ** 23: one operation where a conversion takes two
        numbers = (codes | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + 2 ** (NUM_BITS - 1))
    else:
        numbers = tl.load(lookup_ptr + codes)
    return numbers


@triton.jit
def _dequantize(
    codes_ptr,
    scale_ptr,
    zero_ptr,
    lookup_ptr,
    permutation_ptr,
    out_ptr,
    NUM_COLUMNS: tl.constexpr,
    NUM_INNER: tl.constexpr,
    NUM_BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    PER_BYTE: tl.constexpr = 8 // NUM_BITS
    byte_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_row = byte_row * PER_BYTE < NUM_INNER
    is_element = is_row[:, None] & (columns < NUM_COLUMNS)[None, :]
    codes = tl.load(
        codes_ptr + byte_row.to(tl.int64)[:, None] * NUM_COLUMNS + columns[None, :], mask=is_element, other=0
    ).to(tl.int32)
    for half in tl.static_range(PER_BYTE):
        row = byte_row * PER_BYTE + half
        scale_row = (row // GROUP_SIZE).to(tl.int64)[:, None] * NUM_COLUMNS + columns[None, :]
        values = numbers_of((codes >> (half * NUM_BITS)) & (2**NUM_BITS - 1), lookup_ptr, NUM_BITS)
        if zero_ptr is not None:
            zero = tl.load(zero_ptr + scale_row, mask=is_element, other=0.0).to(tl.float32)
            values -= zero - 2 ** (NUM_BITS - 1)
        values *= tl.load(scale_ptr + scale_row, mask=is_element, other=0.0).to(tl.float32)
        place = row.to(tl.int64)
        if permutation_ptr is not None:
            place = tl.load(permutation_ptr + row, mask=is_row, other=0)
        tl.store(
            out_ptr + place[:, None] * NUM_COLUMNS + columns[None, :],
            values.to(out_ptr.dtype.element_ty),
            mask=is_element,
        )
