"""The fields of requests as encoded blocks."""

import pytest

from weft.wire.client.protocol import RequestHeads
from weft.wire.heads import decode_timeout
from weft.wire.hpack import Decoder


def fields(block: bytes) -> list[tuple[str, str]]:
    return list(Decoder().decode(block).fields)


@pytest.fixture
def heads() -> RequestHeads:
    return RequestHeads("https", "host:1", "agent")


def test_the_fields_of_a_method(heads: RequestHeads) -> None:
    """Pseudo-header fields come first; all that gRPC wants is there."""
    assert fields(heads.method("/a.B/C", "identity")) == [
        (":method", "POST"), (":scheme", "https"), (":path", "/a.B/C"), (":authority", "host:1"), ("te", "trailers"),
        ("content-type", "application/grpc"), ("user-agent", "agent"),
        ("grpc-accept-encoding", "identity, deflate, gzip"),
    ]  # fmt: skip


def test_an_encoding_is_announced(heads: RequestHeads) -> None:
    """Compressed requests are announced."""
    assert ("grpc-encoding", "gzip") in fields(heads.method("/a.B/C", "gzip"))


def test_metadata_of_every_shape(heads: RequestHeads) -> None:
    """Metadata may be a tuple, a list, or pairs that are lists; a block that repeats is the same object."""
    block = heads.metadata((("a", "b"), ("c-bin", b"\x00\xff")))
    assert fields(block) == [("a", "b"), ("c-bin", "AP8")]
    assert heads.metadata([("a", "b"), ("c-bin", b"\x00\xff")]) is block
    assert heads.metadata((["a", "b"], ["c-bin", b"\x00\xff"])) == block


@pytest.mark.parametrize("pair", [("A", "b"), ("a", "line\nbreak"), ("grpc-timeout", "1S"), ("a", "ü"), ("", "b")])
def test_metadata_that_cannot_be_sent(heads: RequestHeads, pair: tuple[str, str]) -> None:
    """A key or value that the protocol does not allow is refused."""
    with pytest.raises(ValueError, match="key"):
        heads.metadata((pair,))


@pytest.mark.parametrize(
    "timeout_s", [1e-9, 0.0001, 0.0123, 0.09999, 0.1, 0.1234, 1.0, 9.999, 10.01, 29.98, 99.95, 100.2, 3600.0, 1e8]
)
def test_timeouts_are_rounded_up_a_little(heads: RequestHeads, timeout_s: float) -> None:
    """A timeout that is sent is not shorter than the one that was given, and longer by little."""
    ((name, value),) = fields(heads.timeout(timeout_s))
    sent_s = decode_timeout(value)
    assert name == "grpc-timeout"
    assert sent_s is not None
    assert timeout_s * (1 - 1e-9) <= sent_s <= timeout_s * 1.11 + 0.001


def test_blocks_of_timeouts_repeat(heads: RequestHeads) -> None:
    """Timeouts that differ little have one block."""
    assert heads.timeout(29.9123) is heads.timeout(29.9456)


def test_what_is_kept_is_bounded(heads: RequestHeads) -> None:
    """A thousand metadata leave a few hundred blocks."""
    for number in range(1000):
        heads.metadata((("a", str(number)),))
        heads.timeout(0.1 + number)
    assert len(heads._metadata) <= 256
    assert len(heads._timeouts) <= 256
