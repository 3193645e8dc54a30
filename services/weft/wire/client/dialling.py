"""Opens connections: resolves names, tries addresses in order, does the TLS and HTTP/2 handshakes."""

import asyncio
import ipaddress
import re
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

from weft.wire.client.protocol import ClientProtocol

_DEFAULT_PORT: Final = 443
_PORT = re.compile(r"[0-9]{1,5}")
#: Schemes of names and addresses; with three slashes, or none.
_INTERNET: Final = ("dns:", "ipv4:", "ipv6:")


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a channel connects to: a host and a port, or the path of a Unix socket (with a zero byte: abstract)."""

    host: str
    port: int
    path: str
    text: str
    authority: str


def parse_address(address: str) -> Destination:
    """Parse an address.

    Args:
        address: ``host:port``, ``[::1]:port``, either with ``dns:``, ``ipv4:`` or ``ipv6:`` before it; ``unix:path``,
            ``unix:///path``, ``unix-abstract:name``. The part after a scheme may be percent-encoded. The default port
            is 443.

    Raises:
        ValueError: Any other address.
    """
    if address.startswith("unix:"):
        path = unquote(address.removeprefix("unix:"))
        if path.startswith("//"):
            path = path[2:]
            if not path.startswith("/"):
                raise ValueError(f"address {address!r}: after unix:// an absolute path has to follow")
        return _unix(address, path)
    if address.startswith("unix-abstract:"):
        name = unquote(address.removeprefix("unix-abstract:"))
        return _unix(address, "\0" + name if name else "")
    rest = address
    for scheme in _INTERNET:
        if address.startswith(scheme):
            rest = unquote(address.removeprefix(scheme))
            if rest.startswith("//"):
                rest = rest[2:].partition("/")[2]  # of dns://server/name the server is the system's
            break
    host, port = _host_and_port(address, rest)
    authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return Destination(host, port, "", authority, authority)


def _unix(address: str, path: str) -> Destination:
    if not path or "\0" in path[1:]:
        raise ValueError(f"address {address!r} has no path")
    return Destination("", 0, path, address, "localhost")


def _host_and_port(address: str, rest: str) -> tuple[str, int]:
    if rest.startswith("["):
        host, bracket, port = rest[1:].partition("]")
        if not bracket or (port and not port.startswith(":")):
            raise ValueError(f"address {address!r} has no closing bracket before its port")
        port = port[1:] if port else str(_DEFAULT_PORT)
    elif rest.count(":") > 1:
        host, port = rest, str(_DEFAULT_PORT)  # an address of IPv6 without brackets
    else:
        host, colon, port = rest.partition(":")
        port = port if colon else str(_DEFAULT_PORT)
    if not host or any(char in host for char in " /?#@"):
        raise ValueError(f"address {address!r} has no host")
    if not _PORT.fullmatch(port) or int(port) > 65_535:
        raise ValueError(f"address {address!r} has no port from 0 to 65535")
    return host, int(port)


#: Begins the message of a call that was never sent, as with every client of gRPC.
_FAILED: Final = "failed to connect to all addresses; last error: "
#: Servers of gRPC do not answer the end of a TLS session.
_TLS_SHUTDOWN_S: Final = 1.0
#: Between attempts to enter the full queue of a Unix socket, in seconds.
_FULL_QUEUE_S: Final = 0.01


class DialError(Exception):
    """No address could be connected; the text becomes the message of failed calls."""


class Dialler:
    """Dials one destination; the timeout is for each address."""

    def __init__(
        self, destination: Destination, ssl_context: ssl.SSLContext | None, server_name: str, timeout_s: float
    ) -> None:
        self._destination = destination
        self._ssl_context = ssl_context
        self._server_name = server_name or destination.host or destination.authority
        self._timeout_s = timeout_s

    async def dial(self, make: Callable[[], ClientProtocol]) -> ClientProtocol:
        """Connect, and return once the server's settings arrived; the server may already be draining. Raises DialError.

        Cancelling closes the connection.
        """
        destination = self._destination
        if destination.path:
            addresses: list[tuple[str, int]] = [("", 0)]
        else:
            addresses = await self._resolve()
        error = ""
        for host, port in addresses:
            where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}" if host else destination.text
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await self._attempt(make, host, port)
            except TimeoutError:
                error = f"{where}: no connection within {self._timeout_s:g} s"
            except OSError as failure:  # also of TLS
                error = f"{where}: {_text(failure)}"
        raise DialError(_FAILED + error)

    async def _resolve(self) -> list[tuple[str, int]]:
        host, port = self._destination.host, self._destination.port
        try:
            ipaddress.ip_address(host.partition("%")[0])
        except ValueError:
            pass
        else:
            return [(host, port)]
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except TimeoutError:
            raise DialError(f"DNS resolution failed for {host}: no answer within {self._timeout_s:g} s") from None
        except (OSError, UnicodeError) as error:
            raise DialError(f"DNS resolution failed for {host}: {error}") from None
        return list(dict.fromkeys((str(address[0]), port) for *_, address in found))

    async def _attempt(self, make: Callable[[], ClientProtocol], host: str, port: int) -> ClientProtocol:
        loop = asyncio.get_running_loop()
        context = self._ssl_context
        tls: dict[str, Any] = {}
        if context is not None:
            tls = {
                "ssl": context,
                "server_hostname": self._server_name,
                "ssl_handshake_timeout": self._timeout_s,
                "ssl_shutdown_timeout": _TLS_SHUTDOWN_S,
            }
        protocol: ClientProtocol
        if host:
            _, protocol = await loop.create_connection(make, host, port, **tls)
        else:
            _, protocol = await loop.create_unix_connection(make, sock=await self._connect_unix(), **tls)
        try:
            if context is not None:
                session = protocol.transport.get_extra_info("ssl_object")
                if session is None or session.selected_alpn_protocol() != "h2":
                    raise ConnectionError("the server does not speak HTTP/2 over TLS (ALPN h2)")
            await protocol.is_settled
            connection = protocol.connection
            # A server that is about to stop may send GOAWAY with its settings: a connection that came and went.
            if not connection.has_peer_settings or (connection.is_closed and not connection.is_peer_leaving):
                raise ConnectionError(f"the connection ended before the server's settings: {protocol.reason}")
        except BaseException:
            protocol.abort("the connection was not completed")
            raise
        return protocol

    async def _connect_unix(self) -> socket.socket:
        """Connect a socket. Event loops support neither all names nor waiting while the server's queue is full."""
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connected.setblocking(False)
            while True:
                try:
                    connected.connect(self._destination.path)
                except BlockingIOError:
                    await asyncio.sleep(_FULL_QUEUE_S)
                else:
                    return connected
        except BaseException:
            connected.close()
            raise


def _text(error: OSError) -> str:
    return f"{error.strerror} ({error.errno})" if error.strerror and error.errno else str(error) or repr(error)
