"""RFC 9113, section 5.2: all that is sent counts, and windows are given back for it, also where a stream is over."""

import pytest
from tests.wire import peer as h2
from tests.wire.conformance import ECHO, SLOW, opened, raw_headers
from tests.wire.conftest import StartEcho
from tests.wire.echo_process import EchoService
from tests.wire.peer import Peer, request_fields

STREAM_BYTES = 60_000  # fits each server's first window of a stream


class Credit:
    """What the server lets its peer send over all streams.

    Attributes:
        sent: Bytes of DATA.
        granted: The sum of WINDOW_UPDATE on the connection, and the first window.
    """

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self.sent = 0
        self.granted = 65_535
        self._settle()

    def _settle(self) -> None:
        """Reads what has come until SETTINGS are acknowledged."""
        self._peer.send(h2.settings_frame())
        while (read := self._peer.read()).kind != h2.SETTINGS or not read.flags & h2.ACK:
            assert read.kind != h2.GOAWAY, read
            if read.kind == h2.WINDOW_UPDATE and read.stream_id == 0:
                self.granted += int.from_bytes(read.payload, "big")

    def pour(self, stream_id: int, size: int) -> None:
        """Sends so many bytes of DATA on a stream, once the window of the connection has room for them.

        Raises:
            AssertionError: The window stays too small.
        """
        for _ in range(50):
            if self.sent + size <= self.granted:
                break
            self._settle()
        assert self.sent + size <= self.granted, f"{self.sent} bytes are sent, {self.granted} were granted"
        while size:
            piece = min(size, 1 << 14)
            self._peer.send(h2.data(stream_id, bytes(piece)))
            self.sent += piece
            size -= piece


def malformed(peer: Peer, stream_id: int) -> None:
    peer.send(raw_headers(stream_id, [*request_fields(ECHO), ("connection", "close")]))


def unknown(peer: Peer, stream_id: int) -> None:
    peer.send(opened(peer, stream_id, "/test.Echo/Missing"))


def too_large(peer: Peer, stream_id: int) -> None:
    peer.send(opened(peer, stream_id, ECHO), h2.data(stream_id, b"\0\xff\xff\xff\xff"))


def reset(peer: Peer, stream_id: int) -> None:
    peer.send(opened(peer, stream_id, SLOW), h2.reset(stream_id))


@pytest.mark.parametrize("begin", [malformed, unknown, too_large, reset])
def test_data_of_streams_that_are_over(start_echo: StartEcho, begin) -> None:
    """DATA that was on its way to a stream that has ended is counted, and given back to the other streams."""
    echo = start_echo()
    with Peer.connect(echo.address) as peer:
        peer.handshake()
        credit = Credit(peer)
        for stream_id in range(1, 2 * (credit.granted // STREAM_BYTES + 8), 2):
            begin(peer, stream_id)
            credit.pour(stream_id, STREAM_BYTES)
        last = stream_id + 2
        peer.send(peer.request(ECHO, b"a", stream_id=last))
        assert [b"a"] == peer.read_answer(last).messages


@pytest.mark.parametrize("padding", [None, 255])
def test_a_message_of_several_windows(echo: EchoService, padding: int | None) -> None:
    """A message arrives while its client keeps to the windows, which padding uses up as data do."""
    with Peer.connect(echo.address) as peer:
        peer.handshake()
        windows = {0: 65_535, 1: peer.settings.get(h2.INITIAL_WINDOW_SIZE, 65_535)}
        peer.send(opened(peer, 1, "/test.Echo/Size"))
        body = h2.message(bytes(2 * windows[1]))
        frame_bytes, overhead = (1 << 14, 0) if padding is None else (1024, padding + 1)
        at = 0
        while at < len(body):
            content = min(len(body) - at, frame_bytes - overhead)
            if content + overhead > min(windows.values()):
                read = peer.read()
                assert read.kind not in (h2.GOAWAY, h2.RST_STREAM), read
                if read.kind == h2.WINDOW_UPDATE:
                    windows[read.stream_id] += int.from_bytes(read.payload, "big")
                continue
            is_last = at + content == len(body)
            peer.send(h2.data(1, body[at : at + content], end=is_last, padding=padding))
            at += content
            windows = {stream_id: window - content - overhead for stream_id, window in windows.items()}
        assert [b"%d" % (len(body) - 5)] == peer.read_answer().messages
