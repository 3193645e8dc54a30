"""Large tensors between processes of this machine: what travels beside the socket, and what remains of the dead."""

import asyncio
import os
import signal
import socket
import stat
import sys
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.unit.v2.conftest import started_at

from weft.base.core import InferCall
from weft.base.tensors import WireTensor
from weft.v2.client.local_tensors import LocalTensors
from weft.v2.client.v2_client import V2Client
from weft.v2.protocol.encoding import serialize_call
from weft.v2.protocol.tensor_memory import PARAMETER, UNKNOWN, tensors_path
from weft.v2.protocol.wire import result_of
from weft.v2.server.unix_socket import address_of
from weft_protos import grpc_service_pb2 as pb

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="the system has no such memory")

_CALLER = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from test_local_tensors import Caller, call_of
async def main():
    caller = Caller(sys.argv[2])
    await caller.opened()
    print("calling", flush=True)
    await caller.infer(call_of(b"x" * 1_000_000, "hang"))
asyncio.run(main())
"""


def call_of(data: bytes, model: str = "echo") -> InferCall:
    """A call with one tensor."""
    return InferCall(model, "", "", {}, {"x": WireTensor("UINT8", (len(data),), data)})


class Caller:
    """What calls the service at an address; remembers the requests that it has sent."""

    def __init__(self, address: str, wire: Any = None) -> None:
        self.client = V2Client(address, wire=wire)
        self.tensors = LocalTensors(address)
        self.requests: list[Any] = []

    async def infer(self, call: InferCall) -> bytes:
        """The tensor that comes back."""
        invoke = partial(self.client.model_infer, timeout=20, wait_for_ready=True)

        def noted(request: Any) -> Any:
            self.requests.append(pb.ModelInferRequest.FromString(serialize_call(request)))
            return invoke(request)

        result = result_of(await self.tensors.infer(call, noted))
        assert not result.parameters
        return result.outputs["x"].data

    async def opened(self) -> None:
        """Returns when memory is shared."""
        async with asyncio.timeout(20):
            while not self.tensors.is_open:
                assert await self.infer(call_of(b"y" * 100_000)) == b"y" * 100_000

    @property
    def is_shared(self) -> bool:
        """Whether the last request's tensors were in memory."""
        return PARAMETER in self.requests[-1].parameters and not self.requests[-1].raw_input_contents

    async def close(self) -> None:
        """End."""
        self.tensors.close()
        await self.client.close()


@pytest.fixture
def start(start_at, tmp_path):
    """Starts a service on the path ``s``; it has printed that it serves."""
    return lambda *arguments: start_at(tmp_path / "s", *arguments)


@pytest.fixture
async def caller(tmp_path):
    """Calls the service there."""
    caller = Caller(address_of(tmp_path / "s"))
    yield caller
    await caller.close()


@pytest.fixture(scope="module", params=["weft", "grpcio"])
def service(request, tmp_path_factory):
    """A service for the tests that leave it as it was, its path, and the wire that it and its caller use."""
    path = tmp_path_factory.mktemp("local") / "s"
    with started_at() as start:
        yield start(path, "--wire", request.param), path, request.param


@pytest.fixture
async def neighbour(service):
    """Calls that service."""
    caller = Caller(address_of(service[1]), service[2])
    yield caller
    await caller.close()


