"""Cases of the conformance tables: what a client sends, and what the server has to make of it.

What grpcio does otherwise is an expected failure (``conftest.py``): ``WEFT_TEST_WIRES=grpcio pytest -rx tests/wire``.
A case passes in the manner of h2spec. A connection error is GOAWAY with one of its codes, or a closed connection; a
stream error is RST_STREAM with one of its codes, or a connection error. Of our own server more is asked: if it says why
it ends a stream or the connection, it says the right thing.
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import pytest
from tests.wire import peer as h2
from tests.wire.peer import Closed, Fields, Frame, Peer

ECHO, SLOW, BIDI = "/test.Echo/Unary", "/test.Echo/Slow", "/test.Echo/BidiStream"
ERROR_S = 2.0  # how long an error may take to come
QUIET_S = 0.1  # how long it is waited for what must not come

Expectation = Callable[[Peer, bool], None]


class Case(NamedTuple):
    """One fact.

    Attributes:
        section: Of the RFC, or of gRPC's mapping to HTTP/2.
        fact: What the server does.
        send: What to send on a connection that has exchanged SETTINGS; it may also talk to the server itself.
        expect: Raises AssertionError with what came, if that is wrong; its second argument asks for more than h2spec.
    """

    section: str
    fact: str
    send: Callable[[Peer], Iterable[bytes]]
    expect: Expectation

    @property
    def id(self) -> str:
        """Its name in pytest."""
        return f"{self.section} {self.fact}"


def each(cases: Sequence[Case]) -> pytest.MarkDecorator:
    """A test for each of these cases."""
    return pytest.mark.parametrize("case", cases, ids=[case.id for case in cases])


def check(case: Case, peer: Peer, wire: str) -> None:
    """The case holds for the server that the peer is connected to."""
    peer.try_send(*case.send(peer))
    case.expect(peer, wire == "weft")


# ---- expectations


def connection_error(*codes: int) -> Expectation:
    """The connection ends."""

    def expect(peer: Peer, is_strict: bool) -> None:
        _expect_error(peer, is_strict, codes, stream_id=None)

    return expect


def stream_error(*codes: int, stream_id: int = 1) -> Expectation:
    """The stream is reset, or the connection ends."""

    def expect(peer: Peer, is_strict: bool) -> None:
        _expect_error(peer, is_strict, codes, stream_id)

    return expect


def _expect_error(peer: Peer, is_strict: bool, codes: Sequence[int], stream_id: int | None) -> None:
    came: list[Frame] = []
    try:
        while True:
            read = peer.read(ERROR_S)
            came.append(read)
            is_error = read.kind == h2.GOAWAY or (read.kind == h2.RST_STREAM and read.stream_id == stream_id)
            if is_error and (is_strict or read.error_code in codes):
                break
    except Closed:
        return
    except TimeoutError:
        raise AssertionError(f"no error came, but {came}") from None
    assert came[-1].error_code in codes, f"expected {codes}, but {came} came"


def answered(*messages: bytes, status: int | None = 0, stream_id: int = 1) -> Expectation:
    """The stream ends with these messages and this status; None: with any status or HTTP status but no reset."""

    def expect(peer: Peer, _: bool) -> None:
        answer = peer.read_answer(stream_id)
        assert answer.reset_code in (None, h2.NO_ERROR), answer
        assert status in (None, answer.status), answer
        assert not messages or list(messages) == answer.messages, answer

    return expect


def ended(*statuses: int, http: Sequence[int] = (), resets: Sequence[int] = ()) -> Expectation:
    """Stream 1 ends with one of these gRPC statuses, or HTTP statuses, or codes of RST_STREAM."""

    def expect(peer: Peer, _: bool) -> None:
        answer = peer.read_answer()
        by_http = int(answer.headers.get(":status", 0)) in http
        assert answer.status in statuses or by_http or answer.reset_code in resets, answer

    return expect


def alive(peer: Peer, _: bool = False) -> None:
    """The server answers PING, without an error before it."""
    peer.send(h2.ping(b"isalive?"))
    while (read := peer.read()).kind != h2.PING or not read.flags & h2.ACK or read.payload != b"isalive?":
        assert read.kind not in (h2.GOAWAY, h2.RST_STREAM), read


def alive_without_stream(peer: Peer, _: bool = False) -> None:
    """The server answers PING; streams may have been reset before it."""
    peer.send(h2.ping(b"isalive?"))
    peer.read_until(lambda read: read.kind == h2.PING and bool(read.flags & h2.ACK) and read.payload == b"isalive?")


# ---- what to send


def fixed(*pieces: bytes) -> Callable[[Peer], Iterable[bytes]]:
    """These bytes."""
    return lambda _: pieces


def opened(peer: Peer, stream_id: int = 1, path: str = BIDI, metadata: Fields = ()) -> bytes:
    """HEADERS of a call whose client goes on sending."""
    return peer.request(path, None, stream_id=stream_id, metadata=metadata, end=False)


def asked(peer: Peer, stream_id: int = 1, path: str = ECHO, body: bytes = b"a") -> bytes:
    """A whole call."""
    return peer.request(path, body, stream_id=stream_id)


def finished(peer: Peer, stream_id: int = 1) -> None:
    """A call of this id has come to its end on both sides."""
    peer.send(asked(peer, stream_id))
    peer.read_answer(stream_id)


def waiting(peer: Peer, stream_id: int = 1) -> None:
    """The server works on a call whose client has sent all."""
    peer.send(asked(peer, stream_id, SLOW), h2.ping(b"received"))
    peer.read_until(lambda read: read.kind == h2.PING and read.payload == b"received")


def block(fields: Fields) -> bytes:
    """A header block of literals that are not indexed: it may be sent any number of times, or not at all."""
    out = bytearray()
    for name, value in fields:
        for index, text in enumerate((name, value)):
            raw = text if isinstance(text, bytes) else text.encode("latin-1")
            prefix = b"" if index else b"\x00"
            length = bytes([len(raw)]) if len(raw) < 127 else b"\x7f" + _rest(len(raw) - 127)
            out += prefix + length + raw
    return bytes(out)


def _rest(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + _rest(value >> 7)


def raw_headers(stream_id: int, fields: Fields, flags: int = h2.END_HEADERS) -> bytes:
    """HEADERS, of literals that are not indexed."""
    return h2.frame(h2.HEADERS, flags, stream_id, block(fields))


def priority(depends_on: int = 0, weight: int = 15, *, exclusive: bool = False) -> bytes:
    """The payload of PRIORITY, and the beginning of HEADERS with that flag."""
    return struct.pack("!IB", depends_on | exclusive << 31, weight)
