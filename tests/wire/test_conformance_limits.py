"""gRPC over HTTP/2: messages that are larger than the server takes."""

import gzip

import pytest
from tests.wire import peer as h2
from tests.wire.conformance import ECHO, alive_without_stream, raw_headers
from tests.wire.conftest import StartEcho
from tests.wire.peer import Peer, message, request_fields

RESOURCE_EXHAUSTED = 8
GZIP = [("grpc-encoding", "gzip")]


@pytest.mark.parametrize("compressed", [False, True])
def test_a_message_over_the_limit(start_echo: StartEcho, compressed: bool) -> None:
    """A message of the size of the limit is taken; a greater one is RESOURCE_EXHAUSTED, also one that is packed."""
    echo = start_echo("--max-message-bytes=1000")
    metadata = GZIP if compressed else []

    def packed(body: bytes) -> bytes:
        return message(gzip.compress(body), compressed=1) if compressed else message(body)

    with Peer.connect(echo.address) as peer:
        peer.handshake()
        for stream_id, size, status in ((1, 1000, 0), (3, 1001, RESOURCE_EXHAUSTED), (5, 16_000, RESOURCE_EXHAUSTED)):
            head = raw_headers(stream_id, [*request_fields("/test.Echo/Size"), *metadata])
            peer.send(head, h2.data(stream_id, packed(bytes(size)), end=True))
            assert status == peer.read_answer(stream_id).status


def test_an_announced_size_over_the_limit(start_echo: StartEcho) -> None:
    """A size above the limit is refused when it is announced, before the message has come."""
    echo = start_echo("--max-message-bytes=1000")
    with Peer.connect(echo.address) as peer:
        peer.handshake()
        peer.send(raw_headers(1, request_fields(ECHO)), h2.data(1, message(b"abc", length=2**32 - 1)))
        assert RESOURCE_EXHAUSTED == peer.read_answer().status
        alive_without_stream(peer)
