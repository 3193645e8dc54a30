"""CUDA memory: device memory shared by other processes, and pinned host memory.

CUDA's own libraries are called through ctypes. They come with the CUDA builds of torch, with ``nvidia-cuda-runtime`` or
with a CUDA toolkit; nothing else is required, and nothing is loaded before its first use.

Source: https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__MEMORY.html, group__CUDART__DEVICE.html,
https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__CTX.html, group__CUDA__MEM.html
"""

import ctypes
import functools
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from weft.base.errors import InternalError, InvalidArgumentError, UnsupportedError

#: Size of a ``cudaIpcMemHandle_t``, bytes.
HANDLE_BYTES = 64

_RUNTIMES = ("libcudart.so.13", "libcudart.so.12")
_DRIVER = "libcuda.so.1"
_STREAM_NON_BLOCKING = 1  # cudaStreamNonBlocking: not synchronised with streams of models
_HOST_ALLOC_PORTABLE = 1  # cudaHostAllocPortable: pinned for every device
_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess
_MEMCPY_DEFAULT = 4  # cudaMemcpyDefault: direction inferred from the addresses


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class Cuda:
    """The CUDA calls that this process makes itself.

    Copies run on a dedicated stream, so they wait for no model. Each call restores the CUDA context of the calling
    thread. Copies must come from one thread; memory may be released on any.
    """

    def __init__(self, runtime: Any, driver: Any) -> None:
        self._runtime = runtime
        self._driver = driver
        self._streams: dict[int, ctypes.c_void_p] = {}

    def check_device(self, device_id: int) -> None:
        """Raise InvalidArgumentError if this process has no such device."""
        count = ctypes.c_int()
        status = self._runtime.cudaGetDeviceCount(ctypes.byref(count))
        if status or not 0 <= device_id < count.value:
            known = f"0 to {count.value - 1}" if not status and count.value else f"none ({self._text(status)})"
            raise InvalidArgumentError(f"CUDA device {device_id} does not exist; this process has {known}")

    def open(self, handle: bytes, device_id: int) -> tuple[int, int]:
        """Map memory of another process; returns its address here and its size in bytes. Release it with ``close``."""
        address, base, size = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_size_t()
        with self._on(device_id):
            struct = _IpcHandle.from_buffer_copy(handle)
            status = self._runtime.cudaIpcOpenMemHandle(ctypes.byref(address), struct, ctypes.c_uint(_LAZY_PEER_ACCESS))
            if status or not address.value:
                raise InvalidArgumentError(f"CUDA cannot open the handle: {self._text(status)}")
            status = self._driver.cuMemGetAddressRange_v2(
                ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address.value)
            )
        if status:
            self.close(address.value, device_id)
            raise InvalidArgumentError(f"CUDA does not tell the size of the memory behind the handle: error {status}")
        return address.value, base.value + size.value - address.value

    def close(self, address: int, device_id: int) -> None:
        """Unmap memory of another process. Never raises, because no caller could handle an error."""
        with suppress(InternalError), self._on(device_id):
            self._runtime.cudaIpcCloseMemHandle(ctypes.c_void_p(address))

    def copy(self, target: int, source: int, num_bytes: int, device_id: int) -> None:
        """Copy ``num_bytes`` between host and device; complete on return. Raises InternalError."""
        with self._on(device_id):
            stream = self._stream(device_id)
            status = self._runtime.cudaMemcpyAsync(
                ctypes.c_void_p(target),
                ctypes.c_void_p(source),
                ctypes.c_size_t(num_bytes),
                ctypes.c_int(_MEMCPY_DEFAULT),
                stream,
            )
            # Also after an error: no copy may be in flight when the memory is released.
            self._check(self._runtime.cudaStreamSynchronize(stream) or status, f"copy {num_bytes} bytes")

    def allocate_pinned(self, num_bytes: int, device_id: int) -> int:
        """Allocate host memory (at least 1 byte), pinned for all devices; its address. Raises InternalError."""
        address = ctypes.c_void_p()
        with self._on(device_id):
            status = self._runtime.cudaHostAlloc(
                ctypes.byref(address), ctypes.c_size_t(num_bytes), ctypes.c_uint(_HOST_ALLOC_PORTABLE)
            )
        self._check(status, f"pin {num_bytes} bytes of host memory")
        return address.value or 0

    def free_pinned(self, address: int, device_id: int) -> None:
        """Free memory of ``allocate_pinned``. Never raises, like ``close``."""
        with suppress(InternalError), self._on(device_id):
            self._runtime.cudaFreeHost(ctypes.c_void_p(address))

    @contextmanager
    def _on(self, device_id: int) -> Iterator[None]:
        """Make the device current for this thread within the block.

        Restores the context, not the device: setting a device creates a context there, even if it was not wanted.
        """
        before = ctypes.c_void_p()
        self._driver.cuCtxGetCurrent(ctypes.byref(before))  # none, if CUDA has done nothing yet
        try:
            self._check(self._runtime.cudaSetDevice(ctypes.c_int(device_id)), f"use device {device_id}")
            yield
        finally:
            self._driver.cuCtxSetCurrent(before)

    def _stream(self, device_id: int) -> ctypes.c_void_p:
        if device_id not in self._streams:
            stream = ctypes.c_void_p()
            status = self._runtime.cudaStreamCreateWithFlags(ctypes.byref(stream), ctypes.c_uint(_STREAM_NON_BLOCKING))
            self._check(status, f"make a stream on device {device_id}")
            self._streams[device_id] = stream
        return self._streams[device_id]

    def _check(self, status: int, what: str) -> None:
        if status:
            raise InternalError(f"CUDA cannot {what}: {self._text(status)}")

    def _text(self, status: int) -> str:
        text: bytes = self._runtime.cudaGetErrorString(ctypes.c_int(status))
        return f"{text.decode(errors='replace')} (error {status})"


@functools.cache
def find_cuda() -> Cuda:
    """Load CUDA's libraries; touches no device. Raises UnsupportedError that names a missing library."""
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError as error:
        raise UnsupportedError(f"GPUs not supported: {error}; it comes with the NVIDIA driver") from error
    for name in [*_RUNTIMES, *_installed_runtimes()]:
        try:
            runtime = ctypes.CDLL(name)
        except OSError:
            continue
        runtime.cudaGetErrorString.restype = ctypes.c_char_p
        return Cuda(runtime, driver)
    raise UnsupportedError(
        f"GPUs not supported: neither {' nor '.join(_RUNTIMES)} is on the loader's path or among the Python packages; "
        "install a CUDA build of torch, or nvidia-cuda-runtime"
    )


def _installed_runtimes() -> list[str]:
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ()) if spec] if spec else []
    return [str(path) for name in _RUNTIMES for folder in folders for path in sorted(folder.glob(f"*/lib/{name}"))]
