"""Ports that a process reserves for its children."""

import socket


def reserve_port(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """A socket that reserves the port, or a free one if it is 0, until it is closed; it does not listen.

    Sockets of this user with SO_REUSEPORT, as those of services that share ports, may listen on the port meanwhile.

    Args:
        host: Address of this machine.
        port: Port, or 0.
        is_shared: Whether such a socket may be there already; if not, a port in use is an error.

    Raises:
        OSError: The port is in use or not allowed, or the host is no address of this machine.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    reserved = socket.socket(family, kind, protocol)
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a closed connection in TIME_WAIT may have it
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(is_shared))
        reserved.bind(address)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError:
        reserved.close()
        raise
    return reserved
