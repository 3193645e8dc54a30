"""Reading and writing of float32 and bfloat16 numbers in functions that numba compiles."""

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from weft_kernels.jit import jit

#: An empty array by whose type a compiled function knows that of numbers at an address: bfloat16 is uint16 there.
LIKE: dict[torch.dtype, Any] = {torch.float32: np.empty(0, np.float32), torch.bfloat16: np.empty(0, np.uint16)}


@intrinsic
def _pointer(typing: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.voidptr(types.int64), generate


@intrinsic
def _float_of(typing: Any, bits: Any) -> Any:
    return types.float32(types.uint32), lambda _, builder, __, arguments: builder.bitcast(arguments[0], ir.FloatType())


@intrinsic
def _bits_of(typing: Any, number: Any) -> Any:
    return types.uint32(types.float32), lambda _, builder, __, arguments: builder.bitcast(arguments[0], ir.IntType(32))


@jit
def at(address: int, size: int, like: Any) -> Any:
    """The array of ``size`` elements at an address, which is not checked, of the type of ``like``."""
    return carray(_pointer(address), (size,), like.dtype)


@jit
def read(array: Any, index: int) -> Any:
    """An element of float32 or bfloat16, as float32."""
    if array.itemsize == 4:
        return np.float32(array[index])
    return _float_of(np.uint32(array[index]) << np.uint32(16))


@jit
def write(array: Any, index: int, number: Any) -> None:
    """Set an element of float32 or bfloat16; rounds to the nearest, ties to even."""
    if array.itemsize == 4:
        array[index] = number
    else:
        bits = _bits_of(number)
        rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        is_number = (bits & np.uint32(0x7FFFFFFF)) <= np.uint32(0x7F800000)
        array[index] = np.uint16((rounded if is_number else bits | np.uint32(0x400000)) >> np.uint32(16))


@jit
def magnitude_bits(number: Any) -> Any:
    """Bits that are ordered like the magnitudes, not a number above all."""
    return np.int32(_bits_of(number) & np.uint32(0x7FFFFFFF))


@jit
def of_bits(bits: Any) -> Any:
    """The float32 of ``magnitude_bits``."""
    return _float_of(np.uint32(bits))


@jit
def nearest(number: Any) -> Any:
    """The nearest whole number, ties to even, of one between -2**22 and 2**22, as int32; any for NaN."""
    return np.int32(_bits_of(number + np.float32(1.5 * 2**23)) - np.uint32(0x4B400000))
