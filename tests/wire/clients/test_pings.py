"""PINGs of clients: which are counted as too many."""

import pytest
from tests.wire import peer as h2
from tests.wire.conftest import StartEcho
from tests.wire.peer import Closed, Peer


def test_pings_that_measure_a_large_answer_are_free(peer: Peer) -> None:
    """A client that sends a PING with each window of an answer, as Go's and C++'s do, gets all of it."""
    peer.send(peer.request("/test.Echo/Big", b"2000000"))
    num_bytes = 0
    while num_bytes < 2_000_005:
        read = peer.read_kind(h2.DATA, 1)
        num_bytes += len(read.payload)
        if num_bytes % 65_535 == 0:
            peer.send(h2.ping(), h2.window_update(0, 65_535), h2.window_update(1, 65_535))
            assert peer.read_kind(h2.PING).flags & h2.ACK
    fields, is_end = peer.read_headers(1)
    assert ("0", True) == (fields["grpc-status"], is_end)


def test_pings_without_data(wire: str, start_echo: StartEcho) -> None:
    """The fourth PING since the last data ends the connection, with the word that clients know."""
    limits = {"min_ping_interval_s": 60} if wire == "weft" else {"http2.min_ping_interval_without_data_ms": 60_000}
    with Peer.connect(start_echo(**limits).address) as peer:
        peer.handshake()
        peer.send(h2.ping() * 3)
        for _ in range(3):
            assert peer.read_kind(h2.PING).flags & h2.ACK
        assert 0 == peer.call("/test.Echo/Unary").status
        peer.send(h2.ping() * 5)
        goaway = peer.wait_goaway()
        assert (h2.ENHANCE_YOUR_CALM, b"too_many_pings") == (goaway.error_code, goaway.payload[8:])
        with pytest.raises(Closed):
            peer.read_until(lambda _: False)
