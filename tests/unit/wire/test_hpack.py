"""Field blocks: the examples of RFC 7541, agreement with the ``hpack`` library, what is refused, what is cached."""

import contextlib
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import hpack
import pytest
from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH
from hpack.struct import HeaderTuple
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.wire.notation import Case, fields_of, piece_of, read_cases, words

from weft.wire.frames import ErrorCode, Http2ConnectionError
from weft.wire.hpack import Decoder, encode

Fields = list[tuple[str, str]]

CASES = read_cases(Path(__file__).with_name("hpack.txt"))
GET: Fields = [(":method", "GET"), (":scheme", "http"), (":path", "/"), (":authority", "www.example.com")]
_NAMES = st.text(st.sampled_from("abcdefghijklmnopqrstuvwxyz-"), min_size=1, max_size=20)
_VALUES = st.text(st.characters(max_codepoint=255), max_size=200)
_REPEATED = [
    *GET,
    (":status", "200"),
    ("cache-control", "private"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
    ("authorization", "Bearer x"),
]
_LISTS = st.lists(st.sampled_from(_REPEATED) | st.tuples(_NAMES, _VALUES), max_size=20)


@contextlib.contextmanager
def at_most(*, kept_bytes: int = 1 << 30, peak_bytes: int = 1 << 30) -> Iterator[None]:
    """What is done within keeps, and takes, no more memory."""
    tracemalloc.start()
    try:
        yield
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < kept_bytes
    assert peak < peak_bytes


def decode(decoder: Decoder, block: bytes) -> Fields:
    decoded = decoder.decode(block)
    assert not decoded.is_too_large
    return list(decoded.fields)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_blocks(case: Case) -> None:
    """Blocks are decoded to their fields one after the other; what RFC 7541 forbids is a COMPRESSION_ERROR."""
    decoder = Decoder()
    for block, *rest in map(words, case.lines):
        if block == "malformed":
            with pytest.raises(Http2ConnectionError) as raised:
                decoder.decode(b"".join(map(piece_of, rest)))
            assert raised.value.code is ErrorCode.COMPRESSION_ERROR
        else:
            fields = [(name.decode(), value.decode()) for name, value in fields_of(rest)]
            assert fields == decode(decoder, bytes.fromhex(block))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(_LISTS, st.booleans(), st.none() | st.integers(0, 4096), st.none() | st.integers(0, 4096)),
        max_size=8,
    )
)
def test_decodes_what_the_library_encodes(blocks: list[tuple[Fields, bool, int | None, int | None]]) -> None:
    """Lists of any fields arrive through indexing, eviction, Huffman coding and up to two table sizes a block."""
    encoder, decoder = hpack.Encoder(), Decoder()
    for fields, huffman, smallest, final in blocks:
        for size in (smallest, final):
            if size is not None and size != encoder.header_table_size:  # the library forgets a size that is set twice
                encoder.header_table_size = size
        block = encoder.encode(
            [HeaderTuple(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields], huffman=huffman
        )
        assert fields == decode(decoder, block)


@settings(max_examples=200, deadline=None)
@given(st.lists(_LISTS, max_size=4))
def test_the_library_decodes_what_is_encoded(lists: list[Fields]) -> None:
    """The library and our decoder read encoded fields back, in text and in bytes."""
    library, decoder = hpack.Decoder(), Decoder()
    for fields in lists:
        block = encode(fields)
        raw = [(name.encode(), value.encode("latin-1")) for name, value in fields]
        assert raw == [(bytes(name), bytes(value)) for name, value in library.decode(block, raw=True)]
        assert fields == decode(decoder, block)
        assert fields == decode(Decoder(), encode((name, value.encode("latin-1")) for name, value in fields))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60), st.binary(max_size=300))
def test_any_bytes_are_decoded_or_refused(first: bytes, second: bytes) -> None:
    """Of arbitrary bytes, blocks are decoded as the library does or refused with a connection error."""
    library, decoder = hpack.Decoder(), Decoder()
    for block in (first, second):
        try:
            ours = decode(decoder, block)
        except Http2ConnectionError:
            return
        assert [(name.encode("latin-1"), value.encode("latin-1")) for name, value in ours] == [
            (bytes(name), bytes(value)) for name, value in library.decode(block, raw=True)
        ]


