"""Emits LLVM code of products of rows with panels of outputs, for vectors of any number of lanes.

What an instruction set adds is an ``InstructionSet`` in a module of its own; ``instruction_sets`` lists them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils

I8, I16, I32, I64, FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
WORD_BYTES = 4
_LINE_BYTES = 64


def every(of: ir.VectorType, value: int) -> ir.Constant:
    """The number in each lane."""
    return ir.Constant(of, [value] * of.count)


class PanelCode:
    """Emits addresses, loads and calls at the place where ``b`` builds, for vectors of so many lanes of 32 bits.

    Attributes:
        floats: The type of a vector of float32; ``halves`` of as many float16.
        ints: Of 32 bits; ``shorts`` and ``bytes`` of as many bits.
    """

    def __init__(self, builder: ir.IRBuilder, lanes: int) -> None:
        self.b, self.lanes = builder, lanes
        self.floats, self.halves = ir.VectorType(FLOAT, lanes), ir.VectorType(ir.HalfType(), lanes)
        self.ints, self.shorts, self.bytes = (ir.VectorType(ir.IntType(32 // n), n * lanes) for n in (1, 2, 4))

    def at(self, address: ir.Value, offset: ir.Value | int) -> ir.Value:
        """The address plus bytes."""
        return self.b.add(address, offset if isinstance(offset, ir.Value) else ir.Constant(I64, offset))

    def load(self, address: ir.Value, of: ir.Type) -> ir.Value:
        """A value at any address."""
        loaded = self.b.load(self.b.inttoptr(address, of.as_pointer()))
        loaded.align = 1
        return loaded

    def store(self, value: ir.Value, address: ir.Value) -> None:
        """To any address."""
        self.b.store(value, self.b.inttoptr(address, value.type.as_pointer())).align = 1

    def call(self, name: str, result: ir.Type, *arguments: ir.Value) -> ir.Value:
        """What LLVM's function of the name gives."""
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        return self.b.call(cgutils.get_or_insert_function(self.b.module, kind, name), arguments)

    def times(self, value: ir.Value, factor: int) -> ir.Value:
        """The product of 64 bits."""
        return self.b.mul(value, ir.Constant(I64, factor))

    def rows(self, first: ir.Value, stride: ir.Value, count: int) -> list[ir.Value]:
        """Addresses, ``stride`` bytes from one to the next."""
        addresses = [first]
        while len(addresses) < count:
            addresses.append(self.at(addresses[-1], stride))
        return addresses

    def prefetch(self, address: ir.Value, num_bytes: int) -> None:
        """Cache lines into the second-level cache, to be read: two of each four, or the only one."""
        for line in range(max(num_bytes // (2 * _LINE_BYTES), 1)):
            place = self.at(address, (line // 2 * 4 + line % 2) * _LINE_BYTES)
            pointer = self.b.inttoptr(place, I8.as_pointer())
            self.call("llvm.prefetch.p0", ir.VoidType(), pointer, *(ir.Constant(I32, each) for each in (0, 2, 1)))

    def spread(self, value: ir.Value) -> ir.Value:
        """A value in all lanes of a vector."""
        vector = ir.VectorType(value.type, self.lanes)
        none = ir.Constant(vector, ir.Undefined)
        one = self.b.insert_element(none, value, ir.Constant(I32, 0))
        return self.b.shuffle_vector(one, none, ir.Constant(self.ints, [0] * self.lanes))

    def word(self, address: ir.Value, of: ir.Type) -> ir.Value:
        """The word at the address in all lanes."""
        return self.b.bitcast(self.spread(self.load(address, I32)), of)

    def fma(self, one: ir.Value, other: ir.Value, total: ir.Value) -> ir.Value:
        """``one * other + total``, rounded once."""
        return self.call(f"llvm.fma.v{self.lanes}f32", self.floats, one, other, total)

    def nibbles(self, codes: ir.Value) -> list[ir.Value]:
        """The low and the high halves of bytes."""
        high = self.b.bitcast(self.b.lshr(self.b.bitcast(codes, self.ints), every(self.ints, 4)), self.bytes)
        return [self.b.and_(half, every(self.bytes, 15)) for half in (codes, high)]

    def bfloats(self, floats: ir.Value) -> ir.Value:
        """Bits of floats as those of the nearest bfloat16 numbers, ties to even; not a number stays so."""
        b = self.b

        def constant(value: int) -> ir.Value:
            return every(self.ints, value)

        odd = b.and_(b.lshr(floats, constant(16)), constant(1))
        rounded = b.add(floats, b.add(odd, constant(0x7FFF)))
        is_number = b.icmp_unsigned("<=", b.and_(floats, constant(0x7FFFFFFF)), constant(0x7F800000))
        kept = b.select(is_number, rounded, b.or_(floats, constant(0x400000)))
        return b.trunc(b.lshr(kept, constant(16)), ir.VectorType(I16, self.lanes))

    def loop(self, count: ir.Value, carried: Sequence[ir.Value], body: Callable[..., Sequence[ir.Value]]) -> list[Any]:
        """``body(index, *values)`` at least once, up to ``count`` times; returns the values after the last."""
        before, inside = self.b.block, self.b.append_basic_block()
        self.b.branch(inside)
        self.b.position_at_end(inside)
        index = self.b.phi(I64)
        index.add_incoming(ir.Constant(I64, 0), before)
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


class Dot:
    """Adds the product of a word of a weight and of a row to each lane of a sum: here one float32.

    Attributes:
        num_parts: A word is multiplied in so many parts.
        row_bytes: Of a row for each word of a weight.
        num_words: 2 if ``add_pairs`` multiplies several rows by two words at once.
        has_signed_codes: Whether codes of 8 bits of a weight, and values of a table, are signed; else 128 is added.
            Codes of 4 bits never are.
        sums: Type of a sum.
        words: Type of words that are multiplied.
    """

    num_parts = 1
    row_bytes = WORD_BYTES
    num_words = 1
    has_signed_codes = False

    def __init__(self, code: PanelCode) -> None:
        self.code = code
        self.sums: ir.Type = code.floats
        self.words: ir.Type = code.floats

    def weight(self, loaded: ir.Value, part: int) -> Any:
        """A part of the words of a weight, ready to be multiplied."""
        return loaded

    def row(self, address: ir.Value, part: int) -> ir.Value:
        """The same part of the word of a row, in all lanes."""
        return self.code.word(address, self.words)

    def add(self, total: ir.Value, weight: Any, row: ir.Value) -> ir.Value:
        """The sum with the product."""
        return self.code.fma(weight, row, total)

    def arranged(self, totals: Mapping[tuple[int, int], ir.Value]) -> dict[tuple[int, int], ir.Value]:
        """Sums by row and vector as ``add_pairs`` has them, or back."""
        return dict(totals)

    def add_pairs(
        self, totals: dict[tuple[int, int], ir.Value], vector: int, words: Sequence[ir.Value], rows: Sequence[ir.Value]
    ) -> None:
        """Add the products of two words of a vector of outputs and of all rows, at their addresses."""
        raise NotImplementedError

    def total(self, sums: ir.Value) -> ir.Value:
        """A sum of codes in 32 bits."""
        return sums


class WidenedDot(Dot):
    """The two bfloat16 numbers of a word as float32, the first and then the second, with rows of float32."""

    num_parts = 2
    row_bytes = 2 * WORD_BYTES

    def weight(self, loaded: ir.Value, part: int) -> Any:
        """Bits of float32."""
        b, ints = self.code.b, self.code.ints
        bits = b.bitcast(loaded, ints)
        bits = b.shl(bits, every(ints, 16)) if part == 0 else b.and_(bits, every(ints, 0xFFFF0000))
        return b.bitcast(bits, self.code.floats)

    def row(self, address: ir.Value, part: int) -> ir.Value:
        """Each of the two."""
        return self.code.word(self.code.at(address, part * WORD_BYTES), self.code.floats)


class CodesDot(Dot):
    """Four 8-bit codes of a weight by four signed ones of a row; how is up to the instruction set."""

    def __init__(self, code: PanelCode) -> None:
        super().__init__(code)
        self.sums, self.words = code.ints, code.bytes


class InstructionSet(NamedTuple):
    """How products are computed on some CPUs.

    Attributes:
        name: As its makers call it.
        lanes: Words of a vector.
        num_vectors: Vectors of a panel.
        most_sums: Vectors of sums that the registers hold beside words; with many rows a panel is multiplied in parts.
        most_rows: Rows that are multiplied at once.
        most_widened_rows: The same where weights of bfloat16 become float32: more, so that a weight is converted for
            more of them.
        most_code_rows: The same for codes.
        features: What a CPU must have for numbers of a type, or ``int8`` for codes, by LLVM's names.
        dots: By the same names, and ``int4`` for codes of 4 bits that no table has, how words are multiplied. Where
            rows of codes are int16, ``shorts`` for codes of 8 bits that became so too.
        lookup: The values of bytes from 0 to 15 in a table, which is repeated through a vector.
    """

    name: str
    lanes: int
    num_vectors: int
    most_sums: int
    most_rows: int
    most_widened_rows: int
    most_code_rows: int
    features: Mapping[str, tuple[str, ...]]
    dots: Mapping[str, type[Dot]]
    lookup: Callable[[PanelCode, ir.Value, ir.Value], ir.Value]
