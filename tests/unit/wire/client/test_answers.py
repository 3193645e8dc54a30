"""What a call makes of an answer, whether it is right or not: the cases of ``answers.txt``, and others."""

import contextlib
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import StatusCode
from tests.unit.wire.client.scripted import HEAD, OK, ScriptedDialler, failure, headers, make_link
from tests.wire import peer
from tests.wire.notation import Case, frame_of, read_cases

from weft.wire.client.channel import UnaryMethod, UnaryStreamingMethod
from weft.wire.client.link import Link


@pytest.mark.parametrize("case", read_cases(Path(__file__).with_name("answers.txt")), ids=lambda case: case.name)
async def test_answer(case: Case, dialler: ScriptedDialler) -> None:
    """The call ends as the case says at once, nothing stays behind, and the next call is answered."""
    (limit,) = case.starting_with("limit") or ["4000000"]
    link = make_link(dialler, max_message_bytes=int(limit))
    dialler.accept()
    is_stream = "stream" in case.lines
    call: Any = (UnaryStreamingMethod if is_stream else UnaryMethod)(link, "/a.B/C", None, None)(b"request", timeout=60)
    server = await dialler.server()
    await server.frames_of(peer.DATA)
    server.send(*map(frame_of, case.starting_with(">")))
    if "lose" in case.lines:
        server.lose()
    outcome, *given = case.starting_with("=")
    code, _, details = outcome.partition(" ")
    responses: list[bytes] = []
    with contextlib.suppress(grpc.aio.AioRpcError):
        if is_stream:
            async for response in call:
                responses.append(response)
        else:
            responses.append(await call)
    assert code == (await call.code()).name
    assert details in (await call.details() or "")
    assert " ".join(given).encode().split() == responses
    for line in case.starting_with("<"):
        sent = [frame for frame in server.frames() if frame.kind == peer.RST_STREAM]
        assert [frame_of(line)[9:]] == [frame.payload for frame in sent]
    assert server.protocol.connection.streams == {}
    dialler.accept()
    again = UnaryMethod(link, "/a.B/C", None, None)(b"")
    if server.is_closed() or "lose" in case.lines:
        server = await dialler.server(1)
    (head,) = await server.frames_of(peer.HEADERS)
    server.answer(head.stream_id, b"yes")
    assert await again == b"yes"
    await link.close(None)


async def test_an_answer_in_the_smallest_parts(link: Link, dialler: ScriptedDialler) -> None:
    """Bytes may come one by one; initial metadata, a message and trailers are a response with status OK."""
    dialler.accept()
    call = UnaryMethod(link, "/a.B/C", None, None)(b"request", timeout=60.0)
    server = await dialler.server()
    await server.frames_of(peer.DATA)
    frames = [peer.data(1, byte.to_bytes()) for byte in peer.message(b"in parts")]
    ends = headers(1, (*HEAD, ("a", "b"))), headers(1, (*OK, ("c-bin", "AP8")), end=True)
    for byte in b"".join([ends[0], *frames, ends[1]]):
        server.send(byte.to_bytes())
    assert await call == b"in parts"
    assert (await call.code(), await call.details()) == (StatusCode.OK, "")
    assert list(await call.initial_metadata()) == [("a", "b")]
    assert list(await call.trailing_metadata()) == [("c-bin", b"\x00\xff")]


async def test_a_request_that_cannot_be_sent(dialler: ScriptedDialler) -> None:
    """One that is too large or cannot be written fails its call; nothing is sent, and nobody is dialled."""
    link = make_link(dialler, max_message_bytes=100)
    error = await failure(UnaryMethod(link, "/a.B/C", None, None)(b"a" * 101))
    assert (error.code(), error.details()) == (
        StatusCode.RESOURCE_EXHAUSTED,
        "Sent message larger than max (101 vs. 100)",
    )
    error = await failure(UnaryMethod(link, "/a.B/C", lambda request: request.encode(), None)(5))
    assert (error.code(), error.details()) == (StatusCode.INTERNAL, "Exception serializing request!")
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
