"""Compiles CPU kernels to machine code with numba (LLVM), where it is installed.

Compiled code is kept on disk, for the processor and the source that it was made from: beside the source, or where that
directory is not writable, in the user's cache directory. A first process compiles for about a second a kernel, later
ones load it in some ten milliseconds.
"""

import importlib.util
import logging
from collections.abc import Callable
from functools import cache
from typing import Any


@cache
def is_available() -> bool:
    """Whether numba is installed; without it operations on a CPU are those of torch."""
    return importlib.util.find_spec("numba") is not None


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled at its first call for the types of its arguments. Calls release the GIL.

    Floating-point operations are not reordered. Divisions by zero and indices out of range are not checked.
    """
    import numba  # noqa: PLC0415  # optional, and 0.3 s

    logging.getLogger("numba").setLevel(logging.WARNING)  # at DEBUG a compilation writes a thousand lines
    options = {"nogil": True, "error_model": "numpy", "boundscheck": False}
    try:
        compiled: Callable[..., Any] = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # neither directory is writable
        compiled = numba.njit(**options)(function)
    return compiled
