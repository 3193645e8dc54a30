"""Handlers that do what they should not: their own call ends, and no other call on the connection is touched."""

import asyncio
from collections.abc import Callable

import grpc
import pytest
from grpc import StatusCode

from weft.wire.client import Channel, ChannelOptions
from weft.wire.hpack import encode
from weft.wire.server import Server, ServerOptions

unary = grpc.unary_unary_rpc_method_handler


async def sets_odd_trailers(request, context):
    context.set_trailing_metadata((("a", 5),))
    return request


async def aborts_with_an_exception(request, context):
    await context.abort(StatusCode.INTERNAL, ValueError("why"))


async def aborts_with_bytes(request, context):
    await context.abort(StatusCode.INTERNAL, b"why")


async def sets_odd_code(request, context):
    context.set_code("odd")


async def compresses_too_late(request, context):
    await context.send_initial_metadata(())
    context.set_compression(grpc.Compression.Gzip)
    return bytes(100)


async def echo(request, context):
    return request


class FailingLookup(grpc.GenericRpcHandler):
    """Finds no handler, with an exception."""

    def service(self, handler_call_details):
        raise KeyError("nothing")


HANDLERS = {
    "odd trailers": (unary(sets_odd_trailers), StatusCode.INTERNAL, "metadata are pairs"),
    "odd details": (unary(aborts_with_an_exception), StatusCode.INTERNAL, "why"),
    "details of bytes": (unary(aborts_with_bytes), StatusCode.INTERNAL, "why"),
    "odd code": (unary(sets_odd_code), StatusCode.UNKNOWN, ""),
    "compresses too late": (unary(compresses_too_late), StatusCode.UNKNOWN, "Unexpected <class 'RuntimeError'>"),
    "response of text": (
        unary(echo, response_serializer=lambda _: "text"), StatusCode.INTERNAL, "Failed to serialize response!",
    ),
    "response of numbers": (
        unary(echo, response_serializer=lambda _: memoryview(bytes(8)).cast("d")),
        StatusCode.INTERNAL, "Failed to serialize response!",
    ),
    "failing lookup": (None, StatusCode.UNKNOWN, "Unexpected <class 'KeyError'>: 'nothing'"),
}  # fmt: skip


@pytest.fixture
async def opened():
    """Starts servers with methods of ``t``; gives a channel to each."""
    parts: list[Server | Channel] = []

    async def start(
        handlers, options: ChannelOptions | None = None, server_options: ServerOptions | None = None
    ) -> Channel:
        server = Server(server_options)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t", handlers), FailingLookup()))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        channel = Channel(f"127.0.0.1:{port}", options or ChannelOptions())
        parts[:0] = (channel, server)
        return channel

    yield start
    for part in parts:
        await (part.close(None) if isinstance(part, Channel) else part.stop(None))


