"""RFC 7541: representations that the server decodes, errors that end the connection, and tables that stay in step."""

import os
import signal

from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH
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
)
from tests.wire.conftest import StartEcho
from tests.wire.peer import Peer, frame, request_fields

FIELDS = list(request_fields(ECHO))
BLOCK = block(FIELDS)
BODY = h2.data(1, h2.message(b"a"), end=True)
_HUFFMAN = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH)

INCREMENTAL, WITHOUT, NEVER = 0x40, 0x00, 0x10
USER_AGENT = 58


def text(value: bytes, *, huffman: bool) -> bytes:
    """A string literal of at most 126 bytes."""
    coded = _HUFFMAN.encode(value) if huffman else value
    return bytes([len(coded) | 0x80 * huffman]) + coded


def literal(pattern: int, name: bytes | int, *, huffman: bool) -> bytes:
    """A literal field: its name is a string or an index."""
    if isinstance(name, bytes):
        return bytes([pattern]) + text(name, huffman=huffman) + text(b"value", huffman=huffman)
    mask = 0x3F if pattern == INCREMENTAL else 0x0F
    index = bytes([pattern | name]) if name < mask else bytes([pattern | mask, name - mask])
    return index + text(b"value", huffman=huffman)


def request(payload: bytes) -> bytes:
    return frame(h2.HEADERS, h2.END_HEADERS, 1, payload)


def takes(section: str, fact: str, payload: bytes) -> Case:
    return Case(section, f"takes {fact}", fixed(request(payload), BODY), answered(b"a"))


def refuses(section: str, fact: str, payload: bytes) -> Case:
    return Case(section, f"refuses {fact}", fixed(request(payload)), connection_error(h2.COMPRESSION_ERROR))


LITERALS = [
    takes(
        section,
        f"a literal {kind}, {'name by index' if name == USER_AGENT else 'new name'}, {'' if huffman else 'not '}coded",
        BLOCK + literal(pattern, name, huffman=huffman),
    )
    for section, kind, pattern in (
        ("6.2.1", "with indexing", INCREMENTAL),
        ("6.2.2", "without indexing", WITHOUT),
        ("6.2.3", "never indexed", NEVER),
    )
    for name in (USER_AGENT, b"x-test")
    for huffman in (False, True)
]

CASES = [
    *LITERALS,
    takes("6.1", "an indexed field", b"\x83\x86" + block(FIELDS[2:])),
    takes("6.3", "a table size", b"\x20" + BLOCK),
    takes("6.3", "two table sizes", b"\x20\x3f\xe1\x1f" + BLOCK),
    refuses("6.1", "index 0", BLOCK + b"\x80"),
    refuses("2.3.3", "an index beyond the tables", BLOCK + b"\xff\x10"),
    refuses("2.3.3", "a literal whose name's index is beyond the tables", BLOCK + b"\x7f\x20\x01a"),
    refuses("4.2", "a table size at the end of a block", BLOCK + b"\x20"),
    refuses("6.3", "a table size above SETTINGS_HEADER_TABLE_SIZE", b"\x3f\xff\xff\x7f" + BLOCK),
    refuses("5.1", "an integer without an end", BLOCK + b"\xff" * 12),
    refuses("5.1", "a block that ends within an integer", BLOCK + b"\xff"),
    refuses("5.2", "a block that ends within a string", BLOCK + b"\x00\x05abc"),
    refuses("5.2", "padding longer than 7 bits", BLOCK + b"\x00\x85\xf2\xb2\x4a\x84\xff\x84\x49\x50\x9f\xff"),
    refuses("5.2", "padding with zeros", BLOCK + b"\x00\x85\xf2\xb2\x4a\x84\xff\x83\x49\x50\x90"),
    refuses("5.2", "the end-of-string symbol", BLOCK + b"\x00\x85\xf2\xb2\x4a\x84\xff\x87\x49\x51\xff\xff\xff\xfa\x7f"),
]


@each(CASES)
def test_field_blocks(case: Case, peer: Peer, wire: str) -> None:
    """The server does what the case says."""
    check(case, peer, wire)


