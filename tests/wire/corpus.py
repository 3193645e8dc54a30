"""Valid byte streams of clients and servers: what mutations start from.

Those of the folder ``recordings`` were recorded between clients and servers of gRPC; others are built here, for what
those never send: padding, priorities, CONTINUATION, compression, trailers of a request.
"""

import gzip
import random
import socket
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from tests.wire import peer as h2
from tests.wire.peer import PREFACE, Peer

_RECORDINGS = Path(__file__).parent / "recordings"
_RESPONSE = [(":status", "200"), ("content-type", "application/grpc")]

UNARY, CLIENT_STREAM, SERVER_STREAM, BIDI_STREAM = (
    f"/test.Echo/{name}" for name in ("Unary", "ClientStream", "ServerStream", "BidiStream")
)


def _encoder() -> Peer:
    peer = Peer(socket.socket())
    peer.close()
    return peer


def _unary(peer: Peer) -> bytes:
    return peer.request(UNARY, b"hello", timeout="5S") + h2.settings_frame_ack() + peer.request(UNARY, stream_id=3)


def _repeated(peer: Peer) -> bytes:
    return b"".join(peer.request(UNARY, b"%d" % index, stream_id=2 * index + 1) for index in range(8))


def _metadata(peer: Peer) -> bytes:
    metadata = [
        ("a-bin", "AAEC/w"),
        ("b", "x" * 200),
        ("b", "twice"),
        ("user-agent", "fuzz/1.0"),
        ("grpc-timeout", "3H"),
    ]
    return peer.request(UNARY, b"m", metadata=metadata) + peer.request(UNARY, b"m", stream_id=3, metadata=metadata)


def _client_stream(peer: Peer) -> bytes:
    parts = [peer.request(CLIENT_STREAM, None, end=False)]
    parts += [h2.data(1, h2.message(bytes([index]) * 50 * index)) for index in range(8)]
    return b"".join([*parts, h2.data(1, b"", end=True)])


def _bidi(peer: Peer) -> bytes:
    parts = [peer.request(BIDI_STREAM, None, end=False), peer.request(SERVER_STREAM, b"3 10", stream_id=3)]
    for index in range(4):
        parts += [h2.data(1, h2.message(b"ping %d" % index)), h2.window_update(0, 20), h2.window_update(1, 20)]
    return b"".join([*parts, peer.headers(1, [("x-checksum", "5")], end=True)])


def _split_messages(peer: Peer) -> bytes:
    whole = h2.message(b"a" * 300) + h2.message(b"") + h2.message(b"b")
    cuts = [0, 1, 4, 6, 200, 305, 308, len(whole)]
    parts = [h2.data(1, whole[at:to], padding=at % 7) for at, to in pairwise(cuts)]
    return b"".join([peer.request(CLIENT_STREAM, None, end=False), *parts, h2.data(1, end=True, padding=3)])


def _compressed(peer: Peer) -> bytes:
    fields = h2.request_fields(UNARY, [("grpc-encoding", "gzip"), ("grpc-accept-encoding", "identity,deflate,gzip")])
    body = gzip.compress(b"compressed " * 100, mtime=0)
    return peer.headers(1, fields) + h2.data(1, h2.message(body, compressed=1), end=True)


def _blocks(peer: Peer) -> bytes:
    block = peer.encoder.encode(h2.request_fields(UNARY, [("x", "y" * 3000)]), huffman=False)
    parts = [h2.frame(h2.HEADERS, h2.PRIORITIZED | h2.PADDED, 1, b"\x05\0\0\0\0\x10" + block[:100] + bytes(5))]
    parts += [h2.frame(h2.CONTINUATION, 0, 1, block[at : at + 500]) for at in range(100, 3000, 500)]
    parts += [h2.frame(h2.CONTINUATION, h2.END_HEADERS, 1, block[3100:]), h2.data(1, h2.message(b"x"), end=True)]
    return b"".join(parts)


