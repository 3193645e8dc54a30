"""Compression of messages: gzip and deflate, with a limit on what a message may grow to."""

import zlib

from weft.wire.connection.parts import Parts
from weft.wire.interface import StatusCode
from weft.wire.rpc.status import CallError

#: ``wbits`` of zlib for writing.
_WRITE_BITS = {"gzip": 31, "deflate": 15}
#: Both headers are recognised when reading.
_READ_BITS = 47
#: Value of ``grpc-accept-encoding``.
ACCEPTED = "identity, deflate, gzip"
ENCODINGS = frozenset({"identity", *_WRITE_BITS})


def compress(encoding: str, message: bytes | bytearray | memoryview | Parts) -> bytes:
    """A message in an encoding other than ``identity``."""
    compressor = zlib.compressobj(wbits=_WRITE_BITS[encoding])
    pieces = message.pieces if isinstance(message, Parts) else (message,)
    return b"".join((*map(compressor.compress, pieces), compressor.flush()))


def decompress(message: bytes | memoryview, max_bytes: int) -> bytes:
    """A message that was compressed.

    Raises:
        CallError: INTERNAL: it cannot be read; RESOURCE_EXHAUSTED: it grows beyond ``max_bytes``.
    """
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
