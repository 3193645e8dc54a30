"""gRPC over HTTP/2, requests: https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md."""

import gzip
import time
import zlib

from tests.wire import peer as h2
from tests.wire.conformance import (
    BIDI,
    ECHO,
    SLOW,
    Case,
    alive_without_stream,
    answered,
    check,
    each,
    ended,
    fixed,
    raw_headers,
)
from tests.wire.echo_process import EchoService
from tests.wire.peer import Fields, Peer, message, request_fields

DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL = 4, 8, 12, 13
ERRORS = range(1, 17)
CARDINALITY = (UNIMPLEMENTED, INTERNAL)  # statuscodes.md and what gRPC in Java and Go answer
FIELDS = list(request_fields(ECHO))
WHOLE = h2.END_HEADERS | h2.END_STREAM


def called(fields: Fields, *payloads: bytes, end: bool = True) -> list[bytes]:
    """HEADERS and DATA of a call on stream 1."""
    pieces = [h2.data(1, payload) for payload in payloads]
    return [raw_headers(1, fields), *pieces, *([h2.data(1, end=True)] if end else [])]


def sent(section: str, fact: str, *payloads: bytes, expect, path: str = ECHO, metadata: Fields = ()) -> Case:
    return Case(section, fact, fixed(*called([*request_fields(path), *metadata], *payloads)), expect)


def typed(content_type: str | None) -> Fields:
    return [*FIELDS[:-1], *([("content-type", content_type)] if content_type is not None else [])]


CONTENT_TYPES = [
    Case("Content-Type", f"takes {value}", fixed(*called(typed(value), message(b"a"))), answered(b"a"))
    for value in (
        "application/grpc",
        "application/grpc+proto",
        "application/grpc+json",
        "application/grpc;charset=utf-8",
    )
] + [
    Case("Content-Type", f"refuses {value}", fixed(*called(typed(value), message(b"a"))), ended(http=[415]))
    for value in ("application/json", "text/html", "application/octet-stream", "", None)
]

PATHS = [
    sent("Path", f"has no method {path}", message(b"a"), path=path, expect=ended(UNIMPLEMENTED))
    for path in (
        "/test.Echo/Missing",
        "/test.Missing/Unary",
        "/test.Echo",
        "/",
        "//",
        "/test.Echo/",
        "/test.echo/unary",
    )
] + [
    sent("Path", f"refuses {path}", message(b"a"), path=path, expect=ended(*ERRORS, http=range(400, 500), resets=[1]))
    for path in ("test.Echo/Unary", "*", "/test.Echo/Unary/", "/test.Echo/Unary?a=b")
]

TIMEOUTS = (
    [
        sent("Timeout", f"takes {value}", message(b"a"), metadata=[("grpc-timeout", value)], expect=answered(b"a"))
        for value in ("1H", "1M", "10S", "10000m", "10000000u", "99999999n", "99999999H", "00000010S")
    ]
    + [
        sent("Timeout", f"refuses {value!r}", message(b"a"), metadata=[("grpc-timeout", value)], expect=ended(INTERNAL))
        for value in ("", "1", "S", "1s", "-1S", "123456789S", "1.5S", "1 S", "1SS", "\xb2S")
    ]
    + [
        sent(
            "Timeout",
            f"has passed if it is {value}",
            message(b"a"),
            path=SLOW,
            metadata=[("grpc-timeout", value)],
            expect=ended(DEADLINE_EXCEEDED, resets=[h2.CANCEL]),
        )
        for value in ("0S", "0n", "1n")
    ]
)

MESSAGES = [
    sent("Message", "takes an empty message", message(b""), expect=answered(b"")),
    sent("Message", "refuses a message that is cut off", message(b"abc", length=9), expect=ended(*ERRORS)),
    sent("Message", "refuses a prefix that is cut off", b"\0\0\0", expect=ended(*ERRORS)),
    Case(
        "Message",
        "refuses a message that is cut off by trailers",
        fixed(*called(request_fields(BIDI), message(b"a"), b"\0\0", end=False), raw_headers(1, [("a", "b")], WHOLE)),
        ended(*ERRORS),
    ),
    sent("Message", "refuses a second message that is cut off", message(b"a"), b"\0\0", expect=ended(*ERRORS)),
    sent("Message", "refuses two messages to a unary method", message(b"a") * 2, expect=ended(*CARDINALITY)),
    sent(
        "Message",
        "refuses two messages to a unary method, in two frames",
        message(b"a"),
        message(b"b"),
        expect=ended(*CARDINALITY),
    ),
    sent("Message", "refuses a unary call without a message", expect=ended(*CARDINALITY)),
    Case(
        "Message",
        "refuses a unary call whose HEADERS end the stream",
        fixed(raw_headers(1, FIELDS, WHOLE)),
        ended(*CARDINALITY),
    ),
    sent(
        "Message",
        "refuses a call of a server stream without a message",
        path="/test.Echo/ServerStream",
        expect=ended(*CARDINALITY),
    ),
    sent("Message", "takes a client stream without a message", path="/test.Echo/ClientStream", expect=answered(b"0 0")),
    sent(
        "Message",
        "takes a client stream of several messages in one frame",
        message(b"ab") + message(b"") + message(b"cde"),
        path="/test.Echo/ClientStream",
        expect=answered(b"3 5"),
    ),
    sent("Message", "takes a bidirectional stream without a message", path=BIDI, expect=answered()),
    sent(
        "Message",
        "takes frames that end anywhere in a message",
        *(message(b"ab") + message(b"c"))[:3].split(b"|"),
        (message(b"ab") + message(b"c"))[3:8],
        (message(b"ab") + message(b"c"))[8:],
        path=BIDI,
        expect=answered(b"ab", b"c"),
    ),
    sent("Message", "takes empty DATA frames", b"", message(b"a"), b"", expect=answered(b"a")),
    sent(
        "Message",
        "answers a server stream of no messages",
        message(b"0 0"),
        path="/test.Echo/ServerStream",
        expect=answered(),
    ),
]

