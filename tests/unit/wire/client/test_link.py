"""The connection of a channel: when it is dialled, which calls wait for it, and which are sent once more."""

import asyncio
import gc
import weakref
from typing import Any

import grpc
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


def requests(server: ScriptedServer) -> list[int]:
    """Streams that the client has opened since the last look."""
    return [frame.stream_id for frame in server.frames() if frame.kind == peer.HEADERS]


async def test_the_first_call_dials(link: Link, dialler: ScriptedDialler) -> None:
    """A channel is idle until its first call; the calls until it is connected are sent together."""
    await turns()
    assert (link.connectivity.state, dialler.num_attempts) == (ChannelConnectivity.IDLE, 0)
    calls = [begin(link, b"%d" % number) for number in range(3)]
    assert link.connectivity.state is ChannelConnectivity.CONNECTING
    dialler.accept()
    server = await dialler.server()
    await server.frames_of(peer.DATA)
    for number in range(3):
        server.answer(1 + 2 * number, b"%d" % number)
    assert [await call for call in calls] == [b"0", b"1", b"2"]
    assert (link.connectivity.state, dialler.num_attempts) == (ChannelConnectivity.READY, 1)


async def test_a_failed_attempt_fails_the_calls_that_do_not_wait(dialler: ScriptedDialler) -> None:
    """A call that waits for a server outlives failed attempts; others get UNAVAILABLE, in the backoff at once."""
    link = make_link(dialler, initial_backoff_s=0.3)
    patient, other = begin(link, wait_for_ready=True), begin(link)
    dialler.refuse(REFUSED)
    error = await failure(other)
    assert (error.code(), error.details()) == (StatusCode.UNAVAILABLE, REFUSED)
    assert link.connectivity.state is ChannelConnectivity.TRANSIENT_FAILURE
    assert begin(link).done()
    assert not patient.done()
    dialler.accept()
    server = await dialler.server()
    await server.frames_of(peer.DATA)
    server.answer(1, b"yes")
    assert await patient == b"yes"
    assert dialler.num_attempts == 2
    await link.close(None)


async def test_a_backoff_without_calls_ends_idle(link: Link, dialler: ScriptedDialler) -> None:
    """After the backoff nobody dials unless there is a call; the next call dials and waits for that."""
    dialler.refuse(REFUSED)
    await failure(begin(link))
    await until(lambda: link.connectivity.state is ChannelConnectivity.IDLE)
    await turns()
    assert dialler.num_attempts == 1
    call = begin(link)
    dialler.accept()
    server = await dialler.server()
    await server.frames_of(peer.DATA)
    server.answer(1, b"yes")
    assert await call == b"yes"


async def test_a_lost_connection_fails_its_calls(link: Link, dialler: ScriptedDialler) -> None:
    """Calls in flight end with UNAVAILABLE, in gRPC's words; the channel is idle, and dials for the next call."""
    server = await connected(link, dialler)
    call = begin(link)
    server.lose(ConnectionResetError("Connection reset by peer"))
    error = await failure(call)
    assert error.code() is StatusCode.UNAVAILABLE
    assert error.details() == "Socket closed: the connection was lost: Connection reset by peer"
    assert link.connectivity.state is ChannelConnectivity.IDLE
    begin(link)
    await until(lambda: dialler.num_attempts == 2)


async def test_calls_beyond_the_limit_of_the_server_wait_in_order(link: Link, dialler: ScriptedDialler) -> None:
    """With MAX_CONCURRENT_STREAMS 2 the third call is sent when the first has ended, and so on, in their order."""
    server = await connected(link, dialler, {peer.MAX_CONCURRENT_STREAMS: 2})
    calls = [begin(link, b"%d" % number) for number in range(6)]
    await turns()
    assert requests(server) == [1, 3]
    calls[3].cancel()
    server.answer(1, b"a")
    await turns()
    assert requests(server) == [5]
    server.answer(5, b"c")
    await turns()
    bodies = [frame.payload[5:] for frame in server.frames() if frame.kind == peer.DATA]
    assert bodies == [b"4"]
    server.send(peer.settings_frame({peer.MAX_CONCURRENT_STREAMS: 100}))
    await turns()
    assert requests(server) == [9]
    for stream_id in (3, 7, 9):
        server.answer(stream_id, b"x")
    assert await asyncio.gather(*[calls[number] for number in (0, 1, 2, 4, 5)]) == [b"a", b"x", b"c", b"x", b"x"]


