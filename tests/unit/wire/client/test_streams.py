"""Calls with streams of requests or responses."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
from grpc import StatusCode
from tests.unit.wire.client.scripted import (
    HEAD,
    OK,
    ScriptedDialler,
    ScriptedServer,
    connected,
    headers,
    make_link,
    turns,
)
from tests.wire import peer

from weft.wire.client.channel import StreamingMethod, StreamingUnaryMethod, UnaryStreamingMethod
from weft.wire.client.link import Link
from weft.wire.messages import compress

EOF = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in the stubs
FAILED = (("grpc-status", "9"), ("grpc-message", "no"))


@pytest.fixture
async def server(link: Link, dialler: ScriptedDialler) -> ScriptedServer:
    """The server of a link that has connected."""
    return await connected(link, dialler)


def responses(link: Link, **keywords: Any) -> Any:
    return UnaryStreamingMethod(link, "/a.B/C", None, None)(b"request", **keywords)


def upload(link: Link, requests: Any = None, **keywords: Any) -> Any:
    return StreamingUnaryMethod(link, "/a.B/C", None, None)(requests, **keywords)


def both(link: Link, requests: Any = None, **keywords: Any) -> Any:
    return StreamingMethod(link, "/a.B/C", None, None)(requests, **keywords)


async def collect(call: Any, seen: list[bytes]) -> None:
    async for message in call:
        seen.append(message)


def sent(server: ScriptedServer) -> list[tuple[bytes, bool]]:
    """DATA of the client since the last look, and whether it ends its stream."""
    return [(frame.payload, bool(frame.flags & 1)) for frame in server.frames() if frame.kind == peer.DATA]


async def test_responses_are_read(link: Link, server: ScriptedServer) -> None:
    """``read`` waits for a message, and gives EOF at the end, again and again."""
    call = responses(link)
    reading = asyncio.ensure_future(call.read())
    await turns()
    server.send(headers(1, HEAD), peer.data(1, peer.message(b"a")))
    assert await reading == b"a"
    reading = asyncio.ensure_future(call.read())
    await turns()
    server.send(headers(1, OK, end=True))
    assert await reading is EOF
    assert await call.read() is EOF


async def test_credit_is_given_as_the_application_reads(dialler: ScriptedDialler) -> None:
    """A server may send a window of responses that nobody reads, and more once they are read."""
    link = make_link(dialler, stream_window_bytes=65_535)
    server = await connected(link, dialler)
    call = responses(link)
    message = peer.data(1, peer.message(bytes(10_000)))
    server.send(headers(1, HEAD), *[message] * 6)
    await turns()
    assert [frame for frame in server.frames() if frame.kind == peer.WINDOW_UPDATE and frame.stream_id] == []
    for _ in range(5):
        await call.read()
    updates = [frame for frame in server.frames() if frame.kind == peer.WINDOW_UPDATE and frame.stream_id == 1]
    granted = sum(int.from_bytes(frame.payload, "big") for frame in updates)
    assert 65_535 // 2 <= granted <= 5 * 10_005
    await link.close(None)


async def test_a_message_larger_than_the_window(dialler: ScriptedDialler) -> None:
    """Credit for a message that is not complete is given as it comes, since nobody can read it."""
    link = make_link(dialler, stream_window_bytes=65_535)
    server = await connected(link, dialler)
    call = responses(link)
    message = peer.message(bytes(1_000_000))
    server.send(headers(1, HEAD))
    window = 65_535
    for start in range(0, len(message), 16_384):
        part = message[start : start + 16_384]
        assert window >= len(part)
        server.send(peer.data(1, part))
        window -= len(part)
        for frame in server.frames():
            if frame.kind == peer.WINDOW_UPDATE and frame.stream_id == 1:
                window += int.from_bytes(frame.payload, "big")
    server.send(headers(1, OK, end=True))
    assert [len(message) async for message in call] == [1_000_000]
    await link.close(None)


async def test_an_iteration_that_is_left_cancels_the_call(link: Link, server: ScriptedServer) -> None:
    """Leaving ``async for`` before the end tells the server."""
    call = responses(link)
    server.send(headers(1, HEAD), peer.data(1, peer.message(b"a")))
    async for _ in call:
        break
    assert [frame.error_code for frame in await server.frames_of(peer.RST_STREAM)] == [peer.CANCEL]
    assert call.cancelled()


async def test_cancelling_a_reader_cancels_the_call(link: Link, server: ScriptedServer) -> None:
    """A task that is cancelled while it reads, by either way, cancels the call."""
    first, second = responses(link), responses(link)
    reading = asyncio.ensure_future(first.read())
    iterating = asyncio.ensure_future(anext(aiter(second)))
    await turns()
    for task in (reading, iterating):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert len(await server.frames_of(peer.RST_STREAM)) == 2
    with pytest.raises(asyncio.CancelledError):
        await first.read()


async def test_a_call_that_is_cancelled_wakes_its_reader(link: Link, server: ScriptedServer) -> None:
    """Whoever reads a call that is cancelled sees CancelledError, also if messages were there."""
    call = responses(link)
    reading = asyncio.ensure_future(call.read())
    await turns()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


def numbers() -> Iterator[bytes]:
    yield from (b"a", b"b")


async def later() -> AsyncIterator[bytes]:
    for request in numbers():
        await asyncio.sleep(0)
        yield request


@pytest.mark.parametrize("requests", [numbers, later])
async def test_requests_come_from_an_iterator(link: Link, server: ScriptedServer, requests: Any) -> None:
    """An iterator, asynchronous or not, is read to its end, which ends the requests."""
    call = upload(link, requests())
    await turns(20)
    assert sent(server) == [(peer.message(b"a"), False), (peer.message(b"b"), False), (b"", True)]
    server.answer(1, b"yes")
    assert await call == b"yes"
    with pytest.raises(grpc.aio.UsageError, match="mixed"):
        await call.write(b"c")
    with pytest.raises(grpc.aio.UsageError, match="mixed"):
        await call.done_writing()


async def test_an_iterator_that_fails_cancels_the_call(link: Link, server: ScriptedServer) -> None:
    """The server is told, and whoever awaits the call sees CancelledError."""

    async def failing() -> AsyncIterator[bytes]:
        yield b"a"
        raise RuntimeError("no more")

    call = upload(link, failing())
    with pytest.raises(asyncio.CancelledError):
        await call
    assert [frame.error_code for frame in await server.frames_of(peer.RST_STREAM)] == [peer.CANCEL]


async def test_an_iterator_ends_with_its_call(link: Link, server: ScriptedServer) -> None:
    """An iterator that waits is left when the server ends the call, which needs no more requests."""
    is_left = asyncio.Event()

    async def waiting() -> AsyncIterator[bytes]:
        try:
            yield b"a"
            await asyncio.sleep(1000.0)
        finally:
            is_left.set()

    call = upload(link, waiting())
    await server.frames_of(peer.DATA)
    server.answer(1, b"enough")
    assert await call == b"enough"
    await is_left.wait()
    resets = await server.frames_of(peer.RST_STREAM)
    assert [frame.error_code for frame in resets] == [peer.NO_ERROR]


async def test_writing_waits_for_the_server(link: Link, dialler: ScriptedDialler) -> None:
    """A message beyond the server's window is written when the window grows; what waits fails with the call."""
    server = await connected(link, dialler)
    call = both(link)
    first = asyncio.ensure_future(call.write(bytes(65_535 - 5)))
    second = asyncio.ensure_future(call.write(b"abc"))
    await turns()
    assert (first.done(), second.done()) == (True, False)
    server.send(peer.window_update(0, 8), peer.window_update(1, 8))
    await second
    third = asyncio.ensure_future(call.write(b"d"))
    await turns()
    assert not third.done()
    server.send(headers(1, HEAD), headers(1, FAILED, end=True))
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await third
    assert failed.value.code() is StatusCode.FAILED_PRECONDITION


