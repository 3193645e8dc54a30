"""RFC 9113, section 8: requests that are malformed, and unusual ones that are not."""

from collections.abc import Sequence

import pytest
from tests.wire import peer as h2
from tests.wire.conformance import (
    BIDI,
    ECHO,
    Case,
    alive_without_stream,
    answered,
    check,
    each,
    fixed,
    opened,
    raw_headers,
    stream_error,
)
from tests.wire.peer import Fields, Peer, request_fields

FIELDS = list(request_fields(ECHO))
BODY = h2.data(1, h2.message(b"a"), end=True)
WHOLE = h2.END_HEADERS | h2.END_STREAM


def without(name: str) -> Fields:
    return [field for field in FIELDS if field[0] != name]


def replaced(name: str, value: str) -> Fields:
    return [(known, value if known == name else old) for known, old in FIELDS]


def malformed(section: str, fact: str, fields: Fields) -> Case:
    """HEADERS of these fields and a message are a stream error of type PROTOCOL_ERROR (section 8.1.1)."""
    return Case(section, f"refuses {fact}", fixed(raw_headers(1, fields), BODY), stream_error(h2.PROTOCOL_ERROR))


def accepted(section: str, fact: str, fields: Fields) -> Case:
    return Case(section, f"takes {fact}", fixed(raw_headers(1, fields), BODY), answered(b"a"))


def length(value: str, *payloads: bytes) -> Sequence[bytes]:
    """A request whose content-length is the value."""
    pieces = [h2.data(1, payload) for payload in payloads]
    return [raw_headers(1, [*FIELDS, ("content-length", value)]), *pieces, h2.data(1, end=True)]


MESSAGE = h2.message(b"abc")

