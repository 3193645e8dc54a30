"""System and CUDA shared memory: regions registered by clients, and tensors in them.

Source: the extensions "system shared memory" and "CUDA shared memory" of the V2 protocol,
``protocol/extension_shared_memory.md`` of Triton Inference Server.
"""

import ctypes
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeVar

from weft.base.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnsupportedError,
)
from weft.base.limits import check_name
from weft.base.processes.malloc import available_bytes
from weft.base.security.access import check_right
from weft.v2.protocol.cuda_memory import HANDLE_BYTES, Cuda, find_cuda

DISABLED = "Client shared memory is disabled; start the server with --allow-client-shm, or send tensors in the message"

#: Each region holds a file descriptor.
MAX_REGIONS = 256

#: Most bytes that one ``pread`` gives on Linux.
MAX_PREAD_BYTES = 0x7FFFF000
#: From this size on a tensor is read only if it leaves memory for others.
_LARGE_BYTES = 64 << 20
_AVAILABLE_SHARE = 0.8

REGION_PARAMETER = "shared_memory_region"
_SIZE_PARAMETER = "shared_memory_byte_size"
_OFFSET_PARAMETER = "shared_memory_offset"

#: Folder of ``shm_open`` objects on Linux.
_FOLDER = Path("/dev/shm")  # noqa: S108  # no temporary file: the name is the client's


@dataclass(frozen=True, slots=True, eq=False)
class Region(ABC):
    """Memory shared by a client and this server; ``kind`` is ``"system"`` or ``"CUDA"``."""

    kind: ClassVar[str]

    name: str
    byte_size: int

    @abstractmethod
    def read(self, offset: int, num_bytes: int) -> bytes:
        """Copy a part of the region."""

    @abstractmethod
    def write(self, offset: int, data: bytes) -> None:
        """Write ``data`` into the region."""


@dataclass(frozen=True, slots=True, eq=False)
class SystemRegion(Region):
    """A part of a POSIX shared memory object.

    Accessed by system calls, not mapped: if a client truncates the object while it is in use, the access fails, whereas
    a mapped page would kill this process with SIGBUS.
    """

    kind: ClassVar[str] = "system"

    key: str
    start: int
    descriptor: int

    def __del__(self) -> None:
        os.close(self.descriptor)

    def read(self, offset: int, num_bytes: int) -> bytes:
        """A copy. Raises InvalidArgumentError if the object shrank."""
        if num_bytes <= MAX_PREAD_BYTES:
            data = os.pread(self.descriptor, num_bytes, self.start + offset)
        else:
            # It reads into one buffer, as often as it takes; opened anew, as descriptors share their position.
            with open(f"/proc/self/fd/{self.descriptor}", "rb") as file:
                file.seek(self.start + offset)
                data = file.read(num_bytes)
        if len(data) != num_bytes:
            raise InvalidArgumentError(
                f"shared memory region '{self.name}' has shrunk: {len(data)} of {num_bytes} bytes are left at "
                f"offset {offset}; keep the object '{self.key}' as large as it was registered"
            )
        return data

    def write(self, offset: int, data: bytes) -> None:
        """Write to the object. Raises ResourceExhaustedError if the machine has no shared memory left."""
        view, position = memoryview(data), self.start + offset
        try:
            while view:
                count = os.pwrite(self.descriptor, view, position)
                view, position = view[count:], position + count
        except OSError as error:  # a page that the client has not touched yet is allocated here
            raise ResourceExhaustedError(
                f"{len(data)} bytes cannot be written to shared memory region '{self.name}': {error.strerror}; give "
                f"{_FOLDER} more room, or write to the object '{self.key}' before it is registered"
            ) from error


