"""A server in memory, frame by frame, for a channel whose dialling is scripted too."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from grpc import ChannelConnectivity
from tests.wire import peer
from tests.wire.memory import MemoryTransport

from weft.wire.client.dialling import DialError
from weft.wire.client.link import Link
from weft.wire.client.protocol import ChannelOptions, ClientProtocol, RequestHeads
from weft.wire.hpack import Decoder, encode

HEAD = ((":status", "200"), ("content-type", "application/grpc"))
OK = (("grpc-status", "0"),)


async def until(is_so: Callable[[], bool]) -> None:
    """Let the event loop turn until it is so."""
    async with asyncio.timeout(20):
        while not is_so():  # noqa: ASYNC110  # every turn is to be looked at
            await asyncio.sleep(0)


async def turns(number: int = 5) -> None:
    """Let the event loop turn so many times."""
    for _ in range(number):
        await asyncio.sleep(0)


async def failure(call: Any) -> grpc.aio.AioRpcError:
    """What the call fails with."""
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    return failed.value


async def connected(link: Link, dialler: "ScriptedDialler", settings: dict[int, int] | None = None) -> "ScriptedServer":
    """The server of a link that has just connected."""
    number = len(dialler.servers)
    dialler.accept(settings)
    link.connect()
    await until(lambda: link.connectivity.state is ChannelConnectivity.READY)
    return dialler.servers[number]


class ScriptedServer:
    """The server's end of one connection.

    Attributes:
        protocol: The client's end.
    """

    def __init__(self, protocol: ClientProtocol) -> None:
        self.protocol = protocol
        self._transport = MemoryTransport(protocol)
        self._decoder = Decoder()
        self._num_read = len(peer.PREFACE)
        protocol.connection_made(self._transport)

    def send(self, *pieces: bytes) -> None:
        """The client receives these bytes at once."""
        self.protocol.data_received(b"".join(pieces))

    def frames(self) -> list[peer.Frame]:
        """Frames that the client has sent since the last call."""
        found = []
        data = bytes(self._transport.written)
        while len(data) - self._num_read >= 9:
            at = self._num_read
            length = int.from_bytes(data[at : at + 3], "big")
            stream_id = int.from_bytes(data[at + 5 : at + 9], "big")
            found.append(peer.Frame(data[at + 3], data[at + 4], stream_id, data[at + 9 : at + 9 + length]))
            self._num_read = at + 9 + length
        return found

    async def frames_of(self, kind: int) -> list[peer.Frame]:
        """Frames of one kind that the client has sent since the last call, once there are any."""
        found: list[peer.Frame] = []
        await until(lambda: found.extend(frame for frame in self.frames() if frame.kind == kind) or bool(found))
        return found

    def fields(self, frame: peer.Frame) -> dict[str, str]:
        """The fields of a frame of HEADERS."""
        return dict(self._decoder.decode(frame.payload).fields)

    def lose(self, error: Exception | None = None) -> None:
        """The connection is lost at once."""
        self.protocol.connection_lost(error)

    def eof(self) -> None:
        """The server sends no more."""
        if not self.protocol.eof_received():
            self._transport.close()

    def break_off(self) -> None:
        """The socket has failed, which the client is told in the next turn."""
        self._transport.close(ConnectionResetError("reset"))

    def is_closed(self) -> bool:
        """Whether the client has closed the connection."""
        return self._transport.is_closing()

    def answer(self, stream_id: int, *messages: bytes, head: Any = HEAD, trailers: Any = OK) -> None:
        """A whole answer."""
        data = b"".join(peer.data(stream_id, peer.message(body)) for body in messages)
        self.send(headers(stream_id, head), data, headers(stream_id, trailers, end=True))


def headers(stream_id: int, fields: Any, *, end: bool = False) -> bytes:
    """A HEADERS frame."""
    flags = peer.END_HEADERS | (peer.END_STREAM if end else 0)
    return peer.frame(peer.HEADERS, flags, stream_id, encode(fields))


class ScriptedDialler:
    """Gives connections to scripted servers, each when the test says so.

    Attributes:
        num_attempts: How often a link has dialled.
        servers: Of all connections so far.
    """

    def __init__(self) -> None:
        self.num_attempts = 0
        self.servers: list[ScriptedServer] = []
        self._outcomes: asyncio.Queue[str | dict[int, int]] = asyncio.Queue()

    def accept(self, settings: dict[int, int] | None = None) -> None:
        """The next attempt succeeds, with these settings of the server."""
        self._outcomes.put_nowait(settings or {})

    def refuse(self, error: str) -> None:
        """The next attempt fails."""
        self._outcomes.put_nowait(error)

    async def dial(self, make: Callable[[], ClientProtocol]) -> ClientProtocol:
        """As ``Dialler.dial``."""
        self.num_attempts += 1
        outcome = await self._outcomes.get()
        if isinstance(outcome, str):
            raise DialError(outcome)
        server = ScriptedServer(make())
        self.servers.append(server)
        server.send(peer.settings_frame(outcome))
        return server.protocol

    async def server(self, number: int = 0) -> ScriptedServer:
        """The server of a connection, once there is one."""
        await until(lambda: len(self.servers) > number)
        return self.servers[number]


def make_link(dialler: Any, **options: Any) -> Link:
    """A link on a scripted dialler, without jitter and with a backoff that is over at once."""
    chosen = ChannelOptions(**{"initial_backoff_s": 0.0, "backoff_jitter": 0.0} | options)
    return Link(dialler, RequestHeads("http", "test", "tests"), chosen, lambda: 0.5)
