"""Connections that wait until the event loop of a server accepts them."""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from weft.wire.server import Server

#: More than event loops allow by themselves.
NUM_CONNECTIONS = 300


@pytest.mark.parametrize("loop_factory", [None, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_hundreds_of_connections_may_wait(
    tmp_path: Path, loop_factory: Callable[[], asyncio.AbstractEventLoop] | None
) -> None:
    """While the event loop does something else, none is refused or delayed."""
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        assert runner.run(_num_accepted(f"{tmp_path}/socket")) == NUM_CONNECTIONS


async def _num_accepted(path: str) -> int:
    """How many of the connections are made in one turn of the event loop, and accepted then."""
    server = Server()
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    num_made = 0
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(BlockingIOError):
            for _ in range(NUM_CONNECTIONS):
                connection = stack.enter_context(socket.socket(socket.AF_UNIX))
                connection.setblocking(False)  # else it would wait where it cannot be queued
                connection.connect(path)
                num_made += 1
        async with asyncio.timeout(30):
            while len(server.protocols) < num_made:  # noqa: ASYNC110  # a server does not tell
                await asyncio.sleep(0.01)
    await server.stop(30)
    return num_made
