"""Fields of requests, responses and trailers: what is malformed, however often it comes."""

import pytest

from weft.wire.connection import field_rules
from weft.wire.connection.field_rules import content_length, request_fault, response_fault, trailer_fault

REQUEST = [(":method", "POST"), (":scheme", "http"), (":path", "/a/b"), ("te", "trailers")]
#: Fields after those of a request, and a word of what is said of them.
REGULAR = [
    (("X-Test", "a"), "X-Test"),
    (("", "a"), "characters"),
    (("a b", "a"), "characters"),
    (("caf\u00e9", "a"), "characters"),
    (("connection", "close"), "HTTP/1.1"),
    (("te", "gzip"), "te"),
    (("x", "a\nb"), "line break"),
    (("x", "a\rb"), "line break"),
    (("x", "a\0b"), "zero"),
    ((":path", "/"), "pseudo"),
    (("content-length", "-1"), "content-length"),
    (("content-length", "\u00b2"), "content-length"),
]


@pytest.mark.parametrize(("field", "word"), REGULAR)
def test_malformed_fields(field: tuple[str, str], word: str) -> None:
    """A field is refused in requests, responses and trailers, also when it was seen before."""
    for _ in range(2):
        assert "" == request_fault([*REQUEST, ("x-before", "a")])
        assert word in request_fault([*REQUEST, ("x-before", "a"), field])
        assert word in response_fault([(":status", "200"), ("x-before", "a"), field])
        assert word in trailer_fault([field])


def test_lengths() -> None:
    """One length, or the same twice, is a length; others are none."""
    assert -1 == content_length(REQUEST)
    assert 7 == content_length([("content-length", "7"), ("content-length", "7")])
    assert -2 == content_length([("content-length", "7"), ("content-length", "8")])
    assert "content-length" in request_fault([*REQUEST, ("content-length", "7"), ("content-length", "8")])


def test_names_that_are_remembered_are_few() -> None:
    """Names that differ each time, or are long, take no memory."""
    for number in range(3000):
        assert "" == trailer_fault([(f"x-{number}", "a")])
    assert "" == trailer_fault([("x" * 1000, "a")])
    assert len(field_rules._known_names) <= 1024
    assert max(map(len, field_rules._known_names)) <= 64
