"""A client's side of an HTTP/2 connection, the options of a channel, and encoded request headers."""

import asyncio
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from typing_extensions import override

from weft.wire.connection import ConnectionLimits
from weft.wire.frames import ErrorCode
from weft.wire.heads import CONTENT_TYPE, encode_metadata, encode_timeout
from weft.wire.hpack import encode
from weft.wire.interface import grpc
from weft.wire.messages import ACCEPTED
from weft.wire.transport import Http2Protocol, LivenessOptions


@dataclass(frozen=True)
class ChannelOptions(ConnectionLimits, LivenessOptions):
    """Options of a channel and of its connection.

    Attributes:
        initial_backoff_s: From the start of a failed attempt to connect to the next one.
        backoff_jitter: Share by which each of these times is spread, 0 to 1.
        keepalive_time_s: Silence of the server after which a PING is sent; 0: never. Servers of gRPC end a connection
            whose PINGs come more often than they allow, by default every five minutes.
    """

    max_message_bytes: int = 2**31 - 1
    connect_timeout_s: float = 20.0
    initial_backoff_s: float = 0.1
    max_backoff_s: float = 2.0
    backoff_factor: float = 1.6
    backoff_jitter: float = 0.2
    keepalive_time_s: float = 0.0
    keepalive_timeout_s: float = 20.0
    keepalive_without_calls: bool = False
    user_agent: str = "grpc-python-weft-wire/0.1"
    compression: grpc.Compression = grpc.Compression.NoCompression

    def liveness(self, keepalive_factor: int = 1) -> LivenessOptions:
        """Keepalive and time-outs of one connection, with the time between PINGs multiplied."""
        keepalive_time_s = self.keepalive_time_s * keepalive_factor
        return replace(self, keepalive_time_s=keepalive_time_s, handshake_timeout_s=self.connect_timeout_s)


class _User(Protocol):
    def on_stream_closed(self, protocol: "ClientProtocol") -> None: ...
    def on_settings(self, protocol: "ClientProtocol") -> None: ...
    def on_leaving(self, protocol: "ClientProtocol", code: int, debug: bytes) -> None: ...
    def on_protocol_lost(self, protocol: "ClientProtocol") -> None: ...


class ClientProtocol(Http2Protocol):
    """Reports the events of a connection to the link that opened it.

    Attributes:
        is_settled: Done when the server's first settings arrive, or when the connection ends before them.
        has_served: A call has ended on it, or was accepted before the server asked for another connection.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, limits: ConnectionLimits, liveness: LivenessOptions, user: _User
    ) -> None:
        super().__init__(loop, limits, liveness, is_client=True)
        self._user = user
        self.is_settled: asyncio.Future[None] = loop.create_future()
        self.has_served = False
        self.reason = ""

    @override
    def on_output(self) -> None:
        # At once for a call alone on the connection, and else at the end of this turn of the event loop.
        if len(self.connection.streams) > 1 or self.connection.waiting:
            self.loop.call_soon(self.flush)
        else:
            self.flush()

    @override
    def eof_received(self) -> bool:
        # Calls end now, and none begins before the socket is closed.
        self.connection.close("the peer closed the connection")
        return False

    @override
    def abort(self, reason: str) -> None:
        self.reason = self.reason or reason
        super().abort(reason)

    @override
    def on_peer_settings(self) -> None:
        if self.is_settled.done():
            self._user.on_settings(self)
        else:
            self.is_settled.set_result(None)

    @override
    def on_goaway(self, last_stream_id: int, code: int, debug: bytes) -> None:
        if code == ErrorCode.NO_ERROR and any(stream_id <= last_stream_id for stream_id in self.connection.streams):
            self.has_served = True
        self._user.on_leaving(self, code, debug)

    @override
    def on_stream_closed(self) -> None:
        self.has_served = True
        self._user.on_stream_closed(self)

    @override
    def on_lost(self, error: Exception | None) -> None:
        self.reason = self.reason or str(error or self.connection.failure or "the peer closed the connection")
        if not self.is_settled.done():
            self.is_settled.set_result(None)
        self._user.on_protocol_lost(self)


_MAX_CACHED: Final = 256
#: The first timeouts of a channel, among which are those that all its calls have.
_MAX_EXACT: Final = 16
ENCODING_BY_COMPRESSION: Final = {
    grpc.Compression.NoCompression: "identity",
    grpc.Compression.Deflate: "deflate",
    grpc.Compression.Gzip: "gzip",
}


class RequestHeads:
    """Encodes the request headers of one channel's calls."""

    def __init__(self, scheme: str, authority: str, user_agent: str) -> None:
        self._scheme = scheme
        self._authority = authority
        self._user_agent = user_agent
        self._timeouts: dict[int, bytes] = {}
        self._exact_timeouts: dict[float, bytes] = {}
        self._metadata: dict[object, bytes] = {}

    def method(self, path: str, encoding: str) -> bytes:
        """Encode the headers that all calls of a method share; ``path`` starts with a slash."""
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
        """Encode the metadata of a call, which follow ``method``. Raises ValueError that names what cannot be sent."""
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
        """Encode ``grpc-timeout``, rounded up by at most 1 % or to a millisecond, so that header blocks repeat."""
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
