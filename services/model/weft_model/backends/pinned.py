"""Host memory that a GPU copies from and to by itself, kept for the next batch."""

import contextlib
import ctypes
import math
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from weft_common.tensors import Array

_MIN_BLOCK_BYTES = 4096


class PinnedPool:
    """Gives arrays in pinned memory. Memory that no array uses any longer is given again; pinning it anew is slow.

    An array and its views may be kept as long as one likes, also after ``close``. Blocks have sizes of powers of two.

    Args:
        allocate: Gives the address of so many bytes, for example by ``Cuda.allocate_pinned``.
        free: Takes back what ``allocate`` gave.
    """

    def __init__(self, allocate: Callable[[int], int], free: Callable[[int], None]) -> None:
        self._allocate = allocate
        self._free = free
        self._unused: dict[int, list[int]] = defaultdict(list)
        self._is_closed = False

    def empty(self, shape: tuple[int, ...], dtype: "np.dtype[Any] | type") -> Array:
        """An array with undefined contents. Raises InternalError if there is no more memory."""
        dtype = np.dtype(dtype)
        num_elements = math.prod(shape)
        size = max(_MIN_BLOCK_BYTES, 1 << (num_elements * dtype.itemsize - 1).bit_length())
        unused = self._unused[size]
        address = unused.pop() if unused else self._allocate(size)
        block = (ctypes.c_char * size).from_address(address)
        weakref.finalize(block, self._give_back, size, address)  # every view of the array holds the block
        array: Array = np.frombuffer(memoryview(block), dtype, num_elements).reshape(shape)
        return array

    def close(self) -> None:
        """Unused memory is freed, the rest when its arrays are gone."""
        self._is_closed = True
        self._free_unused()

    def _give_back(self, size: int, address: int) -> None:
        self._unused[size].append(address)
        if self._is_closed:  # asked after: whichever thread comes last frees it
            self._free_unused()

    def _free_unused(self) -> None:
        for addresses in list(self._unused.values()):
            with contextlib.suppress(IndexError):  # another thread does the same
                while True:
                    self._free(addresses.pop())
