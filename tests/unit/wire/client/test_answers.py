"""What a unary call makes of an answer, whether it is right or not."""

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from grpc import StatusCode
from tests.unit.wire.client.scripted import HEAD, OK, ScriptedDialler, ScriptedServer, headers, make_link
from tests.wire import peer

from weft.wire.client.calls import UnaryCall
from weft.wire.client.channel import UnaryMethod
from weft.wire.client.link import Link

HTML = ((":status", "503"), ("content-type", "text/html"))


async def answered(link: Link, dialler: ScriptedDialler, send: Callable[[ScriptedServer], Any]) -> UnaryCall:
    """A call whose server sends this once the request has come."""
    dialler.accept()
    call = UnaryMethod(link, "/a.B/C", None, None)(b"request", timeout=60.0)
    server = await dialler.server()
    await server.frames_of(peer.DATA)
    send(server)
    return call


async def failure(call: UnaryCall) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    return failed.value


async def test_an_answer(link: Link, dialler: ScriptedDialler) -> None:
    """Initial metadata, a message and trailers are a response with status OK."""
    head, trailers = (*HEAD, ("a", "b")), (*OK, ("c-bin", "AP8"))
    call = await answered(link, dialler, lambda server: server.answer(1, b"yes", head=head, trailers=trailers))
    assert await call == b"yes"
    assert (await call.code(), await call.details()) == (StatusCode.OK, "")
    assert list(await call.initial_metadata()) == [("a", "b")]
    assert list(await call.trailing_metadata()) == [("c-bin", b"\x00\xff")]


async def test_an_answer_in_the_smallest_parts(link: Link, dialler: ScriptedDialler) -> None:
    """Bytes may come one by one, and a message in many frames."""

    def send(server: ScriptedServer) -> None:
        message = peer.message(b"in parts")
        frames = [peer.data(1, message[at : at + 1]) for at in range(len(message))]
        for byte in b"".join([headers(1, HEAD), *frames, headers(1, OK, end=True)]):
            server.send(bytes([byte]))

    assert await (await answered(link, dialler, send)) == b"in parts"


async def test_an_answer_with_padding(link: Link, dialler: ScriptedDialler) -> None:
    """DATA may be padded."""

    def send(server: ScriptedServer) -> None:
        message = peer.message(b"padded")
        data = [
            peer.data(1, message[:3], padding=7),
            peer.data(1, b"", padding=9),
            peer.data(1, message[3:], padding=0),
        ]
        server.send(headers(1, HEAD), *data, headers(1, OK, end=True))

    assert await (await answered(link, dialler, send)) == b"padded"


async def test_informational_fields_are_skipped(link: Link, dialler: ScriptedDialler) -> None:
    """Fields with a status of HTTP from 100 to 199 come before the answer and mean nothing."""

    def send(server: ScriptedServer) -> None:
        server.send(headers(1, ((":status", "103"), ("link", "x"))))
        server.answer(1, b"yes")

    assert await (await answered(link, dialler, send)) == b"yes"


@pytest.mark.parametrize(
    ("fields", "code", "details"),
    [
        ((*HEAD, ("grpc-status", "5"), ("grpc-message", "no %E2%98%BA")), StatusCode.NOT_FOUND, "no ☺"),
        (HEAD, StatusCode.UNKNOWN, "No status received"),
        ((*HEAD, ("grpc-status", "abc")), StatusCode.UNKNOWN, "grpc-status 'abc' is no number"),
        ((*HEAD, ("grpc-status", "99")), StatusCode.UNKNOWN, ""),
        ((*HEAD, ("grpc-status", "0")), StatusCode.INTERNAL, "cardinality"),
        (((":status", "503"), ("grpc-status", "5")), StatusCode.NOT_FOUND, ""),
        (((":status", "400"),), StatusCode.INTERNAL, "HTTP status 400"),
        (((":status", "401"),), StatusCode.UNAUTHENTICATED, "HTTP status 401"),
        (((":status", "403"),), StatusCode.PERMISSION_DENIED, "HTTP status 403"),
        (((":status", "404"),), StatusCode.UNIMPLEMENTED, "HTTP status 404"),
        (((":status", "429"),), StatusCode.UNAVAILABLE, "HTTP status 429"),
        (((":status", "302"),), StatusCode.UNKNOWN, "HTTP status 302"),
        (((":status", "103"),), StatusCode.INTERNAL, "HTTP status 103"),
        (((":status", "200"), ("content-type", "text/html")), StatusCode.UNKNOWN, "content-type 'text/html'"),
        ((*HEAD, ("grpc-status", "5"), ("a-bin", "!")), StatusCode.INTERNAL, "'a-bin' is no base64"),
    ],
)
async def test_an_answer_of_fields_alone(
    link: Link, dialler: ScriptedDialler, fields: Any, code: StatusCode, details: str
) -> None:
    """Fields that end the stream give the status, that of gRPC before that of HTTP."""
    error = await failure(await answered(link, dialler, lambda server: server.send(headers(1, fields, end=True))))
    assert error.code() is code
    assert details in (error.details() or "")


