"""One connection of a server."""

import logging
import random
from typing import Any

from typing_extensions import override

from weft.wire.connection import ConnectionLimits
from weft.wire.connection.sending import Stream
from weft.wire.frames import ErrorCode, Http2ConnectionError
from weft.wire.server.call import ServerCall
from weft.wire.server.methods import Host
from weft.wire.transport import Http2Protocol, PingPolice

#: Handlers of a connection that may run, as a multiple of its streams: those of streams that were reset end late.
_RUNNING_FACTOR = 2


_log = logging.getLogger("weft.wire.server")


class ServerProtocol(Http2Protocol):
    """A connection; accepts calls as long as its limits allow.

    Attributes:
        num_running: Handlers that have not ended.
    """

    def __init__(self, server: Host, limits: ConnectionLimits) -> None:
        jitter = random.uniform(0.9, 1.1)  # noqa: S311  # spreads reconnects
        super().__init__(server.loop, limits, server.options, is_client=False, age_factor=jitter)
        self.server = server
        self.num_running = 0
        self._num_buffered_bytes = 0
        self._max_running = _RUNNING_FACTOR * limits.max_concurrent_streams
        self._pings = PingPolice(server.options.min_ping_interval_s)
        self._auth_context: dict[str, list[bytes]] | None = None
        self.peer = ""

    @override
    def connection_made(self, transport: Any) -> None:
        tls = transport.get_extra_info("ssl_object")
        self.transport = transport
        if not self.server.admit(self) or (tls is not None and tls.selected_alpn_protocol() != "h2"):
            self.abort("there are too many connections, or TLS has not agreed on HTTP/2")
            return
        self.peer = peer_name(transport.get_extra_info("peername"))
        super().connection_made(transport)
        if self.server.is_stopping:
            self.drain()

    @property
    def auth_context(self) -> dict[str, list[bytes]]:
        """See ``ServerCall.auth_context``."""
        if self._auth_context is None:
            self._auth_context = auth_context_of(self.transport)
        return self._auth_context

    def count_buffered(self, num_bytes: int) -> None:
        """Count bytes that calls hold, negative when they are released.

        Raises:
            CallError: RESOURCE_EXHAUSTED, when it would be more than the server or this connection may hold.
        """
        self.server.count_buffered(num_bytes, self._num_buffered_bytes)
        self._num_buffered_bytes += num_bytes

    @override
    def accept_stream(self) -> Stream | None:
        if self.num_running >= self._max_running:
            return None
        return ServerCall(self)

    @override
    def on_stream_closed(self) -> None:
        if self.connection.is_drain_finished:
            self.loop.call_soon(self.close_if_drained)

    @override
    def on_peer_ping(self) -> None:
        connection = self.connection
        if self._pings.is_too_many(self.loop.time(), has_sent_data=connection.has_sent_data):
            raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings")
        connection.has_sent_data = False

    @override
    def on_lost(self, error: Exception | None) -> None:
        failure = self.connection.failure
        if failure is not None:
            _log.info("a connection of %s ended: %s", self.peer, failure)
        self.server.forget(self)


def peer_name(address: Any) -> str:
    """An address of a socket as gRPC writes it."""
    if isinstance(address, tuple) and len(address) == 2:
        return f"ipv4:{address[0]}:{address[1]}"
    if isinstance(address, tuple) and len(address) == 4:
        return f"ipv6:%5B{address[0]}%5D:{address[1]}"
    return f"unix:{address.decode(errors='replace') if isinstance(address, bytes) else address or ''}"


def auth_context_of(transport: Any) -> dict[str, list[bytes]]:
    """What TLS has verified of the peer; empty without TLS."""
    if transport is None or transport.get_extra_info("ssl_object") is None:
        return {}
    context = {"transport_security_type": [b"ssl"]}
    certificate = transport.get_extra_info("peercert") or {}
    names = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    others = [value for _, value in certificate.get("subjectAltName", ())]
    if names:
        context["x509_common_name"] = [name.encode() for name in names]
    if others:
        context["x509_subject_alternative_name"] = [name.encode() for name in others]
    return context
