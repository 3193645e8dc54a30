"""The client of ``weft.wire`` against servers in processes of their own: what ``test_aio.py`` does not ask."""

import asyncio
import contextlib
import gc
import ssl
import weakref
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import uvloop
from grpc import ChannelConnectivity, StatusCode
from tests.certificates import Authority
from tests.wire.conftest import StartEcho
from tests.wire.echo_process import EchoService

from weft.wire.client import Channel, ChannelOptions

EOF = grpc.aio.EOF


@pytest.fixture(params=["port", "socket"])
async def channel(request: pytest.FixtureRequest, echo: EchoService) -> AsyncIterator[Channel]:
    """A channel over TCP or a Unix socket."""
    async with Channel(echo.address if request.param == "port" else echo.unix) as opened:
        yield opened


def unary(channel: Channel, method: str) -> Any:
    return channel.unary_unary(f"/test.Echo/{method}")


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    return failed.value


async def test_a_slow_reader(channel: Channel) -> None:
    """A server waits for a client that does not read, and goes on when it does."""
    call = channel.unary_stream("/test.Echo/ServerStream")(b"300 100000")
    assert len(await call.read()) == 100_000
    await asyncio.sleep(0.2)
    assert call._num_held_bytes <= (4 << 20) + 100_000
    number = 1
    while await call.read() is not EOF:
        number += 1
    assert number == 300


async def test_a_server_that_stops(wire: str, start_echo: StartEcho) -> None:
    """Calls in flight of a server that is killed are UNAVAILABLE; a server in its place is found again."""
    service = start_echo()
    async with Channel(service.address) as channel:
        assert await unary(channel, "Unary")(b"a") == b"a"
        call = unary(channel, "Slow")(b"")
        await call.wait_for_connection()
        service.kill()
        error = await failure(call)
        assert error.code() is StatusCode.UNAVAILABLE
        assert (error.details() or "").startswith("Socket closed")
        error = await failure(unary(channel, "Unary")(b"b"))
        assert error.code() is StatusCode.UNAVAILABLE
        assert (error.details() or "").startswith("failed to connect to all addresses; last error: 127.0.0.1:")
        patient = unary(channel, "Unary")(b"c", wait_for_ready=True, timeout=30.0)
        start_echo(f"--address={service.address}")
        assert await patient == b"c"


async def test_a_server_that_stops_gracefully(wire: str, start_echo: StartEcho) -> None:
    """A server that stops lets calls in flight end; they are not failed by its GOAWAY."""
    service = start_echo("--grace-s=10")
    async with Channel(service.address) as channel:
        call = channel.stream_stream("/test.Echo/BidiStream")()
        await call.write(b"a")
        assert await call.read() == b"a"
        stopping = asyncio.create_task(asyncio.to_thread(service.stop))
        await asyncio.wait_for(channel.wait_for_state_change(ChannelConnectivity.READY), 10.0)
        await call.write(b"b")
        assert await call.read() == b"b"
        await call.done_writing()
        assert await call.read() is EOF
        assert await call.code() is StatusCode.OK
        await stopping


async def test_states(echo: EchoService) -> None:
    """A channel is idle, connects when asked to, is ready, and shuts down."""
    async with Channel(echo.address) as channel:
        assert channel.get_state() is ChannelConnectivity.IDLE
        await asyncio.wait_for(channel.channel_ready(), 10.0)
        assert channel.get_state() is ChannelConnectivity.READY
    assert channel.get_state() is ChannelConnectivity.SHUTDOWN
    with pytest.raises(grpc.aio.UsageError):
        await channel.channel_ready()


async def test_calls_leave_nothing(echo: EchoService) -> None:
    """After calls of all kinds and endings nothing is kept, and no task is left."""
    async with Channel(echo.unix) as channel:
        seen: list[weakref.ref[Any]] = []

        async def one(method: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
            call = method(*arguments, **keywords)
            seen.append(weakref.ref(call))
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
                if hasattr(call, "__await__"):
                    await call
                else:
                    async for _ in call:
                        break

        await one(unary(channel, "Unary"), b"a", timeout=60.0)
        await one(unary(channel, "Slow"), b"a", timeout=0.05)
        await one(unary(channel, "Nothing"), b"a")
        await one(channel.unary_stream("/test.Echo/ServerStream"), b"100 1000")
        await one(channel.stream_unary("/test.Echo/ClientStream"), [b"a", b"b"])
        await one(channel.stream_stream("/test.Echo/BidiStream"), [b"a", b"b"])
        await asyncio.sleep(0.05)
        gc.collect()
        assert [ref() for ref in seen if ref() is not None] == []
        assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_the_name_of_a_certificate(start_echo: StartEcho, tmp_path: Path) -> None:
    """The server is verified by its address or by the name that is given; a port without TLS is no server with it."""
    authority = Authority(tmp_path)
    pair = authority.issue("server.test")
    service = start_echo(f"--tls-cert={pair.cert}", f"--tls-key={pair.key}")
    context = ssl.create_default_context(cafile=str(authority.ca))
    for name in ("", "server.test"):
        async with Channel(service.tls, ssl_context=context, server_name=name) as channel:
            assert await unary(channel, "Unary")(bytes(3_000_000), timeout=30.0) == bytes(3_000_000)
    async with Channel(service.tls, ssl_context=context, server_name="other.test") as channel:
        error = await failure(unary(channel, "Unary")(b""))
        assert error.code() is StatusCode.UNAVAILABLE
        assert (error.details() or "").startswith("failed to connect to all addresses; last error: ")
        assert "ertificate" in (error.details() or "")
    async with Channel(service.address, ssl_context=context) as channel:
        assert (await failure(unary(channel, "Unary")(b""))).code() is StatusCode.UNAVAILABLE


def test_on_uvloop(echo: EchoService) -> None:
    """On uvloop, too, calls of all sizes and kinds are answered, and nothing is left."""

    async def calls() -> None:
        for address in (echo.address, echo.unix):
            async with Channel(address, ChannelOptions(connect_timeout_s=5.0)) as channel:
                method = unary(channel, "Unary")
                for size in (0, 100, 70_000, 10_000_000):
                    assert await method(bytes(size), timeout=30.0) == bytes(size)
                assert await asyncio.gather(*[method(b"%d" % n) for n in range(200)]) == [b"%d" % n for n in range(200)]
                stream = channel.unary_stream("/test.Echo/ServerStream")(b"100 100000")
                assert sum([len(message) async for message in stream]) == 10_000_000
                assert await channel.stream_unary("/test.Echo/ClientStream")([bytes(100_000)] * 50) == b"50 5000000"
                error = await failure(unary(channel, "Slow")(b"", timeout=0.05))
                assert error.code() is StatusCode.DEADLINE_EXCEEDED
        assert asyncio.all_tasks() == {asyncio.current_task()}

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(calls())
