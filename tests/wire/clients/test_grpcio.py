"""grpcio's client on threads finds a gRPC server at the other end, whatever it does."""

import contextlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.certificates import Authority
from tests.wire.conftest import StartEcho
from tests.wire.echo_process import EchoService

TIMEOUT_S = 30.0
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
SPECIAL = "\t\ntest with whitespace\r\nand Unicode BMP \u263a and non-BMP \U0001f608\t\n%41"
INITIAL = (
    ("initial-text", "some text"), ("initial-text", "and more"), ("initial-a-bin", b""), ("initial-b-bin", b"\0"),
    ("initial-c-bin", b"\xff\xfe"),
)  # fmt: skip
TRAILING = (("trailing-d-bin", b"\xab\xab\xab"), ("trailing-d-bin", b"\0\1\2\3"), ("trailing-text", "~!,;="))


@pytest.fixture(params=["tcp", "unix"])
def channel(request: pytest.FixtureRequest, echo: EchoService) -> Iterator[grpc.Channel]:
    """A channel to the echo service."""
    address = echo.address if request.param == "tcp" else echo.unix
    with grpc.insecure_channel(address, OPTIONS) as opened:
        yield opened


def unary(channel: grpc.Channel, request: bytes, path: str = "/test.Echo/Unary", **keywords: Any) -> Any:
    return channel.unary_unary(path)(request, **({"timeout": TIMEOUT_S} | keywords))


def chosen(metadata: Any, prefix: str) -> tuple[tuple[str, str | bytes], ...]:
    return tuple((key, value) for key, value in metadata if key.startswith(prefix))


@contextlib.contextmanager
def fails(code: grpc.StatusCode, details: str | None = None) -> Iterator[None]:
    with pytest.raises(grpc.RpcError) as caught:
        yield
    assert code is caught.value.code(), caught.value
    assert details in (None, caught.value.details())


def test_messages_of_every_size(channel: grpc.Channel) -> None:
    """Messages from nothing to 40 MB come back as they went."""
    for size in (0, 1, 16_379, 16_384, 65_535, 271_828, 40_000_000):
        request = bytes([size & 0xFF]) * size
        assert request == unary(channel, request)


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


def test_deadlines_and_cancellation(channel: grpc.Channel, echo: EchoService) -> None:
    """A deadline and a cancellation end a call at both ends."""
    before = echo.stats()["counts"].get("slow_cancelled", 0)
    with fails(grpc.StatusCode.DEADLINE_EXCEEDED):
        unary(channel, b"", "/test.Echo/Slow", timeout=0.1)
    with fails(grpc.StatusCode.DEADLINE_EXCEEDED):
        unary(channel, b"", "/test.Echo/Slow", timeout=0.001)
    echo.wait_stats(lambda found: found["num_slow"] == 0)
    call = channel.unary_unary("/test.Echo/Slow").future(b"", timeout=TIMEOUT_S)
    echo.wait_stats(lambda found: found["num_slow"] == 1)
    call.cancel()
    found = echo.wait_stats(lambda found: found["num_slow"] == 0)
    assert found["counts"]["slow_cancelled"] >= before + 1
    hold = threading.Event()

    def held() -> Iterator[bytes]:
        yield b"a"
        hold.wait(TIMEOUT_S)

    stream = channel.stream_stream("/test.Echo/BidiStream")(held(), timeout=TIMEOUT_S)
    assert b"a" == next(stream)
    stream.cancel()
    hold.set()
    with fails(grpc.StatusCode.CANCELLED):
        next(stream)


def test_metadata(channel: grpc.Channel) -> None:
    """Text and bytes of metadata pass both ways, on success, on failure and on streams, in order for each name."""
    for code in (grpc.StatusCode.OK, grpc.StatusCode.NOT_FOUND):
        metadata = (*INITIAL, *TRAILING, ("want-code", str(code.value[0])))
        call = channel.unary_unary("/test.Echo/Status").future(b"", metadata=metadata, timeout=TIMEOUT_S)
        assert code is call.code()
        assert INITIAL == chosen(call.initial_metadata(), "initial-")
        assert TRAILING == chosen(call.trailing_metadata(), "trailing-")
    stream = channel.stream_stream("/test.Talk/End")(iter([b"a"]), metadata=(*INITIAL, *TRAILING), timeout=TIMEOUT_S)
    assert INITIAL == chosen(stream.initial_metadata(), "initial-")
    assert [b"a"] == list(stream)
    assert TRAILING == chosen(stream.trailing_metadata(), "trailing-")
    seen = json.loads(unary(channel, b"", "/test.Echo/Meta", metadata=(*INITIAL, *TRAILING)))
    sent = [[key, value.hex() if isinstance(value, bytes) else value] for key, value in (*INITIAL, *TRAILING)]
    assert sent == [pair for pair in seen if pair in sent]


