"""The two ends of the pipe between a service and the process of a model instance: frames, and kept shared memory.

A frame is a head, a mark and the number of bytes behind it, and a tuple of builtins as ``marshal`` writes it: ``(freed,
block, kind, ...)``. Small tensors are ``bytes`` in it; those beyond ``INLINE_BYTES`` of one message lie behind one
another in a block of a memory file, and the frame has their numbers in their place. ``freed`` are blocks of the
receiver that the sender has read.

CPU of both ends for an execution that echoes one tensor, in the frame and through the file, on 2 busy cores of an AMD
EPYC: 8 kB 154 and 177 us, 32 kB 174 and 183 us, 64 kB 215 and 184 us, where the process still copied what it was lent.
"""

import ctypes
import itertools
import marshal
import mmap
import os
import socket
import sys
import tempfile
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from struct import Struct
from typing import Any, NamedTuple

import numpy as np

from weft.base.core import InferCall, InferResult, RequestedOutput
from weft.base.errors import ERROR_BY_CODE, InternalError, RemoteError, WeftError
from weft.base.observing.telemetry import carrier_of
from weft.base.tensors import WireTensor, datatype_of, encode
from weft.serving.request.request import RESCHEDULED, EncodedResponse, InferenceRequest, Outcome

_HEAD = Struct("<II")
_MARK = 0x57454654
#: Fixed, so that both ends write the same whatever their Python's newest is.
_MARSHAL_VERSION = 4
#: Longest frame: a larger head is no head. Texts and parameters are in it, and tensors that are small.
MAX_FRAME_BYTES = 64 << 20
#: Bytes of tensors that one message carries itself.
INLINE_BYTES = 32 << 10
_BUFFER_BYTES = 64 << 10
_ALIGNMENT = 64
#: Free blocks of one process that stay in memory, in bytes.
_KEPT_BYTES = 64 << 20

_MAP_FIXED = 0x10  # of Linux and macOS
_mmap = ctypes.CDLL(None).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)

Message = Sequence[Any]


class OutOfStepError(Exception):
    """The other end has sent something that is no message."""


def framed(message: tuple[Any, ...]) -> bytes:
    """The frame of a message. Raises ValueError if it is too long, or has something that is no builtin."""
    body = marshal.dumps(message, _MARSHAL_VERSION)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a message has {len(body)} bytes beside its tensors; at most {MAX_FRAME_BYTES} are allowed")
    return _HEAD.pack(_MARK, len(body)) + body


