"""Products with AVX-512: vectors of 512 bits, 32 registers."""

from typing import Any

from llvmlite import ir

from weft_kernels.linear.panel_code import CodesDot, Dot, InstructionSet, PanelCode


class _BFloat(ir.Type):  # type: ignore[misc]
    """The type ``bfloat``, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


class _BFloatDot(Dot):
    """One instruction for both numbers of a word."""

    def __init__(self, code: PanelCode) -> None:
        super().__init__(code)
        self.words = ir.VectorType(_BFloat(), 2 * code.lanes)

    def add(self, total: ir.Value, weight: Any, row: ir.Value) -> ir.Value:
        return self.code.call("llvm.x86.avx512bf16.dpbf16ps.512", self.sums, total, weight, row)


class UnsignedCodesDot(CodesDot):
    """Four unsigned codes of a weight."""

    def add(self, total: ir.Value, weight: Any, row: ir.Value) -> ir.Value:
        """By one instruction."""
        return self.code.call(f"llvm.x86.avx512.vpdpbusd.{self.code.lanes * 32}", self.sums, total, weight, row)


def _lookup(code: PanelCode, table: ir.Value, indices: ir.Value) -> ir.Value:
    return code.call("llvm.x86.avx512.pshuf.b.512", code.bytes, table, indices)


SETS = (
    InstructionSet(
        "AVX-512",
        lanes=16,
        num_vectors=4,
        most_sums=24,  # of 32 registers
        most_rows=6,
        most_widened_rows=6,
        most_code_rows=6,
        features={
            "float32": ("avx512f", "avx512bw"),
            "bfloat16": ("avx512f", "avx512bw", "avx512bf16"),
            "int8": ("avx512f", "avx512bw", "avx512vnni"),
        },
        dots={"float32": Dot, "bfloat16": _BFloatDot, "int8": UnsignedCodesDot, "int4": UnsignedCodesDot},
        lookup=_lookup,
    ),
)
