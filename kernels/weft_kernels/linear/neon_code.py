"""Products with NEON of 64-bit ARM: vectors of 128 bits, 32 registers."""

from collections.abc import Mapping, Sequence
from typing import Any

from llvmlite import ir

from weft_kernels.linear.panel_code import (
    I8,
    I16,
    I32,
    I64,
    WORD_BYTES,
    CodesDot,
    Dot,
    InstructionSet,
    PanelCode,
    WidenedDot,
)

_SHORTS, _HALF = ir.VectorType(I16, 8), ir.VectorType(I8, 8)


class _Dot(CodesDot):
    """One instruction for four signed codes of a weight."""

    has_signed_codes = True

    def add(self, total: ir.Value, weight: Any, row: ir.Value) -> ir.Value:
        return self.code.call("llvm.aarch64.neon.sdot.v4i32.v16i8", self.sums, total, weight, row)


class _MatrixDot(_Dot):
    """One instruction for two words of two outputs and of two rows.

    The sums of two rows with four outputs stand in two vectors: both rows with two outputs in each.
    """

    num_words = 2

    def arranged(self, totals: Mapping[tuple[int, int], ir.Value]) -> dict[tuple[int, int], ir.Value]:
        result = dict(totals)
        for row, vector in totals:
            if row % 2 == 0 and (row + 1, vector) in totals:
                pair = totals[row, vector], totals[row + 1, vector]
                result[row, vector] = self._shuffled(*pair, [0, 1, 4, 5])
                result[row + 1, vector] = self._shuffled(*pair, [2, 3, 6, 7])
        return result

    def add_pairs(
        self, totals: dict[tuple[int, int], ir.Value], vector: int, words: Sequence[ir.Value], rows: Sequence[ir.Value]
    ) -> None:
        code, ints = self.code, self.code.ints
        first, second = (code.b.bitcast(word, ints) for word in words)
        weights = [self._shuffled(first, second, order) for order in ([0, 4, 1, 5], [2, 6, 3, 7])]
        for row in range(0, len(rows) - 1, 2):
            both = ir.Constant(ir.VectorType(I64, 2), ir.Undefined)
            for at in range(2):
                both = code.b.insert_element(both, code.load(rows[row + at], I64), ir.Constant(I32, at))
            operands = [code.b.bitcast(each, code.bytes) for each in (both, *weights)]
            for at in range(2):
                total, weight = totals[row + at, vector], operands[1 + at]
                totals[row + at, vector] = code.call(
                    "llvm.aarch64.neon.smmla.v4i32.v16i8", ints, total, operands[0], weight
                )
        if len(rows) % 2:
            last = len(rows) - 1
            for at, word in enumerate(words):
                own = self.row(code.at(rows[last], at * WORD_BYTES), 0)
                totals[last, vector] = self.add(totals[last, vector], word, own)

    def _shuffled(self, one: ir.Value, other: ir.Value, order: Sequence[int]) -> ir.Value:
        return self.code.b.shuffle_vector(one, other, ir.Constant(self.code.ints, order))


class _WideningDot(CodesDot):
    """Products in 16 bits, which hold a sum of two: below 2 * 128 * 127. Their sums are added in 32 bits."""

    has_signed_codes = True

    def add(self, total: ir.Value, weight: Any, row: ir.Value) -> ir.Value:
        code = self.code
        low, high = (
            code.call("llvm.aarch64.neon.smull.v8i16", _SHORTS, *(self._half(each, first) for each in (weight, row)))
            for first in (0, 8)
        )
        pairs = code.call("llvm.aarch64.neon.addp.v8i16", _SHORTS, low, high)
        return code.b.add(total, code.call("llvm.aarch64.neon.saddlp.v4i32.v8i16", self.sums, pairs))

    def _half(self, codes: ir.Value, first: int) -> ir.Value:
        lanes = ir.Constant(ir.VectorType(I32, 8), list(range(first, first + 8)))
        return self.code.b.shuffle_vector(codes, codes, lanes)


def _lookup(code: PanelCode, table: ir.Value, indices: ir.Value) -> ir.Value:
    return code.call("llvm.aarch64.neon.tbl1.v16i8", code.bytes, table, indices)


_NEON = InstructionSet(
    "NEON",
    lanes=4,
    num_vectors=8,
    most_sums=24,  # of 32 registers
    most_rows=6,
    most_widened_rows=6,
    most_code_rows=6,
    features=dict.fromkeys(("float32", "bfloat16", "int8"), ("neon",)),
    dots={"float32": Dot, "bfloat16": WidenedDot, "int8": _WideningDot, "int4": _WideningDot},
    lookup=_lookup,
)
SETS = (
    *(
        _NEON._replace(
            name=f"NEON with {feature}",
            features={name: (*names, "dotprod", feature) for name, names in _NEON.features.items()},
            dots={**_NEON.dots, "int8": dot, "int4": dot},
        )
        for feature, dot in (("i8mm", _MatrixDot), ("dotprod", _Dot))
    ),
    _NEON,
)
