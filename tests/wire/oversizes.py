"""Attacks that make a service hold or compute much."""

import functools
import gzip
import random
import time
from collections.abc import Callable

from tests.wire import peer as h2
from tests.wire.arena import MIB, Arena, Attack
from tests.wire.floods import UNARY, Run, again
from tests.wire.peer import Closed, Peer


def ends(peer: Peer, stream_id: int = 1, timeout_s: float = 10.0) -> str:
    """How a stream ended, or the connection with it."""
    try:
        read = peer.read_until(
            lambda read: (
                read.kind == h2.GOAWAY
                or (read.stream_id == stream_id and (read.kind == h2.RST_STREAM or read.flags & h2.END_STREAM))
            ),
            timeout_s,
        )
    except Closed:
        return "closed"
    except TimeoutError:
        return "nothing"
    if read.kind == h2.HEADERS:
        return f"status {peer._fields(read).get('grpc-status', 'none')}"
    return f"{h2.NAMES[read.kind]} {read.error_code}" if read.kind != h2.DATA else "an answer"


def singly(
    *sends: Callable[[Peer], object], full: int = 1, at_least: int = 1, stream_id: int = 1, ends_with: str = ""
) -> Run:
    """An attack of one connection after another, each of which has an end, one of ``ends_with`` if there are some."""

    def run(arena: Arena) -> str:
        answers = []
        for send in sends * arena.num(full, at_least):
            peer, begin_s = arena.peer(), time.monotonic()
            send(peer)
            answers.append(ends(peer, stream_id))
            arena.expect(time.monotonic() - begin_s < 10.0, "slow")
            arena.expect(answers[-1] != "nothing", answers)
            arena.expect(not ends_with or answers[-1] in ends_with.split("|"), answers)
        return _counted(answers)

    return run


def behind_request(piece: bytes) -> Callable[[Peer], None]:
    """A piece after HEADERS of a call."""
    return lambda peer: peer.send(peer.request(UNARY, None, end=False), piece)


def block_in_frames(peer: Peer, block: bytes) -> None:
    """HEADERS and CONTINUATION that end the stream, as far as the service takes them."""
    starts = range(0, len(block), 16_384)
    for at in starts:
        kind, flags = (h2.CONTINUATION, 0) if at else (h2.HEADERS, h2.END_STREAM)
        flags |= h2.END_HEADERS if at == starts[-1] else 0
        if not peer.try_send(h2.frame(kind, flags, 1, block[at : at + 16_384])):
            break


def hpack_bomb(peer: Peer) -> None:
    """A field of 4 kB in the table, and a block that names it 16,000 times."""
    peer.call(UNARY, metadata=[("x", "y" * 3900)])
    index = next(at for at, (name, _) in enumerate(peer.encoder.header_table.dynamic_entries) if name == b"x")
    block = peer.encoder.encode(h2.request_fields(UNARY)) + bytes([0x80 | 62 + index]) * 16_000
    peer.send(h2.frame(h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, 3, block))


def huffman_bomb(peer: Peer) -> None:
    """Values that are long when they are decoded: 5 bits a character."""
    value = b"\x00" * 15_000 + b"\x1f"  # zeros are the character "0"
    coded = b"\x00\x01x" + b"\xff" + _integer(len(value) - 127) + value
    block_in_frames(peer, peer.encoder.encode(h2.request_fields(UNARY)) + coded * 6)


def long_header_list(peer: Peer) -> None:
    """A header list of 1 MB, well-formed."""
    block_in_frames(peer, peer.encoder.encode(h2.request_fields(UNARY, [("x", "~" * 1_000_000)]), huffman=False))


def _integer(value: int) -> bytes:
    """The bytes of an HPACK integer after its prefix."""
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def block_alone(block: bytes) -> Callable[[Peer], None]:
    """A request of this header block."""
    return lambda peer: peer.send(h2.frame(h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, 1, block))


#: Integers of thousands of digits, lengths of 2 GB, table sizes beyond the limit, thousands of table sizes.
_INTEGERS = (
    b"\xff" + b"\xff" * 16_000, b"\x00\x7f" + _integer(2**31) + b"a", b"\x3f" + _integer(2**31),
    b"\x3f" + b"\x80" * 15_000 + b"\x01", b"\x20\x3f\xe1\x1f" * 4_000, b"\x80", b"\xc0\xff",
)  # fmt: skip


