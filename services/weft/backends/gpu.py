"""Shared by the GPU backends: falling back to the CPU, pinned host memory."""

import contextlib
import ctypes
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from weft.base.errors import UnavailableError, UnsupportedError
from weft.base.observing.logs import get_logger
from weft.base.tensors import Array
from weft.serving.backends.base import InstanceContext
from weft.v2.protocol.cuda_memory import find_cuda

_log = get_logger("weft.model")
_MIN_BLOCK_BYTES = 4096


def use_cpu_instead(instance: InstanceContext, reason: str) -> None:
    """Log why an instance that was placed on a GPU runs on the CPU; the reason has the cure.

    Raises:
        UnavailableError: The configuration requires KIND_GPU.
    """
    if not instance.may_use_cpu:
        raise UnavailableError(
            f"instance '{instance.name}' asks for GPU {instance.device_id}, but {reason}, or set instance_group "
            "{ kind: KIND_CPU }"
        )
    _log.warning("instance '%s' of KIND_AUTO runs on the CPU, although there is a GPU: %s", instance.name, reason)


def torch_device(torch: Any, instance: InstanceContext) -> Any:
    """The device of an instance that computes with torch. Raises UnavailableError: torch does not see its GPU."""
    if instance.kind != "GPU":
        return torch.device("cpu")
    index, num_devices = instance.device_id, torch.cuda.device_count()
    if torch.cuda.is_available() and index < num_devices:
        return torch.device("cuda", index)
    use_cpu_instead(
        instance, f"torch {torch.__version__} sees {num_devices} CUDA devices; install a CUDA build of torch"
    )
    return torch.device("cpu")


def is_pinning_enabled(config: Mapping[str, Any], way: str) -> bool:
    """Whether ``optimization { <way>_pinned_memory }`` is absent or enabled; ``way`` is input or output."""
    setting = config.get("optimization", {}).get(f"{way}_pinned_memory")
    return setting is None or bool(setting.get("enable", False))


class PinnedPool:
    """Allocates arrays in pinned memory and reuses the memory of arrays that were garbage-collected; pinning is slow.

    Arrays and their views stay valid as long as they are referenced, also after ``close``. Blocks, of which
    ``allocate`` returns the addresses, have power-of-two sizes.
    """

    def __init__(self, allocate: Callable[[int], int], free: Callable[[int], None]) -> None:
        self._allocate = allocate
        self._free = free
        self._unused: dict[int, list[int]] = defaultdict(list)
        self._is_closed = False

    def empty(self, shape: tuple[int, ...], dtype: "np.dtype[Any] | type") -> Array:
        """An uninitialised array. Raises InternalError if no memory is left."""
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
        """Free unused memory now, and the rest when its arrays are garbage-collected."""
        self._is_closed = True
        self._free_unused()

    def _give_back(self, size: int, address: int) -> None:
        self._unused[size].append(address)
        if self._is_closed:  # checked after the append, so that whichever thread comes last frees it
            self._free_unused()

    def _free_unused(self) -> None:
        for addresses in list(self._unused.values()):
            with contextlib.suppress(IndexError):  # another thread does the same
                while True:
                    self._free(addresses.pop())


def make_pinned_pool(instance: InstanceContext) -> PinnedPool | None:
    """Pinned memory for one instance; None, with a warning in the log, if the CUDA runtime is not found."""
    try:
        cuda = find_cuda()
    except UnsupportedError as error:
        _log.warning("instance '%s' copies without pinned memory: %s", instance.name, error.message)
        return None
    device_id = instance.device_id
    return PinnedPool(
        lambda num_bytes: cuda.allocate_pinned(num_bytes, device_id),
        lambda address: cuda.free_pinned(address, device_id),
    )
