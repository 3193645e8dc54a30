"""uvicorn without its own signals, sockets and logs, which are the process's."""

import asyncio
import contextlib
import errno
import socket

import uvicorn
from starlette.types import ASGIApp

from weft_common.errors import UnavailableError
from weft_common.security.tls import ServerTls
from weft_common.server.listening import host_and_port
from weft_gateway.http.connection import Connection

#: How long a connection without a request is kept, in seconds: longer than clients keep theirs, so that none is used at
#: the moment when it is closed.
KEEP_ALIVE_S = 75


class HttpServer:
    """Serves an application on a socket.

    Args:
        app: The application.
        tls: Certificate; None: plaintext.
        grace_s: How long answers in work have at a stop, seconds.
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
            config.ssl = tls.content().context
            tls.follow(config.ssl)  # the next handshake is made with the certificate that is then in force
        self._server = uvicorn.Server(config)
        self._server.capture_signals = contextlib.nullcontext  # they are for the process
        self._serving: asyncio.Task[None] | None = None

    async def start(self, listening: socket.socket) -> None:
        """It serves on the socket, which it owns from now on. Raises what keeps it from that."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))
        while not self._server.started:
            if self._serving.done():
                await self._serving
            await asyncio.sleep(0.001)

    async def stop(self) -> None:
        """No connection is open any more; answers in work had the grace."""
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving


def bound_socket(host: str, port: int, *, shares_port: bool) -> socket.socket:
    """A socket that is bound, and does not listen yet.

    Args:
        host: Address.
        port: 0: chosen by the system.
        shares_port: Whether other processes that say so too may be bound to it.

    Raises:
        UnavailableError: It is taken, or not of this machine.
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
