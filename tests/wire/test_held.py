"""What a server counts and limits over all connections, and small faults of peers that a server must not forgive."""

import contextlib
import gzip
import os
import signal
import time
from pathlib import Path

import pytest
from tests.wire import peer as h2
from tests.wire.conftest import StartEcho
from tests.wire.echo_process import EchoService
from tests.wire.peer import Peer

MIB = 1 << 20


def test_resets_wear_no_connection_out(peer: Peer) -> None:
    """After 3,000 calls that were reset, before and after their handlers began, a connection answers as before."""
    for start in range(1, 6001, 100):
        for stream_id in range(start, start + 98, 2):
            peer.send(peer.request("/test.Echo/Slow", b"x", stream_id=stream_id), h2.reset(stream_id))
        assert [b"y"] == peer.call("/test.Echo/Unary", b"y", stream_id=start + 98).messages


@pytest.mark.parametrize("body", [b"", b"ab"])
def test_small_messages_count_as_what_they_cost(start_echo: StartEcho, body: bytes) -> None:
    """100,000 messages of no byte or two, which wait for a handler, reach a limit of 1 MiB; then nothing is counted."""
    echo = start_echo(max_buffered_bytes=MIB)
    with Peer.connect(echo.address) as peer:
        peer.handshake({h2.INITIAL_WINDOW_SIZE: 0})
        peer.send(peer.request("/test.Echo/BidiStream", None, end=False))
        piece = h2.message(body) * (16_384 // len(h2.message(body)))
        for _ in range(32):
            peer.try_send(h2.data(1, piece))
        ended = peer.read_until(lambda read: read.stream_id == 1 and read.flags & h2.END_STREAM)
        assert h2.HEADERS == ended.kind
        assert "8" == dict(peer.decoder.decode(ended.payload))["grpc-status"]
        assert 0 == echo.wait_stats(lambda found: not found["num_slow"])["num_buffered_bytes"]


def test_one_connection_leaves_something_to_others(start_echo: StartEcho) -> None:
    """Its calls hold four fifths of the limit at most, then they are refused; a request on another one has room."""
    echo = start_echo(max_buffered_bytes=MIB)
    part = h2.message(bytes(100_000))[:16_000]
    with Peer.connect(echo.address) as greedy, Peer.connect(echo.address) as other:
        greedy.handshake()
        other.handshake()
        for stream_id in range(1, 201, 2):
            greedy.send(
                greedy.request("/test.Echo/Unary", None, stream_id=stream_id, end=False), h2.data(stream_id, part)
            )
        greedy.read_until(lambda read: read.stream_id == 199 and read.flags & h2.END_STREAM)
        assert 0.7 * MIB < echo.stats()["num_buffered_bytes"] <= 0.8 * MIB
        assert [bytes(100_000)] == other.call("/test.Echo/Unary", bytes(100_000)).messages


def test_a_message_is_decompressed_when_it_is_read(peer: Peer, echo: EchoService) -> None:
    """Compressed messages wait as they came, and are answered in their order."""
    bodies = [bytes([index]) * 100_000 for index in range(20)]
    peer.send(peer.headers(1, h2.request_fields("/test.Echo/BidiStream", [("grpc-encoding", "gzip")])))
    whole = b"".join(h2.message(gzip.compress(body), compressed=1) for body in bodies)
    peer.send(h2.data(1, whole, end=True))
    assert bodies == peer.read_answer(1).messages
    assert 0 == echo.stats()["num_buffered_bytes"]


@pytest.mark.parametrize("to", ["address", "unix"])
def test_a_slow_reader_loses_nothing_of_a_drained_connection(start_echo: StartEcho, tmp_path: Path, to: str) -> None:
    """An answer that is written when its server stops arrives whole, although its client reads late and sends on."""
    echo = start_echo(f"--unix={tmp_path}/socket", "--grace-s=20")
    body = os.urandom(1_500_000)
    with Peer.connect(getattr(echo, to), receive_buffer_bytes=4096) as peer:
        peer.handshake({h2.INITIAL_WINDOW_SIZE: 1 << 24}, window=1 << 24)
        peer.send(peer.request("/test.Echo/BidiStream", None, end=False))
        os.kill(echo.pid, signal.SIGTERM)
        peer.wait_goaway()
        peer.wait_goaway()
        pieces = h2.message(body)
        frames = [h2.data(1, pieces[at : at + 16_384]) for at in range(0, len(pieces), 16_384)]
        peer.send(*frames, h2.data(1, end=True))
        for _ in range(8):
            with contextlib.suppress(h2.Closed):
                peer.send(h2.window_update(0, 1000))
            time.sleep(0.1)
        assert [body] == peer.read_answer(gives_window=False).messages
    assert 0 == echo.stop()
