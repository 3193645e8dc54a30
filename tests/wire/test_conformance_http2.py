"""RFC 9113, sections 3 to 5: the connection preface, frames and streams; and RFC 7540, section 5.3.1, on priorities."""

import pytest
from tests.wire import peer as h2
from tests.wire.conformance import (
    BIDI,
    ECHO,
    Case,
    alive,
    alive_without_stream,
    answered,
    asked,
    block,
    check,
    connection_error,
    each,
    finished,
    fixed,
    opened,
    priority,
    raw_headers,
    stream_error,
    waiting,
)
from tests.wire.conftest import StartEcho
from tests.wire.echo_process import EchoService
from tests.wire.peer import Closed, Peer, frame, request_fields

FIELDS = request_fields(ECHO)


def _over_max_frame_size(peer: Peer, kind: int, payload: bytes = b"") -> list[bytes]:
    size = peer.settings.get(h2.MAX_FRAME_SIZE, 1 << 14) + 1
    if size > (1 << 24) - 1:
        pytest.skip("takes frames of any size")
    return [frame(kind, h2.END_HEADERS, 1, (payload + bytes(1 << 16))[: min(size, 1 << 16)], length=size)]


def _finished_then(*pieces: bytes):
    def send(peer: Peer) -> tuple[bytes, ...]:
        finished(peer)
        return pieces

    return send


def _waiting_then(*pieces: bytes):
    def send(peer: Peer) -> tuple[bytes, ...]:
        waiting(peer)
        return pieces

    return send


FRAMES = [
    Case("4.1", "ignores a frame of unknown type", fixed(frame(0x16, 0, 0, b"12345678")), alive),
    Case("4.1", "ignores a frame of unknown type on an idle stream", fixed(frame(0x16, 0, 1, bytes(16384))), alive),
    Case("4.1", "ignores undefined flags", fixed(frame(h2.PING, 0x16, 0, b"12345678")), alive),
    Case("4.1", "ignores the reserved bit", fixed(frame(h2.PING, 0, 1 << 31, b"12345678")), alive),
    Case(
        "4.2",
        "takes DATA of 16,384 bytes",
        lambda p: [opened(p, path=ECHO), h2.data(1, h2.message(bytes(16379)), end=True)],
        answered(bytes(16379)),
    ),
    Case(
        "4.2",
        "refuses DATA above SETTINGS_MAX_FRAME_SIZE",
        lambda p: [opened(p), *_over_max_frame_size(p, h2.DATA)],
        stream_error(h2.FRAME_SIZE_ERROR),
    ),
    Case(
        "4.2",
        "refuses HEADERS above SETTINGS_MAX_FRAME_SIZE",
        lambda p: _over_max_frame_size(p, h2.HEADERS, block(FIELDS)),
        connection_error(h2.FRAME_SIZE_ERROR),
    ),
    Case(
        "4.2",
        "refuses a frame of unknown type above SETTINGS_MAX_FRAME_SIZE",
        lambda p: _over_max_frame_size(p, 0x16),
        connection_error(h2.FRAME_SIZE_ERROR),
    ),
    Case(
        "4.3",
        "refuses an invalid field block",
        fixed(frame(h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, 1, b"\x40" + b"\xff" * 8)),
        connection_error(h2.COMPRESSION_ERROR),
    ),
    Case(
        "4.3",
        "refuses PRIORITY within a field block",
        fixed(raw_headers(1, FIELDS, 0), frame(h2.PRIORITY, 0, 1, priority())),
        connection_error(h2.PROTOCOL_ERROR),
    ),
    Case(
        "4.3",
        "refuses HEADERS of another stream within a field block",
        fixed(raw_headers(1, FIELDS, 0), raw_headers(3, FIELDS)),
        connection_error(h2.PROTOCOL_ERROR),
    ),
    Case("5.5", "ignores an unknown frame between others", lambda p: [frame(0xFE, 0xFF, 7), asked(p)], answered(b"a")),
    Case(
        "5.5",
        "refuses an unknown frame within a field block",
        fixed(raw_headers(1, FIELDS, 0), frame(0xFE, 0, 0, b"12345678")),
        connection_error(h2.PROTOCOL_ERROR),
    ),
]