@dataclass(frozen=True, slots=True, eq=False)
class CudaRegion(Region):
    """Memory of a CUDA device, allocated by another process; released after the last request that uses it."""

    kind: ClassVar[str] = "CUDA"

    device_id: int
    address: int
    cuda: Cuda

    def __del__(self) -> None:
        self.cuda.close(self.address, self.device_id)

    def read(self, offset: int, num_bytes: int) -> bytes:
        """A copy. Raises InternalError if CUDA fails."""
        buffer = (ctypes.c_char * num_bytes)()
        if num_bytes:
            self.cuda.copy(ctypes.addressof(buffer), self.address + offset, num_bytes, self.device_id)
        return buffer.raw

    def write(self, offset: int, data: bytes) -> None:
        """Copy to the device. Raises InternalError if CUDA fails."""
        if data:
            source = ctypes.cast(ctypes.c_char_p(bytes(data)), ctypes.c_void_p).value or 0
            self.cuda.copy(self.address + offset, source, len(data), self.device_id)


AnyRegion = TypeVar("AnyRegion", SystemRegion, CudaRegion)


class TensorLocation(NamedTuple):
    """Location of a tensor in shared memory; a written tensor may be smaller than ``byte_size``."""

    region: Region
    offset: int
    byte_size: int

    def read(self) -> bytes:
        """Copy the tensor, so that the client cannot change it during processing. Raises a WeftError.

        The object may be larger than memory: unwritten pages are free there, but not in the copy.
        """
        available = available_bytes() if self.byte_size >= _LARGE_BYTES else None
        if available is not None and self.byte_size > available * _AVAILABLE_SHARE:
            raise ResourceExhaustedError(
                f"a tensor of {self.byte_size} bytes in shared memory region '{self.region.name}' cannot be copied: "
                f"the server has {available} bytes of memory available; send a smaller one"
            )
        return self.region.read(self.offset, self.byte_size)

    def write(self, data: bytes, output: str) -> None:
        """Write a tensor at the start of the location. Raises InvalidArgumentError if it is larger."""
        if len(data) > self.byte_size:
            raise InvalidArgumentError(
                f"shared memory size specified with the request for output '{output}' ({self.byte_size} bytes) should "
                f"be at least {len(data)} bytes to hold the results"
            )
        self.region.write(self.offset, data)

    def parameters(self, num_bytes: int) -> dict[str, str | int]:
        """Response parameters of an output of ``num_bytes`` that was written here."""
        parameters: dict[str, str | int] = {REGION_PARAMETER: self.region.name, _SIZE_PARAMETER: num_bytes}
        return parameters | {_OFFSET_PARAMETER: self.offset} if self.offset else parameters


