"""Addresses of channels, as gRPC names them."""

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

_DEFAULT_PORT: Final = 443
_PORT = re.compile(r"[0-9]{1,5}")
#: Schemes of names and addresses; with three slashes, or none.
_INTERNET: Final = ("dns:", "ipv4:", "ipv6:")


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a channel connects to: a host and a port, or a Unix socket.

    Attributes:
        host: Name or literal address, without brackets; "" for a Unix socket.
        port: Of TCP; 0 for a Unix socket.
        path: Of the Unix socket; begins with a zero byte in the abstract namespace; "" for TCP.
        text: For messages.
        authority: Value of ``:authority``.
    """

    host: str
    port: int
    path: str
    text: str
    authority: str


def parse_address(address: str) -> Destination:
    """The destination that an address means.

    Args:
        address: ``host:port``, ``[::1]:port``, either with ``dns:``, ``ipv4:`` or ``ipv6:`` before it; ``unix:path``,
            ``unix:///path``, ``unix-abstract:name``. What follows a scheme may be percent-encoded. The port of a host
            without one is 443.

    Raises:
        ValueError: It is none of these.
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
