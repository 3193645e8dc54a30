"""A client's end of a connection."""

import asyncio
from typing import Protocol

from weft.wire.connection.limits import ConnectionLimits
from weft.wire.errors import ErrorCode
from weft.wire.transport.keepalive import LivenessOptions
from weft.wire.transport.protocol import Http2Protocol


class ConnectionUser(Protocol):
    """What a connection tells its link."""

    def on_stream_closed(self, protocol: "ClientProtocol") -> None:
        """A call has ended, so that another may begin."""

    def on_settings(self, protocol: "ClientProtocol") -> None:
        """The server allows another number of calls at once."""

    def on_leaving(self, protocol: "ClientProtocol", code: int, debug: bytes) -> None:
        """The server accepts no more calls on this connection."""

    def on_protocol_lost(self, protocol: "ClientProtocol") -> None:
        """The connection is over."""


class ClientProtocol(Http2Protocol):
    """Tells the link that dialled it what becomes of the connection.

    Args:
        loop: The running event loop.
        limits: What the server may do.
        liveness: Keepalive and time-outs.
        user: Told of events.

    Attributes:
        is_settled: Done with the server's first settings, or when the connection ends before them.
        has_served: A call has ended on it, or was accepted before the server asked for another connection.
        reason: Why the connection ended.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        limits: ConnectionLimits,
        liveness: LivenessOptions,
        user: ConnectionUser,
    ) -> None:
        super().__init__(loop, limits, liveness, is_client=True)
        self._user = user
        self.is_settled: asyncio.Future[None] = loop.create_future()
        self.has_served = False
        self.reason = ""

    def on_output(self) -> None:
        """Write at once for a call alone on the connection, and else at the end of this turn of the event loop."""
        if len(self.connection.streams) > 1 or self.connection.waiting:
            self.loop.call_soon(self.flush)
        else:
            self.flush()

    def eof_received(self) -> bool:
        """The server sends no more: calls end now, and none begins before the socket is closed."""
        self.connection.close("the peer closed the connection")
        return False

    def abort(self, reason: str) -> None:
        """Close without writing anything more."""
        self.reason = self.reason or reason
        super().abort(reason)

    def on_peer_settings(self) -> None:
        """The connection is ready, or limits have changed."""
        if self.is_settled.done():
            self._user.on_settings(self)
        else:
            self.is_settled.set_result(None)

    def on_goaway(self, last_stream_id: int, code: int, debug: bytes) -> None:
        """New calls go to a new connection."""
        if code == ErrorCode.NO_ERROR and any(stream_id <= last_stream_id for stream_id in self.connection.streams):
            self.has_served = True
        self._user.on_leaving(self, code, debug)

    def on_stream_closed(self) -> None:
        """Another call may begin."""
        self.has_served = True
        self._user.on_stream_closed(self)

    def on_lost(self, error: Exception | None) -> None:
        """The connection is over."""
        self.reason = self.reason or str(error or self.connection.failure or "the peer closed the connection")
        if not self.is_settled.done():
            self.is_settled.set_result(None)
        self._user.on_protocol_lost(self)
