"""gRPC over HTTP/2, answers and metadata: https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md."""

import base64
import json
import os
import signal

import pytest
from tests.wire import peer as h2
from tests.wire.conformance import BIDI, ECHO, SLOW, alive_without_stream, asked, opened, waiting
from tests.wire.conftest import StartEcho
from tests.wire.echo_process import EchoService
from tests.wire.peer import Peer, message

STATUS = "/test.Echo/Status"
UNIMPLEMENTED, UNAVAILABLE = 12, 14


def heads(peer: Peer, stream_id: int = 1) -> list[tuple[list[tuple[str, str]], int]]:
    """The field blocks of a stream to its end, each with its flags; DATA are dropped."""
    found = []
    while not found or not found[-1][1] & h2.END_STREAM:
        read = peer.read_kind(h2.HEADERS, stream_id)
        fields = peer.decoder.decode(read.payload, raw=True)
        found.append(([(bytes(name).decode(), bytes(value).decode()) for name, value in fields], read.flags))
    return found


def received(peer: Peer, *metadata: tuple[str, str]) -> list[list[str]]:
    """The metadata that a handler sees."""
    answer = peer.call("/test.Echo/Meta", metadata=metadata)
    assert 0 == answer.status, answer
    found: list[list[str]] = json.loads(answer.messages[0])
    return [pair for pair in found if pair[0].startswith("x-")]


def test_the_form_of_an_answer(peer: Peer) -> None:
    """Headers, data, trailers: a pseudo-header field in the first block alone, the status in the last."""
    peer.send(asked(peer))
    (first, flags), (last, last_flags) = heads(peer)
    assert (":status", "200") == first[0]
    assert dict(first)["content-type"].startswith("application/grpc")
    assert "grpc-status" not in dict(first)
    assert ("grpc-status", "0") in last
    assert not [name for name, _ in [*first[1:], *last] if name.startswith(":") or name != name.lower()]
    assert (0, h2.END_STREAM) == (flags & h2.END_STREAM, last_flags & h2.END_STREAM)


def test_trailers_only(peer: Peer) -> None:
    """A call that fails before it has an answer gets one block, which has HTTP's status and gRPC's."""
    peer.send(asked(peer, path="/test.Echo/Missing"))
    ((fields, _),) = heads(peer)
    assert (":status", "200") == fields[0]
    assert "12" == dict(fields)["grpc-status"]
    assert dict(fields)["content-type"].startswith("application/grpc")
    assert len(fields) == len(dict(fields))


@pytest.mark.parametrize("code", range(1, 17))
def test_statuses(peer: Peer, code: int) -> None:
    """Every status arrives as a number without leading zeros, with its message."""
    answer = peer.call(STATUS, metadata=[("want-code", str(code)), ("want-details", "because")])
    assert (str(code), "because") == (answer.trailers["grpc-status"], answer.trailers["grpc-message"])


@pytest.mark.parametrize(
    ("details", "encoded"),
    [
        ("50% of it", "50%25 of it"),
        ("caf\u00e9 \u20ac", "caf%C3%A9 %E2%82%AC"),
        ("a\nb\tc\x7f", "a%0Ab%09c%7F"),
        ("~!\"#$&'()*+,-./:;<=>?@[]^_`{|}", "~!\"#$&'()*+,-./:;<=>?@[]^_`{|}"),
        ("\U0001f600", "%F0%9F%98%80"),
    ],
)
def test_messages_are_percent_encoded(peer: Peer, details: str, encoded: str) -> None:
    """grpc-message is UTF-8, percent-encoded but for printable ASCII other than the percent sign."""
    details_bin = base64.b64encode(details.encode())
    answer = peer.call(STATUS, metadata=[("want-code", "3"), ("want-details-bin", details_bin)])
    assert encoded == answer.trailers["grpc-message"]


@pytest.mark.parametrize("text", ["AP8=", "AP8", "AP8=,AQI", "AP8,AQI="])
def test_binary_metadata(peer: Peer, text: str) -> None:
    """Binary metadata come with padding or without; values joined by commas are several."""
    expected = [["x-a-bin", "00ff"], ["x-a-bin", "0102"]][: 1 + text.count(",")]
    assert expected == received(peer, ("x-a-bin", text))


def test_empty_binary_metadata(peer: Peer) -> None:
    """An empty value is empty bytes."""
    assert [["x-a-bin", ""]] == received(peer, ("x-a-bin", ""))


def test_metadata_keep_their_order(peer: Peer) -> None:
    """Values of one name come in the order in which they were sent."""
    pairs = [("x-a", "1"), ("x-b", "2"), ("x-a", "3"), ("x-a", "")]
    assert ["1", "3", ""] == [value for name, value in received(peer, *pairs) if name == "x-a"]


def test_white_space_in_metadata(peer: Peer) -> None:
    """White space at the ends of a value fails no call, and may be stripped; that within a value stays."""
    ((_, value),) = received(peer, ("x-a", "  a  b\t"))
    assert "a  b" == value.strip()


