"""The interface of a channel: generated stubs, classes of ``grpc.aio``, states."""

import asyncio
import ssl
from typing import Any

import grpc
import pytest
from grpc import ChannelConnectivity
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.unit.wire.client.scripted import ScriptedDialler, connected
from tests.wire import peer

from weft.wire.client import Channel
from weft.wire.client.link import Link
from weft_protos import grpc_service_pb2 as pb
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub


@pytest.fixture
def channel(link: Link) -> Channel:
    """A channel on the scripted link."""
    made = Channel("unix:/none")
    made.link = link
    return made


async def test_generated_stubs(channel: Channel, link: Link, dialler: ScriptedDialler) -> None:
    """Stubs as protoc makes them call over the channel, with messages in and out."""
    server = await connected(link, dialler)
    call = GRPCInferenceServiceStub(channel).ServerMetadata(pb.ServerMetadataRequest())
    head, data = await _request(server)
    assert server.fields(head)[":path"] == "/inference.GRPCInferenceService/ServerMetadata"
    assert data.payload == peer.message(b"")
    server.answer(1, pb.ServerMetadataResponse(name="weft").SerializeToString())
    assert (await call).name == "weft"
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="a"), wait_for_ready=True)
    await _request(server)
    answers = [health_pb2.HealthCheckResponse(status=status) for status in (1, 2)]
    server.answer(3, *[answer.SerializeToString() for answer in answers])
    assert [answer async for answer in watch] == answers


async def _request(server: Any) -> list[peer.Frame]:
    frames: list[peer.Frame] = []
    while len(frames) < 2:
        await asyncio.sleep(0)
        frames += [frame for frame in server.frames() if frame.kind in (peer.HEADERS, peer.DATA)]
    return frames


async def test_calls_are_those_of_grpc(channel: Channel) -> None:
    """Calls and methods are instances of the classes of ``grpc.aio``."""
    kinds: list[tuple[Any, Any, list[bytes]]] = [
        (channel.unary_unary, grpc.aio.UnaryUnaryCall, [b""]),
        (channel.unary_stream, grpc.aio.UnaryStreamCall, [b""]),
        (channel.stream_unary, grpc.aio.StreamUnaryCall, []),
        (channel.stream_stream, grpc.aio.StreamStreamCall, []),
    ]
    assert isinstance(channel, grpc.aio.Channel)
    for make, kind, arguments in kinds:
        call = make("/a.B/C")(*arguments)
        assert isinstance(call, kind)
        assert isinstance(call, grpc.aio.Call)
        call.cancel()


async def test_call_credentials_are_refused(channel: Channel) -> None:
    """Credentials of a call, which are not supported, are not left out in silence."""
    with pytest.raises(grpc.aio.UsageError, match="credentials"):
        channel.unary_unary("/a.B/C")(b"", credentials=grpc.access_token_call_credentials("token"))


async def test_a_channel_gets_ready(channel: Channel, dialler: ScriptedDialler) -> None:
    """``channel_ready`` outlives attempts that fail; a closed channel never gets ready."""
    assert channel.get_state() is ChannelConnectivity.IDLE
    dialler.refuse("refused")
    dialler.accept()
    await channel.channel_ready()
    assert channel.get_state() is ChannelConnectivity.READY
    await channel.close()
    with pytest.raises(grpc.aio.UsageError, match="closed"):
        await channel.channel_ready()


async def test_a_channel_that_was_never_used() -> None:
    """A channel without calls is closed without an event loop of its own."""
    async with Channel("localhost:1", ssl_context=ssl.create_default_context()) as channel:
        assert channel.get_state() is ChannelConnectivity.IDLE
    assert channel.get_state() is ChannelConnectivity.SHUTDOWN
