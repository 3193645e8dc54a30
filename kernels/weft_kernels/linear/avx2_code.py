"""Products with AVX2 and AVX-VNNI: vectors of 256 bits, 16 registers."""

from typing import Any

from llvmlite import ir

from weft_kernels.linear.avx512_code import UnsignedCodesDot
from weft_kernels.linear.panel_code import CodesDot, Dot, InstructionSet, PanelCode, WidenedDot, every


class _SignedCodesDot(CodesDot):
    """Four signed codes of a weight.

    The sign of a weight goes to the row, since one factor of the instruction is unsigned; two products are below
    2 * 128 * 127, so that no sum of 16 bits overflows.
    """

    has_signed_codes = True

    def weight(self, loaded: ir.Value, part: int) -> Any:
        return loaded, self.code.call("llvm.abs.v32i8", self.words, loaded, ir.Constant(ir.IntType(1), 0))

    def add(self, total: ir.Value, weight: Any, row: ir.Value) -> ir.Value:
        signed, magnitudes = weight
        own = self.code.call("llvm.x86.avx2.psign.b", self.words, row, signed)
        return self.code.b.add(total, _in_words(self.code, _pairs(self.code, magnitudes, own)))


class _NibblesDot(CodesDot):
    """Unsigned 4-bit codes: the sums of a group of 32 inputs, below 16 * 15 * 127, stay in 16 bits to its end."""

    def __init__(self, code: PanelCode) -> None:
        super().__init__(code)
        self.sums = code.shorts

    def add(self, total: ir.Value, weight: Any, row: ir.Value) -> ir.Value:
        return self.code.b.add(total, _pairs(self.code, weight, row))

    def total(self, sums: ir.Value) -> ir.Value:
        return _in_words(self.code, sums)


def _pairs(code: PanelCode, unsigned: ir.Value, row: ir.Value) -> ir.Value:
    """Sums of two products each, in 16 bits."""
    return code.call("llvm.x86.avx2.pmadd.ub.sw", code.shorts, unsigned, row)


def _in_words(code: PanelCode, shorts: ir.Value) -> ir.Value:
    """Sums of two of 16 bits each."""
    return code.call("llvm.x86.avx2.pmadd.wd", code.ints, shorts, every(code.shorts, 1))


def _lookup(code: PanelCode, table: ir.Value, indices: ir.Value) -> ir.Value:
    return code.call("llvm.x86.avx2.pshuf.b", code.bytes, table, indices)


_AVX2 = InstructionSet(
    "AVX2",
    lanes=8,
    num_vectors=4,
    most_sums=12,  # of 16 registers
    most_rows=3,
    most_widened_rows=6,
    features=dict.fromkeys(("float32", "bfloat16", "int8"), ("avx2", "fma", "f16c")),
    dots={"float32": Dot, "bfloat16": WidenedDot, "int8": _SignedCodesDot, "int4": _NibblesDot},
    lookup=_lookup,
)
SETS = (
    _AVX2._replace(
        name="AVX-VNNI",
        features={name: (*names, "avxvnni") for name, names in _AVX2.features.items()},
        dots={**_AVX2.dots, "int8": UnsignedCodesDot, "int4": UnsignedCodesDot},
    ),
    _AVX2,
)