def test_statuses(channel: grpc.Channel) -> None:
    """Each code comes with its details, which may be any text; unknown methods are UNIMPLEMENTED."""
    for code in list(grpc.StatusCode)[1:]:
        metadata = (("want-code", str(code.value[0])), ("want-details", code.name))
        with fails(code, code.name):
            unary(channel, b"", "/test.Echo/Status", metadata=metadata)
    with fails(grpc.StatusCode.UNKNOWN, SPECIAL):
        unary(channel, SPECIAL.encode(), "/test.Talk/Fail")
    for path in ("/test.Echo/Nothing", "/test.Nobody/Unary"):
        with fails(grpc.StatusCode.UNIMPLEMENTED):
            unary(channel, b"", path)


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
def test_compression(channel: grpc.Channel, compression: grpc.Compression) -> None:
    """Requests and responses are compressed with gzip, either or both, unary and on streams."""
    request = b"compress me " * 100_000
    for path in ("/test.Echo/Unary", "/test.Talk/Compressed"):
        assert request == unary(channel, request, path, compression=compression)
    messages = [b"", b"a", request]
    stream = channel.stream_stream("/test.Talk/CompressedStream")
    assert messages == list(stream(iter(messages), compression=compression, timeout=TIMEOUT_S))


def test_many_calls(channel: grpc.Channel) -> None:
    """1,000 calls in a row, then 100 at once that are large, get their own answers."""
    for number in range(1000):
        assert b"%d" % number == unary(channel, b"%d" % number)
    requests = [bytes([number]) * 271_828 for number in range(100)]
    with ThreadPoolExecutor(20) as pool:
        assert requests == list(pool.map(lambda request: unary(channel, request), requests))


def test_headers_that_are_too_large(channel: grpc.Channel) -> None:
    """63 kB of metadata fail or pass, and do not disturb what comes after them."""
    with contextlib.suppress(grpc.RpcError):
        unary(channel, b"", metadata=(("x-large", "x" * 63_000),))
    assert b"a" == unary(channel, b"a", metadata=(("x-large", "x" * 4_000),))


def test_limits(start_echo: StartEcho) -> None:
    """A request above the limit of messages is RESOURCE_EXHAUSTED, and the connection goes on."""
    with grpc.insecure_channel(start_echo("--max-message-bytes=100000").address, OPTIONS) as channel:
        with fails(grpc.StatusCode.RESOURCE_EXHAUSTED):
            unary(channel, bytes(200_000))
        assert b"a" == unary(channel, b"a")


def test_tls(start_echo: StartEcho, tmp_path: Path) -> None:
    """With certificates at both ends calls pass; without the client's, or with another authority's, none does."""
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    server, client = authority.issue("server"), authority.issue("client")
    echo = start_echo(f"--tls-cert={server.cert}", f"--tls-key={server.key}", f"--tls-ca={authority.ca}")
    key, cert = client.key.read_bytes(), client.cert.read_bytes()
    ca = authority.ca.read_bytes()
    for root, pair, is_let_in in ((ca, (key, cert), True), (ca, (None, None), False),
                                  (other.ca.read_bytes(), (key, cert), False)):  # fmt: skip
        credentials = grpc.ssl_channel_credentials(root, *pair)
        options = [*OPTIONS, ("grpc.ssl_target_name_override", "localhost")]
        with grpc.secure_channel(echo.tls, credentials, options) as channel:
            if is_let_in:
                assert bytes(5_000_000) == unary(channel, bytes(5_000_000))
                continue
            with fails(grpc.StatusCode.UNAVAILABLE):
                unary(channel, b"", timeout=5)