MESSAGE = peer.data(1, peer.message(b"yes"))


@pytest.mark.parametrize(
    ("pieces", "code", "details"),
    [
        ([headers(1, HEAD), peer.data(1, peer.message(b"yes"), end=True)], StatusCode.INTERNAL, "without sending"),
        ([headers(1, HEAD), MESSAGE, peer.data(1, b"", end=True)], StatusCode.INTERNAL, "without sending"),
        ([headers(1, HEAD), MESSAGE, headers(1, (), end=True)], StatusCode.UNKNOWN, "No status received"),
        ([headers(1, HEAD), headers(1, OK, end=True)], StatusCode.INTERNAL, "cardinality"),
        ([headers(1, HEAD), MESSAGE, MESSAGE], StatusCode.INTERNAL, "more than one message"),
        ([headers(1, HEAD), peer.data(1, peer.message(b"yes") * 2)], StatusCode.INTERNAL, "more than one message"),
        ([headers(1, HEAD), peer.data(1, b"\0\0\0\0\3ye"), headers(1, OK, end=True)], StatusCode.INTERNAL, "car"),
        ([headers(1, HEAD), MESSAGE, peer.data(1, b"\0\0"), headers(1, OK, end=True)], StatusCode.INTERNAL, "within"),
        ([headers(1, HEAD), peer.data(1, peer.message(b"x", compressed=2))], StatusCode.INTERNAL, "begins with 2"),
        ([headers(1, HEAD), peer.data(1, peer.message(b"x", compressed=1))], StatusCode.INTERNAL, "no grpc-encoding"),
        ([headers(1, HEAD), headers(1, OK)], StatusCode.INTERNAL, "trailers without END_STREAM"),
        ([headers(1, HEAD), headers(1, HEAD)], StatusCode.INTERNAL, "neither begin nor end"),
        ([headers(1, HEAD), headers(1, (*HEAD, *OK), end=True)], StatusCode.INTERNAL, "HTTP status 200"),
        ([MESSAGE], StatusCode.INTERNAL, "before any fields"),
        ([headers(1, OK, end=True)], StatusCode.INTERNAL, "cardinality"),
        ([headers(1, HTML), peer.data(1, b"<html>busy", end=True)], StatusCode.UNAVAILABLE, "503: <html>busy"),
        ([headers(1, HTML), peer.data(1, b"a" * 5000)], StatusCode.UNAVAILABLE, "503: " + "a" * 1000),
        ([headers(1, HTML), peer.data(1, b"b"), headers(1, (), end=True)], StatusCode.UNAVAILABLE, "503: b"),
        ([headers(1, HTML), headers(1, (("grpc-status", "5"),), end=True)], StatusCode.NOT_FOUND, ""),
        ([headers(1, HEAD), headers(1, ((":status", "200"), (":path", "/")))], StatusCode.INTERNAL, "pseudo-header"),
        ([headers(1, ((":status", "2xx"),))], StatusCode.INTERNAL, "no number"),
        ([headers(1, (*HEAD, ("connection", "x")))], StatusCode.INTERNAL, "HTTP/1.1"),
        ([headers(1, (*HEAD, ("a", "b" * 70_000)))[:9]], StatusCode.UNAVAILABLE, "Socket closed"),
    ],
)  # fmt: skip
async def test_an_answer_that_is_not_right(
    link: Link, dialler: ScriptedDialler, pieces: list[bytes], code: StatusCode, details: str
) -> None:
    """Every answer that is none of gRPC's gives a status at once; nothing stays behind on the connection."""

    def send(server: ScriptedServer) -> None:
        server.send(*pieces)
        if code is StatusCode.UNAVAILABLE and details == "Socket closed":
            server.lose()

    call = await answered(link, dialler, send)
    error = await failure(call)
    assert error.code() is code
    assert details in (error.details() or "")
    assert dialler.servers[0].protocol.connection.streams == {}


async def test_metadata_over_the_limit(link: Link, dialler: ScriptedDialler) -> None:
    """Metadata that is larger than the channel's limit fails the call, not the connection."""
    large = ((":status", "200"), ("content-type", "application/grpc"), *((f"x-{n}", "a" * 4000) for n in range(16)))

    def send(server: ScriptedServer) -> None:
        server.send(headers(1, (*large, ("more", "b" * 3500))))

    error = await failure(await answered(link, dialler, send))
    assert error.code() is StatusCode.RESOURCE_EXHAUSTED
    assert not dialler.servers[0].is_closed()