GZIP = [("grpc-encoding", "gzip")]
COMPRESSION = [
    sent(
        "Compression",
        "takes gzip",
        message(gzip.compress(b"a" * 99), compressed=1),
        metadata=GZIP,
        expect=answered(b"a" * 99),
    ),
    sent("Compression", "takes a plain message among gzip", message(b"a"), metadata=GZIP, expect=answered(b"a")),
    sent(
        "Compression",
        "takes gzip of an empty message",
        message(gzip.compress(b""), compressed=1),
        metadata=GZIP,
        expect=answered(b""),
    ),
    sent(
        "Compression",
        "takes identity",
        message(b"a"),
        metadata=[("grpc-encoding", "identity"), ("grpc-accept-encoding", "identity,x-test , gzip")],
        expect=answered(b"a"),
    ),
    sent(
        "Compression",
        "refuses what is not gzip",
        message(b"no gzip", compressed=1),
        metadata=GZIP,
        expect=ended(*ERRORS),
    ),
    sent(
        "Compression",
        "refuses gzip that is cut off",
        message(gzip.compress(b"a" * 99)[:-9], compressed=1),
        metadata=GZIP,
        expect=ended(*ERRORS),
    ),
    sent(
        "Compression",
        "refuses a compressed message without grpc-encoding",
        message(zlib.compress(b"a"), compressed=1),
        expect=ended(INTERNAL),
    ),
    *(
        sent(
            "Compression",
            f"refuses the flag {flag:#x}",
            message(b"a", compressed=flag),
            expect=ended(*ERRORS, resets=[1, 2]),
        )
        for flag in (0x02, 0x80, 0xFF)
    ),
    *(
        sent(
            "Compression",
            f"refuses the flag {flag:#x} in a stream",
            message(b"a", compressed=flag),
            path=BIDI,
            expect=ended(*ERRORS, resets=[1, 2]),
        )
        for flag in (0x02, 0x81)
    ),
]

METADATA = [
    Case(
        "Metadata",
        "takes a name of all characters",
        fixed(*called([*FIELDS, ("0-a_z.9", "v")], message(b"a"))),
        answered(b"a"),
    ),
    Case(
        "Metadata",
        "takes bytes above 127",
        fixed(*called([*FIELDS, ("x", b"caf\xc3\xa9")], message(b"a"))),
        answered(b"a"),
    ),
    Case(
        "Metadata",
        "takes a reserved name",
        fixed(*called([*FIELDS, ("grpc-test", "1")], message(b"a"))),
        answered(b"a"),
    ),
    Case(
        "Metadata",
        "answers where binary metadata are no base64",
        fixed(*called([*FIELDS, ("x-bin", "a b!")], message(b"a"))),
        ended(0, *ERRORS, resets=[h2.PROTOCOL_ERROR]),
    ),
    Case("TE", "takes a request without te", fixed(*called([*FIELDS[:4], FIELDS[5]], message(b"a"))), answered(b"a")),
    *(
        Case(
            "Method",
            f"refuses {method}",
            fixed(*called([(":method", method), *FIELDS[1:]], message(b"a"))),
            ended(*ERRORS, http=[405]),
        )
        for method in ("GET", "PUT", "DELETE")
    ),
]


@each([*CONTENT_TYPES, *PATHS, *TIMEOUTS, *MESSAGES, *COMPRESSION, *METADATA])
def test_grpc_requests(case: Case, peer: Peer, wire: str) -> None:
    """The server does what the case says, and the connection goes on."""
    check(case, peer, wire)
    alive_without_stream(peer)


def test_a_passed_deadline(echo: EchoService, peer: Peer) -> None:
    """A call that runs when its time is over ends with DEADLINE_EXCEEDED or CANCEL, and its handler is cancelled."""
    before = echo.stats()["counts"].get("slow_cancelled", 0)
    start_s = time.monotonic()
    peer.send(peer.request(SLOW, b"a", timeout="150m"))
    answer = peer.read_answer()
    assert DEADLINE_EXCEEDED == answer.status or answer.reset_code == h2.CANCEL
    assert time.monotonic() - start_s >= 0.14
    echo.wait_stats(lambda found: found["counts"].get("slow_cancelled", 0) == before + 1)


def test_unknown_compression(peer: Peer) -> None:
    """A message in a coding that the server lacks is UNIMPLEMENTED, with the codings that it has."""
    peer.send(*called([*FIELDS, ("grpc-encoding", "snappy")], message(b"a", compressed=1)))
    answer = peer.read_answer()
    assert UNIMPLEMENTED == answer.status
    assert "gzip" in (answer.headers | answer.trailers).get("grpc-accept-encoding", "")
