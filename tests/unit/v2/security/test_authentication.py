"""Keys as clients of a real server see them: what opens which RPC, and what becomes of the key."""

import asyncio
import contextlib
import json
import urllib.request
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory, text_format
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub
from tests.unit.v2.builders import code, make_request
from tests.wire.notation import Case, read_cases

from weft.base import errors
from weft.base.observing import telemetry
from weft.base.security.keys import new_key
from weft.v2.client.channels import open_channel
from weft.v2.client.connect import connect, connect_async
from weft.v2.protocol.shared_memory import SharedMemory
from weft.v2.security.channel import ChannelSecurity
from weft_protos import grpc_service_pb2 as pb
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
ACCESS = read_cases(Path(__file__).with_name("access.txt"))


class Keys:
    """The file of keys of a test."""

    def __init__(self, folder):
        self.path = folder / "keys"
        self.folder = folder
        self._lines = {}
        self.keys = {}

    def put(self, name, **fields):
        self.keys[name], line = new_key(name)
        self._lines[name] = json.loads(line) | fields
        self.write()

    def drop(self, name):
        del self._lines[name]
        self.write()

    def write(self):
        self.path.write_text("".join(json.dumps(line) + "\n" for line in self._lines.values()))

    def security(self, name):
        """How a client of that key secures its channel."""
        path = self.folder / f"{name}.key"
        path.write_text(self.keys[name] + "\n")
        return ChannelSecurity(key_file=path)


@pytest.fixture
def keys(tmp_path):
    """``admin`` may do everything, ``shop`` infer with ``echo`` and ``tokens`` only, ``owner`` change ``echo``."""
    keys = Keys(tmp_path)
    keys.put("admin", control=True, feedback=True)
    keys.put("shop", models=["echo", "tok*"])
    keys.put("owner", models=["echo"], control=True)
    return keys


@pytest.fixture
async def ports(listen, keys):
    """A service that asks for keys."""
    return await listen("--auth-keys", keys.path, memory=SharedMemory())


CALLERS = ("", "shop", "owner", "admin")


@pytest.mark.parametrize("case", ACCESS, ids=lambda case: case.name)
async def test_access(ports, keys, case: Case):
    """Each caller gets the status of the table; without a key, with the cure."""
    async with contextlib.AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(open_channel(ports.grpc, security=(name and keys.security(name)) or None))
            for name in CALLERS
        ]
        for line in case.lines:
            call, _, expected = line.partition(" -> ")
            name, _, request = call.partition(" ")
            assert expected.split() == [await code(rpc(channel, name, request)) for channel in channels], line


def rpc(channel, name: str, request: str):
    """A call of a method of the V2 service, of health, or of a path."""
    method = SERVICE.methods_by_name.get(name)
    path = f"/grpc.health.v1.{name}" if name.startswith("Health") else name
    body = b""
    if method is not None:
        path = f"/{SERVICE.full_name}/{name}"
        body = text_format.Parse(request, message_factory.GetMessageClass(method.input_type)()).SerializeToString()
    if name == "ModelStreamInfer":
        return channel.stream_stream(path)(iter([body]), timeout=5).read()
    return channel.unary_unary(path)(body, timeout=5)


def test_the_table_of_access_has_every_rpc():
    """A new RPC is not forgotten."""
    named = {line.split()[0] for case in ACCESS for line in case.lines}
    assert set(SERVICE.methods_by_name) <= named


async def test_a_missing_key_is_told_with_the_cure(ports):
    """As text of the status, which no call without a key gets further than."""
    async with open_channel(ports.grpc) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="authorization: Bearer"):
            await rpc(channel, "ServerMetadata", "")


async def test_nothing_is_read_before_the_key(ports):
    """A call without a key ends before its message has come: what strangers send fills no memory."""
    may_end = asyncio.Event()

    async def nothing():
        await may_end.wait()
        return
        yield

    async with open_channel(ports.grpc) as channel:
        call = channel.stream_unary(f"/{SERVICE.full_name}/ModelInfer")  # type: ignore[call-arg]
        assert "UNAUTHENTICATED" == await code(call(nothing(), timeout=5))
    may_end.set()


async def test_reflection_asks_for_a_key(ports, keys):
    """What is no RPC of the protocol is closed too."""
    reflected = [reflection_pb2.ServerReflectionRequest(list_services="*")]
    async with open_channel(ports.grpc) as stranger, open_channel(ports.grpc, security=keys.security("shop")) as shop:
        assert "UNAUTHENTICATED" == await code(
            ServerReflectionStub(stranger).ServerReflectionInfo(iter(reflected), timeout=5).read()
        )
        assert "OK" == await code(ServerReflectionStub(shop).ServerReflectionInfo(iter(reflected), timeout=5).read())


