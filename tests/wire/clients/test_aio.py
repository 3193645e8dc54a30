"""asyncio's clients, grpcio's and Weft's own, find a gRPC server at the other end, whatever they do."""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.certificates import Authority
from tests.wire.clients.test_grpcio import OPTIONS, TIMEOUT_S
from tests.wire.conftest import StartEcho
from tests.wire.echo_process import EchoService

from weft.wire.client import Channel

SPECIAL = "\t\ntest with whitespace\r\nand Unicode BMP \u263a and non-BMP \U0001f608\t\n%41"
INITIAL = (
    ("initial-text", "some text"), ("initial-text", "and more"), ("initial-a-bin", b""), ("initial-b-bin", b"\0"),
    ("initial-c-bin", b"\xff\xfe"),
)  # fmt: skip
TRAILING = (("trailing-d-bin", b"\xab\xab\xab"), ("trailing-d-bin", b"\0\1\2\3"), ("trailing-text", "~!,;="))


def chosen(metadata: Any, prefix: str) -> tuple[tuple[str, str | bytes], ...]:
    return tuple((key, value) for key, value in metadata if key.startswith(prefix))


def opened(kind: str, address: str) -> grpc.aio.Channel:
    return Channel(address) if kind == "weft-client" else grpc.aio.insecure_channel(address, OPTIONS)


@pytest.fixture(params=["aio", "weft-client"])
def kind(request: pytest.FixtureRequest) -> str:
    """The client that is tested."""
    return str(request.param)


#: Of the tests that move many bytes; to the others all sockets are alike.
EACH_SOCKET = pytest.mark.parametrize("channel", ["tcp", "unix"], indirect=True)


