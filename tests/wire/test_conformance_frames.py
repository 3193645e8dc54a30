"""RFC 9113, sections 6.1 to 6.7, 7 and 8.4: each type of frame: its size, stream, flags and padding."""

import struct

from tests.wire import peer as h2
from tests.wire.conformance import (
    ECHO,
    Case,
    alive,
    answered,
    asked,
    block,
    check,
    connection_error,
    each,
    fixed,
    opened,
    priority,
    raw_headers,
    stream_error,
)
from tests.wire.peer import Peer, frame, request_fields

FIELDS = request_fields(ECHO)
BLOCK = block(FIELDS)
BODY = h2.data(1, h2.message(b"a"), end=True)
WHOLE = h2.END_HEADERS | h2.END_STREAM


def settings(*pairs: tuple[int, int]) -> bytes:
    return h2.settings_frame(pairs)


DATA = [
    Case("6.1", "takes DATA", lambda p: [asked(p)], answered(b"a")),
    Case(
        "6.1",
        "takes a message in many DATA frames",
        lambda p: [
            opened(p, path=ECHO),
            *(h2.data(1, bytes([byte])) for byte in h2.message(b"abc")),
            h2.data(1, end=True),
        ],
        answered(b"abc"),
    ),
    Case(
        "6.1",
        "takes DATA with padding",
        lambda p: [opened(p, path=ECHO), h2.data(1, h2.message(b"a"), end=True, padding=255)],
        answered(b"a"),
    ),
    Case(
        "6.1",
        "takes DATA of padding alone",
        lambda p: [opened(p, path=ECHO), h2.data(1, b"", padding=9), h2.data(1, b"", padding=0), BODY],
        answered(b"a"),
    ),
    Case("6.1", "refuses DATA on stream 0", fixed(h2.data(0, b"test")), connection_error(h2.PROTOCOL_ERROR)),
    Case(
        "6.1",
        "refuses padding as long as the payload",
        lambda p: [opened(p), frame(h2.DATA, h2.PADDED, 1, b"\x05test")],
        connection_error(h2.PROTOCOL_ERROR),
    ),
    Case(
        "6.1",
        "refuses the flag PADDED without payload",
        lambda p: [opened(p), frame(h2.DATA, h2.PADDED, 1)],
        connection_error(h2.FRAME_SIZE_ERROR, h2.PROTOCOL_ERROR),
    ),
]

HEADERS = [
    Case(
        "6.2",
        "takes HEADERS with padding",
        fixed(frame(h2.HEADERS, h2.END_HEADERS | h2.PADDED, 1, b"\x08" + BLOCK + bytes(8)), BODY),
        answered(b"a"),
    ),
    Case(
        "6.2",
        "takes HEADERS with priority",
        fixed(frame(h2.HEADERS, h2.END_HEADERS | h2.PRIORITIZED, 1, priority() + BLOCK), BODY),
        answered(b"a"),
    ),
    Case(
        "6.2",
        "takes HEADERS with padding and priority",
        fixed(
            frame(
                h2.HEADERS,
                h2.END_HEADERS | h2.PRIORITIZED | h2.PADDED,
                1,
                b"\x03" + priority(7, 255, exclusive=True) + BLOCK + bytes(3),
            ),
            BODY,
        ),
        answered(b"a"),
    ),
    Case(
        "6.2",
        "refuses HEADERS on stream 0",
        fixed(raw_headers(0, FIELDS, WHOLE)),
        connection_error(h2.PROTOCOL_ERROR),
    ),
    Case(
        "6.2",
        "refuses HEADERS with priority on stream 0",
        fixed(frame(h2.HEADERS, WHOLE | h2.PRIORITIZED, 0, priority() + BLOCK)),
        connection_error(h2.PROTOCOL_ERROR),
    ),
    Case(
        "6.2",
        "refuses padding longer than the payload",
        fixed(frame(h2.HEADERS, WHOLE | h2.PADDED, 1, bytes([len(BLOCK) + 1]) + BLOCK)),
        connection_error(h2.PROTOCOL_ERROR),
    ),
    Case(
        "6.2",
        "refuses the flag PRIORITY with four bytes",
        fixed(frame(h2.HEADERS, WHOLE | h2.PRIORITIZED, 1, b"1234")),
        connection_error(h2.FRAME_SIZE_ERROR, h2.PROTOCOL_ERROR),
    ),
    Case(
        "6.2",
        "refuses the flag PADDED without payload",
        fixed(frame(h2.HEADERS, WHOLE | h2.PADDED, 1)),
        connection_error(h2.FRAME_SIZE_ERROR, h2.PROTOCOL_ERROR),
    ),
]

