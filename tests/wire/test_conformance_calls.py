"""What a server makes of calls where more than one exchange of frames tells it: blocks, windows, and handlers."""

import threading
import time
from collections.abc import Iterator

import pytest
from tests.wire import peer as h2
from tests.wire.conftest import StartEcho
from tests.wire.echo_process import EchoService
from tests.wire.peer import Peer, message, request_fields
from tests.wire.test_conformance import is_alive

ECHO, SLOW, STATUS = "/test.Echo/Unary", "/test.Echo/Slow", "/test.Echo/Status"
STREAM_BYTES = 60_000  # fits each server's first window of a stream


def heads(peer: Peer, stream_id: int = 1) -> Iterator[tuple[list[tuple[str, str]], bool]]:
    """The field blocks of a stream to its end, each with whether it ends the stream; DATA are dropped."""
    is_end = False
    while not is_end:
        read = peer.read_kind(h2.HEADERS, stream_id)
        is_end = bool(read.flags & h2.END_STREAM)
        fields = peer.decoder.decode(read.payload, raw=True)
        yield [(bytes(name).decode(), bytes(value).decode()) for name, value in fields], is_end


def test_the_form_of_an_answer(peer: Peer) -> None:
    """Headers, data, trailers: a pseudo-header field in the first block alone, the status in the last."""
    peer.send(peer.request(ECHO, b"a"))
    (first, is_first_end), (last, _) = heads(peer)
    assert (":status", "200") == first[0]
    assert dict(first)["content-type"].startswith("application/grpc")
    assert "grpc-status" not in dict(first)
    assert ("grpc-status", "0") in last
    assert not [name for name, _ in [*first[1:], *last] if name.startswith(":") or name != name.lower()]
    assert not is_first_end


def test_trailers_only(peer: Peer) -> None:
    """A call that fails before it has an answer gets one block, which has HTTP's status and gRPC's."""
    peer.send(peer.request("/test.Echo/Missing", b"a"))
    ((fields, _),) = heads(peer)
    assert (":status", "200") == fields[0]
    assert "12" == dict(fields)["grpc-status"]
    assert dict(fields)["content-type"].startswith("application/grpc")
    assert len(fields) == len(dict(fields))


@pytest.mark.parametrize("name", ["initial-a", "trailing-a"])
def test_metadata_that_cannot_be_sent(peer: Peer, name: str) -> None:
    """A handler that gives metadata which are not ASCII fails its call, whose answer is well-formed."""
    peer.send(peer.request(STATUS, b"a", metadata=[(name, "caf\u00e9".encode())]))
    blocks = list(heads(peer))
    assert (":status", "200") == blocks[0][0][0]
    assert dict(blocks[-1][0])["grpc-status"] not in ("0", None)
    assert [] == [field for fields, _ in blocks[1:] for field in fields if field[0].startswith(":")]
    assert [b"b"] == peer.call(ECHO, b"b", stream_id=3).messages


def test_a_passed_deadline(echo: EchoService, peer: Peer) -> None:
    """A call that runs when its time is over ends with DEADLINE_EXCEEDED or CANCEL, and its handler is cancelled."""
    before = echo.stats()["counts"].get("slow_cancelled", 0)
    start_s = time.monotonic()
    peer.send(peer.request(SLOW, b"a", timeout="150m"))
    answer = peer.read_answer()
    assert 4 == answer.status or answer.reset_code == h2.CANCEL
    assert time.monotonic() - start_s >= 0.14
    echo.wait_stats(lambda found: found["counts"].get("slow_cancelled", 0) == before + 1)


def test_cancellation(echo: EchoService, peer: Peer) -> None:
    """RST_STREAM with CANCEL cancels the handler, and nothing more comes on the stream."""
    before = echo.stats()["counts"].get("slow_cancelled", 0)
    peer.send(peer.request(SLOW, b"a"), h2.ping())
    peer.read_kind(h2.PING)
    peer.send(h2.reset(1), peer.request(ECHO, b"a", stream_id=3))
    echo.wait_stats(lambda found: found["counts"].get("slow_cancelled", 0) == before + 1)
    first = peer.read_until(lambda read: read.stream_id != 0)
    assert 3 == first.stream_id


