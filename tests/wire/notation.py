"""A notation of HTTP/2 for files of cases: bytes as people read them, the same for either end of a connection.

Cases are blocks of tests/case_files.py. ``let NAME = text`` makes ``$NAME`` stand for the text in what follows;
``for word = a | b`` makes a case for each value, which stands wherever ``{word}`` does. The other lines are the
runner's, but for frames:

    KIND+FLAG+FLAG STREAM PIECE PIECE ...

KIND and FLAG are names (``HEADERS+END_HEADERS``) or numbers (``0x16+0xff``); ``DATA/99`` says that it has 99 bytes.
A kind in lower case, ``headers``, is a block of fields that the connection encodes and indexes. Pieces of the payload:

- ``00ff`` are bytes in hexadecimal, ``"text"`` is text with Python's escapes, ``5*00`` is a piece five times.
- ``[name: value]`` is a field, as an HPACK literal that is not indexed; ``[name: base64 value]`` encodes its value,
  and ``[name: 5*a]`` repeats it.
- ``message:"a"`` is a gRPC message of a piece; ``message/1:`` has the flag 1, ``message/0/9:`` says it has 9 bytes.
- ``gzip:"a"`` is compressed; ``string:"a"`` and ``coded:"a"`` are HPACK strings, plain and Huffman-coded.
- ``u32:5`` is a number of 32 bits, a name of an error code is one, too; ``INITIAL_WINDOW_SIZE=5`` is a setting.
- ``priority:3/255!`` depends on stream 3 with weight 255, exclusively.
"""

import ast
import base64
import gzip
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import hpack
from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH
from tests.case_files import blocks
from tests.wire import peer as h2
from tests.wire.peer import Peer

_FLAGS = {"END_STREAM": 1, "ACK": 1, "END_HEADERS": 4, "PADDED": 8, "PRIORITY": 0x20}
_SETTINGS: tuple[str, ...] = (
    "HEADER_TABLE_SIZE", "ENABLE_PUSH", "MAX_CONCURRENT_STREAMS", "INITIAL_WINDOW_SIZE", "MAX_FRAME_SIZE",
    "MAX_HEADER_LIST_SIZE",
)  # fmt: skip
CODES = (
    "NO_ERROR", "PROTOCOL_ERROR", "INTERNAL_ERROR", "FLOW_CONTROL_ERROR", "SETTINGS_TIMEOUT", "STREAM_CLOSED",
    "FRAME_SIZE_ERROR", "REFUSED_STREAM", "CANCEL", "COMPRESSION_ERROR", "CONNECT_ERROR", "ENHANCE_YOUR_CALM",
    "INADEQUATE_SECURITY", "HTTP_1_1_REQUIRED",
)  # fmt: skip
_WORD = re.compile(r'(?:[^\s"\[]|"(?:\\.|[^"\\])*"|\[[^\]]*\])+')
_HUFFMAN = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH)


class Case(NamedTuple):
    """One case of a file: its name, and its lines without those of the notation itself."""

    name: str
    lines: tuple[str, ...]

    def starting_with(self, mark: str) -> list[str]:
        """What follows the mark in the lines that begin with it."""
        return [line.removeprefix(mark).strip() for line in self.lines if line.startswith(mark)]


def read_cases(path: Path) -> list[Case]:
    """The cases of a file, in its order."""
    names: dict[str, str] = {}
    lines = []
    for raw in path.read_text().splitlines():
        line = re.sub(r"\$(\w+)", lambda found: names[found[1]], raw)
        if line.startswith("let "):
            name, _, names[name] = (part.strip() for part in line.removeprefix("let ").partition("="))
        else:
            lines.append(line)
    return [case for name, block in blocks("\n".join(lines))[1:] for case in _expanded(name, block)]


def _expanded(name: str, lines: list[str]) -> Iterator[Case]:
    if lines and (found := re.match(r"for (\w+) = (.*)", lines[0])):
        for value in found[2].split(" | "):
            title, *rest = (line.replace(f"{{{found[1]}}}", value.strip()) for line in (name, *lines[1:]))
            yield from _expanded(title, rest)
    else:
        yield Case(name, tuple(lines))


def words(line: str) -> list[str]:
    """The words of a line: spaces within quotes and brackets do not part them."""
    return _WORD.findall(line)


