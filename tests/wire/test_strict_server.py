"""A server on python ``h2``, which refuses whatever breaks the protocol: what our client sends to it."""

import asyncio
import contextlib
import socket
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings
import pytest

from weft.wire.client import Channel

CODES = h2.settings.SettingCodes
#: Windows, frames, tables and streams that a server may announce.
SETTINGS = [
    {},
    {CODES.INITIAL_WINDOW_SIZE: 10, CODES.HEADER_TABLE_SIZE: 0},
    {CODES.INITIAL_WINDOW_SIZE: 1 << 20, CODES.MAX_FRAME_SIZE: 1 << 20, CODES.HEADER_TABLE_SIZE: 1 << 16},
    {CODES.MAX_CONCURRENT_STREAMS: 3},
]


class StrictServer:
    """Echoes what comes on each stream when the client has ended it; on a path that ends with ``Silent``, never.

    Args:
        settings: The server's own.

    Attributes:
        settings: The same.
        address: Where it listens.
        faults: What h2 has said against the client.
        num_reset: Streams that the client has reset.
    """

    def __init__(self, settings: dict[int, int]) -> None:
        self.settings = settings
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.faults: list[Exception] = []
        self.num_reset = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        """All of it has ended; the client has closed its connection."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._listener.close()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # it was closed
            while True:
                accepted, _ = self._listener.accept()
                with accepted:
                    accepted.settimeout(10)
                    self._serve(accepted)

    def _serve(self, accepted: socket.socket) -> None:
        connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        connection.local_settings = h2.settings.Settings(client=False, initial_values=self.settings)
        connection.max_inbound_frame_size = connection.local_settings.max_frame_size
        connection.initiate_connection()
        paths: dict[int, bytes] = {}
        bodies: dict[int, bytearray] = defaultdict(bytearray)
        answers: dict[int, memoryview] = {}
        begun: set[int] = set()
        try:
            accepted.sendall(connection.data_to_send())
            while received := accepted.recv(1 << 16):
                for event in connection.receive_data(received):
                    match event:
                        case h2.events.RequestReceived():
                            paths[event.stream_id] = dict(event.headers)[b":path"]
                        case h2.events.DataReceived():
                            bodies[event.stream_id] += event.data
                            connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                        case h2.events.StreamReset():
                            self.num_reset += 1
                            answers.pop(event.stream_id, None)
                        case h2.events.StreamEnded() if not paths[event.stream_id].endswith(b"Silent"):
                            answers[event.stream_id] = memoryview(bytes(bodies.pop(event.stream_id, b"")))
                for stream_id in sorted(answers):  # those that were reset with the same bytes are not among them
                    if stream_id not in begun:
                        begun.add(stream_id)
                        fields = [(":status", "200"), ("content-type", "application/grpc")]
                        connection.send_headers(stream_id, fields)
                    answers[stream_id] = self._sent(connection, stream_id, answers[stream_id])
                    if not answers[stream_id]:
                        del answers[stream_id]
                        connection.send_headers(stream_id, [("grpc-status", "0"), ("trailing-a", "b")], end_stream=True)
                accepted.sendall(connection.data_to_send())
        except h2.exceptions.ProtocolError as error:
            self.faults.append(error)
        except OSError:
            pass  # the client has closed

    @staticmethod
    def _sent(connection: h2.connection.H2Connection, stream_id: int, left: memoryview) -> memoryview:
        """Sends what windows allow, and returns the rest."""
        while size := min(
            len(left), connection.local_flow_control_window(stream_id), connection.max_outbound_frame_size
        ):
            connection.send_data(stream_id, bytes(left[:size]))
            left = left[size:]
        return left


@pytest.fixture(params=SETTINGS, ids=str)
def server(request: pytest.FixtureRequest) -> Iterator[StrictServer]:
    running = StrictServer(request.param)
    yield running
    running.close()
    assert [] == running.faults


@pytest.fixture
async def channel(server: StrictServer) -> AsyncIterator[Channel]:
    opened = Channel(server.address)
    yield opened
    await opened.close()


async def test_calls_of_every_kind(channel: Channel, server: StrictServer) -> None:
    """Calls of many sizes with metadata of all kinds, many at once, of several windows, and streams."""
    call: Any = channel.unary_unary("/a/Echo")
    for size in (0, 1, 100, 20_000):
        metadata = (("x-id", str(size)), ("x-bin", bytes(size % 999)), ("authorization", "Bearer x"))
        assert bytes(size) == await call(bytes(size), metadata=metadata, timeout=20)
    bodies = [b"%d" % number * number for number in range(60)]
    assert bodies == await asyncio.gather(*(call(body, timeout=20) for body in bodies))
    large = bytes(3_000 if server.settings.get(CODES.INITIAL_WINDOW_SIZE) == 10 else 1_000_000)
    assert [large] * 2 == await asyncio.gather(call(large, timeout=20), call(large, timeout=20))
    stream: Any = channel.stream_stream("/a/Echo")
    for number in (0, 1, 30):
        requests = [b"%d" % index * 9 for index in range(number)]
        assert requests == [answer async for answer in stream(iter(requests), timeout=20)]


async def test_cancellation_and_deadlines(channel: Channel, server: StrictServer) -> None:
    """Calls that are cancelled or whose time is over are reset, before their answers and among them."""
    silent: Any = channel.unary_unary("/a/Silent")
    echo: Any = channel.unary_unary("/a/Echo")
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await silent(b"a", timeout=0.1)
    assert grpc.StatusCode.DEADLINE_EXCEEDED is error.value.code()
    calls = [silent(b"a"), echo(b"b" * 5000), echo(b"c")]
    for call in calls:
        call.cancel()
    assert b"d" == await echo(b"d", timeout=20)
    half = channel.stream_stream("/a/Echo")()
    await half.write(b"a")
    half.cancel()
    assert b"e" == await echo(b"e", timeout=20)
    assert server.num_reset