@pytest.mark.parametrize("is_coded", [False, True])
def test_headers_over_the_limit(peer: Peer, is_coded: bool) -> None:
    """A list of fields above SETTINGS_MAX_HEADER_LIST_SIZE fails the call or the stream alone."""
    limit_bytes = peer.settings.get(h2.MAX_HEADER_LIST_SIZE, 1 << 16)
    fields = [("x-test", f"{number:04}" * 240) for number in range(limit_bytes // 1000 + 5)]
    block = peer.encoder.encode([*request_fields(ECHO), *fields], huffman=is_coded)
    starts = range(0, len(block), 16_384)
    for at in starts:
        kind = h2.HEADERS if at == 0 else h2.CONTINUATION
        peer.send(h2.frame(kind, h2.END_HEADERS if at == starts[-1] else 0, 1, block[at : at + 16_384]))
    peer.send(h2.data(1, message(b"a"), end=True))
    answer = peer.read_answer()
    assert answer.status or answer.reset_code is not None or answer.headers[":status"] == "431"
    peer.send(peer.request(ECHO, b"b", stream_id=3, metadata=[fields[-1]]))
    assert [b"b"] == peer.read_answer(3).messages


def test_many_requests_through_one_table(peer: Peer) -> None:
    """Four hundred requests whose fields are inserted, evicted and referred to are all understood."""
    for number in range(400):
        metadata = [(f"x-{number % 40}", f"{number % 90}" * 20), ("grpc-timeout", f"{90_000 + number}m")]
        peer.send(peer.request(ECHO, b"%d" % number, stream_id=2 * number + 1, metadata=metadata))
        assert [b"%d" % number] == peer.read_answer(2 * number + 1).messages
    is_alive(peer)


class Credit:
    """What the server lets its peer send over all streams; ``granted`` is the sum of its windows, ``sent`` is DATA."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self.sent = 0
        self.granted = 65_535
        self._settle()

    def _settle(self) -> None:
        """Reads what has come until SETTINGS are acknowledged."""
        self._peer.send(h2.settings_frame())
        while (read := self._peer.read()).kind != h2.SETTINGS or not read.flags & h2.ACK:
            assert read.kind != h2.GOAWAY, read
            if read.kind == h2.WINDOW_UPDATE and read.stream_id == 0:
                self.granted += int.from_bytes(read.payload, "big")

    def pour(self, stream_id: int, size: int) -> None:
        """Sends so many bytes of DATA on a stream, once the window of the connection has room for them."""
        for _ in range(50):
            if self.sent + size <= self.granted:
                break
            self._settle()
        assert self.sent + size <= self.granted, f"{self.sent} bytes are sent, {self.granted} were granted"
        self._peer.send(*(h2.data(stream_id, bytes(min(size - at, 1 << 14))) for at in range(0, size, 1 << 14)))
        self.sent += size


@pytest.mark.parametrize(
    ("path", "metadata", "then"),
    [
        (ECHO, [("connection", "close")], lambda _: b""),
        ("/test.Echo/Missing", [], lambda _: b""),
        (ECHO, [], lambda stream_id: h2.data(stream_id, b"\0\xff\xff\xff\xff")),
        (SLOW, [], h2.reset),
    ],
    ids=["malformed", "unknown", "too large", "reset"],
)
def test_data_of_streams_that_are_over(start_echo: StartEcho, path: str, metadata, then) -> None:
    """DATA that was on its way to a stream that has ended is counted, and given back to the other streams (5.2)."""
    echo = start_echo()
    with Peer.connect(echo.address) as peer:
        peer.handshake()
        credit = Credit(peer)
        for stream_id in range(1, 2 * (credit.granted // STREAM_BYTES + 8), 2):
            peer.send(peer.request(path, None, stream_id=stream_id, metadata=metadata, end=False), then(stream_id))
            credit.pour(stream_id, STREAM_BYTES)
        assert [b"a"] == peer.call(ECHO, b"a", stream_id=stream_id + 2).messages


@pytest.mark.parametrize("padding", [None, 255])
def test_a_message_of_several_windows(peer: Peer, padding: int | None) -> None:
    """A message arrives while its client keeps to the windows, which padding uses up as data do (5.2)."""
    windows = {0: 65_535, 1: peer.settings.get(h2.INITIAL_WINDOW_SIZE, 65_535)}
    peer.send(peer.request("/test.Echo/Size", None, end=False))
    body = message(bytes(2 * windows[1]))
    frame_bytes, overhead = (1 << 14, 0) if padding is None else (1024, padding + 1)
    at = 0
    while at < len(body):
        content = min(len(body) - at, frame_bytes - overhead)
        if content + overhead > min(windows.values()):
            read = peer.read()
            assert read.kind not in (h2.GOAWAY, h2.RST_STREAM), read
            if read.kind == h2.WINDOW_UPDATE:
                windows[read.stream_id] += int.from_bytes(read.payload, "big")
            continue
        peer.send(h2.data(1, body[at : at + content], end=at + content == len(body), padding=padding))
        at += content
        windows = {stream_id: window - content - overhead for stream_id, window in windows.items()}
    assert [b"%d" % (len(body) - 5)] == peer.read_answer().messages


def test_waits_of_the_peer_have_an_end(peer: Peer) -> None:
    """What other tests rely on: a wait ends with its time or with the connection, whichever is first."""
    with pytest.raises(TimeoutError):
        peer.read_kind(h2.GOAWAY, timeout_s=0.1)
    with pytest.raises(TimeoutError):
        peer.wait_gone(timeout_s=0.1)
    threading.Timer(0.1, lambda: peer.socket.shutdown(2)).start()
    assert [] == peer.wait_closed()
