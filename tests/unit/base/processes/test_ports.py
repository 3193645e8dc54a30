"""Ports that a parent reserves for its children."""

import contextlib
import socket

import pytest

from weft.base.processes.process import reserve_port


def listener(port: int, *, shares: bool) -> socket.socket:
    """A socket that listens on the port."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shares))
    try:
        made.bind(("127.0.0.1", port))
    except OSError:
        made.close()
        raise
    made.listen()
    return made


def test_a_reserved_port_is_for_sockets_that_share_it() -> None:
    """One that shares the port may listen, another one may not, and connections reach who listens."""
    with reserve_port("127.0.0.1", 0) as reserved:
        port = reserved.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            listener(port, shares=False)
        with listener(port, shares=True), contextlib.closing(socket.create_connection(("127.0.0.1", port), 5)):
            pass


def test_a_port_in_use_is_refused_unless_it_is_shared() -> None:
    """A port that others listen on, sharing it, can be reserved only by who shares it too."""
    with listener(0, shares=True) as other:
        port = other.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            reserve_port("127.0.0.1", port)
        reserve_port("127.0.0.1", port, is_shared=True).close()