def test_a_block_of_a_refused_stream_changes_the_table(peer: Peer) -> None:
    """Fields of a malformed request and of trailers enter the dynamic table, to which later requests refer (4.3)."""
    peer.send(
        peer.headers(1, [*FIELDS, ("connection", "x"), ("x-first", "1")], end=True),
        peer.request(ECHO, b"b", stream_id=3, metadata=[("x-first", "1"), ("x-second", "2")]),
    )
    assert [b"b"] == peer.read_answer(3).messages
    peer.send(
        peer.headers(5, FIELDS),
        h2.data(5, h2.message(b"c")),
        peer.headers(5, [("x-third", "3")], end=True),
        peer.request(ECHO, b"d", stream_id=7, metadata=[("x-third", "3"), ("x-second", "2")]),
    )
    assert [[b"c"], [b"d"]] == [answer.messages for answer in peer.read_answers([5, 7])]


def test_a_block_for_a_stream_that_the_client_has_reset(peer: Peer) -> None:
    """Fields that come after RST_STREAM enter the dynamic table, unless the connection is closed for them."""
    peer.send(peer.headers(1, FIELDS), h2.reset(1), peer.headers(1, [("x-late", "1")], end=True))
    if not peer.try_send(peer.request(ECHO, b"b", stream_id=3, metadata=[("x-late", "1")])):
        return
    answer = peer.read_until(lambda read: read.kind == h2.GOAWAY or read.stream_id == 3)
    assert answer.kind in (h2.GOAWAY, h2.HEADERS)


def test_many_requests_through_one_table(peer: Peer) -> None:
    """Four hundred requests whose fields are inserted, evicted and referred to are all understood."""
    for number in range(400):
        metadata = [(f"x-{number % 40}", f"{number % 90}" * 20), ("grpc-timeout", f"{90_000 + number}m")]
        peer.send(peer.request(ECHO, b"%d" % number, stream_id=2 * number + 1, metadata=metadata))
        assert [b"%d" % number] == peer.read_answer(2 * number + 1).messages
    alive(peer)


def test_a_smaller_table_of_the_client(peer: Peer) -> None:
    """After SETTINGS_HEADER_TABLE_SIZE of 0 answers refer to no entry (4.2)."""
    peer.send(asked(peer))
    peer.read_answer()
    peer.send(h2.settings_frame({h2.HEADER_TABLE_SIZE: 0}))
    peer.read_until(lambda read: read.kind == h2.SETTINGS and bool(read.flags & h2.ACK))
    peer.decoder.max_allowed_table_size = 0
    peer.send(asked(peer, 3))
    answer = peer.read_answer(3)
    assert ([b"a"], 0) == (answer.messages, answer.status)


def test_blocks_that_are_not_wanted_change_the_table(start_echo: StartEcho) -> None:
    """Fields of streams that are refused, and of trailers after the answer, are decoded like others (4.3)."""
    echo = start_echo(max_concurrent_streams=1)
    with Peer.connect(echo.address) as peer:
        peer.handshake()
        peer.send(opened(peer, 1), peer.headers(3, [*FIELDS, ("x-refused", "1")], end=True))
        peer.wait_reset(3)
        peer.send(h2.data(1, h2.message(b"a")), peer.headers(1, [("x-refused", "1"), ("x-trailer", "2")], end=True))
        assert [b"a"] == peer.read_answer().messages
        peer.send(peer.headers(5, [*FIELDS[:4], ("te", "x"), ("x-bad", "3")]))
        peer.wait_reset(5)
        peer.send(peer.headers(5, [("x-late", "4")], end=True))
        names = ("x-refused", "x-trailer", "x-bad", "x-late")
        peer.send(peer.request(ECHO, b"b", stream_id=7, metadata=[(name, str(at)) for at, name in enumerate(names, 1)]))
        assert [b"b"] == peer.read_answer(7).messages


def test_blocks_after_goaway_change_the_table(start_echo: StartEcho) -> None:
    """Streams above the last one of GOAWAY are ignored, but their fields enter the table (RFC 9113, 6.8)."""
    echo = start_echo()
    with Peer.connect(echo.address) as peer:
        peer.handshake()
        peer.send(opened(peer, 1))
        os.kill(echo.pid, signal.SIGTERM)
        while peer.wait_goaway().last_stream_id != 1:
            peer.send(h2.ping(peer.read_kind(h2.PING).payload, ack=True))
        peer.send(peer.headers(3, [*FIELDS, ("x-ignored", "1")]), h2.data(3, b"abc", end=True))
        peer.send(h2.data(1, h2.message(b"a")), peer.headers(1, [("x-ignored", "1")], end=True))
        answer = peer.read_answer()
        assert ([b"a"], 0) == (answer.messages, answer.status)
