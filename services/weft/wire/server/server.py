"""The server: ports, connections, methods, interceptors, start and graceful stop."""

import asyncio
import errno
import logging
import os
import socket
import ssl
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import unquote

from weft.wire.errors import Http2ConnectionError
from weft.wire.interface import StatusCode, grpc
from weft.wire.rpc.status import CallError, UnreadableRequests
from weft.wire.server.call import ServerCall
from weft.wire.server.methods import CallDetails, Methods
from weft.wire.server.options import ServerOptions
from weft.wire.server.protocol import ServerProtocol
from weft.wire.transport.deadlines import DeadlineQueue
from weft.wire.transport.protocol import Heartbeat

#: Connections that wait to be accepted; event loops have 100, also for a socket that listens with more already.
BACKLOG = 4096


def listen(address: str, *, shares_ports: bool) -> list[socket.socket]:
    """Sockets that listen at an address; a name may stand for several addresses, which get one port.

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
#: One connection holds at most so many times what is then left of ``max_buffered_bytes``.
_SHARE = 4

_log = logging.getLogger("weft.wire.server")


class Server(grpc.aio.Server):
    """A gRPC server with the interface of ``grpc.aio.Server``; make it on the event loop that runs it.

    Args:
        options: Limits and time-outs.
        interceptors: Called in this order for each call.

    Attributes:
        options: As given.
        protocols: Open connections.
        is_stopping: ``stop`` was called.
        unreadable: Errors of requests whose message cannot be read.
    """

    def __init__(
        self, options: ServerOptions | None = None, interceptors: Sequence["grpc.aio.ServerInterceptor[Any, Any]"] = ()
    ) -> None:
        self.options = options or ServerOptions()
        self.max_message_bytes = self.options.max_message_bytes
        self.interceptors = tuple(interceptors)
        self.methods = Methods()
        self.unreadable = UnreadableRequests()
        self.loop = asyncio.get_event_loop()
        self.deadlines = DeadlineQueue(self.loop)
        self.protocols: set[ServerProtocol] = set()
        self.is_stopping = False
        self._num_buffered_bytes = 0
        self._heartbeat = Heartbeat(self.loop)
        self._sockets: list[tuple[Any, ssl.SSLContext | None]] = []
        self._listeners: list[asyncio.Server] = []
        self._none_left = asyncio.Event()
        self._none_left.set()
        self._stopped = asyncio.Event()

    # Methods and ports.

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[Any]) -> None:
        """See ``grpc.aio.Server``."""
        self.methods.add_generic(tuple(generic_rpc_handlers))

    def add_registered_method_handlers(self, service_name: str, method_handlers: dict[str, Any]) -> None:
        """Register the methods of one service, as generated code does."""
        self.methods.add_registered(service_name, method_handlers)

    def add_insecure_port(self, address: str) -> int:
        """Listen in plaintext; connections are accepted once the server has started.

        Returns:
            The port; 1 for a Unix socket.

        Raises:
            OSError: The address cannot be bound.
        """
        return self._add_port(address, None)

    def add_tls_port(self, address: str, context: ssl.SSLContext) -> int:
        """Listen with TLS, which must offer ``h2`` by ALPN. As ``add_insecure_port``."""
        return self._add_port(address, context)

    def add_secure_port(self, address: str, server_credentials: "grpc.ServerCredentials") -> int:
        """Not offered: credentials of grpcio cannot be read. Raises TypeError."""
        raise TypeError("give an ssl.SSLContext to add_tls_port; credentials of grpcio work with its own server alone")

    def add_socket(self, listening: Any, context: ssl.SSLContext | None = None) -> None:
        """Serve a socket that listens already, such as an inherited one."""
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

    # Asked by connections and calls.

    def admit(self, protocol: ServerProtocol) -> bool:
        """Register a connection; False: there are too many."""
        limit = self.options.max_connections
        if limit and len(self.protocols) >= limit:
            return False
        self.protocols.add(protocol)
        self._heartbeat.add(protocol)
        self._none_left.clear()
        return True

    def forget(self, protocol: ServerProtocol) -> None:
        """A connection is closed."""
        self.protocols.discard(protocol)
        self._heartbeat.discard(protocol)
        if not self.protocols:
            self._none_left.set()

    def count_buffered(self, num_bytes: int, num_held_bytes: int) -> None:
        """Count bytes that a connection holds beside those that it held before, negative when they are released.

        Raises:
            CallError: RESOURCE_EXHAUSTED, when it would be more than the server may hold, or too little would be left
                for other connections.
        """
        total = self._num_buffered_bytes + num_bytes
        limit = self.options.max_buffered_bytes
        if num_bytes > 0 and limit and num_held_bytes + num_bytes > _SHARE * (limit - total):
            raise CallError(
                StatusCode.RESOURCE_EXHAUSTED,
                f"what this connection has not read or finished has {num_held_bytes + num_bytes} bytes, that of all "
                f"{total}; this server holds at most {limit}, for one connection {_SHARE} times what is then left",
            )
        self._num_buffered_bytes = total

    async def intercept(self, details: CallDetails) -> Any:
        """The handler of a call, found through the interceptors; None: there is none."""

        async def find(position: int, details: Any) -> Any:
            if position == len(self.interceptors):
                return self.methods.handler(details)

            async def go_on(details: Any) -> Any:
                return await find(position + 1, details)

            return await self.interceptors[position].intercept_service(go_on, details)

        return await find(0, details)

    def log_failure(self, peer: str, failure: Http2ConnectionError) -> None:
        """One line for a connection that its peer has broken."""
        _log.info("a connection of %s ended: %s", peer, failure)
