"""Inner loops of products on CPUs, as LLVM instructions: rows of ``x`` by a panel of outputs.

``SETS`` has a row for each set of instructions; ``SET`` is the first that this CPU has. A step of a loop takes a word
of 4 bytes of each output of the panel, and the same inputs of each row: 1 input in float32, 2 in bfloat16, 4 in 8 bits.
The words of an output are added one by one, first to last, whatever the number of rows, so that the sums of a row are
bitwise its own. Sums stay in registers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from weft_kernels import jit


class InstructionSet(NamedTuple):
    """How products are computed on some CPUs.

    Attributes:
        lanes: Words of a vector.
        num_vectors: Vectors of a panel.
        most_rows: Rows that are multiplied at once: the registers hold their sums, ``num_vectors`` each, beside words.
        most_widened_rows: The same where weights of bfloat16 become float32: more rows, by two vectors at a time, so
            that a weight is converted for more of them.
        features: What a CPU must have for numbers of a type, or ``int8`` for codes, by LLVM's names.
        dots: By the same names, how a word of a row is multiplied with one of a weight and added; see ``_DOTS``.
    """

    lanes: int
    num_vectors: int
    most_rows: int
    most_widened_rows: int
    features: Mapping[str, tuple[str, ...]]
    dots: Mapping[str, str]


SETS = {
    # 24 of 32 registers are sums.
    "AVX-512": InstructionSet(
        16,
        4,
        6,
        6,
        {
            "float32": ("avx512f", "avx512bw"),
            "bfloat16": ("avx512f", "avx512bw", "avx512bf16"),
            "int8": ("avx512f", "avx512bw", "avx512vnni"),
        },
        {"float32": "fma", "bfloat16": "dpbf16", "int8": "dpbusd"},
    ),
    # 12 of 16 registers are sums.
    "AVX-VNNI": InstructionSet(
        8,
        4,
        3,
        6,
        dict.fromkeys(("float32", "bfloat16", "int8"), ("avx2", "fma", "f16c", "avxvnni")),
        {"float32": "fma", "bfloat16": "widened", "int8": "dpbusd"},
    ),
    "AVX2": InstructionSet(
        8,
        4,
        3,
        6,
        dict.fromkeys(("float32", "bfloat16", "int8"), ("avx2", "fma", "f16c")),
        {"float32": "fma", "bfloat16": "widened", "int8": "maddubs"},
    ),
}
_HAS = jit.features()
NAME = next((name for name, row in SETS.items() if _HAS.issuperset(row.features["float32"])), "")
#: Those of this CPU; without any nothing is compiled.
SET = SETS.get(NAME, SETS["AVX2"])

MOST_ROWS, MOST_WIDENED_ROWS = SET.most_rows, SET.most_widened_rows
#: Outputs of a panel.
PANEL = SET.num_vectors * SET.lanes
#: Inputs of a group of codes; those of 8 bits may have fewer.
GROUP, SMALL_GROUP = 32, 16
#: Whether rows of bfloat16 numbers are given as float32.
WIDENS_ROWS = SET.dots["bfloat16"] == "widened"
#: Whether codes of 8 bits, and values of a table, are signed; else 128 is added. Codes of 4 bits never are.
HAS_SIGNED_CODES = SET.dots["int8"] == "maddubs"

_LANES, _NUM_VECTORS, _WORD_BYTES = SET.lanes, SET.num_vectors, 4
_VECTOR_BYTES = _LANES * _WORD_BYTES
_STEP_BYTES = _NUM_VECTORS * _VECTOR_BYTES
_SCALES_BYTES = PANEL * 2
_LINE_BYTES = 64


def is_native(name: str) -> bool:
    """Whether this CPU has instructions for ``float32``, ``bfloat16``, or ``int8``: codes of 8 and 4 bits."""
    return bool(NAME) and name in SET.features and _HAS.issuperset(SET.features[name])


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
_FLOATS, _INTS = ir.VectorType(_FLOAT, _LANES), ir.VectorType(_I32, _LANES)
_SHORTS, _BYTES = ir.VectorType(_I16, 2 * _LANES), ir.VectorType(_I8, 4 * _LANES)
_HALVES, _BFLOATS = ir.VectorType(_HALF, _LANES), ir.VectorType(_BFloat(), 2 * _LANES)


def _all(of: ir.VectorType, value: int) -> ir.Constant:
    return ir.Constant(of, [value] * of.count)


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

    def prefetch(self, address: ir.Value, num_bytes: int) -> None:
        """Cache lines into the second-level cache, to be read: two of each four, or the only one."""
        for line in range(max(num_bytes // (2 * _LINE_BYTES), 1)):
            place = self.at(address, (line // 2 * 4 + line % 2) * _LINE_BYTES)
            pointer = self.b.inttoptr(place, _I8.as_pointer())
            self.call("llvm.prefetch.p0", ir.VoidType(), pointer, *(ir.Constant(_I32, each) for each in (0, 2, 1)))

    def spread(self, value: ir.Value) -> ir.Value:
        """A value in all lanes of a vector."""
        vector = ir.VectorType(value.type, _LANES)
        none = ir.Constant(vector, ir.Undefined)
        one = self.b.insert_element(none, value, ir.Constant(_I32, 0))
        return self.b.shuffle_vector(one, none, ir.Constant(_INTS, [0] * _LANES))

    def word(self, address: ir.Value, of: ir.Type) -> ir.Value:
        """The word at the address in all lanes."""
        return self.b.bitcast(self.spread(self.load(address, _I32)), of)

    def fma(self, one: ir.Value, other: ir.Value, total: ir.Value) -> ir.Value:
        return self.call(f"llvm.fma.v{_LANES}f32", _FLOATS, one, other, total)

    def halves(self, codes: ir.Value, table: ir.Value | None) -> list[ir.Value]:
        """The low and the high halves of bytes, or their values in the table."""
        high = self.b.bitcast(self.b.lshr(self.b.bitcast(codes, _INTS), _all(_INTS, 4)), _BYTES)
        both = [self.b.and_(half, _all(_BYTES, 15)) for half in (codes, high)]
        if table is None:
            return both
        name = "llvm.x86.avx512.pshuf.b.512" if _LANES == 16 else "llvm.x86.avx2.pshuf.b"
        return [self.call(name, _BYTES, table, half) for half in both]

    def bfloats(self, floats: ir.Value) -> ir.Value:
        """Bits of floats as those of the nearest bfloat16 numbers, ties to even; not a number stays so."""
        b = self.b

        def constant(value: int) -> ir.Value:
            return _all(_INTS, value)

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


class _Dot:
    """Adds the product of a word of a weight and of a row to each lane of a sum.

    Attributes:
        sums: Type of a sum.
        num_parts: A word is multiplied in so many parts.
        row_bytes: Of a row for each word of a weight.
    """

    sums: ir.Type = _FLOATS
    words: ir.Type = _FLOATS
    num_parts = 1
    row_bytes = _WORD_BYTES

    def __init__(self, builder: _Builder) -> None:
        self.b = builder

    def weight(self, loaded: ir.Value, part: int) -> Any:
        """A part of the words of a weight, ready to be multiplied."""
        return loaded

    def row(self, address: ir.Value, part: int) -> ir.Value:
        """The same part of the word of a row, in all lanes."""
        return self.b.word(address, self.words)

    def add(self, total: ir.Value, weight: Any, row: ir.Value) -> ir.Value:
        """The sum with the product."""
        return self.b.fma(weight, row, total)


class _BFloatDot(_Dot):
    """One instruction for both numbers of a word."""

    words = _BFLOATS

    def add(self, total: ir.Value, weight: Any, row: ir.Value) -> ir.Value:
        return self.b.call("llvm.x86.avx512bf16.dpbf16ps.512", _FLOATS, total, weight, row)


class _WidenedDot(_Dot):
    """The two bfloat16 numbers of a word as float32, the first and then the second, with rows of float32."""

    num_parts = 2
    row_bytes = 2 * _WORD_BYTES

    def weight(self, loaded: ir.Value, part: int) -> Any:
        b, bits = self.b.b, self.b.b.bitcast(loaded, _INTS)
        bits = b.shl(bits, _all(_INTS, 16)) if part == 0 else b.and_(bits, _all(_INTS, 0xFFFF0000))
        return b.bitcast(bits, _FLOATS)

    def row(self, address: ir.Value, part: int) -> ir.Value:
        return self.b.word(self.b.at(address, part * _WORD_BYTES), _FLOATS)


class _CodesDot(_Dot):
    """Four unsigned 8-bit codes of a weight by four signed ones of a row."""

    sums, words = _INTS, _BYTES

    def add(self, total: ir.Value, weight: Any, row: ir.Value) -> ir.Value:
        return self.b.call(f"llvm.x86.avx512.vpdpbusd.{_LANES * 32}", _INTS, total, weight, row)


class _SignedCodesDot(_CodesDot):
    """Four signed 8-bit codes of a weight by four of a row, with the instructions of AVX2.

    The sign of a weight goes to the row, since one factor of the instruction is unsigned; two products are below
    2 * 128 * 127, so that no sum of 16 bits overflows.
    """

    def weight(self, loaded: ir.Value, part: int) -> Any:
        return loaded, self.b.call("llvm.abs.v32i8", _BYTES, loaded, ir.Constant(ir.IntType(1), 0))

    def add(self, total: ir.Value, weight: Any, row: ir.Value) -> ir.Value:
        signed, magnitudes = weight
        own = self.b.call("llvm.x86.avx2.psign.b", _BYTES, row, signed)
        return self.b.b.add(total, self.in_words(self.pairs(magnitudes, own)))

    def pairs(self, unsigned: ir.Value, row: ir.Value) -> ir.Value:
        """Sums of two products each, in 16 bits."""
        return self.b.call("llvm.x86.avx2.pmadd.ub.sw", _SHORTS, unsigned, row)

    def in_words(self, shorts: ir.Value) -> ir.Value:
        """Sums of two of 16 bits each."""
        return self.b.call("llvm.x86.avx2.pmadd.wd", _INTS, shorts, _all(_SHORTS, 1))


class _NibblesDot(_SignedCodesDot):
    """Unsigned 4-bit codes: the sums of a group of 32 inputs, below 16 * 15 * 127, stay in 16 bits to its end."""

    sums = _SHORTS

    def weight(self, loaded: ir.Value, part: int) -> Any:
        return loaded

    def add(self, total: ir.Value, weight: Any, row: ir.Value) -> ir.Value:
        return self.b.b.add(total, self.pairs(weight, row))


_DOTS: dict[str, type[_Dot]] = {
    "fma": _Dot, "dpbf16": _BFloatDot, "widened": _WidenedDot, "dpbusd": _CodesDot, "maddubs": _SignedCodesDot,
}  # fmt: skip


def _add_words(b: _Builder, dot: _Dot, num_rows: int, arguments: Sequence[Any]) -> None:
    """``words_product`` of a fixed number of rows: all vectors of the panel at once, or two by two."""
    num_vectors = _NUM_VECTORS if num_rows <= MOST_ROWS else 2
    for first in range(0, _NUM_VECTORS, num_vectors):
        _add_vectors(b, dot, num_rows, range(first, first + num_vectors), arguments)


def _add_vectors(b: _Builder, dot: _Dot, num_rows: int, vectors: Sequence[int], arguments: Sequence[Any]) -> None:
    x, stride, panel, steps, sums, ahead = arguments
    rows = b.rows(x, stride, num_rows)
    cells = [(row, vector) for row in range(num_rows) for vector in vectors]
    places = [b.at(sums, (row * _NUM_VECTORS + vector) * _VECTOR_BYTES) for row, vector in cells]
    #: The factors that are fewer are loaded first, and stay in registers.
    order = cells if len(vectors) <= num_rows else sorted(cells, key=lambda cell: cell[1])

    def step(index: Any, *totals: Any) -> list[Any]:
        start = b.times(index, _STEP_BYTES)
        place, words = b.at(panel, start), b.times(index, dot.row_bytes)
        if vectors[0] == 0:
            b.prefetch(b.at(ahead, start), _STEP_BYTES)
        found = dict(zip(cells, totals, strict=True))
        for part in range(dot.num_parts):
            own: dict[int, Any] = {}
            weights: dict[int, Any] = {}
            for row, vector in order:
                if row not in own:
                    own[row] = dot.row(b.at(rows[row], words), part)
                if vector not in weights:
                    weights[vector] = dot.weight(b.load(b.at(place, vector * _VECTOR_BYTES), dot.words), part)
                found[row, vector] = dot.add(found[row, vector], weights[vector], own[row])
        return list(found.values())

    for place, total in zip(places, b.loop(steps, [b.load(p, dot.sums) for p in places], step), strict=True):
        b.store(total, place)


def _add_groups(b: _Builder, num_bits: int, size: int, num_rows: int, arguments: Sequence[Any]) -> None:
    """``groups_product`` of a fixed number of rows."""
    x, stride, panel, groups, sums, ahead, factors, factors_stride, table = arguments
    rows, row_factors = b.rows(x, stride, num_rows), b.rows(factors, factors_stride, num_rows)
    dot = _DOTS[SET.dots["int8"]](b)
    if isinstance(dot, _SignedCodesDot) and num_bits == 4 and table is None:
        dot = _NibblesDot(b)
    group_bytes = bytes_of_group(num_bits, size)
    scales_at = group_bytes - 2 * _SCALES_BYTES

    def group(index: Any) -> list[Any]:
        start = b.times(index, group_bytes)
        place, words = b.at(panel, start), b.times(index, size)
        b.prefetch(b.at(ahead, start), group_bytes)
        totals = [_all(dot.sums, 0)] * (num_rows * _NUM_VECTORS)
        for load in range(size // _WORD_BYTES * num_bits // 8):
            for vector in range(_NUM_VECTORS):
                loaded = b.load(b.at(place, (load * _NUM_VECTORS + vector) * _VECTOR_BYTES), _BYTES)
                halves = [loaded] if num_bits == 8 else b.halves(loaded, table)
                for half, codes in enumerate(halves):
                    word, weights = load * len(halves) + half, dot.weight(codes, 0)
                    for row in range(num_rows):
                        own = dot.row(b.at(b.at(rows[row], words), word * _WORD_BYTES), 0)
                        at = row * _NUM_VECTORS + vector
                        totals[at] = dot.add(totals[at], weights, own)
        for vector in range(_NUM_VECTORS):
            scale, offset = (
                b.b.fpext(b.load(b.at(place, scales_at + part + vector * _LANES * 2), _HALVES), _FLOATS)
                for part in (0, _SCALES_BYTES)
            )
            for row in range(num_rows):
                at = row * _NUM_VECTORS + vector
                own = b.at(row_factors[row], b.times(index, 2 * _WORD_BYTES))
                own_scale, own_sum = (b.spread(b.load(b.at(own, part), _FLOAT)) for part in (0, _WORD_BYTES))
                ints = dot.in_words(totals[at]) if isinstance(dot, _NibblesDot) else totals[at]
                product = b.b.fmul(b.b.sitofp(ints, _FLOATS), own_scale)
                total = b.fma(scale, product, b.load(b.at(sums, at * _VECTOR_BYTES), _FLOATS))
                b.store(b.fma(offset, own_sum, total), b.at(sums, at * _VECTOR_BYTES))
        return []

    b.loop(groups, [], group)


def bytes_of_group(num_bits: int, size: int) -> int:
    """Bytes of a group of so many inputs in a panel: codes, scales, offsets."""
    return PANEL * size * num_bits // 8 + 2 * _SCALES_BYTES


def _for_each_count(builder: Any, num_rows: Any, build: Callable[[int], None], most_rows: int = MOST_ROWS) -> None:
    """``build(rows)`` for 1 to ``most_rows`` rows; when it runs, ``num_rows`` chooses."""
    after = builder.append_basic_block()
    choice = builder.switch(num_rows, after)
    for rows in range(1, most_rows + 1):
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
    """Add the products of 1 to ``MOST_ROWS`` rows, or ``MOST_WIDENED_ROWS``, and a panel to ``sums``.

    Args:
        typing: Of the compiler.
        rows: An array of the type of the weight: float32, uint16 for bfloat16, or int8. So are the rows, but float32
            for bfloat16 where ``WIDENS_ROWS``.
        num_rows: Number of rows.
        x: Address of the first row.
        x_stride: Bytes from a row to the next.
        panel: Address of the panel, ``steps`` times ``PANEL`` words.
        steps: At least 1.
        sums: Address of the sums, ``[num_rows, PANEL]`` of float32, or int32 for 8 bits.
        ahead: Address of what to prefetch, two cache lines of each 256 bytes of as many as the panel has.
    """
    kind = _DOTS[SET.dots[{"uint16": "bfloat16"}.get(str(rows.dtype), str(rows.dtype))]]

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        b = _Builder(builder)
        most_rows = MOST_WIDENED_ROWS if kind is _WidenedDot else MOST_ROWS
        _for_each_count(builder, arguments[1], lambda count: _add_words(b, kind(b), count, arguments[2:]), most_rows)
        return context.get_dummy_value()

    return types.void(rows, *[types.int64] * 7), generate


@intrinsic
def groups_product(
    typing: Any, table: Any, num_rows: Any, x: Any, x_stride: Any, panel: Any, groups: Any, sums: Any, ahead: Any,
    factors: Any, factors_stride: Any,
) -> Any:  # fmt: skip
    """As ``words_product``, with rows of signed 8-bit codes and a panel of groups of 32 or 16 inputs.

    Args:
        typing: Of the compiler.
        table: uint8 array, whose number of axes says what the codes are: 1: 8-bit numbers, 2: 4-bit numbers, 3: indices
            of its 16 values, 4: 8-bit numbers in groups of 16. Those of 8 bits are signed where ``HAS_SIGNED_CODES``.
        num_rows: Number of rows.
        x: Address of the first row.
        x_stride: Bytes from a row to the next.
        panel: Address of ``groups`` times ``bytes_of_group``: codes, the scales of the outputs, float16, and their
            offsets, likewise.
        groups: At least 1.
        sums: Address of the sums, float32 ``[num_rows, PANEL]``.
        ahead: As there.
        factors: Address of the scale of each group of a row and of the sum of its numbers, float32.
        factors_stride: Bytes from a row of these to the next.
    """
    num_bits, size = {1: (8, GROUP), 2: (4, GROUP), 3: (4, GROUP), 4: (8, SMALL_GROUP)}[table.ndim]

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        b = _Builder(builder)
        values = None
        if table.ndim == 3:
            address = builder.ptrtoint(make_array(table)(context, builder, arguments[0]).data, _I64)
            quarter = b.load(address, ir.VectorType(_I8, 16))
            lanes = ir.Constant(ir.VectorType(_I32, 4 * _LANES), list(range(16)) * (_LANES // 4))
            values = builder.shuffle_vector(quarter, quarter, lanes)
        _for_each_count(
            builder, arguments[1], lambda count: _add_groups(b, num_bits, size, count, [*arguments[2:], values])
        )
        return context.get_dummy_value()

    return types.void(table, *[types.int64] * 9), generate


@intrinsic
def add_column(typing: Any, words: Any, shift: Any, number: Any, sums: Any) -> Any:
    """Add a number times one of the four codes in each word to ``sums``.

    Args:
        typing: Of the compiler.
        words: Address of ``PANEL`` words of 8-bit codes.
        shift: Bits of a word before the code.
        number: float32.
        sums: Address of float32 ``[PANEL]``.
    """

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        b = _Builder(builder)
        words, shift, number, sums = arguments
        factor = b.spread(number)
        left = b.spread(builder.trunc(builder.sub(ir.Constant(_I64, 24), shift), _I32))
        for vector in range(_NUM_VECTORS):
            codes = builder.shl(b.load(b.at(words, vector * _VECTOR_BYTES), _INTS), left)
            codes = (builder.ashr if HAS_SIGNED_CODES else builder.lshr)(codes, _all(_INTS, 24))
            place = b.at(sums, vector * _VECTOR_BYTES)
            b.store(b.fma(builder.sitofp(codes, _FLOATS), factor, b.load(place, _FLOATS)), place)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.int64), generate


@intrinsic
def store_row(typing: Any, out: Any, address: Any, sums: Any, count: Any) -> Any:
    """Store the first of ``PANEL`` float32 sums, rounded to the nearest where the array is bfloat16.

    Args:
        typing: Of the compiler.
        out: An array of the type of the result, which alone is read: float32, or uint16 for bfloat16.
        address: Where to store.
        sums: Address of the sums.
        count: How many of them; all above ``PANEL``.
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
            name = f"llvm.masked.store.v{_LANES}i{value.type.element.width}.p0"
            b.call(name, ir.VoidType(), value, pointer, ir.Constant(_I32, 1), mask)
        return context.get_dummy_value()

    return types.void(out, *[types.int64] * 3), generate
