"""Ports for services whose port must be known before they start."""

import itertools
import os
import socket
from contextlib import suppress

#: Below the ports that Linux gives to clients, any of which might take a port before the service does.
_FIRST, _NUM = 20_000, 12_000
_NUM_OF_A_WORKER = 1500

_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % (_NUM // _NUM_OF_A_WORKER)
_offsets = itertools.count(os.getpid())


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now, and that no other test of this run is given."""
    for offset in itertools.islice(_offsets, _NUM_OF_A_WORKER):
        port = _FIRST + _worker * _NUM_OF_A_WORKER + offset % _NUM_OF_A_WORKER
        with socket.socket() as held, suppress(OSError):
            held.bind(("127.0.0.1", port))
            return port
    raise RuntimeError(f"all of {_NUM_OF_A_WORKER} ports are taken")
