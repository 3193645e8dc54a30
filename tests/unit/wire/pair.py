"""Two connections without I/O whose bytes are carried by the test, and streams that record their events."""

import random
from typing import Any

from weft.wire.connection import ConnectionLimits
from weft.wire.connection.connection import Http2Connection
from weft.wire.connection.sending import Owner, Stream
from weft.wire.hpack import encode

REQUEST = encode([(":method", "POST"), (":scheme", "http"), (":path", "/a/b"), ("te", "trailers")])
RESPONSE = encode([(":status", "200")])
TRAILERS = encode([("grpc-status", "0")])


class RecordingStream(Stream):
    """Keeps what happens to it; gives credit for all data at once if ``reads``."""

    connection: Http2Connection

    def __init__(self, events: list[Any], *, reads: bool = True) -> None:
        self.events = events
        self.reads = reads
        self.data = b""

    def on_headers(self, headers, is_end):
        self.events.append(("headers", self.stream_id, dict(headers.fields), is_end))

    def on_data(self, data, is_end):
        self.data += data
        self.events.append(("data", self.stream_id, len(data), is_end))
        if self.reads:
            self.connection.grant(self)

    def on_reset(self, code, reason, *, is_unprocessed=False):
        self.events.append(("reset", self.stream_id, int(code), is_unprocessed))

    def on_drained(self):
        self.events.append(("drained", self.stream_id))


class End(Owner):
    """One end: owner and connection."""

    def __init__(self, limits: ConnectionLimits, *, is_client: bool, clock_s=lambda: 0.0) -> None:
        self.events: list[Any] = []
        self.accepted: list[RecordingStream] = []
        self.reads = True
        self.refuses = False
        self.connection = Http2Connection(self, limits, is_client=is_client, clock_s=clock_s)

    def accept_stream(self):
        if self.refuses:
            return None
        self.accepted.append(RecordingStream(self.events, reads=self.reads))
        return self.accepted[-1]

    def on_output(self):
        pass

    def on_peer_settings(self):
        self.events.append(("settings",))

    def on_peer_ping(self):
        self.events.append(("ping",))

    def on_ping_ack(self, data):
        self.events.append(("ping ack", data))

    def on_goaway(self, last_stream_id, code, debug):
        self.events.append(("goaway", last_stream_id, int(code)))

    def on_stream_closed(self):
        pass

    def take(self) -> bytes:
        """Its output as bytes."""
        return b"".join(map(bytes, self.connection.take_output()))


class Pair:
    """A client and a server that have exchanged their settings."""

    def __init__(
        self, server: ConnectionLimits | None = None, client: ConnectionLimits | None = None, seed: int | None = None
    ) -> None:
        self.server = End(server or ConnectionLimits(), is_client=False)
        self.client = End(client or ConnectionLimits(), is_client=True)
        self.random = None if seed is None else random.Random(seed)
        self.carry()
        self.server.events.clear()
        self.client.events.clear()

    def carry(self) -> None:
        """Carry all bytes both ways, in pieces of random sizes if there is a seed, until none are left."""
        while True:
            moved = False
            for source, target in ((self.client, self.server), (self.server, self.client)):
                data = source.take()
                moved = moved or bool(data)
                while data:
                    size = len(data) if self.random is None else self.random.choice((1, 9, 20, 1000, 20_000, 70_000))
                    target.connection.receive(data[:size])
                    data = data[size:]
                source.connection.pump()
            if not moved:
                return

    def request(self, body: bytes = b"", *, is_end: bool = True) -> RecordingStream:
        """A request of the client, carried to the server."""
        stream = RecordingStream(self.client.events)
        self.client.connection.open_stream(stream)
        self.client.connection.send_message(stream, REQUEST, b"", body, is_end=is_end)
        self.carry()
        return stream
