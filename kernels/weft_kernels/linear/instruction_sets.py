"""Which instruction set products on this CPU have.

A further one is a module with its rows, and its place in ``MODULES``.
"""

from weft_kernels import jit
from weft_kernels.linear import avx2_code, avx512_code, neon_code, panel_code
from weft_kernels.linear.panel_code import InstructionSet

#: Modules with instruction sets, the best first.
MODULES = (avx512_code, avx2_code, neon_code)
_HAS = jit.features()
_FOUND: InstructionSet | None = next(
    (row for module in MODULES for row in module.SETS if _HAS.issuperset(row.features["float32"])), None
)
#: That of this CPU; without any nothing is compiled.
SET: InstructionSet = _FOUND or MODULES[-1].SETS[-1]
NAME = "" if _FOUND is None else SET.name
#: What compiled code is made from.
SOURCES = (panel_code, *MODULES)


def is_native(name: str) -> bool:
    """Whether this CPU has instructions for ``float32``, ``bfloat16``, or ``int8``: codes of 8 and 4 bits."""
    return _FOUND is not None and name in SET.features and _HAS.issuperset(SET.features[name])
