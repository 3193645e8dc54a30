"""Emits LLVM code of 16 float32 lanes for kernels that numba compiles.

LLVM does not vectorise loops over keys well by itself (5 GFLOP/s; so written 80). Nothing reorders a sum of these
instructions. Processors with shorter vectors take several for each. Addresses are integers; nothing is checked.
"""

from collections.abc import Callable
from typing import Any

import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

LANES = 16
#: Constants for types of numbers in memory.
FLOAT32, FLOAT16, BFLOAT16, INT8 = range(4)
ITEM_BYTES = (4, 2, 2, 1)
DTYPES = {torch.float32: FLOAT32, torch.float16: FLOAT16, torch.bfloat16: BFLOAT16, torch.int8: INT8}

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32 = ir.FloatType()
VECTOR = ir.VectorType(F32, LANES)
INTS = ir.VectorType(I32, LANES)
_LOG2_E = 1.4426950408889634
#: Taylor's series of 2 ** x, relative error 2e-8 for x from -0.5 to 0.5.
_EXP2 = (
    1.0,
    0.6931471805599453,
    0.2402265069591007,
    0.05550410866482158,
    0.009618129107628477,
    0.0013333558146428443,
    0.00015403530393381608,
)


def padded(size: int) -> int:
    """``size`` rounded up to whole vectors."""
    return -(-size // LANES) * LANES


def pieces(size: int) -> list[tuple[int, int]]:
    """First element and number of elements of each vector of a row."""
    return [(first, min(LANES, size - first)) for first in range(0, size, LANES)]


class VectorCode:
    """Emits instructions at the end of a block."""

    def __init__(self, builder: Any) -> None:
        self.b = builder

    def at(self, address: Any, offset: int) -> Any:
        """The address plus bytes that are known as the kernel is compiled."""
        return self.b.add(address, ir.Constant(I64, offset))

    def load(self, address: Any, dtype: int = FLOAT32, count: int = LANES) -> Any:
        """``count`` numbers as float32, the lanes behind them 0."""
        b = self.b
        item = (F32, ir.HalfType(), I16, I8)[dtype]
        vector = ir.VectorType(item, count)
        loaded = b.load(b.inttoptr(address, vector.as_pointer()), align=ITEM_BYTES[dtype])
        floats, ints = ir.VectorType(F32, count), ir.VectorType(I32, count)
        if dtype == FLOAT16:
            loaded = b.fpext(loaded, floats)
        elif dtype == BFLOAT16:
            loaded = b.bitcast(b.shl(b.zext(loaded, ints), ir.Constant(ints, [16] * count)), floats)
        elif dtype == INT8:
            loaded = b.sitofp(b.sext(loaded, ints), floats)
        if count == LANES:
            return loaded
        order = ir.Constant(ir.VectorType(I32, LANES), [min(lane, count) for lane in range(LANES)])
        return b.shuffle_vector(loaded, ir.Constant(floats, [0.0] * count), order)

    def store(self, vector: Any, address: Any, dtype: int = FLOAT32, count: int = LANES) -> None:
        """The first ``count`` lanes, rounded to the type."""
        b = self.b
        ints = ir.VectorType(I32, LANES)
        if dtype == FLOAT16:
            vector = b.fptrunc(vector, ir.VectorType(ir.HalfType(), LANES))
        elif dtype == BFLOAT16:
            bits = b.bitcast(vector, ints)
            odd = b.and_(b.lshr(bits, ir.Constant(ints, [16] * LANES)), ir.Constant(ints, [1] * LANES))
            rounded = b.add(b.add(bits, odd), ir.Constant(ints, [0x7FFF] * LANES))
            is_nan = b.fcmp_unordered("uno", vector, vector)
            rounded = b.select(is_nan, ir.Constant(ints, [0x7FC00000] * LANES), rounded)
            shifted = b.lshr(rounded, ir.Constant(ints, [16] * LANES))
            vector = b.trunc(shifted, ir.VectorType(I16, LANES))
        item = vector.type.element
        if count < LANES:
            order = ir.Constant(ir.VectorType(I32, count), list(range(count)))
            vector = b.shuffle_vector(vector, vector, order)
        b.store(vector, b.inttoptr(address, ir.VectorType(item, count).as_pointer()), align=ITEM_BYTES[dtype])

    def scalar(self, address: Any) -> Any:
        """The float32 at the address."""
        return self.b.load(self.b.inttoptr(address, F32.as_pointer()), align=4)

    def splat(self, scalar: Any) -> Any:
        """A float32 in every lane."""
        if isinstance(scalar, float):
            return ir.Constant(VECTOR, [scalar] * LANES)
        zeros = ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
        undefined = ir.Constant(VECTOR, ir.Undefined)
        return self.b.shuffle_vector(self.b.insert_element(undefined, scalar, ir.Constant(I32, 0)), undefined, zeros)

    def intrinsic(self, name: str, *operands: Any) -> Any:
        """LLVM's function of the name, lane by lane."""
        kind = ir.FunctionType(VECTOR, [VECTOR] * len(operands))
        return self.b.call(cgutils.get_or_insert_function(self.b.module, kind, f"{name}.v{LANES}f32"), operands)

    def splat_int(self, scalar: Any) -> Any:
        """An int32 in every lane."""
        zeros = ir.Constant(INTS, [0] * LANES)
        return self.b.shuffle_vector(self.b.insert_element(zeros, scalar, ir.Constant(I32, 0)), zeros, zeros)

    def maximum(self, left: Any, right: Any) -> Any:
        """Lane by lane; of a NaN and a number the number."""
        return self.intrinsic("llvm.maxnum", left, right)

    def tanh(self, x: Any) -> Any:
        """``1 - 2 / (exp(2 x) + 1)`` of x from -10 to 10, beyond which float32 has it as 1; absolute error 1e-7."""
        b = self.b
        for bound, is_beyond in ((10.0, "ogt"), (-10.0, "olt")):
            x = b.select(b.fcmp_ordered(is_beyond, x, self.splat(bound)), self.splat(bound), x)
        return b.fsub(self.splat(1.0), b.fdiv(self.splat(2.0), b.fadd(self.exp(b.fadd(x, x)), self.splat(1.0))))

    def prefetch(self, address: Any) -> None:
        """Begin to load the cache line at the address into the second-level cache."""
        kind = ir.FunctionType(ir.VoidType(), [ir.PointerType(I8), I32, I32, I32])
        function = cgutils.get_or_insert_function(self.b.module, kind, "llvm.prefetch.p0")
        read, locality, data = (ir.Constant(I32, x) for x in (0, 2, 1))
        self.b.call(function, [self.b.inttoptr(address, ir.PointerType(I8)), read, locality, data])

    def fma(self, left: Any, right: Any, addend: Any) -> Any:
        """``left * right + addend``, rounded once."""
        return self.intrinsic("llvm.fma", left, right, addend)

    def sum_four(self, vectors: list[Any]) -> Any:
        """Sums over the lanes of four vectors, ``<4 x float>``: halves, quarters, and a transposition of four."""
        b = self.b

        def both(first: Any, second: Any, *lanes: list[int]) -> Any:
            low, high = (b.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, len(x)), x)) for x in lanes)
            return b.fadd(low, high)

        halves = [both(vector, vector, list(range(8)), list(range(8, 16))) for vector in vectors]
        quads = [both(vector, vector, list(range(4)), list(range(4, 8))) for vector in halves]
        pairs = [both(left, right, [0, 4, 1, 5], [2, 6, 3, 7]) for left, right in (quads[:2], quads[2:])]
        return both(pairs[0], pairs[1], [0, 1, 4, 5], [2, 3, 6, 7])

    def across(self, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """All lanes combined, in every lane."""
        for step in (8, 4, 2, 1):
            order = ir.Constant(ir.VectorType(I32, LANES), [(lane + step) % LANES for lane in range(LANES)])
            vector = combine(vector, self.b.shuffle_vector(vector, vector, order))
        return vector

    def exp(self, x: Any) -> Any:
        """``exp(x)``, of x up to 88; 1e-38 below -87."""
        b = self.b
        x = b.fmul(x, self.splat(_LOG2_E))
        x = b.select(b.fcmp_ordered("olt", x, self.splat(-126.0)), self.splat(-126.0), x)
        whole = self.intrinsic("llvm.rint", x)
        rest = b.fsub(x, whole)
        result = self.splat(_EXP2[-1])
        for factor in reversed(_EXP2[:-1]):
            result = self.fma(result, rest, self.splat(factor))
        ints = ir.VectorType(I32, LANES)
        exponent = b.shl(
            b.add(b.fptosi(whole, ints), ir.Constant(ints, [127] * LANES)), ir.Constant(ints, [23] * LANES)
        )
        return b.fmul(result, b.bitcast(exponent, VECTOR))


@intrinsic(prefer_literal=True)
def load_int32(typing: Any, address: Any) -> Any:
    """The int32 at the address, as int64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sext(builder.load(builder.inttoptr(args[0], I32.as_pointer()), align=4), I64)

    return types.int64(types.int64), codegen


@intrinsic(prefer_literal=True)
def load_int64(typing: Any, address: Any) -> Any:
    """The int64 at the address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], I64.as_pointer()), align=8)

    return types.int64(types.int64), codegen


@intrinsic(prefer_literal=True)
def store_int64(typing: Any, address: Any, value: Any) -> Any:
    """Store an int64 at the address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], builder.inttoptr(args[0], I64.as_pointer()), align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def copy_float32(typing: Any, source: Any, target: Any) -> Any:
    """Copy the float32 at ``source`` to ``target``."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = VectorCode(builder)
        builder.store(code.scalar(args[0]), builder.inttoptr(args[1], F32.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen
