"""gRPC messages without I/O: length-prefixed framing (a flag, four bytes of length, the message) and statuses.

A large message need not be copied into one piece. If a serializer has a method ``to_parts``, it is called instead and
may return ``Parts``. A deserializer whose attribute ``takes_parts`` is true gets bytes, a view of bytes, or ``Parts``.
"""

import logging
import struct
import time
import zlib
from collections.abc import Callable
from typing import TypeAlias
from urllib.parse import quote_from_bytes, unquote_to_bytes

from weft.wire.connection.sending import Parts
from weft.wire.frames import ErrorCode
from weft.wire.interface import StatusCode

STATUS_BY_NUMBER: dict[int, StatusCode] = {code.value[0]: code for code in StatusCode}
NUMBER_BY_STATUS: dict[StatusCode, int] = {code: number for number, code in STATUS_BY_NUMBER.items()}

_UNESCAPED = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
_BY_RESET = {
    ErrorCode.REFUSED_STREAM: StatusCode.UNAVAILABLE,
    ErrorCode.CANCEL: StatusCode.CANCELLED,
    ErrorCode.ENHANCE_YOUR_CALM: StatusCode.RESOURCE_EXHAUSTED,
    ErrorCode.INADEQUATE_SECURITY: StatusCode.PERMISSION_DENIED,
}
_BY_HTTP = {
    400: StatusCode.INTERNAL,
    401: StatusCode.UNAUTHENTICATED,
    403: StatusCode.PERMISSION_DENIED,
    404: StatusCode.UNIMPLEMENTED,
    429: StatusCode.UNAVAILABLE,
    431: StatusCode.INTERNAL,
    502: StatusCode.UNAVAILABLE,
    503: StatusCode.UNAVAILABLE,
    504: StatusCode.UNAVAILABLE,
}


class CallError(Exception):
    """A call that ends with a status other than OK."""

    def __init__(self, code: StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code = code
        self.details = details


def encode_message(text: str) -> str:
    """``text`` as the value of ``grpc-message``: percent-encoded UTF-8; a lone surrogate becomes a question mark."""
    return quote_from_bytes(text.encode("utf-8", "replace"), safe=_UNESCAPED)


def decode_message(value: str) -> str:
    """The text of a ``grpc-message``; invalid percent-encoding or UTF-8 is kept or replaced, never an error."""
    return unquote_to_bytes(value.encode("latin-1", "replace")).decode("utf-8", "replace") if "%" in value else value


def status_of_reset(code: int) -> StatusCode:
    """The gRPC status for a call that the server ended with RST_STREAM."""
    return _BY_RESET.get(ErrorCode(code), StatusCode.INTERNAL) if code in _ERROR_CODES else StatusCode.INTERNAL


def status_of_http(status: int) -> StatusCode:
    """The gRPC status for a response with an HTTP status other than 200 and no gRPC status."""
    return _BY_HTTP.get(status, StatusCode.UNKNOWN)


_ERROR_CODES = frozenset(ErrorCode)


#: Requests of this time share one line in the log: whoever sends garbage must not fill it. In seconds.
_LOG_PERIOD_S = 1.0

_log = logging.getLogger("weft.wire.server")


class UnreadableRequests:
    """Makes the errors for requests that a deserializer rejected, and logs the first of them."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._num_untold = 0
        self._told_s = -_LOG_PERIOD_S

    def failure(self, path: str, peer: str, error: BaseException) -> CallError:
        """The error of one call: INVALID_ARGUMENT; RESOURCE_EXHAUSTED for a MemoryError."""
        if isinstance(error, MemoryError):
            code = StatusCode.RESOURCE_EXHAUSTED
            details = f"the server has no memory left to read a request of this size for {path}; send a smaller one"
        else:
            code = StatusCode.INVALID_ARGUMENT
            details = f"the request is not a message that {path} takes: {error}; serialize it by the service's .proto"
        self._num_untold += 1
        now_s = self._clock_s()
        if now_s - self._told_s >= _LOG_PERIOD_S:
            extra = {"num_unreadable": self._num_untold, "peer": peer, "status": code.name}
            _log.warning("a request cannot be read: %s", details, extra=extra)
            self._num_untold, self._told_s = 0, now_s
        return CallError(code, details)


#: ``wbits`` of zlib for writing.
_WRITE_BITS = {"gzip": 31, "deflate": 15}
#: Both headers are recognised when reading.
_READ_BITS = 47
#: Value of ``grpc-accept-encoding``.
ACCEPTED = "identity, deflate, gzip"
ENCODINGS = frozenset({"identity", *_WRITE_BITS})


def compress(encoding: str, message: bytes | bytearray | memoryview | Parts) -> bytes:
    """Compress a message; ``encoding`` is not ``identity``."""
    compressor = zlib.compressobj(wbits=_WRITE_BITS[encoding])
    pieces = message.pieces if isinstance(message, Parts) else (message,)
    return b"".join((*map(compressor.compress, pieces), compressor.flush()))


def decompress(message: bytes | memoryview, max_bytes: int) -> bytes:
    """Decompress a message. Raises CallError if it is corrupt or grows beyond ``max_bytes``."""
    reader = zlib.decompressobj(wbits=_READ_BITS)
    try:
        plain = reader.decompress(message, max_bytes + 1)
    except zlib.error as error:
        raise CallError(StatusCode.INTERNAL, f"a compressed message cannot be read: {error}") from None
    if len(plain) > max_bytes:
        raise CallError(
            StatusCode.RESOURCE_EXHAUSTED, f"Received message larger than max (decompressed, over {max_bytes})"
        )
    if not reader.eof or reader.unused_data:
        raise CallError(StatusCode.INTERNAL, "a compressed message is cut off or has more after its end")
    return plain


#: What has come; ``Parts`` only for whoever takes them.
Message: TypeAlias = bytes | Parts
#: What is to be sent.
Body: TypeAlias = bytes | bytearray | memoryview | Parts

PREFIX_BYTES = 5


def is_body(value: object) -> bool:
    """Whether a serializer's result can be sent: a bytes-like object whose length is its number of bytes."""
    if isinstance(value, memoryview):
        return value.ndim == 1 and value.itemsize == 1 and value.c_contiguous
    return isinstance(value, bytes | bytearray | Parts)


#: Flag (0: plain, 1: compressed) and length.
pack_prefix = struct.Struct(">BI").pack
_unpack_prefix = struct.Struct(">BI").unpack_from

#: Chunks smaller than this are gathered in one buffer: an object for each would cost more than they hold.
_SMALL_CHUNK_BYTES = 2048


def whole_message(data: bytes | memoryview) -> bytes | memoryview | None:
    """Return the message if ``data`` is exactly one uncompressed message, else None."""
    length = len(data) - PREFIX_BYTES
    if length >= 0 and data[:PREFIX_BYTES] == pack_prefix(0, length):
        return data[PREFIX_BYTES:]
    return None


class CompressedMessage(bytes):
    """A message as received, still compressed."""


class MessageReader:
    """Assembles the messages of one direction of a call. Memory grows with received bytes, not with announced lengths.

    Args:
        count_bytes: Called with each change of the number of bytes held, negative when they are released.
        decompresses: False leaves messages compressed until the caller reads them: a window may hold thousands, each
            of which can decompress to the largest allowed message.
    """

    __slots__ = (
        "_count", "_decompresses", "_is_compressed", "_keeps_parts", "_length", "_max_message_bytes", "_may_compress",
        "_parts", "num_bytes",
    )  # fmt: skip

    def __init__(
        self,
        max_message_bytes: int,
        *,
        may_compress: bool = False,
        count_bytes: Callable[[int], None] | None = None,
        decompresses: bool = True,
        keeps_parts: bool = False,
    ) -> None:
        self._max_message_bytes = max_message_bytes
        self._may_compress = may_compress
        self._count = count_bytes
        self._decompresses = decompresses
        self._keeps_parts = keeps_parts
        self._parts: list[bytes | bytearray | memoryview] = []
        self._length = -1  # of the message that has begun; -1: its prefix is incomplete
        self._is_compressed = False
        self.num_bytes = 0

    @property
    def is_empty(self) -> bool:
        """Whether no message has begun."""
        return not self.num_bytes and self._length < 0

    def feed(self, data: bytes | memoryview) -> list[Message]:
        """Add received data; return the messages it completes. Raises CallError: too large or corrupt."""
        messages: list[Message] = []
        while True:
            if self._length < 0:
                data = self._read_prefix(data)
                if self._length < 0:
                    return messages
            num_missing = self._length - self.num_bytes
            if len(data) < num_missing:
                self._keep(data)
                return messages
            messages.append(self._complete(data[:num_missing]))
            data = data[num_missing:]
            if not len(data):
                return messages

    def release(self) -> None:
        """Forget what is held."""
        self._parts = []
        self._counted(-self.num_bytes)
        self.num_bytes = 0
        self._length = -1

    def _read_prefix(self, data: bytes | memoryview) -> bytes | memoryview:
        if self.num_bytes:
            missing = PREFIX_BYTES - self.num_bytes
            self._keep(data[:missing])
            data = data[missing:]
            if self.num_bytes < PREFIX_BYTES:
                return data
            prefix = b"".join(self._parts)
            self.release()
        elif len(data) < PREFIX_BYTES:
            self._keep(data)
            return data
        else:
            prefix, data = bytes(data[:PREFIX_BYTES]), data[PREFIX_BYTES:]
        flag, length = _unpack_prefix(prefix)
        if flag > 1:
            raise CallError(StatusCode.INTERNAL, f"a message begins with {flag}; 0 and 1 are known")
        if flag and not self._may_compress:
            raise CallError(StatusCode.INTERNAL, "a message is compressed, and the call has no grpc-encoding")
        if length > self._max_message_bytes:
            raise CallError(
                StatusCode.RESOURCE_EXHAUSTED,
                f"Received message larger than max ({length} vs. {self._max_message_bytes})",
            )
        self._length, self._is_compressed = length, bool(flag)
        return data

    def _keep(self, data: bytes | memoryview) -> None:
        size = len(data)
        if not size:
            return
        self._counted(size)
        self.num_bytes += size
        parts = self._parts
        if size >= _SMALL_CHUNK_BYTES:
            parts.append(data)
        elif parts and isinstance(parts[-1], bytearray):
            parts[-1] += data
        else:
            parts.append(bytearray(data))

    def _complete(self, data: bytes | memoryview) -> Message:
        if self._parts:
            pieces = [*self._parts, data]
            self.release()
            if self._keeps_parts and not self._is_compressed:
                return Parts(pieces)
            message = b"".join(pieces)
        else:
            message = data if isinstance(data, bytes) else bytes(data)
            self._length = -1
        if not self._is_compressed:
            return message
        return decompress(message, self._max_message_bytes) if self._decompresses else CompressedMessage(message)

    def _counted(self, num_bytes: int) -> None:
        if self._count is not None and num_bytes:
            self._count(num_bytes)
