"""Limits of a router as its clients meet them, over gRPC."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from prometheus_client import CollectorRegistry
from tests.messages import request_from_call
from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget
from tests.unit.router.make import StartedRouter

from weft.base.core import CallContext, InferCall
from weft.base.errors import (
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
    WeftError,
)
from weft.v2.client.channels import open_channel
from weft.v2.server.make_server import make_server
from weft.v2.server.server import add_services
from weft_protos import grpc_service_pb2 as pb
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

if TYPE_CHECKING:
    from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceAsyncStub
from weft.router.admission.controller import AdmissionSettings


class Held:
    """Answers of a model that wait until they are released."""

    def __init__(self, target: FakeTarget) -> None:
        self.num_calls = 0
        self.release = asyncio.Event()
        target.answers["double"] = self._answer

    async def _answer(self, call: InferCall, context: CallContext) -> dict[str, Any]:
        self.num_calls += 1
        await self.release.wait()
        return {"Y": call.inputs["X"]}


@asynccontextmanager
async def router(
    root: Path, target: FakeTarget, graph: str, **settings: Any
) -> AsyncIterator[tuple[StartedRouter, "GRPCInferenceServiceAsyncStub"]]:
    """A router with one graph behind a real port, and a stub of it."""
    make.write(root, graph)
    async with make.started(root, target, admission=AdmissionSettings(**settings)) as s:
        server = make_server()
        add_services(server, s.core, "weft.router", s.core.extension())
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with open_channel(f"127.0.0.1:{port}") as channel:
                yield s, GRPCInferenceServiceStub(channel)
        finally:
            await server.stop(None)


def message(priority: int = 0) -> pb.ModelInferRequest:
    """A request for the graph."""
    return request_from_call(make.request(parameters={"priority": priority} if priority else {}))


async def until(claim: Callable[[], bool]) -> None:
    """The claim holds; within 10 s."""
    async with asyncio.timeout(10):
        while not claim():  # noqa: ASYNC110  # the claim is about another task of this loop
            await asyncio.sleep(0.001)


async def test_a_full_router_refuses_before_tensors_are_looked_at(tmp_path: Path, target: FakeTarget) -> None:
    """A request that makes no sense is refused for the same reason; the hint, and that nothing was begun, are there."""
    held = Held(target)
    async with router(tmp_path, target, make.PIPE + "policy { max_inflight: 1 }") as (s, stub):
        first = asyncio.ensure_future(stub.ModelInfer(message()))
        await until(lambda: held.num_calls == 1)
        senseless = message()
        senseless.inputs[0].datatype = "NONE"
        del senseless.raw_input_contents[:]
        for request in (message(), senseless):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.ModelInfer(request)
            assert grpc.StatusCode.RESOURCE_EXHAUSTED is caught.value.code()
            trailing = dict(caught.value.trailing_metadata())  # type: ignore[arg-type]
            assert 10 <= int(trailing["retry-after-ms"]) <= 5000
            assert "true" == trailing["x-refused"]
        held.release.set()
        await first
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ModelInfer(senseless)
        assert grpc.StatusCode.INVALID_ARGUMENT is caught.value.code()
        (statistics,) = s.core.statistics("pipe", "")
        assert 2 == statistics.failures_by_reason["REJECTED"]


async def test_the_lower_priority_is_refused_where_the_higher_gets_in(tmp_path: Path, target: FakeTarget) -> None:
    """Refusals are counted by graph, reason and priority."""
    held = Held(target)
    async with router(tmp_path, target, make.PIPE, max_inflight=4) as (s, stub):
        inside = []
        for count, priority in enumerate((1, 3), start=1):
            inside.append(asyncio.ensure_future(stub.ModelInfer(message(priority))))
            await until(lambda count=count: held.num_calls == count)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ModelInfer(message(3))
        assert "are kept for priorities above 3" in caught.value.details()
        inside.append(asyncio.ensure_future(stub.ModelInfer(message(1))))
        await until(lambda: held.num_calls == 3)
        registry = CollectorRegistry()
        for collector in s.core.extension().collectors:
            registry.register(collector)
        labels = {"graph": "pipe", "reason": "priority", "priority": "3"}
        assert 1.0 == registry.get_sample_value("weft_admission_refusals_total", labels)
        assert 4.0 == registry.get_sample_value("weft_admission_limit", {"graph": ""})
        assert 3.0 == registry.get_sample_value("weft_admission_inflight", {"graph": "pipe"})
        held.release.set()
        await asyncio.gather(*inside)


async def test_with_an_adaptive_limit_some_wait_and_are_answered(tmp_path: Path, target: FakeTarget) -> None:
    """As soon as those before them are; a client that goes away leaves the line."""
    held = Held(target)
    graph = make.PIPE + "policy { max_inflight: 2 }"
    async with router(tmp_path, target, graph, is_adaptive=True) as (s, stub):
        for _ in range(2):
            held.release.set()
            await stub.ModelInfer(message())
        held.release.clear()
        limit = s.core._admission.limits["pipe"]
        limit.median_ns = 10e9  # whoever waits has the time
        calls = [asyncio.ensure_future(stub.ModelInfer(message())) for _ in range(4)]
        await until(lambda: len(limit.queue) == 2)
        with pytest.raises(grpc.aio.AioRpcError, match="what was measured allows 2"):
            await stub.ModelInfer(message())
        calls[3].cancel()
        await until(lambda: len(limit.queue) == 1 or calls[3].done())
        held.release.set()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert 3 == sum(isinstance(answer, pb.ModelInferResponse) for answer in answers)
        await until(lambda: (0, 0, 0) == (limit.num_inflight, len(limit.queue), s.core._admission.router.num_inflight))


@pytest.mark.parametrize(("parameters", "timeout_s"), [({}, 20), ({"timeout": 20_000_000}, None)])
async def test_a_deadline_that_has_no_chance_costs_nothing(
    tmp_path: Path, target: FakeTarget, parameters: dict[str, Any], timeout_s: float | None
) -> None:
    """Of the client, or of the parameter `timeout`: refused with DEADLINE_EXCEEDED before any call."""
    held = Held(target)
    async with router(tmp_path, target, make.PIPE) as (s, stub):
        held.release.set()
        for _ in range(20):
            await stub.ModelInfer(message())
        held.release.clear()
        first = asyncio.ensure_future(stub.ModelInfer(message()))
        await until(lambda: held.num_calls == 41)
        s.core._admission.limits["pipe"].median_ns = 30e9
        request = request_from_call(make.request(parameters=parameters))
        with pytest.raises(grpc.aio.AioRpcError, match="cannot answer inside the deadline") as caught:
            await stub.ModelInfer(request, timeout=timeout_s)
        assert grpc.StatusCode.DEADLINE_EXCEEDED is caught.value.code()
        assert 41 == held.num_calls
        held.release.set()
        await first


async def test_an_answer_that_its_client_has_not_read_holds_no_place(tmp_path: Path, target: FakeTarget) -> None:
    """In a stream, whose client may be slow: the work is done."""
    make.write(tmp_path, make.PIPE + "policy { max_inflight: 1 }")
    async with make.started(tmp_path, target) as s:
        slow = s.core.stream_infer(make.request(), CallContext())
        await anext(slow)
        assert 0 == s.core._admission.router.num_inflight
        await s.core.infer(make.request(), CallContext())
        await slow.aclose()


async def test_a_request_of_a_stream_that_is_refused_leaves_the_others_alone(
    tmp_path: Path, target: FakeTarget
) -> None:
    """It is told so in its turn; when the client breaks off, nothing is in flight any more."""
    held = Held(target)
    async with router(tmp_path, target, make.PIPE + "policy { max_inflight: 1 }") as (s, stub):
        stream = stub.ModelStreamInfer()  # type: ignore[call-arg]
        await stream.write(message())
        await until(lambda: held.num_calls == 1)
        await stream.write(message())
        await until(lambda: sum(s.core._admission.limits["pipe"].refusals.values()) == 1)
        held.release.set()
        first, second = await stream.read(), await stream.read()
        assert ("", True) == (first.error_message, "'max_inflight'" in second.error_message)  # type: ignore[attr-defined]
        held.release.clear()
        await stream.write(message())
        await until(lambda: held.num_calls == 3)
        stream.cancel()
        await until(lambda: s.core._admission.router.num_inflight == s.core._admission.limits["pipe"].num_inflight == 0)


async def test_a_limit_that_is_raised_holds_at_once(tmp_path: Path, target: FakeTarget) -> None:
    """Not when a place of the old one becomes free."""
    held = Held(target)
    make.write(tmp_path, make.PIPE + "policy { max_inflight: 1 }")
    async with make.started(tmp_path, target, model_control="explicit", load_graphs=["*"]) as s:
        first = asyncio.ensure_future(s.core.infer(make.request(), CallContext()))
        await until(lambda: held.num_calls == 1)
        make.write(tmp_path, make.PIPE + "policy { max_inflight: 2 }")
        await s.core.load("pipe", {})
        s.core._check_early("pipe", "", dict, CallContext())
        held.release.set()
        await first


@pytest.mark.parametrize(("version", "error"), [("7", NotFoundError), ("x", InvalidArgumentError)])
async def test_a_version_that_there_is_not_is_no_reason_to_come_back(
    tmp_path: Path, target: FakeTarget, version: str, error: type[WeftError]
) -> None:
    """A full router answers such a request as one with room does, not with RESOURCE_EXHAUSTED and a hint."""
    held = Held(target)
    make.write(tmp_path, make.PIPE + "policy { max_inflight: 1 }")
    async with make.started(tmp_path, target) as s:
        first = asyncio.ensure_future(s.core.infer(make.request(), CallContext()))
        await until(lambda: held.num_calls == 1)
        with pytest.raises(ResourceExhaustedError):
            s.core._check_early("pipe", "1", dict, CallContext())
        with pytest.raises(error):
            s.core._check_early("pipe", version, dict, CallContext())
        held.release.set()
        await first


async def test_a_graph_that_is_unloaded_says_so_first(tmp_path: Path, target: FakeTarget) -> None:
    """It is UNAVAILABLE also for a request with a parameter that is none."""
    make.write(tmp_path, make.PIPE)
    async with make.started(tmp_path, target, model_control="explicit") as s:
        with pytest.raises(UnavailableError, match="not at ready state"):
            await s.core.infer(make.request(parameters={"priority": -1}), CallContext())


async def test_a_graph_that_is_unloaded_has_no_gate(tmp_path: Path, target: FakeTarget) -> None:
    """Nor do requests for it make one; it is UNAVAILABLE, which is counted."""
    make.write(tmp_path, make.PIPE)
    async with make.started(tmp_path, target, model_control="explicit", load_graphs=["*"]) as s:
        await s.core.infer(make.request(), CallContext())
        await s.core.infer(make.request("double"), CallContext())
        assert {"pipe", "double"} == set(s.core._admission.limits)
        await s.core.unload("pipe", unload_dependents=False)
        with pytest.raises(UnavailableError, match="unloaded"):
            await s.core.infer(make.request(), CallContext())
        assert {"double"} == set(s.core._admission.limits)
        (statistics,) = s.core.statistics("pipe", "")
        assert 1 == statistics.fail.count
        target.models = []
        await s.refresh(lambda: not s.core._admission.limits)
