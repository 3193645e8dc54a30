"""Products with AVX2 and AVX-VNNI: vectors of 256 bits, 16 registers."""

from typing import Any

from llvmlite import ir

from weft_kernels.linear.avx512_code import UnsignedCodesDot
from weft_kernels.linear.panel_code import WORD_BYTES, CodesDot, Dot, InstructionSet, PanelCode, WidenedDot, every


class _WideDot(CodesDot):
    """Two numbers of 16 bits of a weight by two of a row, in one instruction."""

    def __init__(self, code: PanelCode) -> None:
        super().__init__(code)
        self.words = code.shorts

    def add(self, total: ir.Value, weight: Any, row: ir.Value) -> ir.Value:
        return self.code.b.add(total, _in_words(self.code, weight, row))


class _ShortsDot(_WideDot):
    """Four signed codes of a weight as numbers of 16 bits, the first two and then the others, with rows of 16 bits."""

    num_parts = 2
    row_bytes = 2 * WORD_BYTES
    has_signed_codes = True

    def weight(self, loaded: ir.Value, part: int) -> Any:
        """Each code in the high byte of its number, whose sign then fills it."""
        code = self.code
        places = [byte for lane in range(code.lanes) for low in (0, 1) for byte in (-1, lane % 4 * 4 + 2 * part + low)]
        codes = _lookup(code, code.b.bitcast(loaded, code.bytes), ir.Constant(code.bytes, places))
        return code.b.ashr(code.b.bitcast(codes, code.shorts), every(code.shorts, 8))

    def row(self, address: ir.Value, part: int) -> ir.Value:
        """Each half."""
        return self.code.word(self.code.at(address, part * WORD_BYTES), self.code.shorts)


class _NibblesDot(CodesDot):
    """Unsigned 4-bit codes: the sums of a group of 32 inputs, below 16 * 15 * 127, stay in 16 bits to its end."""

    def __init__(self, code: PanelCode) -> None:
        super().__init__(code)
        self.sums = code.shorts

    def add(self, total: ir.Value, weight: Any, row: ir.Value) -> ir.Value:
        return self.code.b.add(total, self.code.call("llvm.x86.avx2.pmadd.ub.sw", self.code.shorts, weight, row))

    def total(self, sums: ir.Value) -> ir.Value:
        return _in_words(self.code, sums, every(self.code.shorts, 1))


def _in_words(code: PanelCode, shorts: ir.Value, others: ir.Value) -> ir.Value:
    """Sums of two products each."""
    return code.call("llvm.x86.avx2.pmadd.wd", code.ints, shorts, others)


def _lookup(code: PanelCode, table: ir.Value, indices: ir.Value) -> ir.Value:
    return code.call("llvm.x86.avx2.pshuf.b", code.bytes, table, indices)


_AVX2 = InstructionSet(
    "AVX2",
    lanes=8,
    num_vectors=4,
    most_sums=12,  # of 16 registers
    most_rows=3,
    most_widened_rows=6,
    most_code_rows=5,
    features=dict.fromkeys(("float32", "bfloat16", "int8"), ("avx2", "fma", "f16c")),
    dots={"float32": Dot, "bfloat16": WidenedDot, "int8": _ShortsDot, "shorts": _WideDot, "int4": _NibblesDot},
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