def _control(peer: Peer) -> bytes:
    return b"".join([
        h2.window_update(0, 1 << 20), h2.ping(), h2.frame(h2.PRIORITY, 0, 5, bytes(4) + b"\x10"),
        h2.settings_frame({h2.INITIAL_WINDOW_SIZE: 5, h2.MAX_FRAME_SIZE: 20_000, h2.HEADER_TABLE_SIZE: 0, 0x99: 7}),
        peer.request(UNARY, b"windows of five", stream_id=1), h2.window_update(1, 3),
        h2.settings_frame({h2.INITIAL_WINDOW_SIZE: 1 << 20}), h2.frame(0xBE, 0x55, 1, b"unknown"),
        peer.request(BIDI_STREAM, None, stream_id=3, end=False), h2.reset(3), h2.data(3, b"late"),
        peer.request(UNARY, b"after", stream_id=5), h2.goaway(0, 0, b"bye"),
    ])  # fmt: skip


def _big(peer: Peer) -> bytes:
    return peer.request(UNARY, b"big" * 10_000) + h2.window_update(1, 1 << 20) + h2.window_update(0, 1 << 20)


def _odd_requests(peer: Peer) -> bytes:
    fields = [h2.request_fields("/none"), h2.request_fields(UNARY, [("content-type", "text/plain")])]
    fields += [[(":method", "GET"), (":scheme", "http"), (":path", "/"), (":authority", "a")]]
    fields += [h2.request_fields(UNARY, [("grpc-encoding", "snappy")])]
    return b"".join(peer.headers(2 * index + 1, list(pairs), end=index % 2 == 0) for index, pairs in enumerate(fields))


_CLIENTS: tuple[Callable[[Peer], bytes], ...] = (
    _unary, _repeated, _metadata, _client_stream, _bidi, _split_messages, _compressed, _blocks, _control, _big,
    _odd_requests,
)  # fmt: skip


def client_streams() -> dict[str, bytes]:
    """What clients send, by name, each with preface and SETTINGS; requests are for ``test.Echo``."""
    built = {
        make.__name__.strip("_"): PREFACE + h2.settings_frame({h2.ENABLE_PUSH: 0}) + make(_encoder())
        for make in _CLIENTS
    }
    return built | {path.stem: path.read_bytes() for path in sorted(_RECORDINGS.glob("*.client"))}