async def test_lists_leave_out_models_outside_the_key(ports, keys):
    """Statistics of all models and the index."""
    async with open_channel(ports.grpc, security=keys.security("shop")) as channel:
        stub = GRPCInferenceServiceStub(channel)
        shown = await stub.ModelStatistics(pb.ModelStatisticsRequest(), timeout=5)
        assert {"echo", "tokens"} == {entry.name for entry in shown.model_stats}
        index = await stub.RepositoryIndex(pb.RepositoryIndexRequest(), timeout=5)
        assert {"echo"} == {entry.name for entry in index.models}


async def test_requests_of_a_stream_are_checked_one_by_one(ports, keys):
    """A stream answers what the key allows, names the status of what it does not, and goes on."""
    async with open_channel(ports.grpc, security=keys.security("shop")) as channel:
        stream = GRPCInferenceServiceStub(channel).ModelStreamInfer(
            iter([make_request("fail", "1"), make_request("echo", "2")]), timeout=5
        )
        answers = [answer async for answer in stream]
    assert [True, False] == ["does not allow" in answer.error_message for answer in answers]
    assert "2" == answers[1].infer_response.id


async def test_registered_memory_is_not_for_everybody(ports, keys):
    """Who may not register shared memory reads and writes none, whether a region has that name or not."""
    region = shared_memory.SharedMemory(create=True, size=64)
    try:
        register = pb.SystemSharedMemoryRegisterRequest(name="own", key=region.name, byte_size=64)
        for name, expected in (("admin", "OK"), ("shop", "PERMISSION_DENIED")):
            async with open_channel(ports.grpc, security=keys.security(name)) as channel:
                stub = GRPCInferenceServiceStub(channel)
                if name == "admin":
                    await stub.SystemSharedMemoryRegister(register, timeout=5)
                read, write = make_request("echo"), make_request("echo")
                del read.raw_input_contents[:]
                write.outputs.add(name="x")
                for tensor in (read.inputs[0], write.outputs[0]):
                    tensor.parameters["shared_memory_region"].string_param = "own"
                    tensor.parameters["shared_memory_byte_size"].int64_param = 8
                assert [expected] * 2 == [await code(stub.ModelInfer(one, timeout=5)) for one in (read, write)]
    finally:
        region.close()
        region.unlink()


async def test_core_learns_the_name_and_never_the_key(ports, keys, core):
    """A model sees who calls, its other headers, and no header with a key, whichever way the key came."""
    async with open_channel(ports.grpc) as channel:
        stub = GRPCInferenceServiceStub(channel)
        key = keys.keys["shop"]
        for header in (("authorization", f"Bearer {key}"), ("x-api-key", key)):
            metadata = (header, ("x-tenant", "a"))
            await stub.ModelInfer(make_request("echo"), metadata=metadata, timeout=5)
            stream = stub.ModelStreamInfer(iter([make_request("echo")]), metadata=metadata, timeout=5)
            assert 1 == len([answer async for answer in stream])
    assert 4 == len(core.calls)
    for _, context in core.calls:
        assert "shop" == context.client_key
        assert "a" == context.headers["x-tenant"]
        assert not any(key in value for value in context.headers.values())


async def test_without_keys_nobody_is_asked(listen, core):
    """A service without ``--auth-keys`` takes every call, its caller has no name, and a key sent to it ends there."""
    ports = await listen()
    async with open_channel(ports.grpc) as channel:
        metadata = (("authorization", "Bearer secret"), ("x-api-key", "secret"))
        await GRPCInferenceServiceStub(channel).ModelInfer(make_request("echo"), metadata=metadata, timeout=5)
    ((_, context),) = core.calls
    assert "" == context.client_key
    assert "secret" not in str(context.headers)


async def test_limits_of_the_key_hold_across_rpcs(listen, keys, core):
    """Requests of streams and alone count together; the one over the limit hears when to try again."""
    keys.put("small", max_inflight=1)
    ports = await listen("--auth-keys", keys.path)
    async with open_channel(ports.grpc, security=keys.security("small")) as channel:
        stub = GRPCInferenceServiceStub(channel)
        hanging = stub.ModelStreamInfer(iter([make_request("hang")]), timeout=20)
        await core.started.wait()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ModelInfer(make_request("echo"), timeout=5)
        assert grpc.StatusCode.RESOURCE_EXHAUSTED is caught.value.code()
        assert 0 < int(dict(caught.value.trailing_metadata())["retry-after-ms"])  # type: ignore[arg-type, index]
        core.release.set()
        assert "hang" == (await hanging.read()).infer_response.model_name  # type: ignore[attr-defined]
        assert "OK" == await code(stub.ModelInfer(make_request("echo"), timeout=5))


async def test_priority_is_lowered_on_the_wire(listen, keys, core):
    """A request above the key's best level is taken at that level."""
    keys.put("low", highest_priority=2)
    ports = await listen("--auth-keys", keys.path)
    async with open_channel(ports.grpc, security=keys.security("low")) as channel:
        await GRPCInferenceServiceStub(channel).ModelInfer(make_request("echo", priority=1), timeout=5)
    ((call, _),) = core.calls
    assert 2 == call.parameters["priority"]