async def test_cancelling_a_writer_cancels_the_call(link: Link, server: ScriptedServer) -> None:
    """A task that is cancelled while it writes cancels the call."""
    call = both(link)
    writing = asyncio.ensure_future(call.write(bytes(100_000)))
    await turns()
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert call.cancelled()
    assert server.protocol.connection.streams == {}


async def test_writing_before_the_connection(link: Link, dialler: ScriptedDialler) -> None:
    """``write`` waits for the connection, and fails if there is none."""
    call, other = both(link), both(link, wait_for_ready=True)
    writing, patient = asyncio.ensure_future(call.write(b"a")), asyncio.ensure_future(other.write(b"b"))
    await turns()
    dialler.refuse("failed to connect to all addresses; last error: refused")
    with pytest.raises(grpc.aio.AioRpcError):
        await writing
    with pytest.raises(grpc.aio.AioRpcError):
        await call.wait_for_connection()
    dialler.accept()
    await patient
    await other.wait_for_connection()


async def test_requests_are_sent_once_more(link: Link, dialler: ScriptedDialler) -> None:
    """A stream that the server has not begun is sent again with all that was written."""
    old = await connected(link, dialler)
    call = both(link)
    await call.write(b"a")
    await call.write(b"b")
    dialler.accept()
    old.send(peer.goaway(0))
    new = await dialler.server(1)
    await new.frames_of(peer.HEADERS)
    await call.write(b"c")
    await call.done_writing()
    await turns()
    bodies = b"".join(bytes(payload) for payload, _ in sent(new))
    assert bodies.endswith(peer.message(b"c"))
    new.answer(1, b"yes")
    assert await call.read() == b"yes"


