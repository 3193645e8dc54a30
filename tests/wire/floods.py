"""Attacks that send much that is cheap to send."""

import select
import ssl
import struct
from collections.abc import Callable, Mapping
from typing import NamedTuple

from tests.wire import peer as h2
from tests.wire.arena import Arena, Attack
from tests.wire.notation import CODES
from tests.wire.peer import Frame, Peer

#: Frames of one ``send``.
BATCH = 200
UNARY, SLOW, UPLOAD, BIDI = (f"/test.Echo/{name}" for name in ("Unary", "Slow", "ClientStream", "BidiStream"))


class Flooded(NamedTuple):
    """How far a flood came.

    Attributes:
        num_sent: Pieces that the kernel took.
        goaway: The code of GOAWAY; "" without one.
        is_open: Whether the connection was open at the end.
        is_read: Whether the service read all the time.
        num_resets: RST_STREAM frames that came.
    """

    num_sent: int
    goaway: str
    is_open: bool
    is_read: bool
    num_resets: int

    def __str__(self) -> str:
        if self.goaway:
            return f"GOAWAY {self.goaway} after {self.num_sent:,} or fewer"
        if not self.is_open:
            return f"closed after {self.num_sent:,} or fewer"
        return f"{self.num_sent:,} taken" + ("" if self.is_read else ", then no longer read")


class _Sink:
    """Takes in what a peer is sent, and keeps little of it."""

    def __init__(self) -> None:
        self.goaway = ""
        self.num_resets = 0
        self._pending = bytearray()

    def feed(self, piece: bytes) -> None:
        pending = self._pending
        pending += piece
        at = 0
        while len(pending) - at >= 9:
            high, low, kind, flags, stream_id = struct.unpack_from("!BHBBI", pending, at)
            size = 9 + (high << 16 | low)
            if len(pending) - at < size:
                break
            if kind == h2.GOAWAY:
                read = Frame(kind, flags, stream_id, bytes(pending[at + 9 : at + size]))
                self.goaway = CODES[read.error_code] if read.error_code < len(CODES) else str(read.error_code)
            self.num_resets += kind == h2.RST_STREAM
            at += size
        del pending[:at]


def flood(peer: Peer, pieces: list[bytes], weight: int = 1, *, patience_s: float = 5.0) -> Flooded:
    """Send pieces, reading what comes meanwhile, until the service ends the connection; at the end comes a PING.

    Args:
        peer: Without TLS.
        pieces: Whole frames, for instance; each counts as ``weight``.
        patience_s: How long the service may take nothing before the flood ends.
    """
    sink, sock = _Sink(), peer.socket
    assert not isinstance(sock, ssl.SSLSocket)
    sink.feed(bytes(peer._read))
    peer._read.clear()
    sock.setblocking(False)
    index = offset = 0
    is_read = is_open = True
    while index < len(pieces):
        readable, writable, _ = select.select([sock], [sock], [], patience_s)
        if not readable and not writable:
            is_read = False
            break
        try:
            if readable:
                if not (piece := sock.recv(1 << 18)):
                    is_open = False
                    break
                sink.feed(piece)
            if writable:
                offset += sock.send(memoryview(pieces[index])[offset:])
                if offset == len(pieces[index]):
                    index, offset = index + 1, 0
        except BlockingIOError:
            continue
        except OSError:
            is_open = False
            break
    if is_open and is_read:
        is_open, is_read = _is_alive(peer, sink, patience_s)
    return Flooded(index * weight, sink.goaway, is_open and not sink.goaway, is_read, sink.num_resets)


def _is_alive(peer: Peer, sink: _Sink, patience_s: float) -> tuple[bool, bool]:
    """Whether the connection is open after a last PING, and whether the service read it; everything is read."""
    token = b"lastping"
    sock = peer.socket
    sock.settimeout(patience_s)
    try:
        sock.sendall(h2.ping(token))
        tail = b""
        while True:
            piece = sock.recv(1 << 18)
            if not piece:
                return False, True
            sink.feed(piece)
            tail = (tail + piece)[-(len(piece) + 17) :]
            if sink.goaway or h2.ping(token, ack=True) in tail:
                return True, True
    except TimeoutError:
        return True, False
    except OSError:
        return False, True


Made = Callable[[Peer, int], bytes]
Run = Callable[[Arena], str]