async def test_revoked_key_ends_at_once(listen, keys, core):
    """A key whose line is gone opens nothing more, and a stream that it opened takes no more requests."""
    ports = await listen("--auth-keys", keys.path)
    queue = asyncio.Queue()

    async def requests():
        while (request := await queue.get()) is not None:
            yield request

    async with open_channel(ports.grpc, security=keys.security("shop")) as channel:
        stub = GRPCInferenceServiceStub(channel)
        stream = stub.ModelStreamInfer(requests(), timeout=20)
        queue.put_nowait(make_request("echo"))
        assert not (await stream.read()).error_message  # type: ignore[attr-defined]
        keys.drop("shop")
        assert "UNAUTHENTICATED" == await code(stub.ModelInfer(make_request("echo"), timeout=5))
        queue.put_nowait(make_request("echo"))
        assert "is not valid any more" in (await stream.read()).error_message  # type: ignore[attr-defined]
        queue.put_nowait(None)


async def test_new_key_of_a_client_is_sent_from_then_on(listen, keys):
    """A client whose key file is replaced goes on over the same channel with the new key."""
    ports = await listen("--auth-keys", keys.path)
    security = keys.security("shop")
    async with open_channel(ports.grpc, security=security) as channel:
        stub = GRPCInferenceServiceStub(channel)
        assert "OK" == await code(stub.ModelInfer(make_request("echo"), timeout=5))
        keys.put("shop")
        assert "UNAUTHENTICATED" == await code(stub.ModelInfer(make_request("echo"), timeout=5))
        keys.security("shop")
        assert "OK" == await code(stub.ModelInfer(make_request("echo"), timeout=5))


async def test_span_names_the_client_and_nothing_has_the_key(listen, keys, otlp_collector, caplog):
    """The SERVER span has the name of the key; no span and no log line has the key, or an attempt at one."""
    telemetry.configure("weft.test")
    try:
        ports = await listen("--auth-keys", keys.path)
        wrong = f"shop.{'w' * 43}"
        async with open_channel(ports.grpc) as channel:
            stub = GRPCInferenceServiceStub(channel)
            for key in (keys.keys["shop"], wrong):
                metadata = (("authorization", f"Bearer {key}"),)
                await code(stub.ModelInfer(make_request("echo"), metadata=metadata, timeout=5))
    finally:
        telemetry.shutdown()
    spans = otlp_collector.wait_for(bool)
    assert "shop" == spans[0].attributes["weft.client"]
    told = repr(spans) + caplog.text
    assert keys.keys["shop"] not in told
    assert wrong not in told


async def test_refusals_are_counted(listen, keys):
    """The metrics tell how often which client was refused why; a caller without a valid key has no name."""
    ports = await listen("--auth-keys", keys.path)
    async with open_channel(ports.grpc) as stranger, open_channel(ports.grpc, security=keys.security("shop")) as shop:
        await code(GRPCInferenceServiceStub(stranger).ModelInfer(make_request("echo"), timeout=5))
        await code(GRPCInferenceServiceStub(shop).ModelInfer(make_request("fail"), timeout=5))

    def scrape():
        with urllib.request.urlopen(f"http://{ports.metrics}/metrics", timeout=10) as answer:
            return answer.read().decode()

    text = await asyncio.to_thread(scrape)
    assert 'weft_access_refused_total{client="",reason="missing"} 1.0' in text
    assert 'weft_access_refused_total{client="shop",reason="model"} 1.0' in text


async def test_weft_connect_takes_certificates_and_keys(listen, keys, authority):
    """Both clients, one of them beside the event loop; a key that may do less, or none, is refused with its class."""
    pair = authority.issue("service")
    ports = await listen("--auth-keys", keys.path, "--tls-cert", pair.cert, "--tls-key", pair.key)
    files: Any = {"tls_ca": str(authority.ca), "tls_name": "service"}
    values = {"x": [[1, 2]], "s": [["a"]], "timeout_s": 10}
    key_file = keys.security("shop").key_file
    async with connect_async(ports.grpc, key_file=key_file, **files) as client:
        assert [[1, 2]] == (await client.echo(**values)).x.tolist()
        with pytest.raises(errors.PermissionDeniedError):
            await client.hang(**values)
    async with connect_async(ports.grpc, **files) as client:
        with pytest.raises(errors.UnauthenticatedError, match="authorization: Bearer"):
            await client.echo(**values)
    with connect(ports.grpc, key_file=key_file, **files) as blocking:
        assert [[1, 2]] == (await asyncio.to_thread(blocking.echo, **values)).x.tolist()
    with (
        connect(ports.grpc, key_file=key_file, tls_ca=authority.ca, tls_name="another") as blocking,
        pytest.raises(errors.UnavailableError, match="cannot be reached"),
    ):
        await asyncio.to_thread(blocking.echo, **values)
