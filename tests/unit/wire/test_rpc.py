"""gRPC on HTTP/2 without I/O: messages, metadata, timeouts and fields; what is refused of them: ``tests/wire``."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.wire.client.protocol import RequestHeads
from weft.wire.connection import field_rules
from weft.wire.connection.field_rules import request_fault, response_fault, trailer_fault
from weft.wire.heads import decode_metadata, decode_timeout, encode_metadata, encode_timeout
from weft.wire.hpack import Decoder
from weft.wire.messages import MessageReader, compress, decode_message, encode_message, pack_prefix, whole_message


def message(body: bytes, flag: int = 0) -> bytes:
    return pack_prefix(flag, len(body)) + body


@given(st.lists(st.binary(max_size=5000), max_size=8), st.randoms(use_true_random=False))
def test_messages_are_read_however_they_are_split(bodies, rng):
    """The messages of a stream come out whole and in order, and nothing is held at the end."""
    data = b"".join(map(message, bodies))
    held = []
    reader = MessageReader(5000, count_bytes=held.append)
    found = []
    while data:
        size = rng.choice((1, 3, 5, 6, 100, 4000))
        found += reader.feed(data[:size])
        data = data[size:]
    assert bodies == found
    assert reader.is_empty
    assert 0 == sum(held)


def test_one_byte_chunks_are_gathered():
    """A message that announces 2 GB holds the bytes that came, in one piece."""
    reader = MessageReader(2**31 - 1)
    reader.feed(pack_prefix(0, 2**31 - 1))
    for _ in range(10_000):
        reader.feed(b"x")
    assert (10_000, 1) == (reader.num_bytes, len(reader._parts))
    reader.release()
    assert reader.is_empty


def test_whole_message_is_exact():
    """Only data that is one plain message is taken without a reader."""
    assert b"abc" == whole_message(message(b"abc"))
    assert b"" == whole_message(message(b""))
    for data in (b"", b"\0\0\0", message(b"abc")[:-1], message(b"abc") + b"x", message(b"abc", 1)):
        assert whole_message(data) is None


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_compressed_messages_are_read(encoding):
    """Up to the limit of a message."""
    body = b"weft " * 1000
    assert [body] == MessageReader(len(body), may_compress=True).feed(message(compress(encoding, body), 1))


@given(st.lists(st.tuples(st.from_regex(r"[a-z][a-z0-9_.-]{0,9}", fullmatch=True), st.binary(max_size=50))))
def test_metadata_come_back(pairs):
    """Binary values come back as they were, ASCII values too."""
    metadata = tuple(
        (f"x{key}-bin", value) if index % 2 else (f"x{key}x", value.hex()) for index, (key, value) in enumerate(pairs)
    )
    assert metadata == decode_metadata(encode_metadata(metadata))


@pytest.mark.parametrize(
    "pair", [("Upper", "x"), ("a b", "x"), ("te", "x"), ("grpc-timeout", "1S"), ("a", "ü"), ("a", "x\ny"), ("", "x")]
)
def test_metadata_that_cannot_be_sent(pair):
    """Names and values that HTTP/2 or gRPC does not allow are errors that say which."""
    with pytest.raises(ValueError, match=repr(pair[0])):
        encode_metadata([pair])
    with pytest.raises(ValueError, match="key"):
        RequestHeads("https", "host:1", "agent").metadata((pair,))


@given(st.text(max_size=50))
def test_status_messages_come_back(text):
    """Any text survives percent-encoding, lone surrogates apart."""
    text = text.encode("utf-8", "replace").decode()
    assert encode_message(text).isascii()
    assert text == decode_message(encode_message(text))


@pytest.mark.parametrize("value", ["%", "%zz", "%ff", "100 %", "a%2"])
def test_bad_status_messages_are_kept(value):
    """What is no percent-encoding gives a text, never an error."""
    assert isinstance(decode_message(value), str)


def test_timeouts():
    """Values have at most eight digits, are never shorter than asked, and at most 1 % longer, of a call 11 %."""
    rng = random.Random(3)
    heads = RequestHeads("https", "host:1", "agent")
    for seconds in (*(10 ** rng.uniform(-8, 8) for _ in range(2000)), 1e-9, 0.0999, 0.1, 1.0, 9.999, 29.98, 100.2):
        value = encode_timeout(seconds)
        assert len(value) <= 9
        assert seconds * 0.999999 <= (decode_timeout(value) or 0) <= seconds * 1.011 + 1e-9
        ((name, sent),) = Decoder().decode(heads.timeout(seconds)).fields
        assert name == "grpc-timeout"
        assert seconds * (1 - 1e-9) <= (decode_timeout(sent) or 0) <= seconds * 1.11 + 0.001
    assert "0n" == encode_timeout(-1)
    assert (decode_timeout(encode_timeout(1e15)) or 0) > 1e11
    assert heads.timeout(29.9123) is heads.timeout(29.9456)


def test_the_fields_of_a_request():
    """Pseudo-header fields first, all that gRPC wants; blocks that repeat are one object, of which few are kept."""
    heads = RequestHeads("https", "host:1", "agent")
    assert list(Decoder().decode(heads.method("/a.B/C", "gzip")).fields) == [
        (":method", "POST"), (":scheme", "https"), (":path", "/a.B/C"), (":authority", "host:1"), ("te", "trailers"),
        ("content-type", "application/grpc"), ("user-agent", "agent"),
        ("grpc-accept-encoding", "identity, deflate, gzip"), ("grpc-encoding", "gzip"),
    ]  # fmt: skip
    assert "grpc-encoding" not in dict(Decoder().decode(heads.method("/a.B/C", "identity")).fields)
    block = heads.metadata((("a", "b"), ("c-bin", b"\x00\xff")))
    assert list(Decoder().decode(block).fields) == [("a", "b"), ("c-bin", "AP8")]
    assert heads.metadata([("a", "b"), ("c-bin", b"\x00\xff")]) is block
    assert heads.metadata((["a", "b"], ["c-bin", b"\x00\xff"])) == block
    for number in range(1000):
        heads.metadata((("a", str(number)),))
        heads.timeout(0.1 + number)
    assert len(heads._metadata) <= 256
    assert len(heads._timeouts) <= 256


@pytest.mark.parametrize(
    ("field", "word"),
    [
        (("X-Test", "a"), "X-Test"),
        (("", "a"), "characters"),
        (("connection", "close"), "HTTP/1.1"),
        (("x", "a\nb"), "line break"),
        (("x", "a\0b"), "zero"),
        (("content-length", "\u00b2"), "content-length"),
    ],
)
def test_a_malformed_field_is_told(field, word):
    """In requests, responses and trailers, also when it was seen before."""
    request = [(":method", "POST"), (":scheme", "http"), (":path", "/a/b"), ("x-before", "a")]
    for _ in range(2):
        assert "" == request_fault(request)
        assert word in request_fault([*request, field])
        assert word in response_fault([(":status", "200"), ("x-before", "a"), field])
        assert word in trailer_fault([field])


def test_names_that_are_remembered_are_few():
    """Names that differ each time, or are long, take no memory."""
    for number in range(3000):
        assert "" == trailer_fault([(f"x-{number}", "a")])
    assert "" == trailer_fault([("x" * 1000, "a")])
    assert len(field_rules._known_names) <= 1024
    assert max(map(len, field_rules._known_names)) <= 64
