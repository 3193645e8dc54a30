"""Targets over real sockets and in-process, before a tiny server that does as it is told."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from tests.unit.router import make

from weft.base.core import CallContext, IndexEntry, InferCall, InferenceCore, InferResult
from weft.base.errors import (
    DeadlineExceededError,
    NotFoundError,
    RemoteError,
    ResourceExhaustedError,
    UnavailableError,
)
from weft.base.tensors import WireTensor
from weft.router.core import RouterCore
from weft.router.repository.config import config_of_signature
from weft.router.target import Target
from weft.router.targets.grpc_target import CONFIGS_PER_DISCOVERY, GrpcTarget
from weft.router.targets.in_process import InProcessTarget
from weft.v2.client.wires import WireName
from weft.v2.protocol.status import CACHE_HIT
from weft.v2.server.make_server import make_server
from weft.v2.server.server import add_services
from weft.v2.server.unix_socket import LocalTensorService, address_of
from weft_protos import grpc_service_pb2 as pb
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from weft_protos.model_config_pb2 import ModelConfig

GRAPH = """
name: "pipe" platform: "graph" max_batch_size: 4
input  [ { name: "X" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] } ]
node { name: "root" sequence { step { name: "only" model_name: "double" } } }
"""


class TinyCore(InferenceCore):
    """Serves `double`, and lists `broken`, which has no configuration; `answer` may be replaced."""

    def __init__(self) -> None:
        signature = make.signature("double", [make.spec("X", dims=(2,))], [make.spec("Y", dims=(2,))], max_batch_size=4)
        self.model_config: ModelConfig | None = config_of_signature(signature)
        self.calls: list[InferCall] = []
        self.contexts: list[CallContext] = []
        self.num_config_calls = 0
        self.state = "READY"
        self.answer: Callable[[], Awaitable[None]] | None = None

    def is_ready(self) -> bool:
        return True

    def config(self, name: str, version: str) -> ModelConfig:
        self.num_config_calls += 1
        if name != "double" or self.model_config is None:
            raise NotFoundError(f"Request for unknown model: '{name}' is not found")
        return self.model_config

    def index(self, *, ready_only: bool) -> list[IndexEntry]:
        return [IndexEntry("double", "3", self.state, ""), IndexEntry("broken", "1", "UNAVAILABLE", "bad file")]

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        self.calls.append(call)
        self.contexts.append(context)
        if self.answer is not None:
            await self.answer()
        return InferResult("double", "3", call.request_id, {"cost": 2}, {"Y": call.inputs["X"]})


@asynccontextmanager
async def serving(core: TinyCore, port: int = 0) -> AsyncIterator[int]:
    """The core behind a real gRPC server on a port of loopback."""
    server = make_server()
    add_services(server, core, "weft.model")
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(None)


@pytest.fixture
def core() -> TinyCore:
    return TinyCore()


@pytest.fixture(params=["grpc", "in-process"])
async def target(request: pytest.FixtureRequest, core: TinyCore) -> AsyncIterator[Target]:
    """The same core, reached both ways."""
    if request.param == "in-process":
        yield InProcessTarget("model", core)
        return
    async with serving(core) as port:
        target = GrpcTarget("model", f"127.0.0.1:{port}")
        yield target
        await target.close()


def call() -> InferCall:
    return InferCall("double", "3", "r1", {"priority": 2, "lang": "de"}, {"X": make.tensor(1, 2, shape=(1, 2))})


def in_ms(milliseconds: float) -> CallContext:
    return CallContext(deadline_ns=time.monotonic_ns() + int(milliseconds * 1e6))


async def test_a_call_arrives_as_it_was_made(core: TinyCore, target: Target) -> None:
    """Tensors, id, parameters and headers there; outputs, version and parameters back."""
    result = await target.infer(call(), CallContext(headers={"x-user-id": "7"}))
    assert call() == core.calls[0]
    assert "7" == core.contexts[0].headers["x-user-id"]
    assert {"Y": make.tensor(1, 2, shape=(1, 2))} == result.outputs
    assert ("double", "3", "r1", {"cost": 2}) == (
        result.model_name,
        result.model_version,
        result.request_id,
        dict(result.parameters),
    )


@pytest.mark.parametrize("wire", WireName)
async def test_hits_of_a_models_own_cache_are_counted(core: TinyCore, wire: WireName, tmp_path: Path) -> None:
    """In place of an execution, as Triton Inference Server does."""
    infer = core.infer

    async def hit(call: InferCall, context: CallContext) -> InferResult:
        if core.calls:
            context.trailing_metadata += (("x-other", "1"), CACHE_HIT)
        return await infer(call, context)

    core.infer = hit  # type: ignore[method-assign]
    async with serving(core) as port:
        router = RouterCore(tmp_path, [GrpcTarget("model", f"127.0.0.1:{port}", wire=wire)])
        await router.start()
        try:
            for expected in (False, True, True):
                result = await router.infer(call(), CallContext())
                assert expected == result.is_cached
            (counted,) = router.statistics("double", "3")
        finally:
            await router.close(grace_s=0)
    assert (3, 1, 1, 2) == (
        counted.success.count, counted.inference_count, counted.execution_count, counted.cache_hit.count
    )  # fmt: skip


async def test_hits_with_large_tensors_are_known_as_such(core: TinyCore, tmp_path: Path) -> None:
    """Whether the tensors are in the message or, once the service has accepted it, in shared memory."""

    async def infer(call: InferCall, context: CallContext) -> InferResult:
        context.trailing_metadata.append(CACHE_HIT)
        return InferResult("double", "3", outputs={"Y": call.inputs["X"]})

    core.infer = infer  # type: ignore[method-assign]
    path = tmp_path / "s"
    server, tensors = make_server(), LocalTensorService(path, takes_over=False, max_message_bytes=1 << 24)
    add_services(server, core, "weft.model", local_tensors=tensors)
    server.add_insecure_port(address_of(path))
    await server.start()
    tensors.start()
    target = GrpcTarget("model", address_of(path))
    large = InferCall("double", inputs={"X": WireTensor("UINT8", (1, 200_000), bytes(200_000))})
    try:
        async with asyncio.timeout(30):
            is_shared = False
            while not is_shared:
                is_shared = target._tensors is not None and target._tensors.is_open
                result = await target.infer(large, CallContext())
                assert result.is_cached
                assert result.outputs["Y"] == large.inputs["X"]
    finally:
        await target.close()
        await server.stop(None)
        tensors.close()


async def test_the_deadline_travels_with_the_call(core: TinyCore, target: Target) -> None:
    """The other side knows what is left, to within what the way costs."""
    context = in_ms(60_000)
    await target.infer(call(), context)
    assert abs(context.deadline_ns - core.contexts[0].deadline_ns) < 5e9


async def test_a_call_that_takes_too_long_ends_at_its_deadline(core: TinyCore, target: Target) -> None:
    """DEADLINE_EXCEEDED with model, target and the time that was left; the other side's work is cancelled."""
    cancelled = asyncio.Event()

    async def wait_for_ever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    await target.infer(call(), CallContext())  # connects, which a busy machine takes long for
    core.answer = wait_for_ever
    with pytest.raises((RemoteError, DeadlineExceededError)) as caught:
        await target.infer(call(), in_ms(200))
    assert "DEADLINE_EXCEEDED" == caught.value.code
    assert "model 'double'" in caught.value.message
    assert "did not answer within the" in caught.value.message
    async with asyncio.timeout(5):
        await cancelled.wait()


