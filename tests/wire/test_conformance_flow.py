"""RFC 9113, sections 6.8 to 6.10: GOAWAY, flow control, and field blocks that are continued."""

from collections.abc import Iterable

from tests.wire import peer as h2
from tests.wire.conformance import (
    ECHO,
    Case,
    answered,
    asked,
    block,
    check,
    connection_error,
    each,
    fixed,
    opened,
    raw_headers,
    stream_error,
)
from tests.wire.peer import Peer, frame, request_fields

FIELDS = request_fields(ECHO)
BLOCK = block(FIELDS)
BODY = h2.data(1, h2.message(b"a"), end=True)
BIG = "/test.Echo/Big"


def initial_window(size: int) -> bytes:
    return h2.settings_frame({h2.INITIAL_WINDOW_SIZE: size})


def continuation(payload: bytes, *, end: bool = False, stream_id: int = 1) -> bytes:
    return frame(h2.CONTINUATION, h2.END_HEADERS if end else 0, stream_id, payload)


def sizes_of_data(peer: Peer) -> list[int]:
    """The sizes of DATA that come while SETTINGS are acknowledged three times over."""
    sizes = []
    for _ in range(3):
        peer.send(h2.settings_frame())
        while (read := peer.read()).kind != h2.SETTINGS or not read.flags & h2.ACK:
            assert read.kind not in (h2.GOAWAY, h2.RST_STREAM), read
            if read.kind == h2.DATA:
                sizes.append(len(read.payload))
    return sizes


def one_byte(peer: Peer, _: bool) -> None:
    """DATA of one byte comes, and no more until the window grows."""
    first = peer.read_kind(h2.DATA, 1)
    assert [1] == [len(first.payload), *sizes_of_data(peer)]
    peer.send(h2.window_update(1, 3))
    second = peer.read_kind(h2.DATA, 1)
    assert 3 == sum([len(second.payload), *sizes_of_data(peer)])


def _adjusted_after_headers(peer: Peer) -> Iterable[bytes]:
    peer.send(initial_window(0), asked(peer))
    assert [] == sizes_of_data(peer)
    return [initial_window(1)]


def _negative_window(peer: Peer) -> Iterable[bytes]:
    peer.send(initial_window(3), peer.request(BIG, b"100"))
    assert 3 == len(peer.read_kind(h2.DATA, 1).payload)
    peer.send(initial_window(2), h2.window_update(1, 1))
    assert [] == sizes_of_data(peer)
    return [h2.window_update(1, 1)]


def _windows_of_both(peer: Peer) -> Iterable[bytes]:
    """The window of the connection is used up by a stream; another waits although its own window is open."""
    peer.send(h2.settings_frame({h2.INITIAL_WINDOW_SIZE: 1 << 20}), peer.request(BIG, b"100000"))
    came = 0
    while came < 65_535:
        came += len(peer.read_kind(h2.DATA, 1).payload)
    assert 65_535 == came
    assert [] == sizes_of_data(peer)
    return [h2.window_update(0, 1)]


def small_frames(peer: Peer, _: bool) -> None:
    """DATA comes in frames of at most 16,384 bytes."""
    came = 0
    while came < 40_005:
        size = len(peer.read_kind(h2.DATA, 1).payload)
        assert size <= 1 << 14
        came += size


def a_byte_more(peer: Peer, _: bool) -> None:
    """One byte comes on stream 1."""
    assert 1 == len(peer.read_kind(h2.DATA, 1).payload)


FLOW_CONTROL = [
    Case("6.9", "takes WINDOW_UPDATE on the connection", lambda p: [h2.window_update(0, 1), asked(p)], answered(b"a")),
    Case(
        "6.9",
        "takes WINDOW_UPDATE on a stream",
        lambda p: [opened(p, path=ECHO), h2.window_update(1, 1), BODY],
        answered(b"a"),
    ),
    Case(
        "6.9",
        "refuses an increment of 0 on the connection",
        fixed(h2.window_update(0, 0)),
        connection_error(h2.PROTOCOL_ERROR),
    ),
    Case(
        "6.9",
        "refuses an increment of 0 on a stream",
        lambda p: [opened(p), h2.window_update(1, 0)],
        stream_error(h2.PROTOCOL_ERROR),
    ),
    Case(
        "6.9",
        "refuses WINDOW_UPDATE of 3 bytes",
        fixed(frame(h2.WINDOW_UPDATE, 0, 0, b"\0\0\1")),
        connection_error(h2.FRAME_SIZE_ERROR),
    ),
    Case(
        "6.9",
        "refuses WINDOW_UPDATE of 5 bytes on a stream",
        lambda p: [opened(p), frame(h2.WINDOW_UPDATE, 0, 1, b"\0\0\0\1\0")],
        connection_error(h2.FRAME_SIZE_ERROR),
    ),
    Case("6.9.1", "sends no more than the window of a stream", lambda p: [initial_window(1), asked(p)], one_byte),
    Case("6.9.1", "sends no more than the window of the connection", _windows_of_both, a_byte_more),
    Case(
        "4.2",
        "sends no frame above the client's SETTINGS_MAX_FRAME_SIZE",
        lambda p: [peer_request(p, b"40000")],
        small_frames,
    ),
    Case(
        "6.9.1",
        "refuses a window of the connection above 2^31-1",
        fixed(h2.window_update(0, h2.MAX_WINDOW), h2.window_update(0, h2.MAX_WINDOW)),
        connection_error(h2.FLOW_CONTROL_ERROR),
    ),
    Case(
        "6.9.1",
        "refuses a window of a stream above 2^31-1",
        lambda p: [opened(p), h2.window_update(1, h2.MAX_WINDOW), h2.window_update(1, h2.MAX_WINDOW)],
        stream_error(h2.FLOW_CONTROL_ERROR),
    ),
    Case("6.9.2", "adjusts windows of open streams to SETTINGS", _adjusted_after_headers, a_byte_more),
    Case("6.9.2", "keeps a window that SETTINGS make negative", _negative_window, a_byte_more),
    Case(
        "6.9.2",
        "refuses SETTINGS that make a window greater than 2^31-1",
        lambda p: [opened(p), h2.window_update(1, h2.MAX_WINDOW - 65_535), initial_window(65_536)],
        connection_error(h2.FLOW_CONTROL_ERROR),
    ),
    Case(
        "6.5.3",
        "processes values in the order in which they come",
        lambda p: [
            h2.settings_frame([(h2.INITIAL_WINDOW_SIZE, 100), (h2.INITIAL_WINDOW_SIZE, 1)]),
            asked(p),
        ],
        one_byte,
    ),
]