async def test_a_call_that_waits_for_its_turn_may_expire(link: Link, dialler: ScriptedDialler) -> None:
    """A call that waits ends at its deadline, and is never sent."""
    server = await connected(link, dialler, {peer.MAX_CONCURRENT_STREAMS: 1})
    first, second = begin(link), begin(link, timeout=0.01)
    error = await failure(second)
    assert (error.code(), error.details()) == (StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
    server.answer(1, b"yes")
    assert await first == b"yes"
    assert requests(server) == [1]


async def test_a_server_that_allows_no_call(link: Link, dialler: ScriptedDialler) -> None:
    """With MAX_CONCURRENT_STREAMS 0 calls wait until it allows some."""
    server = await connected(link, dialler, {peer.MAX_CONCURRENT_STREAMS: 0})
    call = begin(link)
    await turns()
    assert requests(server) == []
    server.send(peer.settings_frame({peer.MAX_CONCURRENT_STREAMS: 1}))
    await server.frames_of(peer.HEADERS)
    server.answer(1, b"yes")
    assert await call == b"yes"


async def test_goaway_sends_new_calls_to_a_new_connection(link: Link, dialler: ScriptedDialler) -> None:
    """After GOAWAY calls up to its stream go on, those above it are sent once more, and the old connection closes."""
    old = await connected(link, dialler)
    calls = [begin(link, b"%d" % number) for number in range(3)]
    dialler.accept()
    old.send(peer.goaway(1))
    new = await dialler.server(1)
    await turns()
    assert requests(new) == [1, 3]
    later = begin(link, b"3")
    await turns()
    assert requests(new) == [5]
    assert not old.is_closed()
    old.answer(1, b"old")
    await turns()
    assert old.is_closed()
    for stream_id in (1, 3, 5):
        new.answer(stream_id, b"new")
    assert await asyncio.gather(*calls, later) == [b"old", b"new", b"new", b"new"]


async def test_goaway_in_two_steps(link: Link, dialler: ScriptedDialler) -> None:
    """A graceful GOAWAY first takes all streams, with a PING, which is answered; its second step names the last one."""
    old = await connected(link, dialler)
    call = begin(link)
    old.send(peer.goaway(peer.MAX_WINDOW), peer.ping(b"graceful"))
    assert [frame.payload for frame in old.frames() if frame.kind == peer.PING] == [b"graceful"]
    old.send(peer.goaway(1))
    old.answer(1, b"yes")
    assert await call == b"yes"
    await turns()
    assert old.is_closed()
    assert link.connectivity.state is ChannelConnectivity.IDLE


async def test_a_call_is_sent_once_more_at_most(link: Link, dialler: ScriptedDialler) -> None:
    """A call that two servers refuse with GOAWAY fails with UNAVAILABLE."""
    old = await connected(link, dialler)
    call = begin(link)
    dialler.accept()
    old.send(peer.goaway(0))
    new = await dialler.server(1)
    await new.frames_of(peer.HEADERS)
    new.send(peer.goaway(0))
    error = await failure(call)
    assert error.code() is StatusCode.UNAVAILABLE
    assert "GOAWAY" in (error.details() or "")


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


async def test_a_refused_stream_is_sent_once_more(link: Link, dialler: ScriptedDialler) -> None:
    """REFUSED_STREAM says that the server has not begun: the call is sent again on the same connection, once.

    That and all new calls wait a moment, because servers refuse while they still free the calls before.
    """
    server = await connected(link, dialler)
    call = begin(link, b"request")
    server.send(peer.reset(1, peer.REFUSED_STREAM))
    later = begin(link, b"later")
    assert requests(server) == [1]
    frames: list[peer.Frame] = []
    while len(frames) < 2:
        frames += await server.frames_of(peer.DATA)
    sent = [(frame.stream_id, frame.payload) for frame in frames]
    assert sent == [(3, peer.message(b"request")), (5, peer.message(b"later"))]
    server.send(peer.reset(3, peer.REFUSED_STREAM))
    assert (await failure(call)).code() is StatusCode.UNAVAILABLE
    server.answer(5, b"yes")
    assert await later == b"yes"


async def test_a_call_that_was_answered_in_part_is_not_sent_again(link: Link, dialler: ScriptedDialler) -> None:
    """After the initial metadata a call is never sent once more."""
    server = await connected(link, dialler)
    call = begin(link)
    server.send(headers(1, HEAD), peer.reset(1, peer.REFUSED_STREAM))
    assert (await failure(call)).code() is StatusCode.UNAVAILABLE
    assert requests(server) == [1]


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


async def test_a_deadline_resets_the_stream(link: Link, dialler: ScriptedDialler) -> None:
    """A call ends by the client's own clock."""
    server = await connected(link, dialler)
    call = begin(link, timeout=0.01)
    remaining_s = call.time_remaining()
    assert remaining_s is not None
    assert remaining_s < 0.011
    error = await failure(call)
    assert (error.code(), error.details()) == (StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
    assert [frame.error_code for frame in await server.frames_of(peer.RST_STREAM)] == [peer.CANCEL]
    assert call.time_remaining() == 0.0


async def test_a_deadline_that_has_passed(link: Link, dialler: ScriptedDialler) -> None:
    """A call with a timeout of 0 or less is not sent."""
    assert (await failure(begin(link, timeout=0))).code() is StatusCode.DEADLINE_EXCEEDED
    assert dialler.num_attempts == 0


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


async def test_closing_cancels_calls(link: Link, dialler: ScriptedDialler) -> None:
    """Closing without grace cancels calls in flight and calls that wait, and the channel takes no more."""
    await connected(link, dialler, {peer.MAX_CONCURRENT_STREAMS: 1})
    calls = [begin(link), begin(link)]
    await link.close(None)
    for call in calls:
        with pytest.raises(asyncio.CancelledError):
            await call
    assert link.connectivity.state is ChannelConnectivity.SHUTDOWN
    with pytest.raises(grpc.aio.UsageError, match="closed"):
        begin(link)
    await link.close(None)


async def test_closing_that_is_cancelled_as_it_ends_is_cancelled(link: Link, dialler: ScriptedDialler) -> None:
    """The caller's task learns of its cancellation, also in the turn of the event loop in which the connection ends."""
    server = await connected(link, dialler)
    closing, other = (asyncio.ensure_future(link.close(None)) for _ in range(2))
    await until(lambda: server.protocol.is_lost)
    closing.cancel()
    await asyncio.wait([closing, other])
    assert (closing.cancelled(), other.cancelled()) == (True, False)


async def test_closing_with_grace_waits_for_calls(link: Link, dialler: ScriptedDialler) -> None:
    """Closing with grace returns when the calls in flight have ended; new ones are refused meanwhile."""
    server = await connected(link, dialler, {peer.MAX_CONCURRENT_STREAMS: 1})
    calls = [begin(link), begin(link)]
    closing = asyncio.ensure_future(link.close(30.0))
    await turns()
    with pytest.raises(grpc.aio.UsageError):
        begin(link)
    server.answer(1, b"a")
    await turns()
    assert not closing.done()
    server.answer(3, b"b")
    await closing
    assert [await call for call in calls] == [b"a", b"b"]
    assert server.is_closed()


async def test_grace_has_an_end(link: Link, dialler: ScriptedDialler) -> None:
    """After the grace, calls are cancelled."""
    await connected(link, dialler)
    call = begin(link)
    await link.close(0.01)
    assert call.cancelled()


async def test_closing_while_it_dials(link: Link, dialler: ScriptedDialler) -> None:
    """A call that waits for a connection is cancelled, and so is the attempt."""
    call = begin(link, wait_for_ready=True)
    await turns()
    assert dialler.num_attempts == 1
    await link.close(None)
    assert call.cancelled()
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


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