def block_that_differs(peer: Peer, stream_id: int) -> bytes:
    """A request with 500 indexed fields, no two alike, which a cache of blocks would keep."""
    indexed = bytes(0x80 | _DRAW.choice((15, 16, 17, 18, 19)) for _ in range(500))
    block = b"\x83\x86\x04\x10/test.Echo/Unary\x01\x09localhost\x0f\x10\x10application/grpc" + indexed
    return h2.frame(h2.HEADERS, h2.END_HEADERS, stream_id, block) + h2.data(stream_id, h2.message(b"x"), end=True)


_DRAW = random.Random(1)


def names_that_differ(peer: Peer, stream_id: int) -> bytes:
    """Metadata whose names and values no request repeats."""
    metadata = [(f"n{stream_id}-{field}", f"v{stream_id}-{field}") for field in range(20)]
    return peer.request(UNARY, b"x", stream_id=stream_id, metadata=metadata)


def header_lists_that_stay(arena: Arena) -> str:
    """Requests that wait, each with 1,300 fields of one byte each, no two requests alike."""
    peer = arena.peer()
    generator = random.Random(1)
    block = peer.encoder.encode(h2.request_fields("/test.Echo/Slow"), huffman=False)
    number = min(peer.settings.get(h2.MAX_CONCURRENT_STREAMS, 100), arena.num(20_000))
    for stream_id in range(1, 2 * number, 2):
        indexed = bytes(0x80 | generator.choice((15, 17, 18, 19)) for _ in range(1300))
        request = h2.frame(h2.HEADERS, h2.END_HEADERS, stream_id, block + indexed)
        if not peer.try_send(request, h2.data(stream_id, h2.message(b"x"), end=True)):
            return f"closed after {stream_id // 2:,} or fewer"
        block = peer.encoder.encode(h2.request_fields("/test.Echo/Slow"), huffman=False)
    if arena.is_ours:  # each list costs as much as 163 control frames
        assert ends(peer, stream_id=-1) in ("closed", "GOAWAY 11")
        return f"closed after {number:,} or fewer"
    return f"{number:,} wait" if peer.try_send(h2.ping()) else "closed"


def lists_of_values(arena: Arena) -> str:
    """A binary field of 3,900 commas in the table, which requests that wait name 15 times each."""
    peer = arena.peer()
    start = peer.encoder.encode(h2.request_fields("/test.Echo/Slow"), huffman=False)
    peer.send(h2.frame(h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, 1, start))
    block = peer.encoder.encode([*h2.request_fields("/test.Echo/Slow"), ("x-bin", "," * 3900)], huffman=False)
    peer.send(h2.frame(h2.HEADERS, h2.END_HEADERS, 3, block))
    index = bytes([0x80 | 62 + [name for name, _ in peer.encoder.header_table.dynamic_entries].index(b"x-bin")])
    # From here on nothing is put into the table: literals without indexing.
    fields = b"\x83\x86\x04\x0f/test.Echo/Slow\x01\x09localhost"
    number = min(peer.settings.get(h2.MAX_CONCURRENT_STREAMS, 100) - 2, arena.num(20_000))
    for stream_id in range(5, 5 + 2 * number, 2):
        rest = b"\0\x02te\x08trailers\x0f\x10\x10application/grpc\0\x01n\x05" + b"%05d" % stream_id
        if not peer.try_send(
            h2.frame(h2.HEADERS, h2.END_HEADERS, stream_id, fields + rest + index * 15),
            h2.data(stream_id, h2.message(b"x"), end=True),
        ):
            break
    if arena.is_ours:
        peer.send(h2.ping())
        peer.read_kind(h2.PING, timeout_s=60.0)
    return f"{number:,} sent"


def _slow_readers(arena: Arena, windows: list[int], *, is_read: bool) -> str:
    """Answers of 40 MB, none of which gets further than its window."""
    peers = []
    number = arena.num(4, 1)
    for window in windows:
        for _ in range(number):
            buffer_bytes = 0 if is_read else 4096
            peer = arena.peer({h2.INITIAL_WINDOW_SIZE: window}, window=2**30, receive_buffer_bytes=buffer_bytes)
            peer.send(*(peer.request("/test.Echo/Big", b"41943040", stream_id=stream_id) for stream_id in (1, 3)))
            peers.append(peer)
    for peer in peers:
        if is_read:
            peer.read_kind(h2.HEADERS)
    arena.echo.call("Unary", b"x")
    time.sleep(0.5)
    return f"{2 * len(peers)} answers of 40 MB wait"