def peer_request(peer: Peer, size: bytes) -> bytes:
    """A call whose answer has so many bytes."""
    return peer.request(BIG, size)


CONTINUATION = [
    Case(
        "6.10",
        "takes a field block in two frames",
        fixed(raw_headers(1, FIELDS[:3], 0), continuation(block(FIELDS[3:]), end=True), BODY),
        answered(b"a"),
    ),
    Case(
        "6.10",
        "takes a field block in frames of four bytes, the first of them empty",
        fixed(
            frame(h2.HEADERS, 0, 1),
            *(continuation(BLOCK[at : at + 4]) for at in range(0, len(BLOCK), 4)),
            continuation(b"", end=True),
            BODY,
        ),
        answered(b"a"),
    ),
    Case(
        "6.10",
        "takes HEADERS that end the stream before they are continued",
        lambda p: [
            frame(h2.HEADERS, h2.END_STREAM, 1, BLOCK[:9]),
            continuation(BLOCK[9:], end=True),
            asked(p, 3),
        ],
        answered(b"a", stream_id=3),
    ),
    Case(
        "6.10",
        "refuses another frame between CONTINUATION frames",
        fixed(raw_headers(1, FIELDS[:3], 0), continuation(b""), h2.data(1), continuation(BLOCK, end=True)),
        connection_error(h2.PROTOCOL_ERROR),
    ),
    Case(
        "6.10",
        "refuses CONTINUATION on stream 0",
        fixed(raw_headers(1, FIELDS[:3], 0), continuation(BLOCK, end=True, stream_id=0)),
        connection_error(h2.PROTOCOL_ERROR),
    ),
    Case(
        "6.10",
        "refuses CONTINUATION on another stream",
        fixed(raw_headers(1, FIELDS[:3], 0), continuation(BLOCK, end=True, stream_id=3)),
        connection_error(h2.PROTOCOL_ERROR),
    ),
    Case(
        "6.10",
        "refuses CONTINUATION after HEADERS with END_HEADERS",
        fixed(raw_headers(1, FIELDS), continuation(BLOCK, end=True)),
        connection_error(h2.PROTOCOL_ERROR),
    ),
    Case(
        "6.10",
        "refuses CONTINUATION after CONTINUATION with END_HEADERS",
        fixed(raw_headers(1, FIELDS, 0), continuation(b"", end=True), continuation(BLOCK, end=True)),
        connection_error(h2.PROTOCOL_ERROR),
    ),
    Case(
        "6.10",
        "refuses CONTINUATION after DATA",
        fixed(raw_headers(1, FIELDS), h2.data(1), continuation(BLOCK, end=True)),
        connection_error(h2.PROTOCOL_ERROR),
    ),
]


GOAWAY = [
    Case(
        "6.8",
        "refuses GOAWAY on a stream",
        fixed(frame(h2.GOAWAY, 0, 1, bytes(8))),
        connection_error(h2.PROTOCOL_ERROR),
    ),
    Case(
        "6.8",
        "refuses GOAWAY of 7 bytes",
        fixed(frame(h2.GOAWAY, 0, 0, bytes(7))),
        connection_error(h2.FRAME_SIZE_ERROR),
    ),
    Case(
        "6.8",
        "finishes calls after the client's GOAWAY",
        lambda p: [opened(p, path=ECHO), h2.goaway(), BODY],
        answered(b"a"),
    ),
    Case(
        "7",
        "takes an unknown error code in GOAWAY",
        lambda p: [opened(p, path=ECHO), h2.goaway(0, 0xFF), BODY],
        answered(b"a"),
    ),
]


@each([*GOAWAY, *FLOW_CONTROL, *CONTINUATION])
def test_goaway_flow_control_and_continuation(case: Case, peer: Peer, wire: str) -> None:
    """The server does what the case says."""
    check(case, peer, wire)