async def outcome(call) -> tuple[StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    return failed.value.code(), failed.value.details() or ""


@pytest.mark.parametrize("does_wait", [False, True], ids=["at once", "after waiting"])
@pytest.mark.parametrize("name", HANDLERS)
async def test_other_calls_go_on(opened, name, does_wait):
    """A call that waits on the same connection is answered, and the odd one has a status that says what was wrong."""
    handler, status, details = HANDLERS[name]
    release = asyncio.Event()

    async def held(request, context):
        await release.wait()
        return request

    async def later(request, context):
        await asyncio.sleep(0)
        return await handler.unary_unary(request, context)

    handlers = {"Held": unary(held)}
    if handler is not None:
        handlers["Odd"] = unary(later, response_serializer=handler.response_serializer) if does_wait else handler
    channel = await opened(handlers)
    other = channel.unary_unary("/t/Held")(b"held", timeout=10)
    await other.wait_for_connection()
    code, text = await outcome(channel.unary_unary("/t/Odd")(b"odd", timeout=10))
    assert (code, text[: len(details)]) == (status, details)
    release.set()
    assert b"held" == await other


async def test_several_tasks_write(opened):
    """Each writer of one stream goes on when the client has read."""

    async def many(request, context):
        await asyncio.gather(*(context.write(bytes(200_000)) for _ in range(8)))

    channel = await opened(
        {"Many": grpc.unary_stream_rpc_method_handler(many)}, ChannelOptions(stream_window_bytes=70_000)
    )
    async with asyncio.timeout(10):
        sizes = [len(response) async for response in channel.unary_stream("/t/Many")(b"")]
    assert [200_000] * 8 == sizes


async def test_call_that_ends_in_its_first_step_is_cancelled(opened):
    """A handler that cancels its call before it first waits goes on no longer than to there."""
    ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def cancels(request, context):
        context.cancel()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.set_result(True)
            raise

    channel = await opened({"Cancels": unary(cancels)})
    code, _ = await outcome(channel.unary_unary("/t/Cancels")(b""))
    async with asyncio.timeout(10):
        assert (StatusCode.CANCELLED, True) == (code, await ended)


@pytest.mark.parametrize("way", ["direct", "first", "stream"])
async def test_request_that_is_no_bytes(opened, way):
    """It fails before it is among the output of the connection; calls beside it are answered."""
    channel = await opened({"Echo": unary(echo)})
    if way != "first":
        await channel.channel_ready()
    before = channel.unary_unary("/t/Echo")(b"before", timeout=10)
    begin: Callable[..., grpc.aio.Call] = channel.unary_unary("/t/Echo")
    if way == "stream":
        begin = channel.stream_unary("/t/Echo")
    odd = begin(iter(["text"]) if way == "stream" else "text", timeout=10)
    after = channel.unary_unary("/t/Echo")(b"after", timeout=10)
    assert (StatusCode.INTERNAL, "Exception serializing request!") == await outcome(odd)
    assert [b"before", b"after"] == [await before, await after]


async def test_call_whose_time_is_over(opened):
    """A timeout of nothing, as some clients send it at the end of their time, runs no handler."""
    has_run = []

    async def run(request, context):
        has_run.append(True)

    channel = await opened({"Run": unary(run)})
    call = channel.unary_unary("/t/Run")(b"", metadata=(("a", "b"),), timeout=10)
    channel.link.heads.timeout = lambda _: encode([("grpc-timeout", "0n")])
    assert (StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") == await outcome(call)
    assert [] == has_run


@pytest.mark.parametrize("way", ["iterates", "reads"])
async def test_request_of_a_stream_that_is_too_large(opened, way):
    """Its status is the client's, whatever the handler makes of the exception in its reading task."""

    async def reads(requests, context):
        async def read():
            if way == "iterates":
                async for _ in requests:
                    pass
            while await context.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]  # missing in the stubs
                pass

        try:
            await asyncio.create_task(read())
        except Exception as error:
            await context.abort(StatusCode.INTERNAL, type(error).__name__)

    channel = await opened(
        {"Reads": grpc.stream_unary_rpc_method_handler(reads)},
        ChannelOptions(compression=grpc.Compression.Gzip),
        ServerOptions(max_message_bytes=1000),
    )
    code, details = await outcome(channel.stream_unary("/t/Reads")(iter([bytes(100), bytes(2000)]), timeout=10))
    assert (StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max") == (code, details[:32])


async def test_several_tasks_read(opened):
    """Each reader of one stream, at either end, gets a message or the end."""

    async def reads(requests, context):
        async def read():
            if (request := await context.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]  # missing in the stubs
                await context.write(request)

        await asyncio.gather(*(read() for _ in range(3)))

    channel = await opened({"Reads": grpc.stream_stream_rpc_method_handler(reads)})
    call = channel.stream_stream("/t/Reads")(timeout=10)
    readers = [asyncio.create_task(call.read()) for _ in range(3)]
    await call.wait_for_connection()
    for request in (b"1", b"2"):
        await call.write(request)
        await call.initial_metadata()  # the first has been read, so that the second wakes a reader of its own
    await call.done_writing()
    answers = await asyncio.gather(*readers)
    assert [b"1", b"2"] == sorted(answer for answer in answers if isinstance(answer, bytes))
