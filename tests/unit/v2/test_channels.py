"""Ports are not shared, large tensors pass, and a channel outlives its server."""

import asyncio
import contextlib

import grpc
import pytest
from tests.unit.v2.builders import make_request

from weft.v2.client.channels import open_channel
from weft.v2.server.make_server import make_server
from weft.v2.server.server import add_services
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub


async def test_two_servers_never_share_a_port(server, services):
    """A second server on a taken port is refused, instead of getting every other call."""
    second = make_server()
    with pytest.raises((RuntimeError, OSError), match=r"bind|in use"):
        second.add_insecure_port(f"127.0.0.1:{server.port}")


async def test_large_tensors_pass_both_ways(address):
    """A tensor beyond gRPC's default limit of 4 MiB comes back whole."""
    data = bytes(range(256)) * (5 * 2**20 // 256)
    async with open_channel(address) as channel:
        response = await GRPCInferenceServiceStub(channel).ModelInfer(make_request(data=data))
    assert data == response.raw_output_contents[0]


async def test_calls_started_at_once_are_all_accepted():
    """Of 5000 calls that one channel starts in one turn of the loop, none is cancelled before a handler sees it."""

    async def echo(request: bytes, context: object) -> bytes:
        return request

    handlers = {"Echo": grpc.unary_unary_rpc_method_handler(echo)}
    server = make_server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary("/test/Echo", bytes, bytes)
        answers = await asyncio.gather(*[call(b"%d" % i) for i in range(5000)], return_exceptions=True)
    await server.stop(None)
    assert [b"%d" % i for i in range(5000)] == answers


async def test_a_peer_may_be_far_away(address, services):
    """A peer whose first bytes take 300 ms is reached, over the first connection."""
    host, port = address.split(":")
    num_connections = 0

    async def copy(reader, writer, delay_s):
        await asyncio.sleep(delay_s)
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
        writer.close()

    async def relay(reader, writer):
        nonlocal num_connections
        num_connections += 1
        far_reader, far_writer = await asyncio.open_connection(host, port)
        await asyncio.gather(copy(reader, far_writer, 0), copy(far_reader, writer, 0.3))

    async with await asyncio.start_server(relay, host, 0) as far:
        far_port = far.sockets[0].getsockname()[1]
        async with open_channel(f"{host}:{far_port}") as channel:
            await GRPCInferenceServiceStub(channel).ModelInfer(make_request(), timeout=10)
    assert 1 == num_connections


async def test_channel_outlives_its_server(core):
    """When a server comes back at its address, calls on the old channel are answered again."""

    async def start(port=0):
        server = make_server()
        add_services(server, core, "weft.test")
        port = server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        return server, port

    first, port = await start()
    async with open_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(10):
        stub = GRPCInferenceServiceStub(channel)
        await stub.ModelInfer(make_request())
        await first.stop(None)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ModelInfer(make_request())
        assert "UNAVAILABLE" == caught.value.code().name
        second, _ = await start(port)
        await stub.ModelInfer(make_request(), wait_for_ready=True)
        await second.stop(None)
