"""What a call ends with that no server answered: whether it may have run decides whether it may be sent elsewhere."""

import asyncio
import contextlib
import socket

import pytest
from tests.unit.v2.builders import make_request

from weft.base.errors import RemoteError
from weft.v2.client.v2_client import V2Client
from weft.v2.client.wires import WireName

SETTINGS = bytes.fromhex("000000040000000000")
SETTINGS_ACK = bytes.fromhex("000000040100000000")
HEADERS_TYPE = 1
#: The last stream is 0: nothing was begun.
GOAWAY = bytes.fromhex("0000080700000000000000000000000000")


@contextlib.asynccontextmanager
async def peer(on_request, *, goes_on=False):
    """A port where a call's fields are answered with these bytes, and the end of the connection unless it goes on."""

    async def serve(reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            writer.write(SETTINGS)
            await reader.readexactly(24)
            while True:
                head = await reader.readexactly(9)
                await reader.readexactly(int.from_bytes(head[:3], "big"))
                if head[3] == 4 and not head[4]:
                    writer.write(SETTINGS_ACK)
                elif head[3] == HEADERS_TYPE:
                    writer.write(on_request(int.from_bytes(head[5:9], "big")))
                    await writer.drain()
                    if not goes_on:
                        break
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


async def failure(port, wire):
    """How a call of the port ends."""
    async with V2Client(f"127.0.0.1:{port}", where="the callee", wire=wire) as client:
        with pytest.raises(RemoteError) as caught:
            await client.infer(make_request(), timeout_s=10)
    return caught.value


@pytest.mark.parametrize("wire", WireName)
async def test_call_of_a_port_without_a_server_was_never_sent(wire):
    """It may go elsewhere; its message names the callee."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        error = await failure(bound.getsockname()[1], wire)
    assert ("UNAVAILABLE", True, True) == (error.code, error.is_unanswered, error.is_refused)
    assert error.message.startswith("the callee cannot be reached: ")


@pytest.mark.parametrize("wire", WireName)
async def test_call_whose_connection_is_lost_may_have_run(wire):
    """Nobody answered it, and it is not known whether the server began."""
    async with peer(lambda stream_id: b"") as port:
        error = await failure(port, wire)
    assert ("UNAVAILABLE", True, False) == (error.code, error.is_unanswered, error.is_refused)
    assert error.message.startswith("the callee cannot be reached: ")


async def test_call_that_a_goaway_leaves_out_was_not_begun():
    """After the one retry that a client makes by itself it may go elsewhere."""
    async with peer(lambda stream_id: GOAWAY) as port:
        error = await failure(port, WireName.WEFT)
    assert ("UNAVAILABLE", True, True) == (error.code, error.is_unanswered, error.is_refused)


@pytest.mark.parametrize(
    ("code", "expected"),
    [(7, ("UNAVAILABLE", True, True)), (8, ("UNAVAILABLE", True, False)), (2, ("INTERNAL", False, False))],
)
async def test_call_that_the_server_resets(code, expected):
    """REFUSED_STREAM says that it was not begun; CANCEL, as of a server that stops, says nothing; others are faults."""

    def reset(stream_id):
        return bytes.fromhex("0000040300") + stream_id.to_bytes(4, "big") + code.to_bytes(4, "big")

    async with peer(reset, goes_on=True) as port:
        error = await failure(port, WireName.WEFT)
    assert expected == (error.code, error.is_unanswered, error.is_refused)


@pytest.mark.parametrize("wire", WireName)
async def test_caller_that_tries_again_at_once_leaves_time_to_others(wire):
    """Also while the channel fails calls without an attempt to connect, other tasks get their turn at each call."""
    num_turns = 0

    async def take_turns():
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        async with V2Client(f"127.0.0.1:{bound.getsockname()[1]}", wire=wire) as client:
            other = asyncio.create_task(take_turns())
            for _ in range(20):
                with pytest.raises(RemoteError):
                    await client.infer(make_request(), timeout_s=10)
            other.cancel()
    assert num_turns >= 20
