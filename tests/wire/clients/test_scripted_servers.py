"""gRPC's negative HTTP/2 tests: what grpcio's client and Weft's make of servers that are rude or wrong."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import grpc
import pytest
from tests.wire import peer as h2
from tests.wire.clients.test_aio import opened
from tests.wire.peer import Closed, Listener, Peer

BODY = b"a" * 1024
HEADERS = [(":status", "200"), ("content-type", "application/grpc")]
OK = [("grpc-status", "0")]
Script = Callable[[Peer, int], object]


@pytest.fixture(scope="session", params=["-"])
def wire(request: pytest.FixtureRequest) -> str:
    """There is no service."""
    return str(request.param)


class ScriptedServer:
    """``script`` answers each request that has come whole; each connection has a thread.

    Attributes:
        stream_ids: Of requests, a list for each connection.
        num_unacknowledged: PINGs without their acknowledgement.
    """

    def __init__(self, script: Script, settings: dict[int, int] | None = None) -> None:
        self._script, self._settings = script, settings
        self._listener = Listener()
        self.address = self._listener.address
        self.stream_ids: list[list[int]] = []
        self.num_unacknowledged = 0
        self._threads = [threading.Thread(target=self._serve)]
        self._peers: list[Peer] = []
        self._threads[0].start()

    def ping(self) -> bytes:
        """A PING, counted."""
        self.num_unacknowledged += 1
        return h2.ping()

    def close(self) -> None:
        """All connections are closed."""
        for waiting in (self._listener.socket, *(peer.socket for peer in self._peers)):
            with contextlib.suppress(OSError):
                waiting.shutdown(socket.SHUT_RDWR)  # wakes who waits for it
        for thread in self._threads:
            thread.join(10)
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                ids: list[int] = []
                self._peers.append(self._listener.accept(30.0))
                self._threads.append(threading.Thread(target=self._serve_one, args=(self._peers[-1], ids)))
                self.stream_ids.append(ids)
                self._threads[-1].start()

    def _serve_one(self, peer: Peer, ids: list[int]) -> None:
        with peer, contextlib.suppress(Closed, TimeoutError):
            peer.server_handshake(self._settings)
            self._answer_all(peer, ids)

    def _answer_all(self, peer: Peer, ids: list[int]) -> None:
        while True:
            read = peer.read_until(lambda frame: frame.kind in (h2.HEADERS, h2.DATA, h2.PING))
            if read.kind == h2.PING:
                self.num_unacknowledged -= 1 if read.flags & h2.ACK else 0
                continue
            if read.kind == h2.HEADERS:
                peer.decoder.decode(peer._block(read))
            if read.flags & h2.END_STREAM:
                ids.append(read.stream_id)
                self._script(peer, read.stream_id)


def answer(peer: Peer, stream_id: int) -> None:
    peer.send(
        peer.headers(stream_id, HEADERS), h2.data(stream_id, h2.message(BODY)), peer.headers(stream_id, OK, end=True)
    )


@contextlib.contextmanager
def serving(script: Script, settings: dict[int, int] | None = None) -> Iterator[ScriptedServer]:
    server = ScriptedServer(script, settings)
    try:
        yield server
    finally:
        server.close()


@contextlib.asynccontextmanager
async def called(kind: str, server: ScriptedServer) -> AsyncIterator[Callable[[], grpc.aio.UnaryUnaryCall]]:
    async with opened(kind, server.address) as channel:
        yield lambda: channel.unary_unary("/test.Echo/Unary")(b"x", timeout=10)


@pytest.fixture(params=["aio", "weft-client"])
def kind(request: pytest.FixtureRequest) -> str:
    """The client that is tested."""
    return str(request.param)


@pytest.mark.parametrize("when", ["after_header", "during_data", "after_data"])
async def test_resets(kind: str, when: str) -> None:
    """A stream that is reset with NO_ERROR before its trailers is INTERNAL, and the connection goes on."""

    def script(peer: Peer, stream_id: int) -> None:
        if stream_id > 1:
            answer(peer, stream_id)
            return
        whole = h2.message(BODY)
        part = {"after_header": b"", "during_data": whole[:500], "after_data": whole}[when]
        pieces = [h2.data(stream_id, part)] if part else []
        peer.send(peer.headers(stream_id, HEADERS), *pieces, h2.reset(stream_id, h2.NO_ERROR))

    with serving(script) as server:
        async with called(kind, server) as call:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call()
            assert grpc.StatusCode.INTERNAL is caught.value.code()
            assert BODY == await call()
        assert [[1, 3]] == server.stream_ids


async def test_goaway(kind: str) -> None:
    """After GOAWAY a call goes to a new connection, without the application's doing."""

    def script(peer: Peer, stream_id: int) -> None:
        peer.send(h2.goaway(stream_id))
        answer(peer, stream_id)

    with serving(script) as server:
        async with called(kind, server) as call:
            assert [BODY] * 3 == [await call() for _ in range(3)]
        assert [[1], [1], [1]] == server.stream_ids


async def test_goaway_in_two_steps(kind: str) -> None:
    """A call on its way between the two GOAWAYs is served; one above the id of the second goes to a new connection."""

    def script(peer: Peer, stream_id: int) -> None:
        if len(server.stream_ids) > 1:
            answer(peer, stream_id)
        elif stream_id == 3:
            peer.send(h2.goaway(h2.MAX_WINDOW))
            answer(peer, 1)
            peer.send(h2.goaway(1))

    with serving(script) as server:
        async with called(kind, server) as call:
            assert [BODY, BODY] == await asyncio.gather(call(), call())
        assert [[1, 3], [1]] == server.stream_ids


async def test_pings(kind: str) -> None:
    """PINGs before and after headers and data are all acknowledged."""

    def script(peer: Peer, stream_id: int) -> None:
        ping = server.ping
        peer.send(ping(), peer.headers(stream_id, HEADERS), ping(), h2.data(stream_id, h2.message(BODY)), ping())
        peer.send(peer.headers(stream_id, OK, end=True), ping())
        while server.num_unacknowledged:
            read = peer.read_kind(h2.PING)
            server.num_unacknowledged -= 1 if read.flags & h2.ACK else 0

    with serving(script) as server:
        async with called(kind, server) as call:
            assert BODY == await call()
            assert BODY == await call()
    assert 0 == server.num_unacknowledged


async def test_max_streams(kind: str) -> None:
    """Calls beyond the server's limit of streams wait for their turn."""
    with serving(answer, {h2.MAX_CONCURRENT_STREAMS: 1}) as server:
        async with called(kind, server) as call:
            assert BODY == await call()
            assert [BODY] * 10 == await asyncio.gather(*(call() for _ in range(10)))
        assert [[*range(1, 23, 2)]] == server.stream_ids


async def test_data_frame_padding() -> None:
    """Padded frames give the message to Weft's client; gRPC's C core refuses them."""
    body = b"a" * 100_000

    def script(peer: Peer, stream_id: int) -> None:
        whole = h2.message(body)
        pieces = [whole[at : at + 1000] for at in range(0, len(whole), 1000)]
        peer.send(peer.headers(stream_id, HEADERS), *(h2.data(stream_id, piece, padding=255) for piece in pieces))
        peer.send(peer.headers(stream_id, OK, end=True))

    with serving(script) as server:
        async with called("weft-client", server) as call:
            assert body == await call()
