"""The server: ports, connections, methods, interceptors, start and graceful stop."""

import asyncio
import errno
import logging
import os
import random
import socket
import ssl
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import unquote

from typing_extensions import override

from weft.wire.connection import ConnectionLimits
from weft.wire.connection.sending import Stream
from weft.wire.frames import ErrorCode, Http2ConnectionError
from weft.wire.interface import StatusCode, grpc
from weft.wire.server.call import ServerCall
from weft.wire.server.methods import Host, ServerOptions
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
    """Properties of the peer that TLS verified; empty without TLS."""
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


#: Connections that wait to be accepted; event loops have 100, also for a socket that listens with more already.
BACKLOG = 4096


def listen(address: str, *, shares_ports: bool) -> list[socket.socket]:
    """Open listening sockets; a name that resolves to several addresses gets one port for all.

    Args:
        address: ``host:port``, ``[ipv6]:port``, ``unix:path`` or ``unix:///path``; port 0: chosen by the system.
        shares_ports: Other processes may listen there too.

    Raises:
        OSError: It cannot be bound.
    """
    if address.startswith("unix:"):
        path = unquote(address.removeprefix("unix:"))
        return [_bound(socket.AF_UNIX, "/" + path.lstrip("/") if path.startswith("//") else path, shares_ports=False)]
    host, _, port_text = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not port_text.isdecimal():
        raise OSError(errno.EINVAL, f"'{address}' has no port")
    port = int(port_text)
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, _, _, _, target in dict.fromkeys(found):
            bound = _bound(family, (target[0], port, *target[2:]), shares_ports=shares_ports, is_only=len(found) == 1)
            sockets.append(bound)
            port = port or bound.getsockname()[1]
    except OSError:
        for bound in sockets:
            bound.close()
        raise
    return sockets


def _bound(
    family: int, target: str | tuple[str | int, ...], *, shares_ports: bool, is_only: bool = True
) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family != socket.AF_UNIX:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shares_ports:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(not is_only))
        bound.bind(target)
        bound.listen(BACKLOG)
        bound.setblocking(False)
    except OSError as error:
        bound.close()
        raise OSError(error.errno, os.strerror(error.errno or 0)) from error
    return bound


#: How long the connections of a stopped server may take to write what is left, in seconds.
_CLOSE_TIMEOUT_S = 1.0


class Server(Host, grpc.aio.Server):
    """A gRPC server with the interface of ``grpc.aio.Server``; make it on the event loop that runs it."""

    def __init__(
        self, options: ServerOptions | None = None, interceptors: Sequence["grpc.aio.ServerInterceptor[Any, Any]"] = ()
    ) -> None:
        super().__init__(options or ServerOptions(), interceptors)
        self._sockets: list[tuple[Any, ssl.SSLContext | None]] = []
        self._listeners: list[asyncio.Server] = []
        self._stopped = asyncio.Event()

    # Ports.

    def add_insecure_port(self, address: str) -> int:
        """Listen in plaintext from ``start`` on; returns the port, 1 for a Unix socket. Raises OSError."""
        return self._add_port(address, None)

    def add_tls_port(self, address: str, context: ssl.SSLContext) -> int:
        """Listen with TLS, which must offer ``h2`` by ALPN. As ``add_insecure_port``."""
        return self._add_port(address, context)

    def add_secure_port(self, address: str, server_credentials: "grpc.ServerCredentials") -> int:
        """Not supported: credentials of grpcio cannot be read. Raises TypeError."""
        raise TypeError("give an ssl.SSLContext to add_tls_port; credentials of grpcio work with its own server alone")

    def add_socket(self, listening: Any, context: ssl.SSLContext | None = None) -> None:
        """Serve a socket that is already listening, such as an inherited one."""
        self._sockets.append((listening, context))

    def _add_port(self, address: str, context: ssl.SSLContext | None) -> int:
        sockets = listen(address, shares_ports=self.options.shares_ports)
        for bound in sockets:
            self.add_socket(bound, context)
        name = sockets[0].getsockname()
        return int(name[1]) if isinstance(name, tuple) else 1

    # Life.

    async def start(self) -> None:
        """Accept connections."""
        for bound, context in self._sockets:
            options: dict[str, Any] = {"sock": bound, "ssl": context, "backlog": BACKLOG}
            if context is not None:
                options["ssl_handshake_timeout"] = self.options.handshake_timeout_s
                options["ssl_shutdown_timeout"] = _CLOSE_TIMEOUT_S
            is_local = bound.family.name == "AF_UNIX"
            limits = replace(self.options, max_resets_per_s=0) if is_local else self.options
            make = self.loop.create_unix_server if is_local else self.loop.create_server
            self._listeners.append(await make(partial(ServerProtocol, self, limits), **options))

    async def stop(self, grace: float | None = None) -> None:
        """Drain: accept no more connections and calls, wait for calls in flight, close.

        Each connection gets GOAWAY in two steps, so that calls that were on their way are answered. Calls that do not
        end within ``grace`` seconds end with UNAVAILABLE.
        """
        if not self.is_stopping:
            self.is_stopping = True
            for protocol in tuple(self.protocols):
                protocol.drain()
            if self._listeners:
                await asyncio.sleep(0)  # connections that wait are accepted, and drained
                await asyncio.sleep(0)
            for listener in self._listeners:
                listener.close()
            for bound, _ in self._sockets[len(self._listeners) :]:
                bound.close()
        try:
            async with asyncio.timeout(grace or 0):
                await self._none_left.wait()
        except TimeoutError:
            await self._end_calls()
        self.deadlines.close()
        self._stopped.set()

    async def _end_calls(self) -> None:
        for protocol in tuple(self.protocols):
            for call in tuple(protocol.connection.streams.values()):
                if isinstance(call, ServerCall):
                    self.num_cut_off += 1
                    call.fail(StatusCode.UNAVAILABLE, "the server has stopped")
            protocol.connection.finish_draining()
            protocol.close()
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._none_left.wait()
        except TimeoutError:
            for protocol in tuple(self.protocols):
                protocol.abort("the server has stopped")

    async def wait_for_termination(self, timeout: float | None = None) -> bool:  # noqa: ASYNC109  # the name in grpc.aio
        """Wait until the server has stopped; False when ``timeout`` seconds have passed before."""
        try:
            async with asyncio.timeout(timeout):
                await self._stopped.wait()
        except TimeoutError:
            return False
        return True
