"""Regions of system shared memory that clients register, and tensors that lie in them.

Source: the extension "system shared memory" of the V2 protocol, ``protocol/extension_shared_memory.md`` of Triton
Inference Server.
"""

import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from weft_common.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnsupportedError,
)

DISABLED = "Client shared memory is disabled; start the server with --allow-client-shm, or send tensors in the message"

#: Each region holds a file descriptor.
MAX_REGIONS = 256

REGION_PARAMETER = "shared_memory_region"
_SIZE_PARAMETER = "shared_memory_byte_size"
_OFFSET_PARAMETER = "shared_memory_offset"

#: Where Linux shows what ``shm_open`` names.
_FOLDER = Path("/dev/shm")  # noqa: S108  # no temporary file: the name is the client's


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """A part of a shared memory object.

    It is read and written by system calls, not mapped: a client that shrinks the object while it is in use gets an
    error, where a mapped page would end this process with SIGBUS.

    Attributes:
        name: As registered.
        key: What the client gave ``shm_open``.
        offset, byte_size: The part of the object, bytes.
        descriptor: Of the object; closed with the last request that uses it.
    """

    name: str
    key: str
    offset: int
    byte_size: int
    descriptor: int

    def __del__(self) -> None:
        os.close(self.descriptor)


class Place(NamedTuple):
    """Where a tensor lies, or is to lie.

    Attributes:
        region: The region.
        offset: From its start, bytes.
        byte_size: Of the place; a tensor that is written may be smaller.
    """

    region: Region
    offset: int
    byte_size: int

    def read(self) -> bytes:
        """A copy, so that nothing changes while it is in work. Raises InvalidArgumentError if the object shrank."""
        region = self.region
        data = os.pread(region.descriptor, self.byte_size, region.offset + self.offset)
        if len(data) != self.byte_size:
            raise InvalidArgumentError(
                f"shared memory region '{region.name}' has shrunk: {len(data)} of {self.byte_size} bytes are left at "
                f"offset {self.offset}; keep the object '{region.key}' as large as it was registered"
            )
        return data

    def write(self, data: bytes, output: str) -> None:
        """The tensor lies at the start of the place. Raises InvalidArgumentError if it is larger."""
        if len(data) > self.byte_size:
            raise InvalidArgumentError(
                f"shared memory size specified with the request for output '{output}' ({self.byte_size} bytes) should "
                f"be at least {len(data)} bytes to hold the results"
            )
        view, position = memoryview(data), self.region.offset + self.offset
        while view:
            count = os.pwrite(self.region.descriptor, view, position)
            view, position = view[count:], position + count

    def parameters(self, num_bytes: int) -> dict[str, str | int]:
        """What the response says of an output of ``num_bytes`` that was written here."""
        told: dict[str, str | int] = {REGION_PARAMETER: self.region.name, _SIZE_PARAMETER: num_bytes}
        return told | {_OFFSET_PARAMETER: self.offset} if self.offset else told


class SharedMemory:
    """The regions of one server; for all its clients, as the protocol has it."""

    def __init__(self) -> None:
        self._regions: dict[str, Region] = {}

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """The object ``key``, from ``offset`` on, is the region ``name``.

        Raises:
            AlreadyExistsError: There is a region of that name.
            InvalidArgumentError: The name is empty, there is no such object, or it is too small.
            ResourceExhaustedError: ``MAX_REGIONS`` are registered.
        """
        if not name:
            raise InvalidArgumentError("a shared memory region needs a name, got ''")
        if name in self._regions:
            raise AlreadyExistsError(f"shared memory region '{name}' already in manager")
        if len(self._regions) >= MAX_REGIONS:
            raise ResourceExhaustedError(
                f"{MAX_REGIONS} shared memory regions are registered, the most allowed; unregister those not in use"
            )
        region = Region(name, key, offset, byte_size, _opened(key))
        size = os.fstat(region.descriptor).st_size
        if byte_size < 1 or offset + byte_size > size:
            raise InvalidArgumentError(
                f"Invalid offset + byte size for shared memory region: '{name}': {offset} + {byte_size} bytes; "
                f"the object '{key}' has {size}, and a region at least 1"
            )
        self._regions[name] = region

    def unregister(self, name: str) -> None:
        """The region, or with "" every one, is no longer known; one that is not registered is no error.

        Requests in flight keep what they use.
        """
        if name:
            self._regions.pop(name, None)
        else:
            self._regions.clear()

    def regions(self, name: str) -> Sequence[Region]:
        """The region, or with "" every one. Raises NotFoundError."""
        return [self._region(name)] if name else list(self._regions.values())

    def place(self, parameters: Mapping[str, object], tensor: str) -> Place:
        """Where the parameters of a tensor say that it lies.

        Raises:
            NotFoundError: The region is not registered.
            InvalidArgumentError: A parameter is missing or of the wrong type, or the place is not in the region.
        """
        region = self._region(parameters[REGION_PARAMETER])
        byte_size, offset = parameters.get(_SIZE_PARAMETER), parameters.get(_OFFSET_PARAMETER, 0)
        for name, value in ((_SIZE_PARAMETER, byte_size), (_OFFSET_PARAMETER, offset)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise InvalidArgumentError(
                    f"parameter '{name}' of tensor '{tensor}' must be an integer of at least 0, got {value!r:.80}"
                )
        place = Place(region, int(str(offset)), int(str(byte_size)))
        if place.offset + place.byte_size > region.byte_size:
            raise InvalidArgumentError(
                f"Invalid offset + byte size for shared memory region: '{region.name}': {place.offset} + "
                f"{place.byte_size} bytes of tensor '{tensor}'; the region has {region.byte_size}"
            )
        return place

    def _region(self, name: object) -> Region:
        if isinstance(name, str) and name in self._regions:
            return self._regions[name]
        known = ", ".join(f"'{known}'" for known in self._regions) or "none"
        raise NotFoundError(f"Unable to find shared memory region: {name!r:.80}; registered: {known:.400}")


def place_of(memory: SharedMemory | None, parameters: Mapping[str, object], tensor: str) -> Place | None:
    """Where a tensor lies; None for one that travels in the message.

    Raises:
        UnsupportedError: It lies in shared memory, which the server does not offer.
        WeftError: As ``SharedMemory.place``.
    """
    if REGION_PARAMETER not in parameters:
        return None
    if memory is None:
        raise UnsupportedError(DISABLED)
    return memory.place(parameters, tensor)


def _opened(key: str) -> int:
    """Descriptor of the shared memory object. Raises InvalidArgumentError."""
    name = key.removeprefix("/")
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise InvalidArgumentError(f"shared memory key {key!r:.80} is no name of shm_open; give one such as '/inputs'")
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
