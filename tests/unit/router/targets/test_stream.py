"""Streams of targets, over real sockets and in-process, and of servers that keep the protocol in their own way."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import pytest
from tests.messages import response_from_result
from tests.unit.router import make

from weft.base.core import CallContext, InferCall, InferenceCore, InferResult
from weft.base.errors import DeadlineExceededError, RemoteError, ResourceExhaustedError, WeftError
from weft.router.target import Target
from weft.router.targets.grpc_target import GrpcTarget
from weft.router.targets.in_process import InProcessTarget
from weft.v2.server.make_server import make_server
from weft.v2.server.server import add_services
from weft_protos import grpc_service_pb2 as pb
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceServicer, add_GRPCInferenceServiceServicer_to_server

DECOUPLED = "llm"


class StreamCore(InferenceCore):
    """Streams 1, 2, 3 and then does what `then` says; `num_made` counts, `is_over` tells how it ended."""

    def __init__(self) -> None:
        self.then: Callable[[], Awaitable[None]] | None = None
        self.contexts: list[CallContext] = []
        self.num_made = 0
        self.end: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def is_ready(self) -> bool:
        return True

    async def stream_infer(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        self.contexts.append(context)
        try:
            for number in (1, 2, 3):
                self.num_made += 1
                outputs = {"OUT": make.tensor(number)}
                yield InferResult(DECOUPLED, "1", call.request_id, {"n": number}, outputs, is_final=False)
            if self.then is not None:
                await self.then()
            yield InferResult(DECOUPLED, "1", call.request_id, is_null=True)
            self.end.set_result("complete")
        finally:
            if not self.end.done():
                self.end.set_result("given up")


@asynccontextmanager
async def listening(add: Callable[[grpc.aio.Server], Any]) -> AsyncIterator[GrpcTarget]:
    """A target before a server on a port of loopback."""
    server = make_server()
    add(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    target = GrpcTarget("model", f"127.0.0.1:{port}")
    try:
        yield target
    finally:
        await target.close()
        await server.stop(None)


@pytest.fixture
async def core() -> StreamCore:
    return StreamCore()


@pytest.fixture(params=["grpc", "in-process"])
async def target(request: pytest.FixtureRequest, core: Any) -> AsyncIterator[Target]:
    """The same core, reached both ways."""
    if request.param == "in-process":
        yield InProcessTarget("model", core)
        return
    async with listening(lambda server: add_services(server, core, "weft.model")) as target:
        yield target


def opened(target: Target, **context: Any) -> AsyncGenerator[InferResult, None]:
    return target.stream_infer(InferCall(DECOUPLED, "", "r1", {}, {"IN": make.tensor(0)}), CallContext(**context))


async def collected(results: AsyncGenerator[InferResult, None]) -> tuple[list[InferResult], Any]:
    """What comes, and the error at the end."""
    got: list[InferResult] = []
    try:
        async with asyncio.timeout(10):
            async for result in results:
                got.append(result)
    except WeftError as error:
        return got, error
    return got, None


async def hang() -> None:
    await asyncio.Event().wait()


async def test_responses_come_in_order_and_the_last_says_so(core: StreamCore, target: Target) -> None:
    """The mark of the last is no parameter of it; the other side ends by itself, not by a cancel."""
    got, error = await collected(opened(target, headers={"x-user-id": "7"}))
    assert error is None
    assert [{"n": 1}, {"n": 2}, {"n": 3}, {}] == [dict(result.parameters) for result in got]
    assert [(False, False)] * 3 + [(True, True)] == [(result.is_final, result.is_null) for result in got]
    assert [make.tensor(n) for n in (1, 2, 3)] == [result.outputs["OUT"] for result in got[:3]]
    assert {(DECOUPLED, "1", "r1")} == {(r.model_name, r.model_version, r.request_id) for r in got}
    assert "7" == core.contexts[0].headers["x-user-id"]
    assert "complete" == await asyncio.wait_for(core.end, 5)


async def test_an_error_comes_after_the_responses_before_it(core: StreamCore, target: Target) -> None:
    """With its status and its hint."""

    async def refuse() -> None:
        raise ResourceExhaustedError("out of blocks", retry_after_ms=120)

    core.then = refuse
    got, error = await collected(opened(target))
    assert (3, "RESOURCE_EXHAUSTED", 120) == (len(got), error.code, error.retry_after_ms)
    assert "out of blocks" in error.message


@pytest.mark.parametrize("num_taken", [0, 1, 3])
async def test_a_stream_that_is_left_is_cancelled_at_the_other_side(
    core: StreamCore, target: Target, num_taken: int
) -> None:
    """Closed between two responses, or cancelled while the next is awaited."""
    core.then = hang

    async def take() -> None:
        async with aclosing(opened(target)) as results:
            for _ in range(num_taken):
                await anext(results)
            if num_taken == 3:
                is_waiting.set()
                await anext(results)

    is_waiting = asyncio.Event()
    task = asyncio.create_task(take())
    if num_taken == 3:
        await asyncio.wait_for(is_waiting.wait(), 5)
        task.cancel()
    await asyncio.wait((task,))
    assert num_taken == 0 or "given up" == await asyncio.wait_for(core.end, 5)


async def test_the_deadline_is_that_of_the_whole_stream(core: StreamCore, target: Target) -> None:
    """The error says what was called and how long; a deadline that has passed opens nothing."""
    core.then = hang
    deadline_ns = time.monotonic_ns() + 1_000_000_000
    got, error = await collected(opened(target, deadline_ns=deadline_ns))
    assert (3, "DEADLINE_EXCEEDED") == (len(got), error.code)
    assert f"model '{DECOUPLED}' on target 'model'" in error.message
    assert "given up" == await asyncio.wait_for(core.end, 5)
    with pytest.raises(DeadlineExceededError):
        await anext(opened(target, deadline_ns=1))
    assert 1 == len(core.contexts)


class OddServer(GRPCInferenceServiceServicer):
    """A server that answers a stream with these messages, and then takes its time; `is_complete` if it got it."""

    def __init__(self, *messages: pb.ModelStreamInferResponse, takes_s: float = 0) -> None:
        self.is_complete = False
        self._messages = messages
        self._takes_s = takes_s

    async def ModelStreamInfer(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802
        for message in self._messages:
            yield message
        await asyncio.sleep(self._takes_s)
        self.is_complete = True


def message(number: int, *, is_final: bool = False) -> pb.ModelStreamInferResponse:
    response = response_from_result(InferResult(DECOUPLED, "4", outputs={"OUT": make.tensor(number)}))
    if is_final:
        response.parameters["triton_final_response"].bool_param = True
    return pb.ModelStreamInferResponse(infer_response=response)


async def test_the_end_of_a_stream_without_marks_is_the_end() -> None:
    """Then the last response is an empty one, made here, so that who reads sees an end in any case."""
    server = OddServer(message(1), message(2))
    async with listening(lambda to: add_GRPCInferenceServiceServicer_to_server(server, to)) as target:
        got, error = await collected(opened(target))
    assert (None, [False, False, True]) == (error, [result.is_final for result in got])
    assert (True, "4", "r1") == (got[-1].is_null, got[-1].model_version, got[-1].request_id)


@pytest.mark.parametrize(("takes_s", "waits_s", "is_complete"), [(0.05, 5, True), (60, 0.01, False)])
async def test_a_last_response_may_carry_outputs_and_the_stream_stay_open(
    monkeypatch: pytest.MonkeyPatch, takes_s: float, waits_s: float, is_complete: bool
) -> None:
    """The server may end the stream by itself, so that it counts no cancel; but it is not waited for for ever."""
    monkeypatch.setattr("weft.v2.protocol.status.STATUS_WAIT_S", waits_s)
    server = OddServer(message(1), message(2, is_final=True), takes_s=takes_s)
    async with listening(lambda to: add_GRPCInferenceServiceServicer_to_server(server, to)) as target:
        got, error = await collected(opened(target))
        assert is_complete == server.is_complete
    assert (None, [(False, False), (True, False)]) == (error, [(result.is_final, result.is_null) for result in got])


async def test_an_error_that_is_a_text_has_no_status() -> None:
    """A server that does not know `triton_grpc_error` says what is wrong, and no more."""
    server = OddServer(message(1), pb.ModelStreamInferResponse(error_message="too hot"))
    async with listening(lambda to: add_GRPCInferenceServiceServicer_to_server(server, to)) as target:
        got, error = await collected(opened(target))
    assert (1, "UNKNOWN", "too hot") == (len(got), error.code, error.message)
    assert isinstance(error, RemoteError)


async def test_a_closed_target_opens_no_stream(core: StreamCore) -> None:
    """A call that comes too late gets a status, not an exception of the transport."""
    async with listening(lambda server: add_services(server, core, "weft.model")) as target:
        await target.close()
        _, error = await collected(opened(target))
    assert "UNAVAILABLE" == error.code
