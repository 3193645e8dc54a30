"""Keys as clients of a real server see them: what opens which RPC, and what becomes of the key."""

import asyncio
import json
from multiprocessing import shared_memory

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub
from tests.unit.v2.builders import make_request

from weft.base.security.keys import new_key
from weft.v2.client.channels import open_channel
from weft.v2.protocol.shared_memory import SharedMemory
from weft.v2.security.channel import ChannelSecurity
from weft.v2.server.listening import OPEN_METHODS, RIGHT_BY_METHOD
from weft_protos import grpc_service_pb2 as pb
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]


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
    """``admin`` may do everything, ``shop`` infer with ``echo`` and ``tokens`` only."""
    keys = Keys(tmp_path)
    keys.put("admin", control=True, feedback=True)
    keys.put("shop", models=["echo", "tok*"])
    return keys


@pytest.fixture
async def ports(listen, keys):
    """A service that asks for keys."""
    return await listen("--auth-keys", keys.path, memory=SharedMemory())


async def code(call):
    """How a call ended."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


@pytest.mark.parametrize("method", [m.name for m in SERVICE.methods])
async def test_every_rpc_asks_for_a_key(ports, method):
    """Without a key every RPC of the protocol but the two of probes ends with UNAUTHENTICATED and the cure."""
    descriptor = SERVICE.methods_by_name[method]
    path = f"/{SERVICE.full_name}/{method}"
    is_stream = method == "ModelStreamInfer"
    async with open_channel(ports.grpc) as channel:
        make = channel.stream_stream if is_stream else channel.unary_unary
        request = descriptor.input_type._concrete_class()  # type: ignore[attr-defined]
        call = make(path, type(request).SerializeToString, descriptor.output_type._concrete_class.FromString)  # type: ignore[attr-defined]
        rpc = call(iter([request]), timeout=5) if is_stream else call(request, timeout=5)
        if path in OPEN_METHODS:
            assert "OK" == await code(rpc)
            return
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (rpc.read() if is_stream else rpc)
    assert grpc.StatusCode.UNAUTHENTICATED is caught.value.code()
    assert "authorization: Bearer" in caught.value.details()


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


async def test_probes_need_no_key(ports):
    """The standard health service answers everybody, as probes need it to."""
    async with open_channel(ports.grpc) as channel:
        health = HealthStub(channel)
        assert 1 == (await health.Check(health_pb2.HealthCheckRequest(), timeout=5)).status
        assert 1 == (await health.Watch(health_pb2.HealthCheckRequest(), timeout=5).read()).status


async def test_reflection_asks_for_a_key(ports, keys):
    """What is no RPC of the protocol is closed too."""
    reflected = [reflection_pb2.ServerReflectionRequest(list_services="*")]
    async with open_channel(ports.grpc) as stranger, open_channel(ports.grpc, security=keys.security("shop")) as shop:
        assert "UNAUTHENTICATED" == await code(
            ServerReflectionStub(stranger).ServerReflectionInfo(iter(reflected), timeout=5).read()
        )
        assert "OK" == await code(ServerReflectionStub(shop).ServerReflectionInfo(iter(reflected), timeout=5).read())


async def test_unknown_method_stays_unimplemented(ports):
    """A method that nobody serves is UNIMPLEMENTED, with or without a key."""
    async with open_channel(ports.grpc) as channel:
        assert "UNIMPLEMENTED" == await code(channel.unary_unary("/a.b/C")(b"", timeout=5))  # type: ignore[call-arg]


async def test_models_outside_the_key_are_closed_and_unseen(ports, keys):
    """Every RPC with a model checks it, the same whether there is one of that name; lists leave out the others."""
    async with open_channel(ports.grpc, security=keys.security("shop")) as channel:
        stub = GRPCInferenceServiceStub(channel)
        assert "OK" == await code(stub.ModelInfer(make_request("echo"), timeout=5))
        for name in ("fail", "no_such_model"):
            assert "PERMISSION_DENIED" == await code(stub.ModelInfer(make_request(name), timeout=5))
            for method, request in (
                (stub.ModelReady, pb.ModelReadyRequest(name=name)),
                (stub.ModelMetadata, pb.ModelMetadataRequest(name=name)),
                (stub.ModelConfig, pb.ModelConfigRequest(name=name)),
                (stub.ModelStatistics, pb.ModelStatisticsRequest(name=name)),
            ):
                assert "PERMISSION_DENIED" == await code(method(request, timeout=5))  # type: ignore[arg-type]
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


@pytest.mark.parametrize("method", [m for m in RIGHT_BY_METHOD if m.startswith(f"/{SERVICE.full_name}/")])
async def test_control_needs_its_right(ports, keys, method):
    """Load, unload, shared memory and settings are PERMISSION_DENIED unless the key's line says ``control``."""
    descriptor = SERVICE.methods_by_name[method.rpartition("/")[2]]
    request = descriptor.input_type._concrete_class()  # type: ignore[attr-defined]
    for name in ("shop", "admin"):
        async with open_channel(ports.grpc, security=keys.security(name)) as channel:
            call = channel.unary_unary(
                method,
                type(request).SerializeToString,
                descriptor.output_type._concrete_class.FromString,  # type: ignore[attr-defined]
            )
            assert ("PERMISSION_DENIED" == await code(call(request, timeout=5))) is (name == "shop")


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


async def test_load_stays_within_the_models_of_the_key(listen, keys, core):
    """A key with ``control`` for some models changes no others."""
    keys.put("owner", models=["echo"], control=True)
    ports = await listen("--auth-keys", keys.path)
    async with open_channel(ports.grpc, security=keys.security("owner")) as channel:
        stub = GRPCInferenceServiceStub(channel)
        load, unload = pb.RepositoryModelLoadRequest, pb.RepositoryModelUnloadRequest
        assert "PERMISSION_DENIED" == await code(stub.RepositoryModelLoad(load(model_name="fail"), timeout=5))
        assert "PERMISSION_DENIED" == await code(stub.RepositoryModelUnload(unload(model_name="fail"), timeout=5))
        assert "OK" == await code(stub.RepositoryModelLoad(load(model_name="echo"), timeout=5))
    assert [("load", "echo", {})] == core.loads


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
    from weft.base.observing import telemetry

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
    import urllib.request

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
