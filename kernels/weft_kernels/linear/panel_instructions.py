"""Inner loops of products on CPUs with AVX-512, as LLVM instructions: rows of ``x`` by a panel of 64 outputs.

A step of a loop takes a word of 4 bytes of each row and 64 words of the panel, one of each output: 1 input in float32,
2 in bfloat16, 4 in 8 bits. The words of an output are added one by one, first to last, whatever the number of rows, so
that the sums of a row are bitwise its own. Sums stay in registers, 4 for each row.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

#: Rows that the registers hold the sums of: 24 of 32, the others are for words.
MOST_ROWS = 6
#: Outputs of a panel, in vectors of 16.
PANEL = 64
GROUP = 32

_NUM_VECTORS, _LANES, _VECTOR_BYTES, _WORD_BYTES = 4, 16, 64, 4
_STEP_BYTES = _NUM_VECTORS * _VECTOR_BYTES
_SCALES_BYTES = PANEL * 2


class _BFloat(ir.Type):  # type: ignore[misc]
    """The type ``bfloat``, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_I8, _I16, _I32, _I64, _HALF, _FLOAT = (
    ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.HalfType(), ir.FloatType(),
)  # fmt: skip
_FLOATS, _INTS, _BYTES = ir.VectorType(_FLOAT, 16), ir.VectorType(_I32, 16), ir.VectorType(_I8, 64)
_HALVES, _BFLOATS = ir.VectorType(_HALF, 16), ir.VectorType(_BFloat(), 32)


class _Dot(NamedTuple):
    """``sum + weight word * row word`` in each of 16 lanes: an instruction, and the types of sums and words."""

    name: str
    sums: ir.Type
    words: ir.Type


_DOTS = {
    "float32": _Dot("llvm.fma.v16f32", _FLOATS, _FLOATS),
    "bfloat16": _Dot("llvm.x86.avx512bf16.dpbf16ps.512", _FLOATS, _BFLOATS),
    "int8": _Dot("llvm.x86.avx512.vpdpbusd.512", _INTS, _BYTES),
}
#: What a CPU must have for each, by LLVM's names.
FEATURES = {
    "float32": ("avx512f", "avx512bw"),
    "bfloat16": ("avx512f", "avx512bw", "avx512bf16"),
    "int8": ("avx512f", "avx512bw", "avx512vnni"),
}


