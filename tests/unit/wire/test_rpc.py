"""gRPC on HTTP/2 without I/O."""

import gzip
import random

import pytest
from grpc import StatusCode
from hypothesis import given
from hypothesis import strategies as st

from weft.wire.heads import RequestHead, ResponseHead, decode_metadata, decode_timeout, encode_metadata, encode_timeout
from weft.wire.messages import (
    CallError,
    MessageReader,
    compress,
    decode_message,
    decompress,
    encode_message,
    pack_prefix,
    status_of_http,
    status_of_reset,
    whole_message,
)

CALL = (
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/a/b"),
    ("te", "trailers"),
    ("content-type", "application/grpc+proto"),
)


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


def test_memory_follows_what_has_come():
    """A message that announces 2 GB holds the bytes that came, and one-byte chunks are gathered."""
    reader = MessageReader(2**31 - 1)
    reader.feed(pack_prefix(0, 2**31 - 1))
    for _ in range(10_000):
        reader.feed(b"x")
    assert 10_000 == reader.num_bytes
    assert 1 == len(reader._parts)
    reader.release()
    assert reader.is_empty


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (pack_prefix(0, 101), StatusCode.RESOURCE_EXHAUSTED),
        (pack_prefix(2, 1), StatusCode.INTERNAL),
        (pack_prefix(1, 1), StatusCode.INTERNAL),
    ],
)
def test_bad_prefixes(data, code):
    """A message too large, an unknown flag, and compression that was not announced have their statuses."""
    with pytest.raises(CallError) as info:
        MessageReader(100).feed(data)
    assert code is info.value.code


def test_whole_message_is_exact():
    """Only data that is one plain message is taken without a reader."""
    assert b"abc" == whole_message(message(b"abc"))
    assert b"" == whole_message(message(b""))
    for data in (b"", b"\0\0\0", message(b"abc")[:-1], message(b"abc") + b"x", message(b"abc", 1)):
        assert whole_message(data) is None


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_compression(encoding):
    """A compressed message is read back; one that grows beyond the limit, is cut off or is none is an error."""
    body = b"weft " * 1000
    packed = compress(encoding, body)
    reader = MessageReader(len(body), may_compress=True)
    assert [body] == reader.feed(message(packed, 1))
    for data, limit, code in (
        (packed, len(body) - 1, StatusCode.RESOURCE_EXHAUSTED),
        (packed[:-3], len(body), StatusCode.INTERNAL),
        (b"no gzip", 100, StatusCode.INTERNAL),
        (packed + b"x", len(body), StatusCode.INTERNAL),
    ):
        with pytest.raises(CallError) as info:
            decompress(data, limit)
        assert code is info.value.code


def test_bombs_are_not_unpacked():
    """A gigabyte of zeros in a megabyte is refused at the limit."""
    bomb = gzip.compress(bytes(50_000_000))
    with pytest.raises(CallError, match="larger than max"):
        decompress(bomb, 1000)


@given(st.lists(st.tuples(st.from_regex(r"[a-z][a-z0-9_.-]{0,9}", fullmatch=True), st.binary(max_size=50))))
def test_metadata_come_back(pairs):
    """Binary values come back as they were, ASCII values too."""
    metadata = tuple(
        (f"x{key}-bin", value) if index % 2 else (f"x{key}x", value.hex()) for index, (key, value) in enumerate(pairs)
    )
    assert metadata == decode_metadata(encode_metadata(metadata))


@pytest.mark.parametrize("value", ["AQL/", "AQI", "AQI="])
def test_binary_metadata_with_and_without_padding(value):
    """Base64 is read with and without its padding."""
    assert value[0] == "A"
    assert b"\x01\x02" == decode_metadata([("k-bin", value)])[0][1][:2]


def test_joined_binary_metadata_are_split():
    """Values of one binary key joined by a comma are several values."""
    assert (("k-bin", b"\1"), ("k-bin", b"\2")) == decode_metadata([("k-bin", "AQ,Ag==")])