@pytest.mark.parametrize(
    ("reset_code", "code"),
    [
        (peer.NO_ERROR, StatusCode.INTERNAL),
        (peer.PROTOCOL_ERROR, StatusCode.INTERNAL),
        (peer.FLOW_CONTROL_ERROR, StatusCode.INTERNAL),
        (peer.STREAM_CLOSED, StatusCode.INTERNAL),
        (peer.CANCEL, StatusCode.CANCELLED),
        (peer.ENHANCE_YOUR_CALM, StatusCode.RESOURCE_EXHAUSTED),
        (peer.INADEQUATE_SECURITY, StatusCode.PERMISSION_DENIED),
        (peer.HTTP_1_1_REQUIRED, StatusCode.INTERNAL),
        (12345, StatusCode.INTERNAL),
    ],
)
@pytest.mark.parametrize(
    "begun", [[], [headers(1, HEAD)], [headers(1, HEAD), peer.data(1, b"\0\0")], [headers(1, HEAD), MESSAGE]]
)
async def test_a_stream_that_is_reset(
    link: Link, dialler: ScriptedDialler, begun: list[bytes], reset_code: int, code: StatusCode
) -> None:
    """RST_STREAM ends the call with the status of its code, before, within and after a message."""
    error = await failure(await answered(link, dialler, lambda server: server.send(*begun, peer.reset(1, reset_code))))
    assert error.code() is code
    assert "reset the stream" in (error.details() or "")


async def test_a_reset_after_trailers(link: Link, dialler: ScriptedDialler) -> None:
    """RST_STREAM(NO_ERROR) after an answer means nothing."""

    def send(server: ScriptedServer) -> None:
        server.answer(1, b"yes")
        server.send(peer.reset(1, peer.NO_ERROR))

    assert await (await answered(link, dialler, send)) == b"yes"


@pytest.mark.parametrize(
    "pieces",
    [
        [peer.frame(peer.PUSH_PROMISE, peer.END_HEADERS, 1, b"\0\0\0\2")],
        [headers(2, HEAD)],
        [headers(7, HEAD)],
        [peer.data(7, b"x")],
        [peer.frame(peer.DATA, peer.PADDED, 1, b"\xff")],
        [peer.window_update(0, 0)],
        [peer.frame(peer.HEADERS, peer.END_HEADERS, 1, b"\xff\xff\xff\xff\xff\xff")],
        [peer.frame(peer.DATA, 0, 0, b"x")],
        [peer.frame(peer.HEADERS, 0, 1, b"\x88"), peer.ping()],
        [peer.frame(peer.SETTINGS, 0, 0, b"12345")],
    ],
)
async def test_a_server_that_breaks_the_protocol(link: Link, dialler: ScriptedDialler, pieces: list[bytes]) -> None:
    """The connection ends with GOAWAY, its calls with UNAVAILABLE, and the next call has a new connection."""

    def send(server: ScriptedServer) -> None:
        server.send(*pieces)
        if not server.is_closed():  # a frame that is not complete
            server.lose()

    error = await failure(await answered(link, dialler, send))
    assert error.code() is StatusCode.UNAVAILABLE
    assert "Socket closed" in (error.details() or "")
    dialler.accept()
    again = UnaryMethod(link, "/a.B/C", None, None)(b"")
    server = await dialler.server(1)
    await server.frames_of(peer.HEADERS)
    server.answer(1, b"yes")
    assert await again == b"yes"


async def test_a_response_over_the_limit(dialler: ScriptedDialler) -> None:
    """A response that is too large fails the call before it has come; the server is told."""
    link = make_link(dialler, max_message_bytes=100)
    call = await answered(
        link, dialler, lambda server: server.send(headers(1, HEAD), peer.data(1, peer.message(b"", length=101)))
    )
    error = await failure(call)
    assert error.code() is StatusCode.RESOURCE_EXHAUSTED
    assert error.details() == "Received message larger than max (101 vs. 100)"
    assert [frame.error_code for frame in await dialler.servers[0].frames_of(peer.RST_STREAM)] == [peer.CANCEL]
    await link.close(None)


async def test_a_request_over_the_limit(dialler: ScriptedDialler) -> None:
    """A request that is too large fails the call; nothing is sent, and nobody is dialled."""
    link = make_link(dialler, max_message_bytes=100)
    error = await failure(UnaryMethod(link, "/a.B/C", None, None)(b"a" * 101))
    assert (error.code(), error.details()) == (
        StatusCode.RESOURCE_EXHAUSTED,
        "Sent message larger than max (101 vs. 100)",
    )
    assert dialler.num_attempts == 0


async def test_a_response_that_cannot_be_read(link: Link, dialler: ScriptedDialler) -> None:
    """A deserializer that fails makes INTERNAL of OK."""
    dialler.accept()
    call = UnaryMethod(link, "/a.B/C", None, lambda data: data.decode())(b"")
    server = await dialler.server()
    await server.frames_of(peer.HEADERS)
    server.answer(1, b"\xff")
    error = await failure(call)
    assert (error.code(), error.details()) == (StatusCode.INTERNAL, "Exception deserializing response!")


async def test_a_request_that_cannot_be_written(link: Link, dialler: ScriptedDialler) -> None:
    """A serializer that fails makes INTERNAL."""
    error = await failure(UnaryMethod(link, "/a.B/C", lambda request: request.encode(), None)(5))
    assert (error.code(), error.details()) == (StatusCode.INTERNAL, "Exception serializing request!")
    assert dialler.num_attempts == 0
