"""uvicorn as a library: signals, sockets and logs belong to the process."""

import asyncio
import contextlib
import errno
import socket

import uvicorn
from starlette.types import ASGIApp

from weft.base.errors import UnavailableError
from weft.gateway.http.connection import Connection
from weft.v2.security.tls import ServerTls
from weft.v2.server.listening import host_and_port

#: Keep-alive timeout of idle connections in seconds: longer than that of clients, so that no client sends a request on
#: a connection at the moment it is closed.
KEEP_ALIVE_S = 75


class HttpServer:
    """Serves an ASGI application on a socket.

    Args:
        app: The application.
        tls: Certificate; None: plaintext.
        grace_s: Time for requests in flight at a stop, in seconds.
    """

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
    """A bound socket that does not listen yet.

    Args:
        host: Address.
        port: 0: chosen by the system.
        shares_port: Whether other processes may bind to it with the same setting (SO_REUSEPORT).

    Raises:
        UnavailableError: The port is taken, or the address is not one of this machine.
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