class SharedMemory:
    """The regions of one server, shared by all its clients. System and CUDA regions share a namespace."""

    def __init__(self, find_cuda: Callable[[], Cuda] = find_cuda) -> None:
        self._regions: dict[str, Region] = {}
        self._find_cuda = find_cuda

    @property
    def extensions(self) -> Sequence[str]:
        """Supported protocol extensions; CUDA shared memory only if its libraries are found."""
        try:
            self._find_cuda()
        except UnsupportedError:
            return ("system_shared_memory",)
        return ("system_shared_memory", "cuda_shared_memory")

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Register the object ``key``, from ``offset`` on, as region ``name``."""
        self._check_name(name)
        region = SystemRegion(name, byte_size, key, offset, _opened(name, key))
        size = os.fstat(region.descriptor).st_size
        if byte_size < 1 or offset + byte_size > size:
            raise InvalidArgumentError(
                f"Invalid offset + byte size for shared memory region: '{name}': {offset} + {byte_size} bytes; "
                f"the object '{key}' has {size}, and a region at least 1"
            )
        self._regions[name] = region

    def register_cuda(self, name: str, handle: bytes, device_id: int, byte_size: int) -> None:
        """Register the memory behind ``handle``, a ``cudaIpcMemHandle_t``, as region ``name``."""
        failed = f"failed to register CUDA shared memory region: '{name}'"
        try:
            cuda = self._find_cuda()
        except UnsupportedError as error:
            raise UnsupportedError(f"{failed}, {error.message}; or use system shared memory") from error
        self._check_name(name)
        if len(handle) != HANDLE_BYTES:
            raise InvalidArgumentError(
                f"{failed}: raw_handle has {len(handle)} bytes, a cudaIpcMemHandle_t has {HANDLE_BYTES}; send it as "
                "cudaIpcGetMemHandle gave it, not in base64"
            )
        try:
            cuda.check_device(device_id)
            address, size = cuda.open(handle, device_id)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{failed}: {error.message}") from error
        region = CudaRegion(name, byte_size, device_id, address, cuda)
        if not 1 <= byte_size <= size:
            raise InvalidArgumentError(
                f"{failed}: invalid args, byte_size is {byte_size}; the memory behind the handle has {size} bytes, and "
                "a region at least 1"
            )
        self._regions[name] = region

    def unregister(self, name: str, kind: type[Region]) -> None:
        """Unregister the region of that kind, or all for ""; an unknown name is not an error.

        Requests in flight keep the regions they use.
        """
        for known in [name] if name else list(self._regions):
            if isinstance(self._regions.get(known), kind):
                del self._regions[known]

    def regions(self, name: str, kind: type[AnyRegion]) -> Sequence[AnyRegion]:
        """The region of that kind, or all for "". Raises NotFoundError."""
        candidates = [self._region(name)] if name else list(self._regions.values())
        found = [region for region in candidates if isinstance(region, kind)]
        if name and not found:
            raise NotFoundError(
                f"The region named '{name}' is registered as {candidates[0].kind} shared memory, not {kind.kind} "
                "shared memory"
            )
        return found

    def location(self, parameters: Mapping[str, object], tensor: str) -> TensorLocation:
        """The location that the parameters of a tensor specify. Raises NotFoundError, InvalidArgumentError."""
        region = self._region(parameters[REGION_PARAMETER])
        byte_size, offset = parameters.get(_SIZE_PARAMETER), parameters.get(_OFFSET_PARAMETER, 0)
        for name, value in ((_SIZE_PARAMETER, byte_size), (_OFFSET_PARAMETER, offset)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise InvalidArgumentError(
                    f"parameter '{name}' of tensor '{tensor}' must be an integer of at least 0, got {value!r:.80}"
                )
        location = TensorLocation(region, int(str(offset)), int(str(byte_size)))
        if location.offset + location.byte_size > region.byte_size:
            raise InvalidArgumentError(
                f"Invalid offset + byte size for shared memory region: '{region.name}': {location.offset} + "
                f"{location.byte_size} bytes of tensor '{tensor}'; the region has {region.byte_size}"
            )
        return location

    def _check_name(self, name: str) -> None:
        if not name:
            raise InvalidArgumentError("a shared memory region needs a name, got ''")
        check_name("the name of a shared memory region", name)
        if name in self._regions:
            raise AlreadyExistsError(f"shared memory region '{name}' already in manager")
        if len(self._regions) >= MAX_REGIONS:
            raise ResourceExhaustedError(
                f"{MAX_REGIONS} shared memory regions are registered, the most allowed; unregister those not in use"
            )

    def _region(self, name: object) -> Region:
        if isinstance(name, str) and name in self._regions:
            return self._regions[name]
        known = ", ".join(f"'{known}'" for known in self._regions) or "none"
        raise NotFoundError(f"Unable to find shared memory region: {name!r:.80}; registered: {known:.400}")


def location_of(memory: SharedMemory | None, parameters: Mapping[str, object], tensor: str) -> TensorLocation | None:
    """Location of a tensor in shared memory; None if it is in the message."""
    if REGION_PARAMETER not in parameters:
        return None
    if memory is None:
        raise UnsupportedError(DISABLED)
    check_right("control", "tensors in shared memory")
    return memory.location(parameters, tensor)


def _opened(region: str, key: str) -> int:
    name = key.removeprefix("/")
    check_name("a shared memory key", key)
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise InvalidArgumentError(
            f"cannot register shared memory region '{region}' - invalid shm key {key!r:.80}: it is no name of "
            "shm_open; give one such as '/inputs'"
        )
    try:
        descriptor = os.open(_FOLDER / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise InvalidArgumentError(
            f"Unable to open shared memory region: '{key}': {error.strerror}; make it with shm_open on the server's "
            "machine before it is registered"
        ) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InvalidArgumentError(f"Unable to open shared memory region: '{key}' is no shared memory object")
    return descriptor