@pytest.mark.parametrize("pair", [("Upper", "x"), ("a b", "x"), ("te", "x"), ("a", "ü"), ("a", "x\ny"), ("", "x")])
def test_metadata_that_cannot_be_sent(pair):
    """Names and values that HTTP/2 or gRPC does not allow are errors that say which."""
    with pytest.raises(ValueError, match=repr(pair[0])):
        encode_metadata([pair])


@given(st.text(max_size=50))
def test_status_messages_come_back(text):
    """Any text survives percent-encoding, lone surrogates apart."""
    text = text.encode("utf-8", "replace").decode()
    encoded = encode_message(text)
    assert encoded.isascii()
    assert text == decode_message(encoded)


@pytest.mark.parametrize("value", ["%", "%zz", "%ff", "100 %", "a%2"])
def test_bad_status_messages_are_kept(value):
    """What is no percent-encoding gives a text, never an error."""
    assert isinstance(decode_message(value), str)


def test_timeouts():
    """Values have at most eight digits, are never shorter than asked, and at most 1 % longer."""
    rng = random.Random(3)
    for _ in range(2000):
        seconds = 10 ** rng.uniform(-8, 8)
        value = encode_timeout(seconds)
        assert len(value) <= 9
        assert seconds * 0.999999 <= decode_timeout(value) <= seconds * 1.011 + 1e-9
    assert "0n" == encode_timeout(-1)
    assert decode_timeout(encode_timeout(1e15)) > 1e11


@pytest.mark.parametrize("value", ["", "S", "5", "5s", "-5S", "1.5S", "123456789S", " 5S", "\u0665S", "5SS"])
def test_bad_timeouts(value):
    """What is no timeout is None."""
    assert decode_timeout(value) is None


@pytest.mark.parametrize(
    ("changed", "http_status", "code"),
    [
        ({":method": "GET"}, 405, None),
        ({"content-type": "text/html"}, 415, None),
        ({"content-type": "application/grpcx"}, 415, None),
        ({"grpc-timeout": "soon"}, 200, StatusCode.INTERNAL),
        ({"grpc-encoding": "snappy"}, 200, StatusCode.UNIMPLEMENTED),
        ({"k-bin": "&"}, 200, StatusCode.INTERNAL),
        ({"content-type": "application/grpc;a=b", "grpc-timeout": "5S", "x": "y"}, 200, None),
    ],
)
def test_heads_of_requests(changed, http_status, code):
    """What is no call, or cannot begin, says its HTTP status or its status."""
    head = RequestHead(tuple((dict(CALL) | changed).items()))
    assert http_status == head.http_status
    assert code is (head.failure[0] if head.failure else None)
    if "x" in changed:
        assert (5.0, (("x", "y"),)) == (head.timeout_s, head.metadata)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"grpc-status": "5", "grpc-message": "a%20b"}, StatusCode.NOT_FOUND),
        ({"grpc-status": "99"}, StatusCode.UNKNOWN),
        ({"grpc-status": "x"}, StatusCode.UNKNOWN),
        ({":status": "503"}, StatusCode.UNAVAILABLE),
        ({":status": "418"}, StatusCode.UNKNOWN),
        ({":status": "200", "content-type": "application/grpc"}, None),
    ],
)
def test_heads_of_responses(fields, code):
    """The status of an answer, or that of HTTP where it has none."""
    head = ResponseHead(tuple(fields.items()))
    assert code is head.status
    if "grpc-message" in fields:
        assert "a b" == head.message


def test_statuses_of_other_ends():
    """RST_STREAM and HTTP have the statuses that gRPC gives them, unknown codes one of their own."""
    assert StatusCode.UNAVAILABLE is status_of_reset(7)
    assert StatusCode.CANCELLED is status_of_reset(8)
    assert StatusCode.INTERNAL is status_of_reset(12345)
    assert StatusCode.UNIMPLEMENTED is status_of_http(404)