PRIORITY = [
    Case("6.3", "takes the lowest weight", fixed(frame(h2.PRIORITY, 0, 1, priority(0, 0))), alive),
    Case("6.3", "takes the highest weight", fixed(frame(h2.PRIORITY, 0, 1, priority(0, 255))), alive),
    Case("6.3", "takes a dependency", lambda p: [frame(h2.PRIORITY, 0, 3, priority(1)), asked(p)], answered(b"a")),
    Case(
        "6.3",
        "takes an exclusive dependency",
        lambda p: [frame(h2.PRIORITY, 0, 3, priority(1, exclusive=True)), asked(p)],
        answered(b"a"),
    ),
    Case(
        "6.3",
        "takes a lower stream id after PRIORITY on a higher one",
        lambda p: [frame(h2.PRIORITY, 0, 9, priority()), asked(p)],
        answered(b"a"),
    ),
    Case(
        "6.3",
        "refuses PRIORITY on stream 0",
        fixed(frame(h2.PRIORITY, 0, 0, priority())),
        connection_error(h2.PROTOCOL_ERROR),
    ),
    Case(
        "6.3",
        "refuses PRIORITY of another size than 5",
        lambda p: [opened(p), frame(h2.PRIORITY, 0, 1, b"1234")],
        stream_error(h2.FRAME_SIZE_ERROR),
    ),
]

RST_STREAM = [
    Case("6.4", "takes RST_STREAM", lambda p: [opened(p), h2.reset(1), asked(p, 3)], answered(b"a", stream_id=3)),
    Case("6.4", "refuses RST_STREAM on stream 0", fixed(h2.reset(0)), connection_error(h2.PROTOCOL_ERROR)),
    Case("6.4", "refuses RST_STREAM on an idle stream", fixed(h2.reset(1)), connection_error(h2.PROTOCOL_ERROR)),
    Case(
        "6.4",
        "refuses RST_STREAM of another size than 4",
        lambda p: [opened(p), frame(h2.RST_STREAM, 0, 1, b"123")],
        connection_error(h2.FRAME_SIZE_ERROR),
    ),
    Case(
        "7",
        "takes an unknown error code in RST_STREAM",
        lambda p: [opened(p), h2.reset(1, 0xFF), asked(p, 3)],
        answered(b"a", stream_id=3),
    ),
]


def acknowledged(peer: Peer, _: bool) -> None:
    """SETTINGS are acknowledged."""
    peer.read_until(lambda read: read.kind == h2.SETTINGS and bool(read.flags & h2.ACK))


def acknowledged_twice(peer: Peer, is_strict: bool) -> None:
    """Those of the handshake and one more."""
    acknowledged(peer, is_strict)
    acknowledged(peer, is_strict)