def window_zero(arena: Arena) -> str:
    """Windows of 0 and of 1 byte."""
    return _slow_readers(arena, [0, 1], is_read=True)


def never_read(arena: Arena) -> str:
    """Windows of 2 GB, and a socket that is never read."""
    return _slow_readers(arena, [h2.MAX_WINDOW], is_read=False)


def announced_within(arena: Arena) -> str:
    """Messages of 60 MB, which would be taken, on many streams that send the first kilobyte alone."""
    number = arena.num(1000, 50)
    for start in range(0, number, 50):
        peer = arena.peer()
        for stream_id in range(1, 2 * min(50, number - start), 2):
            peer.send(peer.request("/test.Echo/Unary", None, stream_id=stream_id, end=False))
            peer.send(h2.data(stream_id, h2.message(b"x" * 1000, length=60 * MIB)))
        peer.send(h2.ping())
        peer.read_kind(h2.PING)
    return f"{number:,} wait"


def _message_within_windows(peer: Peer, whole: bytes, *, end: bool) -> None:
    """DATA of stream 1 as the windows of the connection grow."""
    room = 65_535
    for at in range(0, len(whole), 16_384):
        if at + 16_384 > room:
            room += int.from_bytes(peer.read_kind(h2.WINDOW_UPDATE, 0).payload, "big")
        peer.send(h2.data(1, whole[at : at + 16_384], end=end and at + 16_384 >= len(whole)))


def gzip_bomb(peer: Peer) -> None:
    """256 kB that are 256 MB when they are decompressed."""
    peer.send(peer.headers(1, h2.request_fields("/test.Echo/Size", [("grpc-encoding", "gzip")])))
    _message_within_windows(peer, h2.message(_bomb(256 * MIB), compressed=1), end=True)


@functools.cache
def _bomb(size: int) -> bytes:
    return gzip.compress(bytes(size), 9)


def gzip_bombs(arena: Arena) -> str:
    """Forty messages of 32 kB, each of which becomes 32 MB, to a handler that cannot go on."""
    peer = arena.peer({h2.INITIAL_WINDOW_SIZE: 0})
    peer.send(peer.headers(1, h2.request_fields("/test.Echo/BidiStream", [("grpc-encoding", "gzip")])))
    _message_within_windows(peer, h2.message(_bomb(32 * MIB), compressed=1) * 40, end=False)
    peer.send(h2.ping())
    peer.read_kind(h2.PING)
    return "wait"


def unfinished_requests(arena: Arena) -> str:
    """Many connections with requests of 8 MB, each of which lacks its last byte."""
    num_connections, body = arena.num(100, 12), bytes(MIB)
    sent = refused = 0
    for _ in range(num_connections):
        peer = arena.peer(timeout_s=1.0)
        try:
            for stream_id in range(1, 9, 2):
                peer.send(peer.request("/test.Echo/Size", None, stream_id=stream_id, end=False))
                start = h2.message(body[:-5], length=8 * MIB)
                room = min(peer.settings.get(h2.INITIAL_WINDOW_SIZE, 65_535), len(start))
                for at in range(0, room, 16_384):
                    peer.send(h2.data(stream_id, start[at : min(at + 16_384, room)]))
                    sent += min(at + 16_384, room) - at
        except (Closed, TimeoutError):
            refused += 1
    return f"{sent / MIB:.0f} MiB sent, {refused} of {num_connections} connections cut off or not read"


def unfinished_within_windows(arena: Arena) -> str:
    """Many connections with requests of 8 MB, which obey the windows and lack the last byte."""
    num_connections, sent, cut = arena.num(60, 6), 0, 0
    for _ in range(num_connections):
        peer = arena.peer(timeout_s=0.5)
        try:
            sent += _send_within_windows(peer, list(range(1, 9, 2)), 8 * MIB)
        except Closed:
            cut += 1
    return f"{sent / MIB:.0f} MiB sent, {cut} of {num_connections} connections cut off"