class _Builder:
    """Addresses, loads and calls at the place where ``b`` builds."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.b = builder

    def at(self, address: ir.Value, offset: ir.Value | int) -> ir.Value:
        return self.b.add(address, offset if isinstance(offset, ir.Value) else ir.Constant(_I64, offset))

    def load(self, address: ir.Value, of: ir.Type) -> ir.Value:
        loaded = self.b.load(self.b.inttoptr(address, of.as_pointer()))
        loaded.align = 1
        return loaded

    def store(self, value: ir.Value, address: ir.Value) -> None:
        self.b.store(value, self.b.inttoptr(address, value.type.as_pointer())).align = 1

    def call(self, name: str, result: ir.Type, *arguments: ir.Value) -> ir.Value:
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        return self.b.call(cgutils.get_or_insert_function(self.b.module, kind, name), arguments)

    def times(self, value: ir.Value, factor: int) -> ir.Value:
        return self.b.mul(value, ir.Constant(_I64, factor))

    def rows(self, first: ir.Value, stride: ir.Value, count: int) -> list[ir.Value]:
        addresses = [first]
        while len(addresses) < count:
            addresses.append(self.at(addresses[-1], stride))
        return addresses

    def prefetch(self, address: ir.Value, num_lines: int) -> None:
        """Cache lines into the second-level cache, to be read; two of each four."""
        for line in range(num_lines):
            place = self.at(address, (line // 2 * _NUM_VECTORS + line % 2) * _VECTOR_BYTES)
            pointer = self.b.inttoptr(place, _I8.as_pointer())
            self.call("llvm.prefetch.p0", ir.VoidType(), pointer, *(ir.Constant(_I32, each) for each in (0, 2, 1)))

    def spread(self, value: ir.Value) -> ir.Value:
        """A value in all lanes of a vector of 16."""
        vector = ir.VectorType(value.type, _LANES)
        none = ir.Constant(vector, ir.Undefined)
        one = self.b.insert_element(none, value, ir.Constant(_I32, 0))
        return self.b.shuffle_vector(one, none, ir.Constant(_INTS, [0] * _LANES))

    def word(self, address: ir.Value, of: ir.Type) -> ir.Value:
        """The word at the address in all lanes."""
        return self.b.bitcast(self.spread(self.load(address, _I32)), of)

    def dot(self, dot: _Dot, total: ir.Value, weight: ir.Value, row: ir.Value) -> ir.Value:
        arguments = (weight, row, total) if dot.sums is dot.words else (total, weight, row)
        return self.call(dot.name, dot.sums, *arguments)

    def halves(self, codes: ir.Value, table: ir.Value | None) -> list[ir.Value]:
        """The low and the high halves of bytes, or their values in the table."""
        high = self.b.bitcast(self.b.lshr(self.b.bitcast(codes, _INTS), ir.Constant(_INTS, [4] * _LANES)), _BYTES)
        both = [self.b.and_(half, ir.Constant(_BYTES, [15] * 64)) for half in (codes, high)]
        if table is None:
            return both
        return [self.call("llvm.x86.avx512.pshuf.b.512", _BYTES, table, half) for half in both]

    def bfloats(self, floats: ir.Value) -> ir.Value:
        """Bits of floats as those of the nearest bfloat16 numbers, ties to even; not a number stays so."""
        b = self.b

        def constant(value: int) -> ir.Value:
            return ir.Constant(_INTS, [value] * _LANES)

        odd = b.and_(b.lshr(floats, constant(16)), constant(1))
        rounded = b.add(floats, b.add(odd, constant(0x7FFF)))
        is_number = b.icmp_unsigned("<=", b.and_(floats, constant(0x7FFFFFFF)), constant(0x7F800000))
        kept = b.select(is_number, rounded, b.or_(floats, constant(0x400000)))
        return b.trunc(b.lshr(kept, constant(16)), ir.VectorType(_I16, _LANES))

    def loop(self, count: ir.Value, carried: Sequence[ir.Value], body: Callable[..., Sequence[ir.Value]]) -> list[Any]:
        """``body(index, *values)`` at least once, up to ``count`` times; returns the values after the last."""
        before, inside = self.b.block, self.b.append_basic_block()
        self.b.branch(inside)
        self.b.position_at_end(inside)
        index = self.b.phi(_I64)
        index.add_incoming(ir.Constant(_I64, 0), before)
        values = [self.b.phi(value.type) for value in carried]
        for value, first in zip(values, carried, strict=True):
            value.add_incoming(first, before)
        changed = list(body(index, *values))
        following = self.at(index, 1)
        last, after = self.b.block, self.b.append_basic_block()
        for phi, value in zip([index, *values], [following, *changed], strict=True):
            phi.add_incoming(value, last)
        self.b.cbranch(self.b.icmp_signed("<", following, count), inside, after)
        self.b.position_at_end(after)
        return changed


def _add_words(b: _Builder, dot: _Dot, num_rows: int, arguments: Sequence[Any]) -> None:
    """``words_product`` of a fixed number of rows."""
    x, stride, panel, steps, sums, ahead = arguments
    rows = b.rows(x, stride, num_rows)
    places = [b.at(sums, vector * _VECTOR_BYTES) for vector in range(num_rows * _NUM_VECTORS)]

    def step(index: Any, *totals: Any) -> list[Any]:
        start = b.times(index, _STEP_BYTES)
        place, words = b.at(panel, start), b.times(index, _WORD_BYTES)
        weights = [b.load(b.at(place, vector * _VECTOR_BYTES), dot.words) for vector in range(_NUM_VECTORS)]
        b.prefetch(b.at(ahead, start), 2)
        found = []
        for row in range(num_rows):
            word = b.word(b.at(rows[row], words), dot.words)
            mine = totals[row * _NUM_VECTORS : (row + 1) * _NUM_VECTORS]
            found += [b.dot(dot, total, weight, word) for total, weight in zip(mine, weights, strict=True)]
        return found

    for place, total in zip(places, b.loop(steps, [b.load(p, dot.sums) for p in places], step), strict=True):
        b.store(total, place)


def _add_groups(b: _Builder, num_bits: int, num_rows: int, arguments: Sequence[Any]) -> None:
    """``groups_product`` of a fixed number of rows."""
    x, stride, panel, groups, sums, ahead, factors, factors_stride, table = arguments
    rows, row_factors = b.rows(x, stride, num_rows), b.rows(factors, factors_stride, num_rows)
    group_bytes = bytes_of_group(num_bits)
    scales_at = group_bytes - 2 * _SCALES_BYTES

    def group(index: Any) -> list[Any]:
        start = b.times(index, group_bytes)
        place, words = b.at(panel, start), b.times(index, GROUP)
        b.prefetch(b.at(ahead, start), group_bytes // _STEP_BYTES * 2)
        totals = [ir.Constant(_INTS, [0] * _LANES)] * (num_rows * _NUM_VECTORS)
        for load in range(GROUP // _WORD_BYTES * num_bits // 8):
            for vector in range(_NUM_VECTORS):
                loaded = b.load(b.at(place, (load * _NUM_VECTORS + vector) * _VECTOR_BYTES), _BYTES)
                halves = [loaded] if num_bits == 8 else b.halves(loaded, table)
                for half, weights in enumerate(halves):
                    word = load * len(halves) + half
                    for row in range(num_rows):
                        own = b.word(b.at(b.at(rows[row], words), word * _WORD_BYTES), _BYTES)
                        at = row * _NUM_VECTORS + vector
                        totals[at] = b.dot(_DOTS["int8"], totals[at], weights, own)
        for vector in range(_NUM_VECTORS):
            scale, offset = (
                b.b.fpext(b.load(b.at(place, scales_at + part + vector * _LANES * 2), _HALVES), _FLOATS)
                for part in (0, _SCALES_BYTES)
            )
            for row in range(num_rows):
                at = row * _NUM_VECTORS + vector
                own = b.at(row_factors[row], b.times(index, 2 * _WORD_BYTES))
                own_scale, own_sum = (b.spread(b.load(b.at(own, part), _FLOAT)) for part in (0, _WORD_BYTES))
                product = b.b.fmul(b.b.sitofp(totals[at], _FLOATS), own_scale)
                total = b.dot(_DOTS["float32"], b.load(b.at(sums, at * _VECTOR_BYTES), _FLOATS), scale, product)
                b.store(b.dot(_DOTS["float32"], total, offset, own_sum), b.at(sums, at * _VECTOR_BYTES))
        return []

    b.loop(groups, [], group)


def bytes_of_group(num_bits: int) -> int:
    """Bytes of a group of 32 inputs in a panel: codes, scales, offsets."""
    return PANEL * GROUP * num_bits // 8 + 2 * _SCALES_BYTES


def _for_each_count(builder: Any, num_rows: Any, build: Callable[[int], None]) -> None:
    """``build(rows)`` for 1 to ``MOST_ROWS`` rows; when it runs, ``num_rows`` chooses."""
    after = builder.append_basic_block()
    choice = builder.switch(num_rows, after)
    for rows in range(1, MOST_ROWS + 1):
        block = builder.append_basic_block()
        choice.add_case(ir.Constant(_I64, rows), block)
        builder.position_at_end(block)
        build(rows)
        builder.branch(after)
    builder.position_at_end(after)


@intrinsic
def words_product(
    typing: Any, rows: Any, num_rows: Any, x: Any, x_stride: Any, panel: Any, steps: Any, sums: Any, ahead: Any
) -> Any:
    """Add the products of 1 to ``MOST_ROWS`` rows and a panel to ``sums``.

    Args:
        typing: Of the compiler.
        rows: An array of the type of the rows: float32, uint16 for bfloat16, or int8, whose weights are unsigned.
        num_rows: Number of rows.
        x: Address of the first row.
        x_stride: Bytes from a row to the next.
        panel: Address of the panel, ``steps`` times 256 bytes.
        steps: At least 1.
        sums: Address of the sums, ``[num_rows, 64]`` of float32, or int32 for 8 bits.
        ahead: Address of what to prefetch, two cache lines of each 256 bytes of as many as the panel has.
    """
    dot = _DOTS[{"uint16": "bfloat16"}.get(str(rows.dtype), str(rows.dtype))]

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        _for_each_count(builder, arguments[1], lambda count: _add_words(_Builder(builder), dot, count, arguments[2:]))
        return context.get_dummy_value()

    return types.void(rows, *[types.int64] * 7), generate


@intrinsic
def groups_product(
    typing: Any, table: Any, num_rows: Any, x: Any, x_stride: Any, panel: Any, groups: Any, sums: Any, ahead: Any,
    factors: Any, factors_stride: Any,
) -> Any:  # fmt: skip
    """As ``words_product``, with rows of signed 8-bit codes and a panel of groups of 32 inputs.

    Args:
        typing: Of the compiler.
        table: uint8 array, whose number of axes says what the unsigned codes are: 1: 8-bit numbers, 2: 4-bit numbers,
            3: indices of its 16 values.
        num_rows: Number of rows.
        x: Address of the first row.
        x_stride: Bytes from a row to the next.
        panel: Address of ``groups`` times ``bytes_of_group``: codes, the scales of the 64 outputs, float16, and their
            offsets, likewise.
        groups: At least 1.
        sums: Address of the sums, float32 ``[num_rows, 64]``.
        ahead: As there.
        factors: Address of the scale of each group of a row and of the sum of its numbers, float32.
        factors_stride: Bytes from a row of these to the next.
    """
    num_bits = 8 if table.ndim == 1 else 4

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        b = _Builder(builder)
        values = None
        if table.ndim == 3:
            address = builder.ptrtoint(make_array(table)(context, builder, arguments[0]).data, _I64)
            quarter = b.load(address, ir.VectorType(_I8, 16))
            lanes = ir.Constant(ir.VectorType(_I32, 64), list(range(16)) * 4)
            values = builder.shuffle_vector(quarter, quarter, lanes)
        _for_each_count(builder, arguments[1], lambda count: _add_groups(b, num_bits, count, [*arguments[2:], values]))
        return context.get_dummy_value()

    return types.void(table, *[types.int64] * 9), generate


@intrinsic
def store_row(typing: Any, out: Any, address: Any, sums: Any, count: Any) -> Any:
    """Store the first of 64 float32 sums, rounded to the nearest where the array is bfloat16.

    Args:
        typing: Of the compiler.
        out: An array of the type of the result, which alone is read: float32, or uint16 for bfloat16.
        address: Where to store.
        sums: Address of the sums.
        count: How many of them; all above 64.
    """
    is_bfloat16 = str(out.dtype) == "uint16"

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        b = _Builder(builder)
        _, address, sums, count = arguments
        lanes, left = ir.Constant(_INTS, list(range(_LANES))), b.b.trunc(count, _I32)
        for vector in range(_NUM_VECTORS):
            value = b.load(b.at(sums, vector * _VECTOR_BYTES), _INTS)
            mask = builder.icmp_signed("<", lanes, b.spread(builder.sub(left, ir.Constant(_I32, vector * _LANES))))
            value = b.bfloats(value) if is_bfloat16 else value
            place = b.at(address, vector * _LANES * (2 if is_bfloat16 else 4))
            pointer = builder.inttoptr(place, value.type.as_pointer())
            name = f"llvm.masked.store.v16i{value.type.element.width}.p0"
            b.call(name, ir.VoidType(), value, pointer, ir.Constant(_I32, 1), mask)
        return context.get_dummy_value()

    return types.void(out, *[types.int64] * 3), generate