def test_metadata_of_answers(peer: Peer) -> None:
    """Initial metadata come with the headers, trailing ones with the trailers, binary ones in base64."""
    metadata = [("initial-a", "1"), ("initial-bin", "AP8="), ("trailing-a", "2"), ("trailing-bin", "AQ==")]
    answer = peer.call(STATUS, b"a", metadata=metadata)
    assert ("1", "AP8") == (answer.headers["initial-a"], answer.headers["initial-bin"].rstrip("="))
    assert ("2", "AQ") == (answer.trailers["trailing-a"], answer.trailers["trailing-bin"].rstrip("="))
    assert ([b"a"], 0) == (answer.messages, answer.status)


@pytest.mark.parametrize("name", ["initial-a", "trailing-a"])
def test_metadata_that_cannot_be_sent(peer: Peer, name: str) -> None:
    """A handler that gives metadata which are not ASCII fails its call, whose answer is well-formed."""
    peer.send(peer.request(STATUS, b"a", metadata=[(name, "caf\u00e9".encode())]))
    blocks = heads(peer)
    assert (":status", "200") == blocks[0][0][0]
    assert dict(blocks[-1][0])["grpc-status"] not in ("0", None)
    assert [] == [field for fields, _ in blocks[1:] for field in fields if field[0].startswith(":")]
    assert [b"b"] == peer.call(ECHO, b"b", stream_id=3).messages


def test_an_answer_before_the_request_has_ended(peer: Peer) -> None:
    """The stream is reset with NO_ERROR after the trailers, so that the client need not end it (RFC 9113, 8.1)."""
    peer.send(opened(peer, path="/test.Echo/Missing"))
    assert UNIMPLEMENTED == peer.read_answer().status
    assert h2.NO_ERROR == peer.wait_reset(1)
    alive_without_stream(peer)


def test_cancellation(echo: EchoService, peer: Peer) -> None:
    """RST_STREAM with CANCEL cancels the handler, and nothing more comes on the stream."""
    before = echo.stats()["counts"].get("slow_cancelled", 0)
    waiting(peer)
    peer.send(h2.reset(1), asked(peer, 3))
    echo.wait_stats(lambda found: found["counts"].get("slow_cancelled", 0) == before + 1)
    first = peer.read_until(lambda read: read.stream_id != 0)
    assert 3 == first.stream_id


@pytest.mark.parametrize("is_coded", [False, True])
def test_headers_over_the_limit(peer: Peer, is_coded: bool) -> None:
    """A list of fields above SETTINGS_MAX_HEADER_LIST_SIZE fails the call or the stream alone."""
    limit_bytes = peer.settings.get(h2.MAX_HEADER_LIST_SIZE, 1 << 16)
    fields = [("x-test", f"{number:04}" * 240) for number in range(limit_bytes // 1000 + 5)]
    block = peer.encoder.encode([*h2.request_fields(ECHO), *fields], huffman=is_coded)
    starts = range(0, len(block), 16_384)
    for at in starts:
        kind = h2.HEADERS if at == 0 else h2.CONTINUATION
        peer.send_frame(kind, h2.END_HEADERS if at == starts[-1] else 0, 1, block[at : at + 16_384])
    peer.send(h2.data(1, message(b"a"), end=True))
    answer = peer.read_answer()
    assert answer.status or answer.reset_code is not None or answer.headers[":status"] == "431"
    peer.send(peer.request(ECHO, b"b", stream_id=3, metadata=[fields[-1]]))
    assert [b"b"] == peer.read_answer(3).messages


def test_shutdown(start_echo: StartEcho) -> None:
    """A server that stops sends GOAWAY, finishes calls in flight, refuses new ones, and closes the connection."""
    echo = start_echo()
    with Peer.connect(echo.address) as peer:
        peer.handshake()
        peer.send(opened(peer, path=BIDI), h2.data(1, message(b"a")))
        peer.read_kind(h2.DATA, 1)
        os.kill(echo.pid, signal.SIGTERM)
        assert h2.NO_ERROR == peer.wait_goaway().error_code
        peer.send(h2.data(1, message(b"b"), end=True))
        answer = peer.read_answer()
        assert ([b"b"], 0) == (answer.messages, answer.status)
        peer.wait_closed()
    assert 0 == echo.stop()


def test_shutdown_ends_calls_after_its_grace(start_echo: StartEcho) -> None:
    """A call that does not end within the grace period is cancelled, and the process ends."""
    echo = start_echo("--grace-s=0.3")
    with Peer.connect(echo.address) as peer:
        peer.handshake()
        peer.send(asked(peer, path=SLOW), h2.ping())
        peer.read_kind(h2.PING)
        os.kill(echo.pid, signal.SIGTERM)
        frames = peer.wait_closed()
    assert [read for read in frames if read.kind == h2.GOAWAY]
    assert 0 == echo.stop()