def again(
    piece: bytes | Made,
    full: int,
    *,
    first: Callable[[Peer], bytes] = lambda _: b"",
    settings: Mapping[int, int] | None = None,
    to: str = "plain",
    batch: int = BATCH,
    at_least: int = BATCH,
    is_ended: bool | None = True,
    patience_s: float = 5.0,
) -> Run:
    """An attack that sends a piece again and again, ``full`` times at full size.

    Args:
        piece: The same each time, or what makes it for a stream, of which each has one.
        full: How often.
        first: What is sent before.
        settings: Of the peer.
        to: Which port.
        batch: How many are sent at once.
        at_least: How often at any size.
        is_ended: Whether the service has to end the connection, or must not; None: it may.
        patience_s: As ``flood``.
    """

    def run(arena: Arena) -> str:
        peer, number = arena.peer(settings, to=to), arena.num(full, at_least)
        peer.send(first(peer))
        if isinstance(piece, bytes):
            pieces = [piece * batch] * max(number // batch, 1)
        else:
            made = [piece(peer, stream_id) for stream_id in range(1, 2 * number, 2)]
            pieces = [b"".join(made[at : at + batch]) for at in range(0, number, batch)]
        flooded = flood(peer, pieces, batch, patience_s=patience_s)
        arena.expect(is_ended in (None, not flooded.is_open), flooded)
        return str(flooded)

    return run


def opened(path: str = UPLOAD) -> Callable[[Peer], bytes]:
    """HEADERS of a call whose client goes on sending."""
    return lambda peer: peer.request(path, None, end=False)


def unfinished_block(peer: Peer) -> bytes:
    """HEADERS that are to be continued."""
    return h2.frame(h2.HEADERS, 0, 1, peer.encoder.encode(h2.request_fields(UNARY)))


def big_answers_wait(peer: Peer) -> bytes:
    """A hundred answers that have no window."""
    peer.send(*(peer.request("/test.Echo/Big", b"1000", stream_id=stream_id) for stream_id in range(1, 201, 2)))
    peer.read_kind(h2.HEADERS)
    return b""


def ended_call(peer: Peer) -> bytes:
    """A call that has been answered."""
    peer.call(UNARY)
    return b""


def blocks(fields: bytes) -> Made:
    """A header block again and again."""
    return lambda _, stream_id: h2.frame(h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, stream_id, fields)


def unread(piece: bytes, full: int, to: str = "plain") -> Run:
    """An attack of a peer that never reads, and has to lose its socket."""

    def run(arena: Arena) -> str:
        peer, number = arena.peer(to=to, receive_buffer_bytes=4096, timeout_s=3.0), 0
        while number < arena.num(full, 1_000_000) and peer.try_send(piece * 1000):
            number += 1000
        if not arena.is_ours:
            return f"{number:,} taken"
        peer.wait_gone(30.0)
        return f"lost its socket after {number:,} or fewer"

    return run


def requests_unread(arena: Arena) -> str:
    """Requests, from a peer that never reads the answers."""
    peer = arena.peer({h2.INITIAL_WINDOW_SIZE: h2.MAX_WINDOW}, window=2**30, receive_buffer_bytes=4096, timeout_s=3.0)
    stream_id, number = 1, arena.num(100_000)
    while stream_id < 2 * number:
        batch = [peer.request(UNARY, bytes(10_000), stream_id=stream_id + 2 * i) for i in range(10)]
        if not peer.try_send(*batch):
            break
        stream_id += 20
    return f"{stream_id // 2:,} requests of 10 kB taken"


def tiny_messages(arena: Arena) -> str:
    """Messages of two bytes on several streams, to handlers that cannot go on because their answers are not read."""
    peer, stream_ids = arena.peer({h2.INITIAL_WINDOW_SIZE: 0}), range(1, 17, 2)
    peer.send(*(peer.request(BIDI, None, stream_id=stream_id, end=False) for stream_id in stream_ids))
    pieces = [h2.data(stream_id, h2.message(b"ab") * 2340) for stream_id in stream_ids]
    return str(flood(peer, pieces * arena.num(4000, 400), 2340, patience_s=2.0))


def drip(arena: Arena) -> str:
    """Frames of 1 MB that are padded, whose last bytes come one by one."""
    peer, number = arena.peer(), arena.num(40_000)
    largest = peer.settings.get(h2.MAX_FRAME_SIZE, 1 << 14)
    whole = h2.frame(h2.DATA, h2.PADDED, 1, b"\xff" + bytes(largest - 1))
    peer.send(opened()(peer), whole[:-number])
    for at in range(len(whole) - number, len(whole)):
        peer.send(whole[at : at + 1])
    return f"{number:,} bytes one by one"


_WINDOWS = h2.settings_frame([(h2.INITIAL_WINDOW_SIZE, index % 2) for index in range(2700)])
_TABLES = h2.settings_frame([(h2.HEADER_TABLE_SIZE, 2**32 - 1 if index % 2 else 0) for index in range(2700)])
_CHURN = b"".join(b"\x40\x01a\x02%02x" % (number & 0xFF) for number in range(2_600))
_PRIORITIES = b"".join(h2.frame(h2.PRIORITY, 0, 2 * index + 1, bytes(5)) for index in range(1000))


def continued(piece: bytes, full: int) -> Run:
    """A header block that never ends."""
    return again(h2.frame(h2.CONTINUATION, 0, 1, piece), full, first=unfinished_block)


FLOODS = (
    Attack("header blocks of 16,000 references", again(blocks(b"\x84" * 16_000), 2_000, batch=1, at_least=1)),
    Attack("header blocks that churn the table", again(blocks(_CHURN), 2_000, batch=1, at_least=1)),
    Attack(
        "DATA on a stream that was reset",
        again(h2.data(1, b"x"), 6_000_000, first=lambda peer: opened()(peer) + h2.window_update(1, 0)),
    ),
    Attack("rapid reset", again(lambda peer, i: peer.request(SLOW, b"x", stream_id=i) + h2.reset(i), 400_000)),
    Attack(  # CVE-2025-8671: requests on which the client errs at once, so that the server withdraws them
        "resets that the client provokes",
        again(lambda peer, i: peer.request(SLOW, b"x", stream_id=i) + h2.window_update(i, 0), 400_000),
    ),
    Attack(
        "resets on a Unix socket, which are a router's",
        again(
            lambda peer, i: peer.request(UNARY, b"x", stream_id=i) + h2.reset(i), 100_000, to="unix", is_ended=False
        ),
    ),
    Attack("CONTINUATION of 16 kB, endless", continued(b"\x00\x01a\x01b" * 3276, 10_000)),
    Attack("CONTINUATION of one byte, endless", continued(b"\x82", 400_000)),
    Attack("CONTINUATION of no byte, endless", continued(b"", 1_000_000)),
    Attack("SETTINGS", again(h2.settings_frame(), 1_200_000)),
    Attack("SETTINGS, answers not read", unread(h2.settings_frame(), 20_000_000)),
    Attack(
        "SETTINGS of 2,700 windows each, 100 answers waiting",
        again(
            _WINDOWS, 2000, first=big_answers_wait, settings={h2.INITIAL_WINDOW_SIZE: 0}, batch=1, at_least=1,
            is_ended=None,
        ),
    ),
    Attack("SETTINGS of 2,700 table sizes each", again(_TABLES, 2000, batch=1, at_least=1, is_ended=None)),
    Attack("PING", again(h2.ping(), 1_200_000)),
    Attack("PING, answers not read", unread(h2.ping(), 40_000_000)),
    Attack("PING, answers not read, Unix socket", unread(h2.ping(), 40_000_000, "unix")),
    Attack("PING, answers not read, TLS", unread(h2.ping(), 40_000_000, "tls")),
    Attack("requests, answers not read", requests_unread, max_mib=64.0),
    Attack("DATA of no byte", again(h2.data(1), 1_200_000, first=opened())),
    # Windows must be given back, or the flood of padding ends by itself.
    Attack("DATA of padding", again(h2.data(1, padding=255), 400_000, first=opened(), is_ended=None)),
    Attack(
        "WINDOW_UPDATE",
        again(h2.window_update(0, 1) + h2.window_update(1, 1), 1_200_000, first=lambda peer: peer.request(SLOW)),
    ),
    Attack("PRIORITY", again(_PRIORITIES, 1200, batch=1, at_least=1)),
    Attack(
        "unknown frames",
        again(h2.frame(0xEE, 0xFF, 1) + h2.frame(0xEF, 0, 0, bytes(1000)), 200_000, is_ended=None),
    ),
    Attack("GOAWAY", again(h2.goaway(0, debug=b"x" * 100), 200_000, is_ended=None)),
    Attack("RST_STREAM of a stream that has ended", again(h2.reset(1), 1_200_000, first=ended_call)),
    Attack(
        "trailers",
        again(h2.frame(h2.HEADERS, h2.END_HEADERS, 1, b"\x00\x01a\x01b"), 1_200_000, first=opened()),
    ),
    Attack(
        "empty messages, answers not read",
        again(
            h2.data(1, h2.message(b"") * 3276), 8000, first=opened(BIDI), settings={h2.INITIAL_WINDOW_SIZE: 0}, batch=1,
            at_least=1, is_ended=None, patience_s=2.0,
        ),
        max_mib=64.0,
    ),
    Attack(
        "messages of two bytes, answers not read", tiny_messages, max_mib=64.0, limits={"max_buffered_bytes": 32 << 20}
    ),
    Attack("frames of 1 MB whose end comes byte by byte", drip),
    Attack(
        "deadlines of 1 ns and of years",
        again(
            lambda peer, i: peer.request(UNARY, b"x", stream_id=i, timeout="1n" if i % 4 == 3 else "99999999H"),
            100_000, batch=50, is_ended=None,
        ),
        max_mib=64.0,
    ),
)  # fmt: skip