def _send_within_windows(peer: Peer, stream_ids: list[int], size: int) -> int:
    """How many bytes the peer's windows let through of all but the last byte of a message on each stream."""
    for stream_id in stream_ids:
        peer.send(peer.request("/test.Echo/Size", None, stream_id=stream_id, end=False))
        peer.send(h2.data(stream_id, h2.message(b"", length=size)))
    streams = {stream_id: peer.settings.get(h2.INITIAL_WINDOW_SIZE, 65_535) - 5 for stream_id in stream_ids}
    left = dict.fromkeys(stream_ids, size - 1)
    room, sent, piece = 65_535 - 5 * len(stream_ids), 0, bytes(16_384)
    while any(left.values()):
        moved = False
        for stream_id in stream_ids:
            number = min(16_384, left[stream_id], streams[stream_id], room)
            if number > 0:
                peer.send(h2.data(stream_id, piece[:number]))
                left[stream_id] -= number
                streams[stream_id] -= number
                room, sent, moved = room - number, sent + number, True
        if not moved:
            try:
                read = peer.read(0.5)
            except TimeoutError:
                break
            if read.kind == h2.WINDOW_UPDATE and read.stream_id == 0:
                room += int.from_bytes(read.payload, "big")
            elif read.kind == h2.WINDOW_UPDATE:
                streams[read.stream_id] += int.from_bytes(read.payload, "big")
            elif read.kind in (h2.RST_STREAM, h2.HEADERS):
                left[read.stream_id] = 0
    return sent


def _counted(answers: list[str]) -> str:
    return ", ".join(f"{answers.count(answer)}x {answer}" for answer in dict.fromkeys(answers))


_LIMITED = {"max_buffered_bytes": 64 << 20}

OVERSIZES = (
    Attack("HPACK: one 4 kB field 16,000 times", singly(hpack_bomb, full=20, stream_id=3)),
    Attack("HPACK: Huffman-coded values of 24 kB", singly(huffman_bomb, full=100)),
    Attack(
        "HPACK: integers without end, lengths of 2 GB",
        singly(*(block_alone(block) for block in _INTEGERS)),
    ),
    Attack(
        "header blocks of which no two are alike",
        again(block_that_differs, 40_000, batch=20),
        max_mib=48.0,
    ),
    Attack("header lists of 1,300 fields on all streams", header_lists_that_stay, max_mib=150.0),
    Attack("metadata of 60,000 values on all streams", lists_of_values, max_mib=150.0),
    Attack(
        "metadata names of which no two are alike",
        again(names_that_differ, 40_000, batch=20, is_ended=None),
        max_mib=32.0,
    ),
    Attack(
        "methods of which no two are alike",
        again(
            lambda peer, i: peer.request(f"/{i}{'x' * 1000}/y", b"x", stream_id=i), 40_000, batch=10, is_ended=None
        ),
        max_mib=32.0,
    ),
    Attack(
        "header list of 1 MB",
        singly(long_header_list, full=40, at_least=2, ends_with="closed|GOAWAY 11|RST_STREAM 11|status 8"),
    ),
    Attack(
        "windows of 0 and 1, answers of 40 MB", window_zero, max_mib=220.0, limits={"max_buffered_bytes": 100 << 20}
    ),
    Attack("socket not read, answers of 40 MB", never_read, max_mib=400.0),
    Attack(
        "message announced as 2 GB",
        singly(
            *(behind_request(h2.data(1, h2.message(b"x" * 1000, length=size))) for size in (2**31 - 1, 2**32 - 1)),
            full=40, at_least=2, ends_with="status 8|RST_STREAM 8|closed",
        ),
    ),
    Attack("messages announced as 60 MB on 1,000 streams", announced_within, max_mib=32.0),
    Attack(
        "frames announced as 16 MB",
        singly(*(behind_request(h2.frame(kind, 0, 1, b"x", length=2**24 - 1)) for kind in range(10))),
    ),
    Attack(
        "gzip: 256 kB that are 256 MB",
        singly(gzip_bomb, full=20, at_least=2, ends_with="status 8"),
        max_mib=160.0,
    ),
    Attack("gzip: 40 messages of 32 MB in 1.3 MB", gzip_bombs, max_mib=120.0),
    Attack("unfinished requests on many connections", unfinished_requests, max_mib=120.0, limits=_LIMITED),
    Attack("unfinished requests that obey the windows", unfinished_within_windows, max_mib=120.0, limits=_LIMITED),
)  # fmt: skip