class FrameReader:
    """Reads the messages of a connected stream socket; one thread at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._filled = 0

    def read(self, flags: int = 0) -> list[Message]:
        """Receive once, and return the messages that are complete: often one, maybe none.

        Raises BlockingIOError, EOFError or OSError as the socket says, OutOfStepError for what is no message.
        """
        buffer, filled = self._buffer, self._filled
        count = self._connection.recv_into(buffer[filled:] if filled else buffer, 0, flags)
        if not count:
            raise EOFError
        filled += count
        if filled >= _HEAD.size:  # mostly one message, and the whole of it
            mark, size = _HEAD.unpack_from(buffer)
            if mark == _MARK and size == filled - _HEAD.size:
                self._filled = 0
                if filled > _BUFFER_BYTES:
                    self._buffer = memoryview(bytearray(_BUFFER_BYTES))
                return [_loaded(buffer[_HEAD.size : filled])]
        start, messages = 0, []
        while filled - start >= _HEAD.size:
            mark, size = _HEAD.unpack_from(buffer, start)
            if mark != _MARK or size > MAX_FRAME_BYTES:
                raise OutOfStepError
            end = start + _HEAD.size + size
            if end > filled:
                if end - start > len(buffer):
                    self._buffer = memoryview(bytearray(end - start))
                break
            messages.append(_loaded(buffer[start + _HEAD.size : end]))
            start = end
        self._filled = filled - start
        if self._filled:
            self._buffer[: self._filled] = bytes(buffer[start:filled])
        return messages


def _loaded(body: memoryview) -> Message:
    try:
        message: Message = marshal.loads(body)  # noqa: S302  # of a process that has no more rights than this one
    except (ValueError, TypeError, EOFError, MemoryError) as error:
        raise OutOfStepError from error
    if type(message) is not tuple or len(message) < 3:
        raise OutOfStepError
    return message


#: Name, datatype, shape, and bytes or a number in ``Outgoing.large``.
PackedTensor = tuple[str, str, tuple[int, ...], Any]


class Outgoing:
    """Packs the tensors of one message; ``large`` are the contents of those that go through a block."""

    __slots__ = ("_room", "large")

    def __init__(self) -> None:
        self.large: list[Any] = []
        self._room = INLINE_BYTES

    @property
    def num_bytes(self) -> int:
        """Of the tensors so far."""
        return INLINE_BYTES - self._room + sum(map(len, self.large))

    def tensors(self, tensors: dict[str, WireTensor]) -> list[PackedTensor]:
        """Pack encoded tensors."""
        return [(name, datatype, shape, self._content(data)) for name, (datatype, shape, data) in tensors.items()]

    def array(self, name: str, array: Any) -> PackedTensor:
        """Pack an array; many numbers are not copied. Raises InvalidArgumentError for what has no datatype."""
        datatype = datatype_of(array)
        if datatype == "BYTES":
            _, shape, content = encode(array)
            return name, datatype, shape, self._content(content)
        if array.nbytes > self._room:
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            return name, datatype, array.shape, self._content(data)
        self._room -= array.nbytes
        return name, datatype, array.shape, array.tobytes()

    def _content(self, data: Any) -> Any:
        num_bytes = len(data)
        if num_bytes > self._room:
            self.large.append(data)
            return len(self.large) - 1
        self._room -= num_bytes
        return data


def incoming_tensors(packed: Sequence[PackedTensor], large: Any) -> dict[str, WireTensor]:
    """The tensors of ``Outgoing.tensors``, with the contents of the block of their message."""
    return {
        name: WireTensor(datatype, shape, large[data] if type(data) is int else data)
        for name, datatype, shape, data in packed
    }


class MemoryFile:
    """A file in memory that two processes share, of which they map one block after another and keep the maps.

    Attributes:
        freed: Blocks that were lent, and are not any more. Any thread appends to it.
    """

    def __init__(self, descriptor: int = -1) -> None:
        self.descriptor = descriptor if descriptor >= 0 else _memory_file()
        self._maps: dict[int, mmap.mmap] = {}
        self._lent: set[int] = set()
        self.freed: deque[int] = deque()

    def write(self, offset: int, contents: Sequence[Any]) -> None:
        """Write contents behind one another into a block; many bytes without the interpreter lock. Any thread."""
        sizes = [len(content) for content in contents]
        block = self._block(offset, room(sizes), grows=True)
        for part, content in zip(_parts(memoryview(block), sizes), contents, strict=True):
            np.copyto(np.frombuffer(part, np.uint8), np.frombuffer(content, np.uint8))

    def read(self, offset: int, sizes: Sequence[int]) -> list[bytes]:
        """What lies in a block. Raises OutOfStepError where there is no such block."""
        return [part.tobytes() for part in _parts(memoryview(self._block(offset, room(sizes))), sizes)]

    def lend(self, offset: int, sizes: Sequence[int]) -> list[memoryview]:
        """What lies in a block, to be changed; ``freed`` gets the block once nobody has any of it."""
        block = np.frombuffer(self._block(offset, room(sizes)), np.uint8)
        self._lent.add(offset)
        weakref.finalize(block, self._end_loan, offset)
        return _parts(block.data, sizes)

    def _end_loan(self, offset: int) -> None:
        self._lent.discard(offset)
        self.freed.append(offset)

    def keep_loans(self) -> None:
        """Make what is lent memory of this process alone; a process that is forked would see later contents in it."""
        for block in [self._maps.pop(offset) for offset in list(self._lent) if offset in self._maps]:
            contents, size = block[:], len(block)
            address = ctypes.addressof(ctypes.c_char.from_buffer(block))
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
            if _mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == address:
                ctypes.memmove(address, contents, size)

    def read_aside(self, offset: int, sizes: Sequence[int]) -> list[bytes]:
        """As ``read``, slower but without the interpreter lock, from any thread."""
        contents = []
        for size in sizes:
            content = os.pread(self.descriptor, size, offset)
            while len(content) < size:  # one call reads 2 GiB at most
                more = os.pread(self.descriptor, size - len(content), offset + len(content))
                if not more:
                    raise OutOfStepError
                content += more
            contents.append(content)
            offset += room([size])
        return contents

    def release(self, offset: int) -> None:
        """Give the memory of a block back to the system."""
        if sys.platform == "linux":
            self._maps[offset].madvise(mmap.MADV_REMOVE)

    def _block(self, offset: int, num_bytes: int, *, grows: bool = False) -> mmap.mmap:
        size, block = block_size(num_bytes), self._maps.get(offset)
        if block is None or len(block) != size:
            try:
                if grows and os.fstat(self.descriptor).st_size < offset + size:
                    os.ftruncate(self.descriptor, offset + size)
                block = self._maps[offset] = mmap.mmap(self.descriptor, size, offset=offset)
            except (ValueError, OSError, OverflowError) as error:
                raise OutOfStepError from error
        return block

    def __del__(self) -> None:
        os.close(self.descriptor)


def _parts(block: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    starts = itertools.accumulate((room([size]) for size in sizes[:-1]), initial=0)
    return [block[start : start + size] for start, size in zip(starts, sizes, strict=True)]


class Pipe(NamedTuple):
    """One end of a pipe: a stream socket, and the files of the large tensors that leave and arrive."""

    connection: socket.socket
    ours: MemoryFile
    theirs: MemoryFile


def room(sizes: Sequence[int]) -> int:
    """Bytes that contents of these sizes take up in a block: each is where arrays of any datatype may be."""
    return sum([-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes])


def block_size(num_bytes: int) -> int:
    """Bytes of the block that has room for so many: a power of two."""
    return max(1 << (num_bytes - 1).bit_length(), INLINE_BYTES)


def _memory_file() -> int:
    if sys.platform == "linux":
        return os.memfd_create("weft-python-model")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Blocks:
    """The blocks of a file that this process writes, and the other one reads and gives back; one thread at a time.

    A block is kept and used again, so that its pages are there.
    """

    def __init__(self, file: MemoryFile) -> None:
        self.file = file
        self._free: dict[int, list[int]] = {}  # offsets by the number of bytes
        self._taken: dict[int, int] = {}  # numbers of bytes by offset
        self._kept: set[int] = set()
        self._end = self._num_kept_bytes = 0

    def take(self, num_bytes: int) -> int:
        """The offset of a block for so many bytes."""
        size = block_size(num_bytes)
        if free := self._free.get(size):
            offset = free.pop()
            if offset in self._kept:
                self._kept.remove(offset)
                self._num_kept_bytes -= size
        else:
            offset, self._end = self._end, self._end + size
        self._taken[offset] = size
        return offset

    def give_back(self, offset: int) -> None:
        """Use the block again. Raises OutOfStepError if it is not taken."""
        size = self._taken.pop(offset, None)
        if size is None:
            raise OutOfStepError
        self._free.setdefault(size, []).append(offset)
        if self._num_kept_bytes + size <= _KEPT_BYTES:
            self._kept.add(offset)
            self._num_kept_bytes += size
        else:
            self.file.release(offset)


def pack_error(error: WeftError) -> tuple[str, str, str, str | None, int | None]:
    """Code, text, traceback of user code, and maybe an id or a pause in milliseconds."""
    more = getattr(error, "error_id", None), getattr(error, "retry_after_ms", None)
    return error.code, error.message, error.traceback, *more


def unpack_error(packed: Any) -> WeftError:
    """The error of ``pack_error``."""
    code, message, traceback, error_id, retry_after_ms = packed
    error: WeftError
    if error_id is not None:
        error = InternalError("", error_id=error_id).with_message(message)
    elif retry_after_ms is not None or code not in ERROR_BY_CODE:
        error = RemoteError(code, message, retry_after_ms=retry_after_ms)
    else:
        error = ERROR_BY_CODE[code](message)
    error.traceback = traceback
    return error


def pack_request(number: int, request: InferenceRequest, outgoing: Outgoing) -> tuple[Any, ...]:
    """A request as the process gets it: of its headers, those of the trace alone, if there is one."""
    call, context = request.call, request.context
    return (
        number,
        *pack_call(call, outgoing),
        context.deadline_ns,
        carrier_of(request.span, context.headers) or None,
        request.num_rows,
        request.stream is not None,
    )


def pack_call(call: InferCall, outgoing: Outgoing) -> tuple[Any, ...]:
    """A call, as six fields."""
    return (
        call.model_name,
        call.model_version,
        call.request_id,
        call.parameters,
        outgoing.tensors(call.inputs),
        [output.name for output in call.outputs] if call.outputs else (),
    )


def unpack_call(packed: tuple[Any, ...], large: Any) -> InferCall:
    """The call of ``pack_call``."""
    model_name, version, request_id, parameters, inputs, outputs = packed
    names = tuple([RequestedOutput(name, {}) for name in outputs]) if outputs else ()
    return InferCall(model_name, version, request_id, parameters, incoming_tensors(inputs, large), names)


def pack_result(result: InferResult | None, outgoing: Outgoing) -> tuple[Any, ...] | None:
    """The answer to a nested call."""
    if result is None:
        return None
    names = result.model_name, result.model_version, result.request_id
    return (*names, plain(result.parameters), outgoing.tensors(result.outputs))


def unpack_result(packed: tuple[Any, ...] | None, large: Any) -> InferResult | None:
    """The answer of ``pack_result``."""
    if packed is None:
        return None
    name, version, request_id, parameters, outputs = packed
    return InferResult(name, version, request_id, parameters, incoming_tensors(outputs, large))


def pack_outcome(outcome: Outcome, outgoing: Outgoing) -> tuple[Any, ...] | None:
    """Outputs and parameters, or an error; None for RESCHEDULED."""
    if outcome is RESCHEDULED:
        return None
    if isinstance(outcome, WeftError):
        return pack_error(outcome)
    try:
        return [outgoing.array(name, array) for name, array in outcome.outputs.items()], outcome.parameters
    except WeftError as error:
        return pack_error(error)


def unpack_outcome(packed: tuple[Any, ...] | None, large: Any) -> Outcome:
    """The outcome of ``pack_outcome``; outputs stay encoded."""
    if packed is None:
        return RESCHEDULED
    if len(packed) == 2:
        return EncodedResponse(incoming_tensors(packed[0], large), packed[1])
    return unpack_error(packed)


def plain(value: Any) -> Any:
    """What a model has given, as builtins; NumPy's scalars and arrays too. Raises TypeError for other objects."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str, bytes):
        return value
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return tuple(map(plain, value)) if isinstance(value, tuple) else list(map(plain, value))
    if isinstance(value, np.generic | np.ndarray):
        return plain(value.tolist())
    for base in (int, float):
        if isinstance(value, base):
            return base(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise TypeError(f"{kind.__name__} is no plain value: give bool, int, float, str or bytes")
