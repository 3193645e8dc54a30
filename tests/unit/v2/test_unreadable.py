"""Requests that are no message of their method: one clear status, one line in the log, on either wire."""

import asyncio
import logging

import grpc
import pytest
from grpc_health.v1 import health_pb2
from tests.unit.v2.builders import make_request
from tests.unit.v2.scripted_core import ScriptedCore

from weft.v2.client.channels import open_channel
from weft.v2.client.wires import WireName
from weft.v2.protocol.codec import deserialize_call
from weft.v2.server import make_server as made
from weft.v2.server.call_boundary import CallBoundary
from weft.v2.server.server import add_services
from weft.wire.messages import UnreadableRequests
from weft_protos import grpc_service_pb2 as pb

GARBAGE = b"\xff\xff\xff"
V2 = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
PATHS = [
    *(f"/{V2.full_name}/{method.name}" for method in V2.methods if not method.client_streaming),
    *(f"/{health_pb2.DESCRIPTOR.services_by_name['Health'].full_name}/{name}" for name in ("Check", "Watch")),
]


@pytest.fixture(params=list(WireName))
async def channel(request):
    """A channel to a server of the V2 service on one of the wires."""
    server = made.make_server(wire=request.param)
    port = server.add_insecure_port("127.0.0.1:0")
    services = add_services(server, ScriptedCore(), "weft.test")
    await server.start()
    services.health.set_serving(True)
    async with open_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


async def ended(call):
    """Status and message that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(call.read() if hasattr(call, "read") else call, 30)
    return caught.value.code(), caught.value.details()


async def test_garbage_is_an_invalid_argument_of_every_method(channel, caplog):
    """Each method names itself and the cause, and a hundred such calls leave one line without a traceback."""
    for path in PATHS:
        method = channel.unary_stream if path.endswith("Watch") else channel.unary_unary
        code, details = await ended(method(path)(GARBAGE))
        assert grpc.StatusCode.INVALID_ARGUMENT is code, path
        assert path in details
        assert "rror parsing message" in details
        assert ".proto" in details
    for _ in range(80):
        await ended(channel.unary_unary(PATHS[0])(GARBAGE))
    lines = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert 1 <= len(lines) < 20  # one for each second
    assert all(record.exc_info is None and "cannot be read" in record.getMessage() for record in lines)


async def test_text_that_is_no_utf8_is_an_invalid_argument(channel):
    """A name that protobuf cannot take is the client's fault as other garbage is."""
    code, _ = await ended(channel.unary_unary(f"/{V2.full_name}/ModelInfer")(b"\x0a\x02\xff\xfe"))
    assert grpc.StatusCode.INVALID_ARGUMENT is code


async def test_garbage_in_a_stream_ends_it_after_the_answers_before(channel):
    """Requests before it are answered, and then the stream ends with INVALID_ARGUMENT."""
    stream = channel.stream_stream(f"/{V2.full_name}/ModelStreamInfer")()
    await stream.write(make_request(request_id="a").SerializeToString())
    await stream.write(GARBAGE)
    async with asyncio.timeout(30):
        assert b"a" in await stream.read()
    code, details = await ended(stream)
    assert grpc.StatusCode.INVALID_ARGUMENT is code
    assert "ModelStreamInfer" in details


@pytest.mark.parametrize("wire", list(WireName))
async def test_a_request_without_memory_for_it_is_resource_exhausted(wire, monkeypatch):
    """The call that cannot be read for lack of memory is refused as too large, and the server goes on."""
    is_short = True

    def read(data):
        if is_short:
            raise MemoryError
        return deserialize_call(data)

    monkeypatch.setattr(made, "deserialize_call", read)
    server = made.make_server(wire=wire)
    port = server.add_insecure_port("127.0.0.1:0")
    add_services(server, ScriptedCore(), "weft.test").health.set_serving(True)
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        infer = channel.unary_unary(f"/{V2.full_name}/ModelInfer")  # type: ignore[call-arg]
        code, details = await ended(infer(make_request().SerializeToString()))
        assert grpc.StatusCode.RESOURCE_EXHAUSTED is code
        assert "smaller" in details
        is_short = False
        assert await infer(make_request().SerializeToString())
    await server.stop(None)


def test_a_method_without_memory_is_resource_exhausted(caplog):
    """What a method cannot do for lack of memory is refused with the cure, not an internal error with a traceback."""
    failure = CallBoundary("weft.test").as_weft_error(MemoryError(), "a")
    assert "RESOURCE_EXHAUSTED" == failure.code
    assert "send a smaller one" in failure.message
    assert not any(record.exc_info for record in caplog.records)


def test_unreadable_requests_share_a_line_each_second(caplog):
    """The first is told at once, the others of its second with the next."""
    now_s = 0.0
    requests = UnreadableRequests(lambda: now_s)
    for moment_s in (0.0, 0.1, 0.9, 1.1):
        now_s = moment_s
        requests.failure("/a/B", "ipv4:127.0.0.1:1", ValueError("odd"))
    assert [1, 3] == [record.num_unreadable for record in caplog.records]
