"""grpcio's client on threads: what it does otherwise than that on asyncio, which has the same core."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from tests.wire.echo_process import EchoService

TIMEOUT_S = 30.0
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]


@pytest.fixture(params=["tcp", "unix"])
def channel(request: pytest.FixtureRequest, echo: EchoService) -> Iterator[grpc.Channel]:
    """A channel to the echo service."""
    address = echo.address if request.param == "tcp" else echo.unix
    with grpc.insecure_channel(address, OPTIONS) as opened:
        yield opened


def unary(channel: grpc.Channel, request: bytes, path: str = "/test.Echo/Unary", **keywords: Any) -> Any:
    return channel.unary_unary(path)(request, **({"timeout": TIMEOUT_S} | keywords))


def test_streams(channel: grpc.Channel) -> None:
    """Streams in all three forms, empty ones, a server that speaks first, and one that ends before the client."""
    sizes = [27182, 8, 1828, 45904, 0]
    messages = [bytes(size) for size in sizes]
    assert b"5 74922" == channel.stream_unary("/test.Echo/ClientStream")(iter(messages), timeout=TIMEOUT_S)
    answers = channel.unary_stream("/test.Echo/ServerStream")(b"300 31415", timeout=TIMEOUT_S)
    assert [bytes([index & 0xFF]) * 31415 for index in range(300)] == list(answers)
    bidi = channel.stream_stream("/test.Echo/BidiStream")
    assert messages == list(bidi(iter(messages), timeout=TIMEOUT_S))
    assert [] == list(bidi(iter(()), timeout=TIMEOUT_S))
    may_speak = threading.Event()

    def answering() -> Iterator[bytes]:
        may_speak.wait(TIMEOUT_S)
        yield b"answer"

    greeted = channel.stream_stream("/test.Talk/Greet")(answering(), timeout=TIMEOUT_S)
    assert b"hello" == next(greeted)
    may_speak.set()
    assert [b"answer"] == list(greeted)
    first = channel.stream_unary("/test.Talk/First")
    assert b"a" * 10_000 == first((b"a" * 10_000 for _ in range(200)), timeout=TIMEOUT_S)


def test_headers_that_are_too_large(channel: grpc.Channel) -> None:
    """63 kB of metadata fail or pass, and do not disturb what comes after them."""
    with contextlib.suppress(grpc.RpcError):
        unary(channel, b"", metadata=(("x-large", "x" * 63_000),))
    assert b"a" == unary(channel, b"a", metadata=(("x-large", "x" * 4_000),))
