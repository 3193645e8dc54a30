"""A client's end of a connection, and the options of a channel."""

import asyncio
from dataclasses import dataclass, replace
from typing import Protocol

from typing_extensions import override

from weft.wire.connection.limits import ConnectionLimits
from weft.wire.frames import ErrorCode
from weft.wire.interface import grpc
from weft.wire.transport import Http2Protocol, LivenessOptions


@dataclass(frozen=True)
class ChannelOptions(ConnectionLimits, LivenessOptions):
    """Options of a channel and of its connection.

    Attributes:
        max_message_bytes: Largest message in either direction, compressed or not.
        connect_timeout_s: For one address: connection, TLS and HTTP/2's handshake.
        initial_backoff_s: From the start of a failed attempt to connect to the next one.
        backoff_factor: Growth from one failure to the next.
        backoff_jitter: Share by which each of these times is spread, 0 to 1.
        keepalive_time_s: Silence of the server after which a PING is sent; 0: never. Servers of gRPC end a connection
            whose PINGs come more often than they allow, by default every five minutes.
        compression: Of requests, unless a call says otherwise.
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
    """Tells the link that dialled it what becomes of the connection.

    Args:
        user: The link.

    Attributes:
        is_settled: Done with the server's first settings, or when the connection ends before them.
        has_served: A call has ended on it, or was accepted before the server asked for another connection.
        reason: Why the connection ended.
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
