"""Runs uvicorn as a library: the process keeps control of signals, sockets and logs."""

import asyncio
import contextlib
import errno
import socket

import h11
import uvicorn
from starlette.types import ASGIApp
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

from weft.base.errors import UnavailableError
from weft.v2.security.tls import ServerTls
from weft.v2.server.listening import host_and_port

#: Time for a request line and headers, in seconds; also for the rest of a body whose response was sent already.
HEADERS_TIMEOUT_S = 60.0
#: Time that a client may leave response data unread, in seconds.
READ_TIMEOUT_S = 60.0
#: Time that a new connection has for its first request when the server stops, in seconds.
FIRST_REQUEST_S = 0.25
#: So much of a body is read after its response was sent, so that the client can read that; then its connection ends.
MAX_UNREAD_BYTES = 256 << 20


class Connection(H11Protocol):  # type: ignore[misc]  # uvicorn's types are not read
    """uvicorn's protocol with more timeouts; uvicorn itself only limits the pause between two requests."""

    _idle_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _num_unread_bytes = 0

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._update_idle_timer()

    @override
    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_idle_timer()
        if self._idle_timer is None or self.conn.their_state is h11.IDLE:
            self._num_unread_bytes = 0
        elif (num_bytes := self._num_unread_bytes + len(data)) <= MAX_UNREAD_BYTES:
            self._num_unread_bytes = num_bytes
        else:
            self.transport.abort()

    @override
    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(READ_TIMEOUT_S, self.transport.abort)

    @override
    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_write_timer()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._cancel_idle_timer()
        self._cancel_write_timer()

    def shutdown(self) -> None:
        """Close the connection after its current request; a new one may still send its first."""
        if self.cycle is None:
            self.loop.call_later(FIRST_REQUEST_S, self._shutdown)
        else:
            self._shutdown()

    def _shutdown(self) -> None:
        if not self.transport.is_closing():
            super().shutdown()

    def _update_idle_timer(self) -> None:
        """Run the idle timeout while no request is complete. Single bytes do not restart it; complete requests do."""
        is_awaiting_client = self.conn.their_state is h11.IDLE or (
            self.conn.their_state is h11.SEND_BODY and self.cycle is not None and self.cycle.response_complete
        )
        if not is_awaiting_client:
            self._cancel_idle_timer()
        elif self._idle_timer is None:
            self._idle_timer = self.loop.call_later(HEADERS_TIMEOUT_S, self.transport.abort)

    def _cancel_idle_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    def _cancel_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


#: Keep-alive timeout of idle connections in seconds: longer than that of clients, so that no client sends a request on
#: a connection at the moment it is closed.
KEEP_ALIVE_S = 75


class HttpServer:
    """Serves an ASGI application on a socket."""

    def __init__(self, app: ASGIApp, tls: ServerTls | None, grace_s: float) -> None:
        config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, round(grace_s)),
        )
        config.load()
        if tls is not None:
            config.ssl = tls.http_context()
        self._server = uvicorn.Server(config)
        self._server.capture_signals = contextlib.nullcontext  # the process handles signals
        self._serving: asyncio.Task[None] | None = None

    async def start(self, listening: socket.socket) -> None:
        """Serve on the socket, which the server owns from now on. Raises errors of the start."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))
        while not self._server.started:
            if self._serving.done():
                await self._serving
            await asyncio.sleep(0.001)

    async def stop(self) -> None:
        """Close all connections after the grace period."""
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving


def bound_socket(host: str, port: int, *, shares_port: bool) -> socket.socket:
    """A bound socket that does not listen yet; port 0: chosen by the system.

    With ``shares_port`` other processes may bind to it with the same setting (SO_REUSEPORT).

    Raises UnavailableError if the port is taken, or the address is not one of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shares_port:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            bound.bind(address)
            bound.setblocking(False)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        reason = "it is in use" if error.errno == errno.EADDRINUSE else error.strerror
        raise UnavailableError(
            f"cannot listen on {host_and_port(host, port)}: {reason}; choose another --port"
        ) from error
    return bound
