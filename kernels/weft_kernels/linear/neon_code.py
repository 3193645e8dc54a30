"""Products with NEON of 64-bit ARM: vectors of 128 bits, 32 registers."""

from typing import Any

from llvmlite import ir

from weft_kernels.linear.panel_code import I8, I16, I32, CodesDot, Dot, InstructionSet, PanelCode, WidenedDot

_SHORTS, _HALF = ir.VectorType(I16, 8), ir.VectorType(I8, 8)


class _Dot(CodesDot):
    """One instruction for four signed codes of a weight."""

    has_signed_codes = True

    def add(self, total: ir.Value, weight: Any, row: ir.Value) -> ir.Value:
        return self.code.call("llvm.aarch64.neon.sdot.v4i32.v16i8", self.sums, total, weight, row)


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
    most_rows=3,  # 24 of 32 registers are sums
    most_widened_rows=6,
    features=dict.fromkeys(("float32", "bfloat16", "int8"), ("neon",)),
    dots={"float32": Dot, "bfloat16": WidenedDot, "int8": _WideningDot, "int4": _WideningDot},
    lookup=_lookup,
)
SETS = (
    _NEON._replace(
        name="NEON with dotprod",
        features={name: (*names, "dotprod") for name, names in _NEON.features.items()},
        dots={**_NEON.dots, "int8": _Dot, "int4": _Dot},
    ),
    _NEON,
)