@pytest.fixture(params=["tcp"])
async def channel(kind: str, request: pytest.FixtureRequest, echo: EchoService) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to the echo service."""
    async with opened(kind, echo.address if request.param == "tcp" else echo.unix) as connected:
        yield connected


async def unary(channel: grpc.aio.Channel, request: bytes, path: str = "/test.Echo/Unary", **keywords: Any) -> Any:
    return await channel.unary_unary(path)(request, **({"timeout": TIMEOUT_S} | keywords))


async def waited(echo: EchoService, num_slow: int) -> dict[str, Any]:
    return await asyncio.to_thread(echo.wait_stats, lambda found: found["num_slow"] == num_slow)


async def items(*messages: bytes) -> AsyncIterator[bytes]:
    for message in messages:
        yield message


@contextlib.contextmanager
def fails(code: grpc.StatusCode, details: str | None = None) -> Iterator[None]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        yield
    assert code is caught.value.code(), caught.value
    assert details in (None, caught.value.details())


@EACH_SOCKET
async def test_messages_of_every_size(channel: grpc.aio.Channel) -> None:
    """Messages from nothing to 40 MB come back as they went."""
    for size in (0, 1, 4091, 16_379, 16_380, 16_384, 65_530, 65_535, 271_828, 5_000_000, 40_000_000):
        request = bytes([size & 0xFF]) * size
        assert request == await unary(channel, request)


@EACH_SOCKET
async def test_streams(channel: grpc.aio.Channel) -> None:
    """Streams in all three forms, empty ones, a server that speaks first, and one that ends before the client."""
    messages = [bytes(size) for size in (27182, 8, 1828, 45904, 0)]
    counted = channel.stream_unary("/test.Echo/ClientStream")(items(*messages), timeout=TIMEOUT_S)
    assert b"5 74922" == await counted
    assert b"300 30000000" == await channel.stream_unary("/test.Echo/ClientStream")(items(*[bytes(100_000)] * 300))
    answers = channel.unary_stream("/test.Echo/ServerStream")(b"300 31415", timeout=TIMEOUT_S)
    assert [bytes([index & 0xFF]) * 31415 for index in range(300)] == [answer async for answer in answers]
    bidi = channel.stream_stream("/test.Echo/BidiStream")
    for sent in (messages, []):
        assert sent == [answer async for answer in bidi(items(*sent), timeout=TIMEOUT_S)]
    call = bidi(timeout=TIMEOUT_S)
    for message in messages * 40:
        await call.write(message)
        assert message == await call.read()
    await call.done_writing()
    assert grpc.aio.EOF is await call.read()
    assert grpc.StatusCode.OK is await call.code()
    greeted = channel.stream_stream("/test.Talk/Greet")(timeout=TIMEOUT_S)
    assert b"hello" == await greeted.read()
    await greeted.write(b"answer")
    assert b"answer" == await greeted.read()
    await greeted.done_writing()
    assert grpc.StatusCode.OK is await greeted.code()
    first = channel.stream_unary("/test.Talk/First")(items(*[b"a" * 10_000] * 200), timeout=TIMEOUT_S)
    assert b"a" * 10_000 == await first


async def test_deadlines_and_cancellation(channel: grpc.aio.Channel, echo: EchoService) -> None:
    """A deadline and a cancellation, also of the task that waits, end a call at both ends."""
    before = (await waited(echo, 0))["counts"].get("slow_cancelled", 0)
    for timeout_s in (0.1, 0.001):
        with fails(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"):
            await unary(channel, b"", "/test.Echo/Slow", timeout=timeout_s)
    await waited(echo, 0)
    call = channel.unary_unary("/test.Echo/Slow")(b"", timeout=TIMEOUT_S)
    await waited(echo, 1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert grpc.StatusCode.CANCELLED is await call.code()
    await waited(echo, 0)
    task = asyncio.ensure_future(unary(channel, b"", "/test.Echo/Slow"))
    await waited(echo, 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await waited(echo, 0))["counts"]["slow_cancelled"] >= before + 2
    stream = channel.stream_stream("/test.Echo/BidiStream")(timeout=TIMEOUT_S)
    await stream.write(b"a")
    assert b"a" == await stream.read()
    stream.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stream.read()
    assert grpc.StatusCode.CANCELLED is await stream.code()


async def test_metadata(channel: grpc.aio.Channel) -> None:
    """Text and bytes of metadata pass both ways, on success, on failure and on streams, in order for each name."""
    for code in (grpc.StatusCode.OK, grpc.StatusCode.NOT_FOUND):
        metadata = (*INITIAL, *TRAILING, ("want-code", str(code.value[0])))
        call = channel.unary_unary("/test.Echo/Status")(b"", metadata=metadata, timeout=TIMEOUT_S)
        assert code is await call.code()
        assert INITIAL == chosen(await call.initial_metadata(), "initial-")
        assert TRAILING == chosen(await call.trailing_metadata(), "trailing-")
    stream = channel.stream_stream("/test.Talk/End")(metadata=(*INITIAL, *TRAILING), timeout=TIMEOUT_S)
    assert INITIAL == chosen(await stream.initial_metadata(), "initial-")
    await stream.write(b"a")
    assert b"a" == await stream.read()
    assert grpc.aio.EOF is await stream.read()
    assert TRAILING == chosen(await stream.trailing_metadata(), "trailing-")
    seen = json.loads(await unary(channel, b"", "/test.Echo/Meta", metadata=(*INITIAL, *TRAILING)))
    sent = [[key, value.hex() if isinstance(value, bytes) else value] for key, value in (*INITIAL, *TRAILING)]
    assert sent == [pair for pair in seen if pair in sent]


async def test_statuses(channel: grpc.aio.Channel) -> None:
    """Each code comes with its details, which may be any text; unknown methods are UNIMPLEMENTED."""
    for code in list(grpc.StatusCode)[1:]:
        metadata = (("want-code", str(code.value[0])), ("want-details", code.name))
        with fails(code, code.name):
            await unary(channel, b"", "/test.Echo/Status", metadata=metadata)
    with fails(grpc.StatusCode.UNKNOWN, SPECIAL):
        await unary(channel, SPECIAL.encode(), "/test.Talk/Fail")
    for path in ("/test.Echo/Nothing", "/test.Nobody/Unary"):
        with fails(grpc.StatusCode.UNIMPLEMENTED):
            await unary(channel, b"", path)
    metadata = (("want-code", "2"), ("want-details", "test status message"))
    stream = channel.stream_stream("/test.Talk/End")(metadata=metadata, timeout=TIMEOUT_S)
    await stream.write(b"a")
    assert b"a" == await stream.read()
    with fails(grpc.StatusCode.UNKNOWN, "test status message"):
        await stream.read()


@pytest.mark.parametrize("compression", list(grpc.Compression))
async def test_compression(channel: grpc.aio.Channel, compression: grpc.Compression) -> None:
    """Requests and responses are compressed with gzip, either or both, unary and on streams."""
    request = b"compress me " * 100_000
    for path in ("/test.Echo/Unary", "/test.Talk/Compressed"):
        assert request == await unary(channel, request, path, compression=compression)
    messages = [b"", b"a", request]
    stream = channel.stream_stream("/test.Talk/CompressedStream")
    answers = stream(items(*messages), compression=compression, timeout=TIMEOUT_S)
    assert messages == [answer async for answer in answers]


async def test_many_calls(channel: grpc.aio.Channel) -> None:
    """1,000 calls in a row and at once, 100 at once that are large, and 100 streams at once get their own answers."""
    small = [b"%d" % number for number in range(1000)]
    for request in small:
        assert request == await unary(channel, request)
    assert small == await asyncio.gather(*(unary(channel, request) for request in small))
    requests = [bytes([number]) * 271_828 for number in range(100)]
    assert requests == await asyncio.gather(*(unary(channel, request) for request in requests))
    streams = [channel.stream_stream("/test.Echo/BidiStream")(timeout=TIMEOUT_S) for _ in range(100)]
    for size in (1, 500, 20_000):
        for index, stream in enumerate(streams):
            await stream.write(bytes([index]) * size)
        for index, stream in enumerate(streams):
            assert bytes([index]) * size == await stream.read()
    for stream in streams:
        await stream.done_writing()
        assert grpc.StatusCode.OK is await stream.code()


async def test_limits(kind: str, start_echo: StartEcho, wire: str) -> None:
    """A request above the limit of messages is RESOURCE_EXHAUSTED; calls beyond that of streams wait."""
    limits = {"max_concurrent_streams": 5}
    async with opened(kind, start_echo("--max-message-bytes=100000", **limits).address) as channel:
        with fails(grpc.StatusCode.RESOURCE_EXHAUSTED):
            await unary(channel, bytes(200_000))
        if wire == "grpcio":  # counts streams for a moment after their end, and refuses calls of every client
            return
        requests = [b"%d" % number for number in range(200)]
        assert requests == await asyncio.gather(*(unary(channel, request) for request in requests))


async def test_restarts(kind: str, start_echo: StartEcho, wire: str) -> None:
    """A service that stops and is started again loses no call of clients that wait for it."""
    if wire == "grpcio":
        pytest.skip("grpc.aio's stop cancels calls that come while it stops")
    echo = start_echo()
    answered = asyncio.Semaphore(0)
    is_over = False

    async def call(channel: grpc.aio.Channel) -> None:
        while not is_over:
            assert b"a" == await unary(channel, b"a", wait_for_ready=True)
            answered.release()

    async def wait_for_calls() -> None:
        for _ in range(200):
            await answered.acquire()

    async with opened(kind, echo.address) as channel:
        calls = [asyncio.ensure_future(call(channel)) for _ in range(8)]
        for _ in range(2):
            await wait_for_calls()
            assert 0 == await asyncio.to_thread(echo.stop)
            echo = await asyncio.to_thread(start_echo, f"--address={echo.address}")
            while not answered.locked():
                await answered.acquire()
        await wait_for_calls()
        is_over = True
        await asyncio.gather(*calls)


async def test_tls(kind: str, start_echo: StartEcho, tmp_path: Path) -> None:
    """With certificates at both ends calls pass; without the client's, or with another authority's, none does.

    No channel waits for the server's half of TLS' end, which gRPC's C core never sends.
    """
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    server, client = authority.issue("server"), authority.issue("client")
    echo = start_echo(f"--tls-cert={server.cert}", f"--tls-key={server.key}", f"--tls-ca={authority.ca}")
    for ca, is_shown in ((authority.ca, True), (authority.ca, False), (other.ca, True)):
        if kind == "weft-client":
            context = ssl.create_default_context(cafile=ca)
            if is_shown:
                context.load_cert_chain(client.cert, client.key)
            secured: grpc.aio.Channel = Channel(echo.tls, ssl_context=context, server_name="localhost")
        else:
            pair = (client.key.read_bytes(), client.cert.read_bytes()) if is_shown else (None, None)
            credentials = grpc.ssl_channel_credentials(ca.read_bytes(), *pair)
            options = [*OPTIONS, ("grpc.ssl_target_name_override", "localhost")]
            secured = grpc.aio.secure_channel(echo.tls, credentials, options)
        async with secured as channel:
            if ca is authority.ca and is_shown:
                assert bytes(5_000_000) == await unary(channel, bytes(5_000_000))
            else:
                with fails(grpc.StatusCode.UNAVAILABLE):
                    await unary(channel, b"", timeout=5)
            async with asyncio.timeout(5):
                await channel.close()
