"""Connections over sockets of this machine: names, queues, servers that do not finish their handshake."""

import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
import uvloop
from tests.wire import peer

from weft.wire import frames
from weft.wire.client import Channel, ChannelOptions

Run = Callable[[Any], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a coroutine on an event loop of its own."""

    def run(coroutine: Any) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop if request.param == "uvloop" else None) as runner:
            runner.run(coroutine)

    return run


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Closes what a test opens."""
    with ExitStack() as opened:
        yield opened


def listening(stack: ExitStack, path: str, backlog: int = 10) -> socket.socket:
    listener = stack.enter_context(socket.socket(socket.AF_UNIX))
    listener.bind(path)
    listener.listen(backlog)
    listener.settimeout(peer.TIMEOUT_S)
    return listener


async def accepted(listener: socket.socket) -> peer.Peer:
    connected, _ = await asyncio.to_thread(listener.accept)
    return await asyncio.to_thread(peer.Peer(connected).server_handshake)


async def failure(channel: Channel) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await channel.unary_unary("/a.B/C")(b"")
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
    return failed.value.details() or ""


def test_the_abstract_namespace(run: Run, stack: ExitStack) -> None:
    """A server may listen on a name that is no file."""
    name = f"weft wire {os.getpid()}"
    listener = listening(stack, f"\0{name}")

    async def connect() -> None:
        async with Channel(f"unix-abstract:{name.replace(' ', '%20')}") as channel:
            ready = asyncio.ensure_future(channel.channel_ready())
            with await accepted(listener):
                await ready

    run(connect())


def test_a_full_queue_is_waited_for(run: Run, stack: ExitStack, tmp_path: Path) -> None:
    """A Unix socket whose queue of connections is full is tried again until there is room."""
    path = f"{tmp_path}/socket"
    listener = listening(stack, path, backlog=0)
    others = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(3)]
    for other in others:
        other.setblocking(False)
    num_queued = sum(other.connect_ex(path) == 0 for other in others)
    assert 0 < num_queued < 3

    async def connect() -> None:
        async with Channel(f"unix:{path}") as channel:
            ready = asyncio.ensure_future(channel.channel_ready())
            await asyncio.sleep(0.05)
            assert not ready.done()
            for _ in range(num_queued):
                stack.enter_context(listener.accept()[0])
            with await accepted(listener):
                await ready

    run(connect())


def test_a_server_that_says_nothing(run: Run, stack: ExitStack, tmp_path: Path) -> None:
    """A connection without the server's settings counts as none after the time-out."""
    path = f"{tmp_path}/socket"
    listening(stack, path)

    async def connect() -> None:
        async with Channel(f"unix:{path}", ChannelOptions(connect_timeout_s=0.1)) as channel:
            assert await failure(channel) == (
                f"failed to connect to all addresses; last error: unix:{path}: no connection within 0.1 s"
            )

    run(connect())


@pytest.mark.parametrize("greeting", [b"", b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n", b"\0" * 100])
def test_a_server_of_another_protocol(run: Run, stack: ExitStack, tmp_path: Path, greeting: bytes) -> None:
    """A server that closes or says something else is no server of HTTP/2."""
    path = f"{tmp_path}/socket"
    listener = listening(stack, path)

    async def connect() -> None:
        async with Channel(f"unix:{path}") as channel:
            failing = asyncio.ensure_future(failure(channel))
            connected, _ = await asyncio.to_thread(listener.accept)
            with connected:
                connected.sendall(greeting)
                connected.shutdown(socket.SHUT_WR)
                assert "the connection ended before the server's settings" in await failing

    run(connect())


def test_what_cannot_be_reached(run: Run, tmp_path: Path) -> None:
    """Refused connections, missing sockets and names without an address fail with messages that say so."""

    async def connect() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        listener.close()
        for address, text in (
            (f"127.0.0.1:{port}", f"failed to connect to all addresses; last error: 127.0.0.1:{port}: "),
            (f"localhost:{port}", "failed to connect to all addresses; last error: "),
            (f"unix:{tmp_path}/none", f"last error: unix:{tmp_path}/none: No such file or directory (2)"),
            ("unix:" + "x" * 200, "AF_UNIX path too long"),
            ("none.invalid:80", "DNS resolution failed for none.invalid: "),
        ):
            async with Channel(address) as channel:
                assert text in await failure(channel)

    run(connect())


def test_a_server_that_leaves_at_once(run: Run, stack: ExitStack, tmp_path: Path) -> None:
    """A server that stops sends GOAWAY with its settings; calls wait for the next connection."""
    path = str(tmp_path / "socket")
    listener = listening(stack, path)

    def leave() -> None:
        connected, _ = listener.accept()
        with connected:
            connected.sendall(frames.settings({}) + frames.goaway(frames.MAX_STREAM_ID, 0) + frames.ping(bytes(8)))
            while connected.recv(4096):
                pass

    async def call() -> None:
        async with Channel(f"unix:{path}") as channel:
            answer = channel.unary_unary("/a.B/C")(b"", timeout=peer.TIMEOUT_S)
            await asyncio.to_thread(leave)
            server = await accepted(listener)
            stack.callback(server.close)
            await answer.wait_for_connection()
            answer.cancel()

    run(call())
