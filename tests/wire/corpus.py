"""Valid byte streams of clients and servers, what mutations start from, and the mutations.

Those of the folder ``recordings`` were recorded between clients and servers of gRPC; ``corpus.txt`` has others.
"""

import random
import socket
from collections.abc import Callable
from pathlib import Path

from tests.wire import peer as h2
from tests.wire.notation import frame_of, read_cases, request_of
from tests.wire.peer import PREFACE, Peer

_RECORDINGS = Path(__file__).parent / "recordings"
_BUILT = Path(__file__).with_suffix(".txt")
_BEGINNINGS = {
    "client": PREFACE + h2.settings_frame({h2.ENABLE_PUSH: 0}),
    "server": h2.settings_frame({h2.MAX_CONCURRENT_STREAMS: 100}),
}


def client_streams() -> dict[str, bytes]:
    """What clients send, by name, each with preface and SETTINGS; requests are for ``test.Echo``."""
    return _streams("client")


def server_streams() -> dict[str, bytes]:
    """What servers send, by name, each with SETTINGS: answers of the first three calls, which have ids 1, 3 and 5."""
    return _streams("server")


def _streams(end: str) -> dict[str, bytes]:
    built = {}
    for case in read_cases(_BUILT):
        if case.name.startswith(end):
            peer = Peer(socket.socket())
            peer.close()
            pieces = [request_of(line, peer) or frame_of(line, peer.encoder) for line in case.lines]
            built[case.name.removeprefix(f"{end} ")] = _BEGINNINGS[end] + b"".join(pieces)
    return built | {path.stem: path.read_bytes() for path in sorted(_RECORDINGS.glob(f"*.{end}"))}


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