async def test_a_timeout_of_the_service_keeps_its_own_reason(core: TinyCore, target: Target) -> None:
    """DEADLINE_EXCEEDED long before the caller's deadline is told as the service told it."""

    async def expire() -> None:
        raise DeadlineExceededError("Request timeout expired")

    core.answer = expire
    for context in (in_ms(60_000), CallContext()):
        with pytest.raises(RemoteError) as caught:
            await target.infer(call(), context)
        assert ("DEADLINE_EXCEEDED", "Request timeout expired") == (caught.value.code, caught.value.message)


async def test_a_passed_deadline_makes_no_call(core: TinyCore, target: Target) -> None:
    """The other side never hears of it."""
    with pytest.raises(DeadlineExceededError, match="model 'double'"):
        await target.infer(call(), in_ms(-1))
    assert [] == core.calls


async def test_a_cancel_reaches_the_other_side(core: TinyCore, target: Target) -> None:
    """Its task is cancelled while it waits."""
    is_called, cancelled = asyncio.Event(), asyncio.Event()

    async def wait_for_ever() -> None:
        is_called.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    core.answer = wait_for_ever
    request = asyncio.create_task(target.infer(call(), CallContext()))
    async with asyncio.timeout(5):
        await is_called.wait()
        request.cancel()
        await cancelled.wait()
    with pytest.raises(asyncio.CancelledError):
        await request