def frame_of(line: str, encoder: hpack.Encoder | None = None) -> bytes:
    """The bytes of a frame; ``encoder`` encodes blocks in lower case."""
    head, stream_id, *rest = words(line)
    kind, *flags = head.split("+")
    kind, _, length = kind.partition("/")
    if kind == "headers":
        assert encoder is not None, "only a connection has a table of fields"
        number, payload = h2.HEADERS, encoder.encode(fields_of(rest), huffman=False)
        flags.append("END_HEADERS")
    else:
        number = h2.NAMES.index(kind) if kind in h2.NAMES else int(kind, 0)
        payload = b"".join(map(piece_of, rest))
    bits = 0
    for flag in flags:
        bits |= _FLAGS[flag] if flag in _FLAGS else int(flag, 0)
    return h2.frame(number, bits, int(stream_id, 0), payload, length=int(length) if length else None)


def request_of(line: str, peer: Peer) -> bytes:
    """The bytes of ``call STREAM METHOD BODY [field: value]``, or of ``open`` without a body; b"" of anything else."""
    verb, stream_id, *rest = words(line)
    if verb not in ("call", "open"):
        return b""
    fields = [piece for piece in rest[1:] if piece.startswith("[")]
    bodies = [piece_of(piece) for piece in rest[1:] if piece not in fields]
    return peer.request(
        f"/test.Echo/{rest[0]}",
        b"".join(bodies) if verb == "call" else None,
        stream_id=int(stream_id, 0),
        metadata=fields_of(fields),
        end=verb == "call",
    )


def fields_of(pieces: list[str]) -> list[tuple[bytes, bytes]]:
    """The fields that the pieces say."""
    return [_field(piece) for piece in pieces]


def _field(piece: str) -> tuple[bytes, bytes]:
    name, _, value = piece[1:-1].partition(": ")
    if value.startswith("base64 "):
        return _unescaped(name).encode("latin-1"), base64.b64encode(_unescaped(value.removeprefix("base64 ")).encode())
    if found := re.fullmatch(r"(\d+)\*(.+)", value):
        value = int(found[1]) * found[2]
    return _unescaped(name).encode("latin-1"), _unescaped(value).encode("latin-1")


def _unescaped(text: str) -> str:
    return text.encode("latin-1", "backslashreplace").decode("unicode_escape")


def piece_of(piece: str) -> bytes:
    """The bytes of a piece of a payload."""
    head, _, rest = piece.partition(":")
    name, *numbers = head.split("/")
    if piece.startswith('"'):
        return str(ast.literal_eval(piece)).encode("latin-1")
    if piece.startswith("["):
        return b"\x00" + b"".join(_string(text) for text in _field(piece))
    if found := re.match(r"(\d+)\*", piece):
        return int(found[1]) * piece_of(piece.removeprefix(found[0]))
    if found := re.fullmatch(r"(\w+)=(\w+)", piece):
        setting = _SETTINGS.index(found[1]) + 1 if found[1] in _SETTINGS else int(found[1], 0)
        return struct.pack("!HI", setting, int(found[2], 0))
    if piece in CODES:
        return struct.pack("!I", CODES.index(piece))
    match name:
        case "message":
            flag, length = ([int(number, 0) for number in numbers] + [0, -1][len(numbers) :])[:2]
            body = piece_of(rest)
            return h2.message(body, compressed=flag, length=None if length < 0 else length)
        case "gzip":
            return gzip.compress(piece_of(rest), mtime=0)
        case "string":
            return _string(piece_of(rest))
        case "coded":
            coded = _HUFFMAN.encode(piece_of(rest))
            return bytes([len(coded) | 0x80]) + coded
        case "u32":
            return struct.pack("!I", int(rest, 0))
        case "priority":
            stream_id, _, weight = rest.rstrip("!").partition("/")
            return struct.pack("!IB", int(stream_id) | piece.endswith("!") << 31, int(weight or 15))
    return bytes.fromhex(piece)


def _string(text: bytes) -> bytes:
    """A string literal of HPACK, not coded."""
    return _integer(len(text), 127) + text


def _integer(value: int, mask: int) -> bytes:
    if value < mask:
        return bytes([value])
    out, value = bytearray([mask]), value - mask
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])