STREAMS = [
    Case("5.1", "idle: refuses DATA", fixed(h2.data(1, b"test", end=True)), connection_error(h2.PROTOCOL_ERROR)),
    Case("5.1", "idle: refuses RST_STREAM", fixed(h2.reset(1)), connection_error(h2.PROTOCOL_ERROR)),
    Case("5.1", "idle: refuses WINDOW_UPDATE", fixed(h2.window_update(1, 100)), connection_error(h2.PROTOCOL_ERROR)),
    Case(
        "5.1",
        "idle: refuses CONTINUATION",
        fixed(frame(h2.CONTINUATION, h2.END_HEADERS, 1, block(FIELDS))),
        connection_error(h2.PROTOCOL_ERROR),
    ),
    Case("5.1", "idle: takes PRIORITY", fixed(frame(h2.PRIORITY, 0, 1, priority())), alive),
    Case("5.1", "idle: refuses DATA on a stream of the server", fixed(h2.data(2)), connection_error(h2.PROTOCOL_ERROR)),
    Case(
        "5.1",
        "half-closed (remote): refuses DATA",
        _waiting_then(h2.data(1, b"test", end=True)),
        stream_error(h2.STREAM_CLOSED),
    ),
    Case(
        "5.1",
        "half-closed (remote): refuses HEADERS",
        _waiting_then(raw_headers(1, FIELDS, h2.END_HEADERS | h2.END_STREAM)),
        stream_error(h2.STREAM_CLOSED),
    ),
    Case(
        "5.1",
        "half-closed (remote): refuses CONTINUATION",
        _waiting_then(frame(h2.CONTINUATION, h2.END_HEADERS, 1, block(FIELDS))),
        stream_error(h2.STREAM_CLOSED, h2.PROTOCOL_ERROR),
    ),
    Case("5.1", "half-closed (remote): takes WINDOW_UPDATE", _waiting_then(h2.window_update(1, 100)), alive),
    Case("5.1", "half-closed (remote): takes PRIORITY", _waiting_then(frame(h2.PRIORITY, 0, 1, priority())), alive),
    Case("5.1", "half-closed (remote): takes RST_STREAM", _waiting_then(h2.reset(1)), alive_without_stream),
    Case(
        "5.1",
        "closed by RST_STREAM: refuses DATA",
        lambda p: [opened(p), h2.reset(1), h2.data(1, b"test", end=True)],
        stream_error(h2.STREAM_CLOSED),
    ),
    Case(
        "5.1",
        "closed by RST_STREAM: refuses HEADERS",
        lambda p: [opened(p), h2.reset(1), raw_headers(1, FIELDS, h2.END_HEADERS | h2.END_STREAM)],
        stream_error(h2.STREAM_CLOSED),
    ),
    Case(
        "5.1",
        "closed by RST_STREAM: refuses CONTINUATION",
        lambda p: [opened(p), h2.reset(1), frame(h2.CONTINUATION, h2.END_HEADERS, 1, block(FIELDS))],
        stream_error(h2.STREAM_CLOSED, h2.PROTOCOL_ERROR),
    ),
    Case("5.1", "closed: refuses DATA", _finished_then(h2.data(1, b"test", end=True)), stream_error(h2.STREAM_CLOSED)),
    Case(
        "5.1",
        "closed: refuses HEADERS",
        _finished_then(raw_headers(1, FIELDS, h2.END_HEADERS | h2.END_STREAM)),
        connection_error(h2.STREAM_CLOSED),
    ),
    Case(
        "5.1",
        "closed: refuses CONTINUATION",
        _finished_then(frame(h2.CONTINUATION, h2.END_HEADERS, 1, block(FIELDS))),
        connection_error(h2.STREAM_CLOSED, h2.PROTOCOL_ERROR),
    ),
    Case("5.1", "closed: takes PRIORITY", _finished_then(frame(h2.PRIORITY, 0, 1, priority())), alive),
    Case("5.1", "closed: takes WINDOW_UPDATE", _finished_then(h2.window_update(1, 100)), alive),
    Case("5.1", "closed: takes RST_STREAM", _finished_then(h2.reset(1)), alive),
    Case(
        "5.1.1",
        "refuses an even stream id",
        fixed(raw_headers(2, FIELDS, h2.END_HEADERS | h2.END_STREAM)),
        connection_error(h2.PROTOCOL_ERROR),
    ),
    Case(
        "5.1.1",
        "refuses a stream id below an earlier one",
        lambda p: [opened(p, 5), raw_headers(3, FIELDS)],
        connection_error(h2.PROTOCOL_ERROR, h2.STREAM_CLOSED),
    ),
    Case("5.1.1", "takes the greatest stream id", lambda p: [asked(p, 2**31 - 1)], answered(b"a", stream_id=2**31 - 1)),
    Case("5.1.1", "takes ids that leave some out", lambda p: [opened(p, 3), asked(p, 9)], answered(b"a", stream_id=9)),
    Case(
        "5.3.1 of RFC 7540",
        "refuses HEADERS that depend on their own stream",
        fixed(frame(h2.HEADERS, h2.END_HEADERS | h2.PRIORITIZED, 1, priority(1) + block(request_fields(BIDI)))),
        stream_error(h2.PROTOCOL_ERROR),
    ),
    Case(
        "5.3.1 of RFC 7540",
        "refuses PRIORITY that depends on its own stream",
        fixed(frame(h2.PRIORITY, 0, 2, priority(2))),
        stream_error(h2.PROTOCOL_ERROR, stream_id=2),
    ),
]


