"""Listening sockets of a server."""

import errno
import os
import socket
from urllib.parse import unquote

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
