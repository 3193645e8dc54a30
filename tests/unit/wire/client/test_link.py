"""The connection of a channel: when it is dialled, which calls wait for it, and which are sent once more."""

import asyncio
import gc
import weakref
from typing import Any

import pytest
from grpc import ChannelConnectivity, StatusCode
from tests.unit.wire.client.scripted import (
    HEAD,
    ScriptedDialler,
    ScriptedServer,
    connected,
    failure,
    headers,
    make_link,
    turns,
    until,
)
from tests.wire import peer

from weft.wire.client import UnansweredError
from weft.wire.client.calls import UnaryCall
from weft.wire.client.channel import StreamingMethod, UnaryMethod
from weft.wire.client.link import Link
from weft.wire.heads import decode_timeout

REFUSED = "failed to connect to all addresses; last error: refused"


def begin(link: Link, request: bytes = b"", **keywords: Any) -> UnaryCall:
    return UnaryMethod(link, "/a.B/C", None, None)(request, **keywords)


async def is_unprocessed(call: Any) -> bool:
    """Whether the server has not begun a call that fails without an answer."""
    error = await failure(call)
    assert isinstance(error, UnansweredError)
    assert error.code() is StatusCode.UNAVAILABLE
    return error.is_unprocessed


def fail(_: Any) -> None:
    raise ZeroDivisionError


async def test_what_a_lost_server_was_not_sent_is_sent_to_the_next(link: Link, dialler: ScriptedDialler) -> None:
    """Calls that begin between the loss of a socket and its report were not sent; the one that was sent fails."""
    for lose in (ScriptedServer.break_off, ScriptedServer.eof):
        server = await connected(link, dialler)
        num_servers = len(dialler.servers)
        sent = begin(link, b"sent")
        await server.frames_of(peer.DATA)
        dialler.accept()
        lose(server)
        unsent = [begin(link, b"%d" % number) for number in range(2)]
        assert not await is_unprocessed(sent)
        new = await dialler.server(num_servers)
        await new.frames_of(peer.DATA)
        new.answer(1, b"yes")
        new.answer(3, b"yes")
        assert [b"yes", b"yes"] == await asyncio.gather(*unsent)
        new.lose()
        await until(lambda: link.connectivity.state is ChannelConnectivity.IDLE)


async def test_a_request_that_was_sent_in_part_was_not_begun(link: Link, dialler: ScriptedDialler) -> None:
    """One request of a call, without whose end no server begins; of a stream of requests it may have begun."""
    server = await connected(link, dialler)
    call = begin(link, bytes(1 << 16))
    stream = StreamingMethod(link, "/a.B/C", None, None)()
    writing = asyncio.create_task(stream.write(bytes(1)))
    await server.frames_of(peer.DATA)
    await turns()
    dialler.refuse(REFUSED)
    server.lose()
    assert await is_unprocessed(call)
    assert not await is_unprocessed(stream.read())
    assert not await is_unprocessed(writing)


async def test_a_call_that_is_sent_once_more_keeps_its_deadline(link: Link, dialler: ScriptedDialler) -> None:
    """The timeout of the second attempt is what is left."""
    server = await connected(link, dialler)
    call = begin(link, timeout=50.0)
    call._deadline.when_s -= 20.0
    server.send(peer.reset(1, peer.REFUSED_STREAM))
    frames = [*await server.frames_of(peer.HEADERS), *await server.frames_of(peer.HEADERS)]
    sent = [server.fields(frame)["grpc-timeout"] for frame in frames]
    first_s, second_s = (decode_timeout(timeout) or 0.0 for timeout in sent)
    assert first_s == 50.0
    assert 20.0 < second_s <= 30.1
    call.cancel()