@settings(max_examples=300)
@given(st.binary(max_size=300))
def test_huffman_codes_of_all_bytes(value: bytes) -> None:
    """Every byte has its Huffman code."""
    coded = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH).encode(value)
    length = bytes([0x80 | len(coded)]) if len(coded) < 127 else b"\xff" + _continued(len(coded) - 127)
    assert [("a", value.decode("latin-1"))] == decode(Decoder(), b"\x00\x01a" + length + coded)


def _continued(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + _continued(value >> 7)


@pytest.mark.parametrize("what", ["a table size of 0", "a field larger than the table"])
def test_the_table_is_emptied(what: str) -> None:
    """By a size of 0, also when it grows again, and by a field that does not fit, which is decoded (section 4.4)."""
    decoder = Decoder()
    decoder.decode(bytes.fromhex("4001610162"))
    assert [("a", "b")] == decode(decoder, b"\xbe")
    if what == "a table size of 0":
        decoder.decode(bytes.fromhex("203fe11f"))
    else:
        large = hpack.Encoder().encode([("large", "x" * 4100)], huffman=False)
        assert [("large", "x" * 4100)] == decode(decoder, large)
    with pytest.raises(Http2ConnectionError):
        decoder.decode(b"\xbe")


def test_the_advertised_table_size_is_the_limit() -> None:
    """The table grows to the size that was advertised, and is 4096 bytes until the peer says so."""
    fields = [("a", "x" * 3000), ("b", "y" * 3000)]
    encoder, decoder = hpack.Encoder(), Decoder(max_table_bytes=8192)
    assert fields == decode(decoder, encoder.encode(fields))
    encoder.header_table_size = 8192
    assert fields == decode(decoder, encoder.encode(fields))  # b is indexed, a is inserted once more
    assert fields == decode(decoder, b"\xbe\xbf")


def test_how_fields_are_encoded() -> None:
    """One of the static table in a byte, a name by its index, secrets as never indexed, other literals not indexed."""
    assert b"\x83\x86\x88" == encode([(":method", "POST"), (":scheme", "http"), (":status", "200")])
    assert b"\x08\x03201" == encode([(":status", "201")])
    (field,) = hpack.Decoder().decode(encode([("authorization", "Bearer x")]))
    assert isinstance(field, hpack.NeverIndexedHeaderTuple)
    assert b"\x1f\x08" == encode([("authorization", "x")])[:2]
    assert b"\x0f\x10" == encode([("content-type", "application/grpc")])[:2]
    with pytest.raises(UnicodeEncodeError):  # a value that no field can hold
        encode([("grpc-message", "\u20ac")])


def test_a_list_over_the_limit_is_cut_and_keeps_the_table() -> None:
    """Fields beyond the limit are left out, but enter the dynamic table; later blocks are decoded as ever."""
    encoder, decoder = hpack.Encoder(), Decoder(max_list_bytes=200)
    fields = [(f"name-{number}", "x" * 30) for number in range(10)]
    decoded = decoder.decode(encoder.encode(fields))
    assert decoded.is_too_large
    assert list(decoded.fields) == fields[:2]
    assert [fields[9]] == decode(decoder, encoder.encode([fields[9]]))
    assert not decoder.decode(encode([("a", "x" * (200 - 33))])).is_too_large
    assert decoder.decode(encode([("a", "x" * (200 - 32))])).is_too_large


def test_memory_of_an_hpack_bomb_is_bounded() -> None:
    """100,000 references to an entry of 4 KB end the connection after some hundred, in little memory."""
    decoder = Decoder()
    decoder.decode(hpack.Encoder().encode([("a", "x" * 4000)]))
    bomb = b"\xbe" * 100_000
    too_many = pytest.raises(Http2ConnectionError, match="257 header fields beyond a list of 65536 bytes")
    with at_most(peak_bytes=500_000), too_many:
        decoder.decode(bomb)


def test_time_is_linear_in_the_block() -> None:
    """Twenty times the bytes take less than sixty times as long, for each representation of a field."""
    for unit in (b"\xbe", b"\x40\x01a\x01b", b"\x40\x01a\x82\x1f\x1f", b"\x7e\x01b", b"\x00\x00\x00"):
        times = []
        for repetitions in (2_000, 40_000):
            decoder = Decoder(max_list_bytes=1 << 30)
            decoder.decode(bytes.fromhex("4001610162"))
            block = unit * repetitions
            start = time.thread_time()
            decoder.decode(block)
            times.append(time.thread_time() - start)
        assert times[1] < 60 * times[0], unit


def test_a_repeated_block_gives_the_same_object() -> None:
    """What a caller stored with the fields is there when the block comes again, unless it changes the table."""
    decoder = Decoder()
    block = encode([*GET, ("grpc-timeout", "1S")])
    first = decoder.decode(block)
    assert first.memo is None
    first.memo = "derived"
    assert decoder.decode(bytes(block)) is first
    assert first.memo == "derived"
    insertion = bytes.fromhex("4001610162")
    assert decoder.decode(insertion) is not decoder.decode(insertion)
    assert [("a", "b"), ("a", "b")] == decode(decoder, b"\xbe\xbf")


def test_a_changed_table_drops_blocks_that_refer_to_it() -> None:
    """An index means another field after an insertion or a size update; what needs no table stays cached."""
    decoder = Decoder()
    decoder.decode(bytes.fromhex("4001610162"))
    static, by_index, by_name = b"\x82", b"\xbe", bytes.fromhex("0f2f0178")
    kept = decoder.decode(static)
    assert decoder.decode(by_index) is decoder.decode(by_index)
    assert [("a", "x")] == decode(decoder, by_name)
    decoder.decode(bytes.fromhex("4001630164"))
    assert [("c", "d")] == decode(decoder, by_index)
    assert [("c", "x")] == decode(decoder, by_name)
    assert decoder.decode(static) is kept
    decoder.decode(b"\x20\x82")
    for block in (by_index, by_name):
        with pytest.raises(Http2ConnectionError):
            decoder.decode(block)


def test_the_cache_is_bounded() -> None:
    """Blocks that are new each time, small or large, of few fields or many, leave little memory behind."""
    decoder = Decoder()
    decoder.decode(hpack.Encoder().encode([("table", "x" * 900)]))
    entry = b"\xbe"
    usual = [encode([("grpc-timeout", f"{number}u"), ("x", "y" * 900)]) for number in range(2000)]
    dense = [encode((f"n{number:02}", f"{at:02}") for at in range(64)) for number in range(90)]
    large = [encode([("a", "x" * 1100), ("number", str(number))]) for number in range(64)]
    many = [b"\x82" * 100 + encode([("number", str(number))]) for number in range(64)]
    with at_most(kept_bytes=200_000):
        for block in (*usual, *dense, *(entry + block for block in dense), *large, *many):
            decoder.decode(block)
    repeated = encode(GET)
    assert decoder.decode(repeated) is decoder.decode(repeated)


def test_a_block_that_is_repeated_among_others_is_found_most_times() -> None:
    """Blocks that differ each time do not drive out the one between them that does not, but for one time in forty."""
    decoder = Decoder()
    repeated = encode(GET)
    decoder.decode(repeated).memo = marks = []
    for number in range(2000):
        decoder.decode(encode([*GET, ("grpc-timeout", f"{number}u")]))
        found = decoder.decode(repeated)
        if found.memo is None:
            marks.append(number)
            found.memo = marks
    assert len(marks) < 2000 / 40


def test_names_that_are_kept_encoded_are_few() -> None:
    """Names that differ each time, or are long, take little memory, and are encoded as others are."""
    with at_most(kept_bytes=200_000):
        for number in range(3000):
            assert [(f"x-{number}", "a")] == decode(Decoder(), encode([(f"x-{number}", "a")]))
            encode([(f"{number}" * 500, "a")])