CASES = [
    Case(
        "8.1",
        "refuses a second HEADERS frame without END_STREAM",
        lambda p: [opened(p), raw_headers(1, [("a", "b")])],
        stream_error(h2.PROTOCOL_ERROR),
    ),
    Case(
        "8.1",
        "takes trailers",
        fixed(raw_headers(1, FIELDS), h2.data(1, h2.message(b"a")), raw_headers(1, [("a", "b")], WHOLE)),
        answered(b"a"),
    ),
    Case(
        "8.1",
        "refuses trailers with a pseudo-header field",
        fixed(raw_headers(1, request_fields(BIDI)), raw_headers(1, [(":method", "POST")], WHOLE)),
        stream_error(h2.PROTOCOL_ERROR),
    ),
    Case(
        "8.1",
        "refuses trailers with a name in upper case",
        fixed(raw_headers(1, request_fields(BIDI)), raw_headers(1, [("Test", "a")], WHOLE)),
        stream_error(h2.PROTOCOL_ERROR),
    ),
    Case(
        "8.1",
        "answers a request that has ended without a body",
        fixed(raw_headers(1, FIELDS, WHOLE)),
        answered(status=None),
    ),
    malformed("8.2", "a name in upper case", [*FIELDS, ("X-Test", "a")]),
    malformed("8.2.1", "a name with a space", [*FIELDS, ("x test", "a")]),
    malformed("8.2.1", "a name with a byte above 127", [*FIELDS, (b"x-t\xe9st", "a")]),
    malformed("8.2.1", "a name with a control character", [*FIELDS, (b"x-\x00", "a")]),
    malformed("8.2.1", "a name with a colon within", [*FIELDS, ("x:test", "a")]),
    malformed("8.2.1", "an empty name", [*FIELDS, ("", "a")]),
    malformed("8.2.1", "a value with NUL", [*FIELDS, ("x-test", b"a\x00b")]),
    malformed("8.2.1", "a value with CR", [*FIELDS, ("x-test", b"a\rb")]),
    malformed("8.2.1", "a value with LF", [*FIELDS, ("x-test", b"a\nb")]),
    accepted("8.2.1", "an empty value", [*FIELDS, ("x-test", "")]),
    malformed("8.2.2", "connection", [*FIELDS, ("connection", "keep-alive")]),
    malformed("8.2.2", "keep-alive", [*FIELDS, ("keep-alive", "timeout=5")]),
    malformed("8.2.2", "proxy-connection", [*FIELDS, ("proxy-connection", "keep-alive")]),
    malformed("8.2.2", "transfer-encoding", [*FIELDS, ("transfer-encoding", "chunked")]),
    malformed("8.2.2", "upgrade", [*FIELDS, ("upgrade", "websocket")]),
    malformed("8.2.2", "te other than trailers", replaced("te", "trailers, deflate;q=0.5")),
    accepted("8.2.2", "te of trailers", FIELDS),
    accepted("8.2.3", "cookies in several fields", [*FIELDS, ("cookie", "a=b"), ("cookie", "c=d")]),
    malformed("8.3", "an unknown pseudo-header field", [*FIELDS[:4], (":test", "a"), *FIELDS[4:]]),
    malformed("8.3", "a pseudo-header field of responses", [*FIELDS[:4], (":status", "200"), *FIELDS[4:]]),
    malformed("8.3", "a pseudo-header field after a regular one", [*FIELDS[:3], *FIELDS[4:], FIELDS[3]]),
    malformed("8.3", "a request without a pseudo-header field", FIELDS[4:]),
    malformed("8.3.1", "an empty path", replaced(":path", "")),
    malformed("8.3.1", "a request without :method", without(":method")),
    malformed("8.3.1", "a request without :scheme", without(":scheme")),
    malformed("8.3.1", "a request without :path", without(":path")),
    malformed("8.3.1", "two of :method", [(":method", "POST"), *FIELDS]),
    malformed("8.3.1", "two of :scheme", [(":scheme", "http"), *FIELDS]),
    malformed("8.3.1", "two of :path", [(":path", ECHO), *FIELDS]),
    malformed("8.3.1", "two of :authority", [(":authority", "localhost"), *FIELDS]),
    accepted("8.3.1", "pseudo-header fields in another order", [*reversed(FIELDS[:4]), *FIELDS[4:]]),
    accepted("8.3.1", "a scheme other than that of the connection", replaced(":scheme", "https")),
    accepted("8.3.1", "host in place of :authority", [*without(":authority"), ("host", "localhost")]),
    Case("8.1.1", "takes a content-length that is right", fixed(*length("8", MESSAGE)), answered(b"abc")),
    Case(
        "8.1.1",
        "takes a content-length of several frames",
        fixed(*length("8", MESSAGE[:3], MESSAGE[3:])),
        answered(b"abc"),
    ),
    Case(
        "8.1.1",
        "refuses a content-length above the data",
        fixed(*length("9", MESSAGE)),
        stream_error(h2.PROTOCOL_ERROR),
    ),
    Case(
        "8.1.1",
        "refuses a content-length below the data",
        fixed(*length("1", MESSAGE)),
        stream_error(h2.PROTOCOL_ERROR),
    ),
    Case(
        "8.1.1",
        "refuses a content-length above that of several frames",
        fixed(*length("9", MESSAGE[:3], MESSAGE[3:])),
        stream_error(h2.PROTOCOL_ERROR),
    ),
    Case(
        "8.1.1",
        "refuses a content-length where nothing comes",
        fixed(raw_headers(1, [*FIELDS, ("content-length", "5")], WHOLE)),
        stream_error(h2.PROTOCOL_ERROR),
    ),
    malformed("8.1.1", "a content-length that is no number", [*FIELDS, ("content-length", "six")]),
    malformed("8.1.1", "two lengths that differ", [*FIELDS, ("content-length", "6"), ("content-length", "7")]),
]


@each(CASES)
def test_requests(case: Case, peer: Peer, wire: str) -> None:
    """The server does what the case says."""
    check(case, peer, wire)


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "CONNECT"])
def test_other_methods_are_answered(peer: Peer, method: str) -> None:
    """A request by another method gets an answer or a reset, and the connection goes on (section 8.3.1)."""
    fields = [(":method", method), (":scheme", "http"), (":path", "/"), (":authority", "localhost")]
    peer.send(raw_headers(1, fields if method != "CONNECT" else [fields[0], fields[3]], WHOLE))
    peer.read_answer()
    alive_without_stream(peer)
