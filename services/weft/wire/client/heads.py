"""The fields of requests as encoded blocks, kept as long as they repeat."""

import math
from collections.abc import Iterable
from typing import Any, Final

from weft.wire.heads import CONTENT_TYPE, encode_metadata, encode_timeout
from weft.wire.hpack import encode
from weft.wire.interface import grpc
from weft.wire.messages import ACCEPTED

_MAX_CACHED: Final = 256
#: The first timeouts of a channel, among which are those that all its calls have.
_MAX_EXACT: Final = 16
ENCODING_BY_COMPRESSION: Final = {
    grpc.Compression.NoCompression: "identity",
    grpc.Compression.Deflate: "deflate",
    grpc.Compression.Gzip: "gzip",
}


class RequestHeads:
    """Encodes the fields of the calls of one channel."""

    def __init__(self, scheme: str, authority: str, user_agent: str) -> None:
        self._scheme = scheme
        self._authority = authority
        self._user_agent = user_agent
        self._timeouts: dict[int, bytes] = {}
        self._exact_timeouts: dict[float, bytes] = {}
        self._metadata: dict[object, bytes] = {}

    def method(self, path: str, encoding: str) -> bytes:
        """The fields that all calls of a method have; ``path`` with a leading slash, ``encoding`` of the requests."""
        fields = [
            (":method", "POST"),
            (":scheme", self._scheme),
            (":path", path),
            (":authority", self._authority),
            ("te", "trailers"),
            ("content-type", CONTENT_TYPE),
            ("user-agent", self._user_agent),
            ("grpc-accept-encoding", ACCEPTED),
        ]
        if encoding != "identity":
            fields.append(("grpc-encoding", encoding))
        return encode(fields)

    def metadata(self, metadata: Iterable[Any]) -> bytes:
        """Metadata of a call; what follows ``method``.

        Raises:
            ValueError: A key or value cannot be sent; the message says which.
        """
        key = metadata if type(metadata) is tuple else tuple(metadata)
        try:
            block = self._metadata.get(key)
        except TypeError:  # a pair that is a list
            key = tuple((name, value) for name, value in metadata)
            block = self._metadata.get(key)
        if block is None:
            block = encode(encode_metadata(key))
            _keep(self._metadata, key, block)
        return block

    def timeout(self, timeout_s: float) -> bytes:
        """``grpc-timeout``, rounded up to 1 % or to a millisecond, so that blocks repeat."""
        block = self._exact_timeouts.get(timeout_s)
        if block is not None:
            return block
        if timeout_s < 0.1:
            key = -math.ceil(timeout_s * 1e3)
        else:
            key = math.ceil(timeout_s * 1e2)
            if key >= 1000:
                key = -(-key // 10) * 10 if key < 10_000 else -(-key // 100) * 100
        block = self._timeouts.get(key)
        if block is None:
            block = encode([("grpc-timeout", encode_timeout(key / 100 if key > 0 else -key / 1000))])
            _keep(self._timeouts, key, block)
        if len(self._exact_timeouts) < _MAX_EXACT:
            self._exact_timeouts[timeout_s] = block
        return block


def _keep(blocks: dict[Any, bytes], key: object, block: bytes) -> None:
    if len(blocks) >= _MAX_CACHED:
        blocks.clear()  # cheaper than to look for what to drop; what matters comes again
    blocks[key] = block