async def test_an_error_keeps_code_text_and_retry_hint(core: TinyCore, target: Target) -> None:
    """What the model said is what the graph reports."""

    async def refuse() -> None:
        raise ResourceExhaustedError("Exceeds maximum queue size", retry_after_ms=120)

    core.answer = refuse
    with pytest.raises((RemoteError, ResourceExhaustedError)) as caught:
        await target.infer(call(), CallContext())
    assert ("RESOURCE_EXHAUSTED", 120) == (caught.value.code, caught.value.retry_after_ms)  # type: ignore[attr-defined]
    assert "Exceeds maximum queue size" in caught.value.message


async def test_discovery_lists_what_has_a_configuration(core: TinyCore, target: Target) -> None:
    """Ready or not; of a model that failed to load there is a name and a reason."""
    found, broken = await target.discover(timeout_s=5)
    assert ("broken", "1", "bad file", False, False) == (
        broken.signature.name, broken.signature.version, broken.reason, broken.is_ready, broken.is_described
    )  # fmt: skip
    assert ("double", "3", True) == (found.signature.name, found.signature.version, found.is_ready)
    assert (("X", "FP32", (2,)), 4) == (
        (found.signature.inputs[0].name, found.signature.inputs[0].datatype, found.signature.inputs[0].dims),
        found.signature.max_batch_size,
    )
    assert core.model_config == found.config
    core.state = "UNAVAILABLE"
    found, _ = await target.discover(timeout_s=5)
    assert not found.is_ready


