"""A client on python ``h2``, which refuses whatever breaks the protocol: unary calls, streams, large messages."""

import socket
from collections import defaultdict
from collections.abc import Iterator
from typing import Self

import h2.config
import h2.connection
import h2.events
import h2.settings
import pytest
from tests.wire.echo_process import EchoService
from tests.wire.peer import message, request_fields, split_messages

TIMEOUT_S = 30.0
CODES = h2.settings.SettingCodes


class StrictClient:
    """A blocking client; a fault of the server raises ``h2.exceptions.ProtocolError``.

    Args:
        address: ``host:port``.
        settings: The client's own.

    Attributes:
        bodies, headers, trailers: By stream.
        ended: Streams that the server has ended.
        resets: Codes of RST_STREAM by stream.
        pings, acknowledged: How many PING and SETTINGS the server has acknowledged.
    """

    def __init__(self, address: str, settings: dict[int, int] | None = None) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), TIMEOUT_S)
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
        if settings:
            self.h2.local_settings = h2.settings.Settings(client=True, initial_values=settings)
            self.h2.max_inbound_frame_size = self.h2.local_settings.max_frame_size
        self.bodies: dict[int, bytearray] = defaultdict(bytearray)
        self.headers: dict[int, dict[str, str]] = {}
        self.trailers: dict[int, dict[str, str]] = {}
        self.ended: set[int] = set()
        self.resets: dict[int, int] = {}
        self.pings = self.acknowledged = 0
        self.h2.initiate_connection()
        self.flush()

    def flush(self) -> None:
        """What h2 has to send is sent."""
        self._socket.sendall(self.h2.data_to_send())

    def step(self) -> bool:
        """Processes what the server sends next; False once it has closed the connection."""
        received = self._socket.recv(1 << 16)
        for event in self.h2.receive_data(received) if received else ():
            self._on_event(event)
        if self.h2.state_machine.state is not h2.connection.ConnectionState.CLOSED:
            self.flush()
        return bool(received)

    def _on_event(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.ResponseReceived():
                self.headers[event.stream_id] = dict(event.headers)
            case h2.events.TrailersReceived():
                self.trailers[event.stream_id] = dict(event.headers)
            case h2.events.DataReceived():
                self.bodies[event.stream_id] += event.data
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            case h2.events.StreamEnded():
                self.ended.add(event.stream_id)
            case h2.events.StreamReset():
                self.resets[event.stream_id] = int(event.error_code)
            case h2.events.PingAckReceived():
                self.pings += 1
            case h2.events.SettingsAcknowledged():
                self.acknowledged += 1
            case h2.events.ConnectionTerminated():
                assert 0 == event.error_code, event

    def begin(self, path: str, metadata: list[tuple[str, str]] | None = None) -> int:
        """A new stream, open for messages."""
        stream_id = self.h2.get_next_available_stream_id()
        self.h2.send_headers(stream_id, [*request_fields(path), *(metadata or [])])
        return stream_id

    def send(self, stream_id: int, payload: bytes, *, end: bool = False) -> None:
        """All of it, as windows allow."""
        view = memoryview(payload)
        while view or end:
            size = min(len(view), self.h2.local_flow_control_window(stream_id), self.h2.max_outbound_frame_size)
            if size or not view:
                is_last = size == len(view)
                self.h2.send_data(stream_id, bytes(view[:size]), end_stream=end and is_last)
                view, end = view[size:], end and not is_last
                self.flush()
            else:
                assert self.step()

    def wait(self, stream_id: int) -> list[bytes]:
        """The messages of a stream, once the server has ended it with status 0."""
        while stream_id not in self.ended:
            assert stream_id not in self.resets, self.resets
            assert self.step()
        trailers = self.trailers.get(stream_id, self.headers[stream_id])
        assert "0" == trailers["grpc-status"], trailers
        return split_messages(bytes(self.bodies.pop(stream_id, b"")))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Without an error before, says GOAWAY and closes; until the server does so too, it keeps to the protocol."""
        with self._socket:
            if error is None:
                self.h2.close_connection()
                self.flush()
                self._socket.shutdown(socket.SHUT_WR)
                while self.step():
                    pass


@pytest.fixture
def client(echo: EchoService) -> Iterator[StrictClient]:
    with StrictClient(echo.address) as connected:
        yield connected


def test_calls_of_every_kind(client: StrictClient) -> None:
    """Unary calls, thirty at a time, large messages both ways at once, and the streaming forms, interleaved."""
    for start in range(10):
        streams = {}
        for number in range(30):
            stream_id = client.begin("/test.Echo/Unary", [("x-id", f"{start}-{number}"), ("x-same", "same")])
            streams[stream_id] = b"%d" % number * number
            client.send(stream_id, message(streams[stream_id]), end=True)
        for stream_id, body in streams.items():
            assert [body] == client.wait(stream_id)
    body = bytes(range(256)) * 12_000
    first, second = client.begin("/test.Echo/Unary"), client.begin("/test.Echo/Unary")
    client.send(first, message(body), end=True)
    client.send(second, message(body[::-1]), end=True)
    assert [body[::-1]] == client.wait(second)
    assert [body] == client.wait(first)
    bidi, upload = client.begin("/test.Echo/BidiStream"), client.begin("/test.Echo/ClientStream")
    for number in range(50):
        client.send(bidi, message(b"%d" % number))
        client.send(upload, message(bytes(1000)))
    download = client.begin("/test.Echo/ServerStream")
    client.send(download, message(b"40 30000"), end=True)
    client.send(bidi, b"", end=True)
    client.send(upload, b"", end=True)
    assert [b"50 50000"] == client.wait(upload)
    assert [30_000] * 40 == [len(body) for body in client.wait(download)]
    assert [b"%d" % number for number in range(50)] == client.wait(bidi)


def test_errors_cancellation_and_pings(client: StrictClient) -> None:
    """Calls that fail or are cancelled leave the connection as it should be."""
    for path in ("/test.Echo/Missing", "/test.Echo/Status"):
        stream_id = client.begin(path, [("want-code", "5"), ("want-details", "100% \u00e4".encode().decode("latin-1"))])
        client.send(stream_id, message(b""), end=True)
        while stream_id not in client.ended:
            assert client.step()
        assert "0" != client.trailers.get(stream_id, client.headers[stream_id])["grpc-status"]
    slow = client.begin("/test.Echo/Slow")
    client.send(slow, message(b""), end=True)
    client.h2.reset_stream(slow, 8)
    client.h2.ping(b"12345678")
    client.flush()
    while not client.pings:
        assert client.step()
    last = client.begin("/test.Echo/Unary")
    client.send(last, message(b"a"), end=True)
    assert [b"a"] == client.wait(last)


@pytest.mark.parametrize(
    "settings",
    [
        {CODES.INITIAL_WINDOW_SIZE: 1},
        {CODES.INITIAL_WINDOW_SIZE: 2**31 - 1, CODES.MAX_FRAME_SIZE: 2**24 - 1},
        {CODES.HEADER_TABLE_SIZE: 0},
        {CODES.HEADER_TABLE_SIZE: 1 << 20, CODES.MAX_FRAME_SIZE: 20_000},
        {CODES.MAX_CONCURRENT_STREAMS: 0, CODES.ENABLE_PUSH: 0},
    ],
    ids=str,
)
def test_settings_of_the_client(echo: EchoService, settings: dict[int, int]) -> None:
    """The server keeps to the client's settings, from the first answer on."""
    with StrictClient(echo.address, settings) as client:
        for size in (0, 10, 700, 3000 if CODES.INITIAL_WINDOW_SIZE in settings else 300_000):
            stream_id = client.begin("/test.Echo/Big")
            client.send(stream_id, message(b"%d" % size), end=True)
            assert [bytes(size)] == client.wait(stream_id)


def test_settings_that_change(client: StrictClient) -> None:
    """Windows, frames and tables that grow and shrink between calls and within one are kept to."""
    settings = ((100, 0, 16_384), (70_000, 4096, 30_000), (10, 100, 16_384), (500_000, 0, 1 << 20))
    for number, (window, table, frame) in enumerate(settings):
        while client.acknowledged <= number:  # h2 takes any acknowledgement for that of its newest settings
            assert client.step()
        stream_id = client.begin("/test.Echo/Big")
        client.send(stream_id, message(b"2000"), end=True)
        client.h2.update_settings(
            {CODES.INITIAL_WINDOW_SIZE: window, CODES.HEADER_TABLE_SIZE: table, CODES.MAX_FRAME_SIZE: frame}
        )
        client.flush()
        assert [bytes(2000)] == client.wait(stream_id)