async def test_a_long_stream_is_not_sent_once_more(link: Link, dialler: ScriptedDialler) -> None:
    """What a call keeps for a second attempt is bounded; beyond that the call fails."""
    server = await connected(link, dialler)
    server.send(peer.window_update(0, 1 << 20), peer.settings_frame({peer.INITIAL_WINDOW_SIZE: 1 << 20}))
    call = both(link)
    for _ in range(3):
        await call.write(bytes(100_000))
    assert call._kept is None
    server.send(peer.goaway(0))
    assert await call.code() is StatusCode.UNAVAILABLE


async def test_initial_metadata_comes_before_the_end(link: Link, server: ScriptedServer) -> None:
    """Initial metadata can be awaited while the call goes on."""
    call = responses(link)
    waiting = asyncio.ensure_future(call.initial_metadata())
    await turns()
    server.send(headers(1, (*HEAD, ("a", "b"))))
    assert list(await waiting) == [("a", "b")]
    assert not call.done()


@pytest.mark.parametrize("is_ended", [False, True])
async def test_a_response_that_cannot_be_read(link: Link, server: ScriptedServer, is_ended: bool) -> None:
    """A deserializer that fails ends the call with INTERNAL, also if the server has ended it with OK."""
    call = UnaryStreamingMethod(link, "/a.B/C", None, bytes.decode)(b"")
    server.send(headers(1, HEAD), peer.data(1, peer.message(b"\xff")), headers(1, OK, end=True) if is_ended else b"")
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call.read()
    assert (failed.value.code(), failed.value.details()) == (StatusCode.INTERNAL, "Exception deserializing response!")
    assert await call.code() is StatusCode.INTERNAL
    assert server.protocol.connection.streams == {}


async def test_empty_responses_count(dialler: ScriptedDialler) -> None:
    """Credit is not given for messages without content that nobody has read."""
    link = make_link(dialler, stream_window_bytes=65_535)
    server = await connected(link, dialler)
    call = responses(link)
    server.send(headers(1, HEAD), *[peer.data(1, peer.message(b"") * 1000)] * 13)
    await call.read()
    await turns()
    assert [frame for frame in server.frames() if frame.kind == peer.WINDOW_UPDATE and frame.stream_id == 1] == []
    await link.close(None)


async def test_requests_are_written(link: Link, server: ScriptedServer) -> None:
    """``write`` sends a message, ``done_writing`` ends the requests; after that, nothing may be written."""
    call = both(link)
    await call.write(b"a")
    await call.write(b"b")
    await call.done_writing()
    await call.done_writing()
    await turns()
    assert sent(server) == [(peer.message(b"a"), False), (peer.message(b"b"), False), (b"", True)]
    with pytest.raises(asyncio.InvalidStateError, match="half closed"):
        await call.write(b"c")
    server.answer(1, b"x")
    assert (await call.read(), await call.read()) == (b"x", EOF)
    with pytest.raises(asyncio.InvalidStateError, match="finished"):
        await call.write(b"c")


async def test_a_request_over_the_limit(dialler: ScriptedDialler) -> None:
    """A request that is too large ends the call."""
    link = make_link(dialler, max_message_bytes=10)
    await connected(link, dialler)
    call = both(link)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call.write(bytes(11))
    assert failed.value.details() == "Sent message larger than max (11 vs. 10)"
    await link.close(None)


async def test_compression(link: Link, server: ScriptedServer) -> None:
    """Requests are compressed when a call says so; responses are read as their fields announce them."""
    call = both(link, compression=grpc.Compression.Gzip)
    await call.write(b"a" * 1000)
    await turns()
    head, data = server.frames()[-2:]
    assert server.fields(head)["grpc-encoding"] == "gzip"
    assert (data.payload[0], len(data.payload) < 100) == (1, True)
    body = compress("gzip", b"b" * 1000)
    plain, packed = peer.message(b"plain"), peer.message(body, compressed=1)
    server.send(headers(1, (*HEAD, ("grpc-encoding", "gzip"))), peer.data(1, packed + plain), headers(1, OK, end=True))
    assert [message async for message in call] == [b"b" * 1000, b"plain"]