@each([*FRAMES, *STREAMS])
def test_frames_and_streams(case: Case, peer: Peer, wire: str) -> None:
    """The server does what the case says."""
    check(case, peer, wire)


def test_settings_are_the_servers_first_frame(echo: EchoService) -> None:
    """The server's preface is SETTINGS, whatever the client asks for first (section 3.4)."""
    with Peer.connect(echo.address) as peer:
        peer.send(h2.PREFACE, h2.settings_frame(), asked(peer))
        first = peer.read()
        assert (h2.SETTINGS, 0, 0) == (first.kind, first.flags & h2.ACK, first.stream_id)
        assert [b"a"] == peer.read_answer().messages


def test_a_preface_in_pieces(echo: EchoService) -> None:
    """The preface and a request may arrive byte by byte (section 3.4)."""
    with Peer.connect(echo.address) as peer:
        for byte in h2.PREFACE + h2.settings_frame() + asked(peer):
            peer.send(bytes([byte]))
        assert [b"a"] == peer.read_answer().messages


@pytest.mark.parametrize(
    "preface", [b"INVALID CONNECTION PREFACE\r\n\r\n", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"]
)
def test_another_preface(echo: EchoService, preface: bytes) -> None:
    """What is not the preface of HTTP/2 ends the connection (section 3.4)."""
    with Peer.connect(echo.address) as peer:
        peer.send(preface)
        peer.wait_gone()


def test_a_preface_without_settings(echo: EchoService, wire: str) -> None:
    """The client's first frame must be SETTINGS (section 3.4)."""
    with Peer.connect(echo.address) as peer:
        peer.send(h2.PREFACE)
        case = Case("3.4", "", fixed(h2.ping()), connection_error(h2.PROTOCOL_ERROR))
        check(case, peer, wire)


def test_a_connection_error_is_announced(peer: Peer) -> None:
    """A connection error is told by GOAWAY with the last stream that was taken; then the connection closes (5.4.1)."""
    finished(peer)
    peer.send(frame(h2.PING, 0, 0, b"123456"))
    goaways = [read for read in peer.wait_closed() if read.kind == h2.GOAWAY]
    assert [(h2.FRAME_SIZE_ERROR, 1)] == [(read.error_code, read.last_stream_id) for read in goaways]


def test_streams_beyond_the_limit_are_refused(start_echo: StartEcho) -> None:
    """A stream beyond SETTINGS_MAX_CONCURRENT_STREAMS is refused; when one has ended, there is room again (5.1.2)."""
    echo = start_echo(max_concurrent_streams=2)
    with Peer.connect(echo.address) as peer:
        peer.handshake()
        assert 2 == peer.settings[h2.MAX_CONCURRENT_STREAMS]
        peer.send(opened(peer, 1), opened(peer, 3), opened(peer, 5))
        try:
            assert peer.wait_reset(5) in (h2.REFUSED_STREAM, h2.PROTOCOL_ERROR)
        except Closed:
            return
        peer.send(h2.data(1, end=True))
        peer.read_answer(1)
        peer.send(asked(peer, 7))
        assert [b"a"] == peer.read_answer(7).messages