async def test_a_server_that_starts_lists_nothing_that_counts(core: TinyCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its index is empty before it knows its repository: it does not answer yet. One that is ready has no models."""
    monkeypatch.setattr(core, "index", lambda *, ready_only: [])
    async with serving(core) as port:
        target = GrpcTarget("model", f"127.0.0.1:{port}")
        assert [] == await target.discover(timeout_s=5)
        monkeypatch.setattr(core, "is_ready", lambda: False)
        with pytest.raises(UnavailableError, match="is starting: it lists no model yet"):
            await target.discover(timeout_s=5)
        await target.close()


class ManyModels(TinyCore):
    """Two and a half turns of models with maximum batch size `limit`; `asked` has whose configuration was asked for."""

    limit = 4

    def __init__(self) -> None:
        super().__init__()
        self.names = [f"m{i}" for i in range(5 * CONFIGS_PER_DISCOVERY // 2)]
        self.asked: list[str] = []

    def config(self, name: str, version: str) -> ModelConfig:
        self.asked.append(name)
        return ModelConfig(name=name, max_batch_size=self.limit)

    def index(self, *, ready_only: bool) -> list[IndexEntry]:
        return [IndexEntry(name, "1", self.state, "") for name in self.names]


async def test_a_model_that_was_reloaded_is_noticed_though_the_index_looks_the_same() -> None:
    """Each discovery asks for some configurations, in turn, so that many models do not cost many calls each time."""
    core = ManyModels()
    async with serving(core) as port:
        target = GrpcTarget("model", f"127.0.0.1:{port}")
        await target.discover(timeout_s=5)
        assert sorted(core.names) == sorted(core.asked)
        core.asked.clear()
        core.limit = 8
        for num_known in (CONFIGS_PER_DISCOVERY, 2 * CONFIGS_PER_DISCOVERY, len(core.names)):
            found = await target.discover(timeout_s=5)
            assert core.names == [model.signature.name for model in found]
            assert num_known == sum(model.signature.max_batch_size == 8 for model in found)
        assert 3 * CONFIGS_PER_DISCOVERY == len(core.asked)
        assert set(core.names) == set(core.asked)
        core.asked.clear()
        core.state = "UNAVAILABLE"
        await target.discover(timeout_s=5)
        assert sorted(core.names) == sorted(core.asked)
        await target.close()


async def test_a_ready_model_without_a_configuration_is_asked_again(core: TinyCore) -> None:
    """One that could not give it at first is found at the next turn, though the index looks the same."""
    config, core.model_config = core.model_config, None
    async with serving(core) as port:
        target = GrpcTarget("model", f"127.0.0.1:{port}")
        assert ["broken"] == [model.signature.name for model in await target.discover(timeout_s=5)]
        core.model_config = config
        assert ["double", "broken"] == [model.signature.name for model in await target.discover(timeout_s=5)]
        await target.close()


@pytest.mark.parametrize("seconds", [1e9, 2**63 / 1e6, 2**64])
async def test_a_deadline_far_away_is_no_passed_one(core: TinyCore, seconds: float) -> None:
    """GRPC's own clock ends after 292 years; a `timeout` parameter may be longer."""
    async with serving(core) as port:
        target = GrpcTarget("model", f"127.0.0.1:{port}")
        await target.infer(call(), in_ms(seconds * 1e3))
        await target.close()


async def test_a_cancel_does_not_break_off_the_task_of_the_grpc_library(
    core: TinyCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library would lose 1 kB of memory for ever each time; its task ends because the call beneath it does."""
    is_called = asyncio.Event()

    async def hold() -> None:
        is_called.set()
        await asyncio.Event().wait()

    core.answer = hold
    async with serving(core) as port:
        target = GrpcTarget("model", f"127.0.0.1:{port}", wire=WireName.GRPCIO)
        start, calls = target.client.model_infer, []
        monkeypatch.setattr(
            target.client, "model_infer", lambda *args, **kw: calls.append(start(*args, **kw)) or calls[0]
        )
        request = asyncio.create_task(target.infer(call(), CallContext()))
        await is_called.wait()
        request.cancel()
        await asyncio.wait((request, calls[0]._invocation_task))  # type: ignore[attr-defined]
        assert request.cancelled()
        assert not calls[0]._invocation_task.cancelled()  # type: ignore[attr-defined]
        assert grpc.StatusCode.CANCELLED is await calls[0].code()
        await target.close()


async def test_a_closed_target_is_unavailable(core: TinyCore) -> None:
    """A call that comes too late gets a status, not an exception of the transport."""
    async with serving(core) as port:
        target = GrpcTarget("model", f"127.0.0.1:{port}")
        await target.close()
        with pytest.raises(Exception, match="model 'double'") as caught:
            await target.infer(call(), CallContext())
        assert "UNAVAILABLE" == caught.value.code  # type: ignore[attr-defined]


async def test_a_killed_target_is_named_and_used_again_when_it_is_back(tmp_path: Path, core: TinyCore) -> None:
    """Over the wire at both ends: UNAVAILABLE names step, model and address; then readiness and answers return."""
    (tmp_path / "pipe" / "1").mkdir(parents=True)
    (tmp_path / "pipe" / "1" / "graph.pbtxt").write_text(GRAPH)
    data = make.tensor(1, 2, shape=(1, 2)).data
    infer = pb.ModelInferRequest(model_name="pipe", raw_input_contents=[data])
    infer.inputs.add(name="X", datatype="FP32", shape=[1, 2])

    async with serving(core) as port:
        address = f"127.0.0.1:{port}"
        router = RouterCore(tmp_path, [GrpcTarget("model", address)])
        until = make.claims_of(router)
        await router.start()
        front = await _front(router)
        assert [data] == list((await front.stub.ModelInfer(infer)).raw_output_contents)

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await front.stub.ModelInfer(infer)
    assert grpc.StatusCode.UNAVAILABLE is caught.value.code()
    text = f"pipe/1: root/only -> double@3: model 'double' on target 'model' ({address}) cannot be reached"
    assert text in caught.value.details()
    assert "root.only!" == dict(caught.value.trailing_metadata())["x-graph-path"]  # type: ignore[arg-type, index]
    await until(lambda: not router.is_ready())
    assert "not ready" in router.index(ready_only=False)[0].reason

    async with serving(core, port):
        await until(router.is_ready)
        assert [data] == list((await front.stub.ModelInfer(infer)).raw_output_contents)
    await front.close()
    await router.close(grace_s=0)


@dataclass
class Front:
    """A stub on a server."""

    stub: GRPCInferenceServiceStub
    close: Callable[[], Awaitable[None]]


async def _front(router: RouterCore) -> Front:
    """The router behind a gRPC server, and a stub on it."""
    server = make_server()
    add_services(server, router, "weft.router")
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")

    async def close() -> None:
        await channel.close()  # type: ignore[call-arg]
        await server.stop(None)

    return Front(GRPCInferenceServiceStub(channel), close)
