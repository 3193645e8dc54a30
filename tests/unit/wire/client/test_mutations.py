"""Answers that were mutated: whatever a server sends, calls end, and nothing is raised where nobody looks."""

import asyncio
import random
from typing import Any

import grpc
import pytest
from tests.unit.wire.client.scripted import HEAD, OK, ScriptedDialler, connected, headers, make_link
from tests.wire import peer

from weft.wire.client.channel import StreamingMethod, UnaryMethod, UnaryStreamingMethod

EOF = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in the stubs


def answers() -> list[bytes]:
    """Frames of a server that answers streams 1, 3 and 5, and keeps house."""
    frames = [peer.ping(), peer.settings_frame({peer.INITIAL_WINDOW_SIZE: 100_000}), peer.window_update(0, 1000)]
    for stream_id in (1, 3, 5):
        body = peer.message(b"response")
        frames += [
            headers(stream_id, HEAD),
            peer.data(stream_id, body[:4]),
            peer.data(stream_id, body[4:]),
            headers(stream_id, (*OK, ("grpc-message", "%41"), ("x-bin", "AAEC")), end=True),
        ]
    return [*frames, peer.goaway(5), peer.reset(5)]


def mutated(frames: list[bytes], chance: random.Random) -> bytes:
    """Frames left out, repeated and exchanged, and bytes changed."""
    frames = list(frames)
    for _ in range(chance.randrange(4)):
        at = chance.randrange(len(frames))
        kind = chance.randrange(3)
        if kind == 0:
            del frames[at]
        elif kind == 1:
            frames.insert(chance.randrange(len(frames)), frames[at])
        else:
            other = chance.randrange(len(frames))
            frames[at], frames[other] = frames[other], frames[at]
    data = bytearray(b"".join(frames))
    for _ in range(chance.randrange(4)):
        data[chance.randrange(len(data))] = chance.randrange(256)
    return bytes(data)


async def ended(call: Any, reading: bool) -> None:
    try:
        if reading:
            while await call.read() is not EOF:
                pass
        else:
            await call
    except grpc.aio.AioRpcError:
        pass


@pytest.mark.parametrize("seed", range(20))
async def test_mutated_answers(seed: int) -> None:
    """Fifty mutations a seed: each call ends with a response or a status when the connection does, and none is kept."""
    chance = random.Random(seed)
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    for _ in range(50):
        dialler = ScriptedDialler()
        link = make_link(dialler)
        server = await connected(link, dialler)
        connection = server.protocol.connection
        first = UnaryMethod(link, "/a.B/C", None, None)(b"a", timeout=1000.0)
        second = UnaryStreamingMethod(link, "/a.B/C", None, None)(b"b")
        third = StreamingMethod(link, "/a.B/C", None, None)()
        data = mutated(answers(), chance)
        while data and not server.is_closed():
            size = chance.choice((1, 7, 30, 1000))
            server.send(data[:size])
            data = data[size:]
        if not server.is_closed():
            server.lose()
        dialler.refuse("no more")
        async with asyncio.timeout(10.0):
            await asyncio.gather(ended(first, False), ended(second, True), ended(third, True))
        assert connection.streams == {}
        await link.close(None)
    assert errors == []