SETTINGS = [
    Case("6.5", "acknowledges SETTINGS", fixed(settings((h2.MAX_CONCURRENT_STREAMS, 100))), acknowledged_twice),
    Case("6.5", "takes SETTINGS without values", fixed(settings()), acknowledged_twice),
    Case(
        "6.5",
        "refuses an acknowledgement with payload",
        fixed(frame(h2.SETTINGS, h2.ACK, 0, bytes(6))),
        connection_error(h2.FRAME_SIZE_ERROR),
    ),
    Case("6.5", "refuses SETTINGS on a stream", fixed(frame(h2.SETTINGS, 0, 1)), connection_error(h2.PROTOCOL_ERROR)),
    Case(
        "6.5",
        "refuses SETTINGS of no multiple of 6 bytes",
        fixed(frame(h2.SETTINGS, 0, 0, b"123")),
        connection_error(h2.FRAME_SIZE_ERROR),
    ),
    Case("6.5.2", "takes ENABLE_PUSH of 0", fixed(settings((h2.ENABLE_PUSH, 0))), alive),
    Case("6.5.2", "takes ENABLE_PUSH of 1", fixed(settings((h2.ENABLE_PUSH, 1))), alive),
    Case(
        "6.5.2",
        "refuses ENABLE_PUSH of 2",
        fixed(settings((h2.ENABLE_PUSH, 2))),
        connection_error(h2.PROTOCOL_ERROR),
    ),
    Case(
        "6.5.2",
        "refuses INITIAL_WINDOW_SIZE of 2^31",
        fixed(settings((h2.INITIAL_WINDOW_SIZE, 1 << 31))),
        connection_error(h2.FLOW_CONTROL_ERROR),
    ),
    Case(
        "6.5.2",
        "refuses MAX_FRAME_SIZE below 2^14",
        fixed(settings((h2.MAX_FRAME_SIZE, (1 << 14) - 1))),
        connection_error(h2.PROTOCOL_ERROR),
    ),
    Case(
        "6.5.2",
        "refuses MAX_FRAME_SIZE of 2^24",
        fixed(settings((h2.MAX_FRAME_SIZE, 1 << 24))),
        connection_error(h2.PROTOCOL_ERROR),
    ),
    Case("6.5.2", "ignores unknown settings", fixed(settings((0xFF, 1), (0, 1), (0xFFFF, 0xFFFFFFFF))), alive),
    Case(
        "6.5.2",
        "takes HEADER_TABLE_SIZE of 0",
        lambda p: [settings((h2.HEADER_TABLE_SIZE, 0)), asked(p)],
        answered(b"a"),
    ),
    Case(
        "6.5.2",
        "answers where MAX_CONCURRENT_STREAMS is 0, which is about pushed streams",
        lambda p: [settings((h2.MAX_CONCURRENT_STREAMS, 0)), asked(p)],
        answered(b"a"),
    ),
]

PUSH_PROMISE = [
    Case(
        "8.4",
        "refuses PUSH_PROMISE",
        lambda p: [opened(p), frame(h2.PUSH_PROMISE, h2.END_HEADERS, 1, struct.pack("!I", 3) + BLOCK)],
        connection_error(h2.PROTOCOL_ERROR),
    ),
]


def pinged(peer: Peer, _: bool) -> None:
    """The next acknowledgement of PING has the same payload."""
    read = peer.read_until(lambda read: read.kind == h2.PING and bool(read.flags & h2.ACK))
    assert b"\0\1\2\3\4\5\6\7" == read.payload


PING = [
    Case("6.7", "answers PING with its payload", fixed(h2.ping(b"\0\1\2\3\4\5\6\7")), pinged),
    Case(
        "6.7",
        "does not answer an acknowledgement of PING",
        fixed(h2.ping(b"unasked!", ack=True), h2.ping(b"\0\1\2\3\4\5\6\7")),
        pinged,
    ),
    Case("6.7", "refuses PING on a stream", fixed(frame(h2.PING, 0, 1, bytes(8))), connection_error(h2.PROTOCOL_ERROR)),
    Case(
        "6.7", "refuses PING of 6 bytes", fixed(frame(h2.PING, 0, 0, bytes(6))), connection_error(h2.FRAME_SIZE_ERROR)
    ),
    Case(
        "6.7", "refuses PING of 9 bytes", fixed(frame(h2.PING, 0, 0, bytes(9))), connection_error(h2.FRAME_SIZE_ERROR)
    ),
]


@each([*DATA, *HEADERS, *PRIORITY, *RST_STREAM, *SETTINGS, *PUSH_PROMISE, *PING])
def test_frames_of_each_type(case: Case, peer: Peer, wire: str) -> None:
    """The server does what the case says."""
    check(case, peer, wire)