def _answers(peer: Peer) -> bytes:
    parts = [h2.settings_frame_ack()]
    for stream_id in (1, 3, 5):
        parts.append(peer.headers(stream_id, [*_RESPONSE, ("x-initial", "1")]))
        parts += [h2.data(stream_id, h2.message(b"answer %d" % index)) for index in range(1 + stream_id // 2)]
        parts.append(peer.headers(stream_id, [("grpc-status", "0"), ("x-trailing-bin", "AAE")], end=True))
    return b"".join(parts)


def _failures(peer: Peer) -> bytes:
    failure = [*_RESPONSE, ("grpc-status", "5"), ("grpc-message", "not%20found%F0%9F%98%80")]
    parts = [peer.headers(1, failure, end=True)]
    parts += [peer.headers(3, [(":status", "503"), ("content-type", "text/html")]), h2.data(3, b"<html>", end=True)]
    return b"".join([*parts, h2.reset(5, h2.REFUSED_STREAM)])


def _leaving(peer: Peer) -> bytes:
    parts = [peer.headers(1, _RESPONSE), h2.ping(), h2.goaway(h2.MAX_WINDOW), h2.window_update(0, 100)]
    parts += [h2.settings_frame({h2.MAX_CONCURRENT_STREAMS: 1, h2.INITIAL_WINDOW_SIZE: 0}), h2.goaway(1)]
    parts += [h2.data(1, h2.message(b"last")), peer.headers(1, [("grpc-status", "0")], end=True)]
    return b"".join(parts)


def _compressed_answers(peer: Peer) -> bytes:
    parts = [peer.headers(1, [*_RESPONSE, ("grpc-encoding", "gzip")])]
    parts += [h2.data(1, h2.message(gzip.compress(b"z" * 1000, mtime=0), compressed=1), padding=9)]
    parts += [peer.headers(1, [("grpc-status", "0")], end=True), peer.headers(3, [(":status", "100")])]
    parts += [peer.headers(3, _RESPONSE), h2.data(3, h2.message(b"y" * 20_000)[:16_000])]
    return b"".join([*parts, h2.data(3, h2.message(b"y" * 20_000)[16_000:]), peer.headers(3, [], end=True)])


_SERVERS: tuple[Callable[[Peer], bytes], ...] = (_answers, _failures, _leaving, _compressed_answers)


def server_streams() -> dict[str, bytes]:
    """What servers send, by name, each with SETTINGS: answers of the first three calls, which have ids 1, 3 and 5."""
    built = {
        make.__name__.strip("_"): h2.settings_frame({h2.MAX_CONCURRENT_STREAMS: 100}) + make(_encoder())
        for make in _SERVERS
    }
    return built | {path.stem: path.read_bytes() for path in sorted(_RECORDINGS.glob("*.server"))}


def frames_of(stream: bytes) -> list[bytes]:
    """The frames of a stream, each with its head; a preface is the first piece, what is no whole frame the last one."""
    pieces, at = [], 0
    if stream.startswith(PREFACE):
        pieces.append(PREFACE)
        at = len(PREFACE)
    while at < len(stream):
        size = 9 + int.from_bytes(stream[at : at + 3], "big")
        pieces.append(stream[at : at + size])
        at += size
    return pieces


def mutated(stream: bytes, others: list[bytes], generator: random.Random) -> bytes:
    """A stream with one to four changes, of its frames or of its bytes.

    Args:
        stream: A valid one.
        others: More, from which frames are taken.
        generator: Decides; one seed gives one result.
    """
    pieces = frames_of(stream)
    for _ in range(generator.choice((0, 1, 1, 1, 2, 3))):
        generator.choice(_FRAME_CHANGES)(pieces, others, generator)
        if not pieces:
            pieces.append(b"")
    whole = bytearray(b"".join(pieces))
    for _ in range(generator.choice((0, 0, 0, 1, 1, 2))):
        _change_bytes(whole, generator)
    if generator.random() < 0.1:
        del whole[generator.randrange(len(whole) + 1) :]
    return bytes(whole)


def cut(stream: bytes, generator: random.Random) -> list[bytes]:
    """The stream in pieces, as sockets might give them."""
    kind = generator.random()
    if kind < 0.4 or len(stream) < 2:
        return [stream]
    if kind < 0.45 and len(stream) < 3000:
        return [stream[at : at + 1] for at in range(len(stream))]
    cuts = sorted(generator.randrange(1, len(stream)) for _ in range(generator.randint(1, 6)))
    return [stream[at:to] for at, to in zip([0, *cuts], [*cuts, len(stream)], strict=True)]


Pieces = list[bytes]
_NUMBERS = (0, 1, 2, 3, 5, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 16_384, 16_385, 65_535, 65_536)


def _any(pieces: Pieces, generator: random.Random) -> int:
    return generator.randrange(len(pieces))


def _change_length(pieces: Pieces, _others: list[bytes], generator: random.Random) -> None:
    at = _any(pieces, generator)
    size = len(pieces[at]) - 9
    length = generator.choice((0, size - 1, size + 1, size + 9, 1, 4, 5, 6, 8, 16_384, 16_385, 2**20, 2**24 - 1))
    pieces[at] = max(length, 0).to_bytes(3, "big") + pieces[at][3:]


def _change_type(pieces: Pieces, _others: list[bytes], generator: random.Random) -> None:
    at = _any(pieces, generator)
    pieces[at] = pieces[at][:3] + bytes([generator.choice((*range(12), 255))]) + pieces[at][4:]


def _change_flags(pieces: Pieces, _others: list[bytes], generator: random.Random) -> None:
    at = _any(pieces, generator)
    flags = generator.choice((0, 1, 4, 5, 8, 0x20, 0x2D, 255, generator.randrange(256)))
    pieces[at] = pieces[at][:4] + bytes([flags]) + pieces[at][5:]


def _change_id(pieces: Pieces, _others: list[bytes], generator: random.Random) -> None:
    at = _any(pieces, generator)
    pieces[at] = pieces[at][:5] + generator.choice(_NUMBERS).to_bytes(4, "big") + pieces[at][9:]


def _change_number(pieces: Pieces, _others: list[bytes], generator: random.Random) -> None:
    at = _any(pieces, generator)
    start = 9 + generator.randrange(max(len(pieces[at]) - 12, 1))
    pieces[at] = pieces[at][:start] + generator.choice(_NUMBERS).to_bytes(4, "big") + pieces[at][start + 4 :]


def _drop(pieces: Pieces, _others: list[bytes], generator: random.Random) -> None:
    del pieces[_any(pieces, generator)]


def _double(pieces: Pieces, _others: list[bytes], generator: random.Random) -> None:
    at = _any(pieces, generator)
    pieces[at:at] = [pieces[at]] * generator.choice((1, 1, 2, 100))


def _swap(pieces: Pieces, _others: list[bytes], generator: random.Random) -> None:
    one, two = _any(pieces, generator), _any(pieces, generator)
    pieces[one], pieces[two] = pieces[two], pieces[one]


def _take_over(pieces: Pieces, others: list[bytes], generator: random.Random) -> None:
    found = frames_of(generator.choice(others))
    at = generator.randrange(len(found))
    pieces[_any(pieces, generator) : 0] = found[at : at + generator.randint(1, 4)]


def _insert(pieces: Pieces, _others: list[bytes], generator: random.Random) -> None:
    payload = generator.randbytes(generator.choice((0, 1, 4, 5, 6, 8, 12, 40)))
    kind, flags = generator.randrange(11), generator.choice((0, 0, 1, 4, 5, generator.randrange(256)))
    made = h2.frame(kind, flags, generator.choice((0, 1, 1, 2, 3, 5, 7, 99)), payload)
    pieces.insert(generator.randrange(len(pieces) + 1), made)


def _split_block(pieces: Pieces, _others: list[bytes], generator: random.Random) -> None:
    blocks = [at for at, piece in enumerate(pieces) if len(piece) > 10 and piece[3] == h2.HEADERS]
    if not blocks:
        return
    at = generator.choice(blocks)
    piece, middle = pieces[at], generator.randrange(9, len(pieces[at]))
    flags, stream_id = piece[4], int.from_bytes(piece[5:9], "big")
    pieces[at : at + 1] = [
        h2.frame(h2.HEADERS, flags & ~h2.END_HEADERS, stream_id, piece[9:middle]),
        h2.frame(h2.CONTINUATION, flags & h2.END_HEADERS, stream_id, piece[middle:]),
    ]


_FRAME_CHANGES: tuple[Callable[[Pieces, list[bytes], random.Random], None], ...] = (
    _change_length, _change_type, _change_flags, _change_id, _change_number, _drop, _double, _swap, _take_over, _insert,
    _split_block,
)  # fmt: skip


def _change_bytes(whole: bytearray, generator: random.Random) -> None:
    if not whole:
        return
    at, size = generator.randrange(len(whole)), generator.choice((1, 1, 2, 4, 16))
    match generator.randrange(4):
        case 0:
            whole[at] ^= 1 << generator.randrange(8)
        case 1:
            whole[at : at + size] = generator.randbytes(size)
        case 2:
            del whole[at : at + size]
        case _:
            whole[at:at] = generator.choice((generator.randbytes(size), whole[at : at + size], b"\xff" * size))