async def test_cancelling_resets_the_stream(link: Link, dialler: ScriptedDialler) -> None:
    """A call that is cancelled, or whose awaiting task is, tells the server; the awaiting task sees CancelledError."""
    server = await connected(link, dialler)
    first, second = begin(link), begin(link)
    task = asyncio.ensure_future(second)
    await turns()
    assert first.cancel()
    assert not first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    resets = [(frame.stream_id, frame.error_code) for frame in await server.frames_of(peer.RST_STREAM)]
    assert resets == [(1, peer.CANCEL), (3, peer.CANCEL)]
    assert (first.cancelled(), second.cancelled(), await second.code()) == (True, True, StatusCode.CANCELLED)
    assert server.protocol.connection.streams == {}


async def test_callbacks(link: Link, dialler: ScriptedDialler) -> None:
    """Callbacks get the call when it has ended, those added later at once; one that fails does not stop others."""
    server = await connected(link, dialler)
    seen: list[Any] = []
    errors: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))
    call = begin(link)
    call.add_done_callback(fail)
    call.add_done_callback(seen.append)
    assert seen == []
    server.answer(1, b"yes")
    assert seen == [call]
    call.add_done_callback(seen.append)
    assert seen == [call, call]
    assert [type(error) for error in errors] == [ZeroDivisionError]


async def test_closing_that_is_cancelled_as_it_ends_is_cancelled(link: Link, dialler: ScriptedDialler) -> None:
    """The caller's task learns of its cancellation, also in the turn of the event loop in which the connection ends."""
    server = await connected(link, dialler)
    closing, other = (asyncio.ensure_future(link.close(None)) for _ in range(2))
    await until(lambda: server.protocol.is_lost)
    closing.cancel()
    await asyncio.wait([closing, other])
    assert (closing.cancelled(), other.cancelled()) == (True, False)


async def test_states_can_be_waited_for(link: Link, dialler: ScriptedDialler) -> None:
    """Whoever waits sees the state change, at once if it has; one who is cancelled leaves nothing."""
    connectivity = link.connectivity
    await connectivity.wait_for_change(ChannelConnectivity.READY)
    waiting = [asyncio.ensure_future(connectivity.wait_for_change(ChannelConnectivity.IDLE)) for _ in range(3)]
    await turns()
    waiting[0].cancel()
    await connected(link, dialler)
    assert await asyncio.gather(*waiting[1:]) == [None, None]
    assert connectivity._waiters == set()


async def test_too_many_pings_double_the_keepalive_time(dialler: ScriptedDialler) -> None:
    """A server that complains gets PINGs half as often on the next connection."""
    link = make_link(dialler, keepalive_time_s=10.0)
    server = await connected(link, dialler)
    server.send(peer.goaway(0, peer.ENHANCE_YOUR_CALM, b"too_many_pings"))
    server.lose()
    await connected(link, dialler)
    assert link.options.liveness(link._keepalive_factor).keepalive_time_s == 20.0
    await link.close(None)


async def test_a_silent_server_is_lost(dialler: ScriptedDialler) -> None:
    """A PING that is not answered ends the connection, its calls with UNAVAILABLE and a text that says why."""
    link = make_link(dialler, keepalive_time_s=10.0, keepalive_timeout_s=5.0)
    server = await connected(link, dialler)
    call = begin(link)
    now_s = asyncio.get_running_loop().time()
    server.protocol.check(now_s)
    server.protocol.check(now_s + 11.0)
    await server.frames_of(peer.PING)
    server.protocol.check(now_s + 17.0)
    error = await failure(call)
    assert error.code() is StatusCode.UNAVAILABLE
    assert "keepalive" in (error.details() or "")
    await link.close(None)


async def test_calls_leave_nothing(link: Link, dialler: ScriptedDialler) -> None:
    """Ended calls are freed without the garbage collector."""
    server = await connected(link, dialler)
    gc.disable()
    try:
        kept = []
        for number in range(4):
            call = begin(link, timeout=100.0)
            kept.append(weakref.ref(call))
            if number == 0:
                server.answer(1, b"yes")
                await call
            elif number == 1:
                call.cancel()
            elif number == 2:
                server.send(headers(5, (*HEAD, ("grpc-status", "5")), end=True))
            else:
                server.lose()
            await turns()
            del call
        assert [ref() for ref in kept] == [None] * 4
    finally:
        gc.enable()
