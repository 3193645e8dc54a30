"""The ways in which one process can call another: bare ones, which carry bytes, and those of the router's targets."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import grpc

from benchmarks.floor import running_floor, wire_channel, wire_server
from benchmarks.framed import FramedClient
from benchmarks.transport_services import running
from weft.base.core import CallContext, InferCall
from weft.base.tensors import WireTensor
from weft.capacity.tuning.load import caller
from weft.router.targets.grpc_target import GrpcTarget
from weft.v2.client.channels import open_channel
from weft.v2.protocol.encoding import serialize_call

SERVICES = "benchmarks.transport_services"
TCP, UNIX = "TCP", "Unix socket"

#: A call, to be repeated.
Repeated = Callable[[], Awaitable[object]]


class Way(NamedTuple):
    """One way.

    Attributes:
        name: For the table.
        make_call: Makes the call with a tensor of so many bytes.
        service_pid: Process that answers.
    """

    name: str
    make_call: Callable[[int], Repeated]
    service_pid: int


@contextlib.asynccontextmanager
async def open_ways(folder: Path) -> AsyncIterator[list[Way]]:
    """Every way that this tree has, to services in processes of their own, which end with the block.

    Args:
        folder: For sockets.
    """
    async with contextlib.AsyncExitStack() as stack:
        ways: list[Way] = []
        framed_socket = str(folder / "framed.sock")
        framed = stack.enter_context(running("benchmarks.framed", framed_socket))
        client = await FramedClient.connect(framed_socket)
        stack.push_async_callback(client.close)
        ways.append(Way(f"bare, framed, {UNIX}", lambda size: _bare(client.call, size), framed.pid))
        for wire in ("grpcio", "weft") if wire_server() and wire_channel() else ("grpcio",):
            socket_path = folder / f"bare-{wire}.sock"
            bare = stack.enter_context(running_floor("--wire", wire, "--unix-socket", str(socket_path)))
            for place, address in ((TCP, bare.grpc), (UNIX, f"unix:{socket_path}")):
                channel = _channel(wire, address)
                stack.push_async_callback(channel.close)
                ways.append(Way(f"bare, {wire}, {place}", _bare_maker(caller(channel)), bare.pid))
        for wire in ("grpcio", "weft"):
            socket_path = folder / f"echo-{wire}.sock"
            echo = stack.enter_context(running(SERVICES, wire, str(socket_path)))
            for place, address in ((TCP, echo.grpc), (UNIX, f"unix:{socket_path}")):
                target = GrpcTarget("echo", address, wire=wire)
                stack.push_async_callback(target.close)
                ways.append(Way(f"target, {wire}, {place}", _target_maker(target), echo.pid))
        yield ways


def _channel(wire: str, address: str) -> grpc.aio.Channel:
    channel: grpc.aio.Channel = wire_channel()(address) if wire == "weft" else open_channel(address)
    return channel


def _infer_call(size: int) -> InferCall:
    return InferCall("echo", inputs={"X": WireTensor("UINT8", (1, size), bytes(size))})


def _bare(call: Callable[[bytes], Awaitable[object]], size: int) -> Repeated:
    data = serialize_call(_infer_call(size))
    return lambda: call(data)


def _bare_maker(call: Callable[[bytes], Awaitable[object]]) -> Callable[[int], Repeated]:
    return lambda size: _bare(call, size)


def _target_maker(target: GrpcTarget) -> Callable[[int], Repeated]:
    def make(size: int) -> Repeated:
        call = _infer_call(size)
        return lambda: target.infer(call, CallContext())

    return make
