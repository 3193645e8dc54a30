"""Pinned memory that is given again, over memory of the C library."""

import ctypes
import gc

import numpy as np
import pytest

from weft.backends.gpu import PinnedPool
from weft.base.errors import InternalError


class Memory:
    """Counts what is allocated and not freed."""

    def __init__(self, num_blocks=100):
        self.blocks = {}
        self.num_left = num_blocks

    def allocate(self, num_bytes):
        if not self.num_left:
            raise InternalError(f"CUDA cannot pin {num_bytes} bytes of host memory")
        self.num_left -= 1
        block = ctypes.create_string_buffer(num_bytes)
        self.blocks[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def free(self, address):
        del self.blocks[address]


@pytest.fixture
def memory():
    """What the pool gives from."""
    return Memory()


@pytest.fixture
def pool(memory):
    """A pool."""
    return PinnedPool(memory.allocate, memory.free)


def test_memory_is_given_again_when_the_last_view_is_gone(memory, pool):
    """A view of an array keeps its memory; then another array of about that size gets it."""
    array = pool.empty((3, 1000), np.dtype(np.float32))
    address, view = array.ctypes.data, array[1:].reshape(-1)
    del array
    gc.collect()
    other = pool.empty((3, 1000), np.float32)
    assert address != other.ctypes.data
    del view
    again = pool.empty((16384,), np.uint8)
    assert (address, 2) == (again.ctypes.data, len(memory.blocks))


@pytest.mark.parametrize("dtype", [np.bool_, np.float16, np.int64, np.float64])
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (4097,), (2, 3, 5)])
def test_arrays_are_as_asked_for(memory, pool, shape, dtype):
    """Shape and dtype are those asked for, every element can be written, and blocks do not overlap."""
    arrays = [pool.empty(shape, np.dtype(dtype)) for _ in range(3)]
    for value, array in enumerate(arrays):
        array.fill(value)
    assert [(shape, np.dtype(dtype))] * 3 == [(array.shape, array.dtype) for array in arrays]
    assert all((array == np.dtype(dtype).type(value)).all() for value, array in enumerate(arrays))
    assert all(len(block) >= arrays[0].nbytes for block in memory.blocks.values())


def test_closing_frees_what_is_unused_and_later_the_rest(memory, pool):
    """Memory in use outlives the close, and is freed with its array."""
    kept, _ = pool.empty((10,), np.float32), pool.empty((10,), np.float32)
    del _
    kept.fill(7)
    pool.close()
    assert (1, [7.0] * 10) == (len(memory.blocks), kept.tolist())
    del kept
    assert {} == memory.blocks


def test_no_more_memory(memory, pool):
    """The error of the allocation reaches who asked, and what comes back can be used again."""
    memory.num_left = 1
    array = pool.empty((8,), np.float32)
    with pytest.raises(InternalError, match="CUDA cannot pin 4096 bytes"):
        pool.empty((8,), np.float32)
    del array
    pool.empty((8,), np.float32)