def shared_memories(pid: int) -> int:
    """Mappings of memory for tensors in a process."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:weft-tensors")


async def until(predicate, timeout_s: float = 10.0) -> None:
    """Return when it holds."""
    async with asyncio.timeout(timeout_s):
        while not predicate():  # noqa: ASYNC110  # the kernel tells nobody
            await asyncio.sleep(0.01)


async def told(process, text: str) -> None:
    """Return when a service has told this on standard error."""
    while text not in await asyncio.to_thread(process.stderr.readline):
        assert process.poll() is None


async def test_large_tensors_travel_in_memory(neighbour):
    """They come back as they were sent, at once and many at a time; small ones stay in the message."""
    await neighbour.opened()
    contents = [bytes([number]) * (200_000 + number) for number in range(20)]
    assert contents == await asyncio.gather(*(neighbour.infer(call_of(content)) for content in contents))
    assert neighbour.is_shared
    assert await neighbour.infer(call_of(b"small")) == b"small"
    assert not neighbour.is_shared
    assert neighbour.tensors._shared.memory.num_used == 0


async def test_what_has_no_room_travels_in_the_message(neighbour):
    """A full memory, or a tensor larger than it, costs no call."""
    await neighbour.opened()
    while neighbour.tensors._shared.memory.write([bytes(10_000_000)]):
        pass
    assert await neighbour.infer(call_of(b"z" * 12_000_000)) == b"z" * 12_000_000
    assert not neighbour.is_shared


async def test_a_cancelled_call_gives_its_block_back(service, neighbour):
    """The memory is free as soon as the caller has given the call up."""
    await neighbour.opened()
    task = asyncio.create_task(neighbour.infer(call_of(b"x" * 1_000_000, "hang")))
    await told(service[0], "hanging")
    assert neighbour.is_shared
    assert neighbour.tensors._shared.memory.num_used == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert neighbour.tensors._shared.memory.num_used == 0
    assert await neighbour.infer(call_of(b"y" * 1_000_000)) == b"y" * 1_000_000


async def test_a_killed_service_leaves_nothing_at_its_caller(start, caller):
    """The call fails as on any lost connection, the memory is unmapped, and the next service gets one of its own."""
    process = start()
    await caller.opened()
    num_descriptors = len(os.listdir("/proc/self/fd"))
    assert 1 == shared_memories(os.getpid())
    task = asyncio.create_task(caller.infer(call_of(b"x" * 1_000_000, "hang")))
    await told(process, "hanging")
    process.send_signal(signal.SIGKILL)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await task
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    await until(lambda: not caller.tensors.is_open)
    await until(lambda: not shared_memories(os.getpid()))
    start()
    assert await caller.infer(call_of(b"y" * 1_000_000)) == b"y" * 1_000_000
    caller.tensors._next_attempt_s = 0.0
    await caller.opened()
    assert await caller.infer(call_of(b"z" * 1_000_000)) == b"z" * 1_000_000
    assert caller.is_shared
    assert len(os.listdir("/proc/self/fd")) <= num_descriptors + 2  # the new service's pipes


async def test_a_killed_caller_leaves_nothing_at_the_service(start, caller, tmp_path):
    """Its memory is unmapped while its call still computes, and others are served as before."""
    process = start()
    num_descriptors = len(os.listdir(f"/proc/{process.pid}/fd"))
    command = [sys.executable, "-c", _CALLER, str(Path(__file__).parent), address_of(tmp_path / "s")]
    other = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert b"calling\n" == await other.stdout.readline()
        await told(process, "hanging")
        assert 1 == shared_memories(process.pid)
    finally:
        other.kill()
        await other.wait()
    await told(process, "cancelled")
    await until(lambda: shared_memories(process.pid) == 0)
    await until(lambda: len(os.listdir(f"/proc/{process.pid}/fd")) <= num_descriptors)
    await caller.opened()
    assert await caller.infer(call_of(b"z" * 1_000_000)) == b"z" * 1_000_000


async def test_a_service_that_does_not_know_the_memory_gets_the_tensors(neighbour):
    """After a take-over the request is sent again, whole, and new memory is offered later."""
    await neighbour.opened()
    neighbour.tensors._shared.token = "0" * 32
    assert await neighbour.infer(call_of(b"y" * 1_000_000)) == b"y" * 1_000_000
    assert not neighbour.is_shared
    assert not neighbour.tensors.is_open


async def test_a_service_that_stops_answers_what_it_has(start, caller, tmp_path):
    """A call in flight at a graceful stop gets its tensors; the socket is the user's alone, and goes."""
    process = start()
    assert 0o600 == stat.S_IMODE(os.stat(tensors_path(str(tmp_path / "s"))).st_mode)
    await caller.opened()
    task = asyncio.create_task(caller.infer(call_of(b"x" * 1_000_000, "hang")))
    await told(process, "hanging")
    process.terminate()
    await told(process, "stopping")
    process.send_signal(signal.SIGUSR1)
    assert await task == b"x" * 1_000_000
    await asyncio.to_thread(process.communicate)
    assert (0, []) == (process.returncode, list(tmp_path.iterdir()))
    await until(lambda: not caller.tensors.is_open)
    assert 0 == shared_memories(os.getpid())


async def test_calls_in_flight_outlive_memory_that_is_given_up(start, caller):
    """When one call learns that the service has changed, those that the old one computes still get their tensors."""
    process = start()
    await caller.opened()
    task = asyncio.create_task(caller.infer(call_of(b"x" * 1_000_000, "hang")))
    await told(process, "hanging")
    caller.tensors._shared.token = "0" * 32
    assert await caller.infer(call_of(b"y" * 1_000_000)) == b"y" * 1_000_000
    assert not caller.tensors.is_open
    process.send_signal(signal.SIGUSR1)
    assert await task == b"x" * 1_000_000
    assert 0 == shared_memories(os.getpid())


async def test_references_of_strangers_are_refused(neighbour):
    """A token that no connection has brought names nothing, also where it is guessed beside a valid reference."""
    await neighbour.opened()
    await neighbour.infer(call_of(b"x" * 1_000_000))
    reference = neighbour.requests[-1].parameters[PARAMETER].string_param.partition(" ")[2]
    for value in (f"{'1' * 32} {reference}", reference, ""):
        request = pb.ModelInferRequest(model_name="echo")
        request.parameters[PARAMETER].string_param = value
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await neighbour.client.stub.ModelInfer(request, timeout=10)
        assert (raised.value.code(), raised.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, UNKNOWN)


async def test_a_connection_without_memory_is_closed(service):
    """A hello without a descriptor, of another length, or with memory that could shrink ends the connection alone."""
    process, path, _ = service
    descriptors, shrinkable = f"/proc/{process.pid}/fd", os.memfd_create("weft-tensors")
    num_descriptors = len(os.listdir(descriptors))
    await until(lambda: shared_memories(process.pid) == 0)
    for data, sent in ((b"", []), (b"short", []), (b"1" * 32, []), (b"\xff" * 32, []), (b"1" * 32, [shrinkable])):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(10)
            connection.connect(tensors_path(str(path)))
            socket.send_fds(connection, [data], sent) if data else connection.shutdown(socket.SHUT_WR)
            assert b"" == await asyncio.to_thread(connection.recv, 1)
    os.close(shrinkable)
    await until(lambda: len(os.listdir(descriptors)) <= num_descriptors)
    assert 0 == shared_memories(process.pid)
