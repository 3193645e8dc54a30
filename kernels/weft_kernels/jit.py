"""Compiles CPU kernels to machine code with numba (LLVM), where it is installed.

Compiled code is kept on disk, for the processor and the source that it was made from: beside the source, or where that
directory is not writable, in the user's cache directory; ``NUMBA_CACHE_DIR`` names another one. A first process
compiles for about a second a kernel, later ones load it in some ten milliseconds.
"""

import importlib
import logging
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

#: Types of numbers for which every operation with a ``cpu_kernel`` is compiled.
COMPILED_DTYPES = (torch.float32, torch.bfloat16)

_log = logging.getLogger("weft.kernels")
_SUM = "@llvm.vector.partial.reduce.add.v4i32.v16i32(<4 x i32>"
#: Sums of products of signed codes with signed ones (``sdot``), and with unsigned ones (``usdot``).
_PRODUCTS_OF_CODES = f"declare <4 x i32> {_SUM}, <16 x i32>)" + "".join(
    f"""
    define <4 x i32> @{extended}(<4 x i32> %sum, <16 x i8> %x, <16 x i8> %y) {{
      %a = {extended} <16 x i8> %x to <16 x i32>
      %b = sext <16 x i8> %y to <16 x i32>
      %products = mul <16 x i32> %a, %b
      %result = call <4 x i32> {_SUM} %sum, <16 x i32> %products)
      ret <4 x i32> %result
    }}"""
    for extended in ("sext", "zext")
)


@cache
def is_available() -> bool:
    """Whether numba compiles here; without it operations on a CPU are those of torch. The first call takes 0.3 s."""
    try:
        numba = importlib.import_module("numba")
    except (ImportError, OSError) as error:  # it refuses releases of numpy that are newer than it knows
        _log.warning("CPU kernels are not compiled, and attention is slower: %s; install numba", error)
        return False
    if numba.config.DISABLE_JIT:
        _log.warning("CPU kernels are not compiled, and attention is slower: unset NUMBA_DISABLE_JIT")
        return False
    logging.getLogger("numba").setLevel(logging.WARNING)  # at DEBUG a compilation writes a thousand lines
    return True


@cache
def features() -> frozenset[str]:
    """The instructions for which numba compiles, by LLVM's names (``avx512f``).

    They are those of this CPU, or fewer: ``NUMBA_CPU_NAME``, ``NUMBA_CPU_FEATURES`` and ``NUMBA_ENABLE_AVX`` name
    another one. LLVM ends the process at an instruction that is not among them. On ARM it lists few of those that the
    CPU's name stands for, so products of codes are compiled for a look at what it makes of them.
    """
    from llvmlite import binding  # noqa: PLC0415  # as numba
    from numba.core.registry import cpu_target  # noqa: PLC0415  # optional, and 0.3 s

    triple, cpu, listed = cpu_target.target_context.codegen().magic_tuple()
    found = {each[1:] for each in listed.split(",") if each.startswith("+")}
    if triple.startswith(("aarch64", "arm64")):
        machine = binding.Target.from_triple(triple).create_target_machine(cpu=cpu, features=listed)
        code = machine.emit_assembly(binding.parse_assembly(_PRODUCTS_OF_CODES)).split()
        found |= {"neon"} | {name for word, name in (("sdot", "dotprod"), ("usdot", "i8mm")) if word in code}
    return frozenset(found)


def jit(function: Callable[..., Any], *modules: ModuleType) -> Callable[..., Any]:
    """The function, compiled at its first call for the types of its arguments. Calls release the GIL.

    Floating-point operations are not reordered. Divisions by zero and indices out of range are not checked.

    Args:
        function: Its closure holds constants of the compiled code.
        modules: Whose functions are compiled into it, so that a change of their source counts as one of its own.
    """
    import numba  # noqa: PLC0415  # optional, and 0.3 s

    from weft_kernels.jit_cache import KernelCache  # noqa: PLC0415  # needs numba

    if modules:
        sources = b"".join(Path(str(module.__file__)).read_bytes() for module in modules)
        function.__qualname__ += f"_{zlib.crc32(sources):08x}"
    compiled: Any = numba.njit(nogil=True, error_model="numpy", boundscheck=False)(function)
    try:
        compiled._cache = KernelCache(function)
    except RuntimeError:  # neither directory is writable
        _say_that_nothing_is_kept()
    return compiled  # type: ignore[no-any-return]


@cache
def _say_that_nothing_is_kept() -> None:
    _log.info("each process compiles its kernels, until NUMBA_CACHE_DIR names a directory that is writable")


def jit_with(*modules: ModuleType) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """``jit`` as a decorator of functions that are compiled with those of the modules."""
    return lambda function: jit(function, *modules)
