"""What a target in this process does as one behind gRPC would, and what it knows beside."""

import asyncio
import contextlib
import gc
import sys
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.router import make

from weft.base.core import CallContext, IndexEntry, InferCall, InferenceCore, InferResult
from weft.base.errors import (
    InternalError,
    InvalidArgumentError,
    RemoteError,
    ResourceExhaustedError,
    UnavailableError,
    WeftError,
)
from weft.base.observing import telemetry
from weft.base.statistics import ModelStatistics
from weft.router.core import RouterCore
from weft.router.repository.config import config_of_signature
from weft.router.targets.in_process import InProcessTarget
from weft.v2.protocol.status import MAX_TEXT_BYTES
from weft_protos.model_config_pb2 import ModelConfig


class RaisingCore(InferenceCore):
    """Serves `double`, whose answers are what `act` makes of a call; `is_loaded` is whether it can tell of it."""

    def __init__(self, act: Callable[[CallContext], Any] = lambda context: None) -> None:
        signature = make.signature("double", [make.spec("X", dims=(2,))], [make.spec("Y", dims=(2,))], max_batch_size=4)
        self.model_config: ModelConfig = config_of_signature(signature)
        self.counters = ModelStatistics("double", "1")
        self.act = act
        self.is_loaded = True

    def config(self, name: str, version: str) -> ModelConfig:
        if not self.is_loaded:
            raise UnavailableError("not now")
        return self.model_config

    def index(self, *, ready_only: bool) -> list[IndexEntry]:
        return [IndexEntry("double", "1", "READY" if self.is_loaded else "UNAVAILABLE", "")]

    def statistics(self, name: str, version: str) -> list[ModelStatistics]:
        return [self.counters]

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        waited = self.act(context)
        if waited is not None:
            await waited
        return InferResult("double", "1", outputs={"Y": call.inputs["X"]})

    async def stream_infer(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        yield InferResult("double", "1", outputs={"Y": call.inputs["X"]}, is_final=False)
        yield await self.infer(call, context)


def call() -> InferCall:
    return InferCall("double", inputs={"X": make.tensor(1, 2, shape=(1, 2))})


async def failure(act: Callable[[CallContext], Any], **context: Any) -> RemoteError:
    """What a call of a core that does so ends with."""
    with pytest.raises(RemoteError) as caught:
        await InProcessTarget("model", RaisingCore(act)).infer(call(), CallContext(**context))
    return caught.value


def raising(error: Exception) -> Callable[[CallContext], Any]:
    def act(context: CallContext) -> None:
        raise error

    return act


async def test_errors_arrive_as_those_of_another_service() -> None:
    """Code, text, hint and error id are kept, and so is that a request was never begun; a long text is cut."""
    full = await failure(raising(ResourceExhaustedError("full", retry_after_ms=7).refused()))
    assert ("RESOURCE_EXHAUSTED", "full", 7, True) == (full.code, full.message, full.retry_after_ms, full.is_refused)
    behind = await failure(raising(RemoteError("UNAVAILABLE", "down").refused()))
    assert ("UNAVAILABLE", False) == (behind.code, behind.is_refused)
    broken = await failure(raising(InternalError("it failed", error_id="abc")))
    assert ("INTERNAL", "it failed (error id abc)", "abc") == (broken.code, broken.message, broken.error_id)
    long = await failure(raising(InvalidArgumentError("x" * 10_000)))
    assert MAX_TEXT_BYTES == len(long.message)
    empty = await failure(raising(InvalidArgumentError("")))
    assert "model 'double' on target 'model' (in-process) answered INVALID_ARGUMENT" == empty.message


async def test_what_nobody_expected_is_internal_with_an_id_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """The exception's text is in the log only; a TimeoutError of the core is no deadline."""
    error = await failure(raising(TimeoutError("a secret")), deadline_ns=time.monotonic_ns() + 10**10)
    assert "INTERNAL" == error.code
    assert f"weft.model failed on model 'double' (error id {error.error_id})" == error.message
    assert error.error_id == caplog.records[-1].error_id  # type: ignore[attr-defined]
    assert "a secret" in caplog.text


async def test_a_late_stream_ends_at_its_deadline() -> None:
    """What came before is there; the core's generator is closed."""
    closed = asyncio.Event()

    async def wait_for_ever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            closed.set()

    target = InProcessTarget("model", RaisingCore(lambda context: wait_for_ever()))
    stream = target.stream_infer(call(), CallContext(deadline_ns=time.monotonic_ns() + 50_000_000))
    assert not (await anext(stream)).is_final
    with pytest.raises(RemoteError, match=r"the stream of model 'double' .* did not end within the \d+ ms") as caught:
        await anext(stream)
    assert "DEADLINE_EXCEEDED" == caught.value.code
    assert closed.is_set()


async def test_an_error_among_the_responses_ends_a_stream() -> None:
    """As between services: what others may follow is not asked for."""
    core = RaisingCore()

    async def responses(call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        yield InferResult("double", "1", is_final=False, error=InvalidArgumentError("not this one"))
        raise AssertionError("asked for more")

    core.stream_infer = responses  # type: ignore[method-assign]
    with pytest.raises(RemoteError, match="not this one"):
        await anext(InProcessTarget("model", core).stream_infer(call(), CallContext()))


async def test_a_model_that_is_not_ready_now_stays_known() -> None:
    """As with a target behind gRPC: graphs say that it is not ready, not that there is none; a reload is seen."""
    core = RaisingCore()
    target = InProcessTarget("model", core)
    (ready,) = await target.discover(timeout_s=1)
    core.is_loaded = False
    (lost,) = await target.discover(timeout_s=1)
    assert (True, False, ready.signature) == (ready.is_ready, lost.is_ready, lost.signature)
    core.is_loaded, core.model_config = True, ModelConfig(name="double", max_batch_size=9)
    (reloaded,) = await target.discover(timeout_s=1)
    assert 9 == reloaded.signature.max_batch_size


async def test_a_router_tells_the_counters_that_the_core_keeps(tmp_path: Path) -> None:
    """Those of its own view, which have no queue, are not shown beside."""
    core = RaisingCore()
    router = RouterCore(tmp_path, [InProcessTarget("model", core)])
    await router.start()
    await router.infer(call(), CallContext())
    assert [core.counters] == router.statistics("", "") == router.statistics("double", "1")
    await router.close(grace_s=1)


async def test_a_call_is_a_client_and_a_server_span(otlp_collector: Any) -> None:
    """The span of the service hangs below that of the caller, and has the status."""
    telemetry.configure("weft.router")
    try:
        step = telemetry.start_span("step", parent=None, kind=telemetry.CLIENT)
        await failure(raising(InvalidArgumentError("no")), trace_context=telemetry.context_of(step))
        telemetry.end_span(step)
    finally:
        telemetry.shutdown()
    by_name = {span.name: span for span in otlp_collector.spans}
    served = by_name["weft.model/double"]
    assert ("SERVER", "UNSET", 3, "in-process") == (
        served.kind, served.status, served.attributes["rpc.grpc.status_code"], served.attributes["rpc.system"]
    )  # fmt: skip
    assert by_name["step"].span_id == served.parent_span_id


async def test_an_error_keeps_no_tensors() -> None:
    """When the caller has let go of an error, nothing holds the call, also before the garbage collector comes by."""

    def refuse(context: CallContext) -> None:
        raise InvalidArgumentError("no")

    request, target = call(), InProcessTarget("model", RaisingCore(refuse))
    num_references = sys.getrefcount(request)
    gc.disable()
    try:
        with contextlib.suppress(WeftError):
            await target.infer(request, CallContext())
        assert num_references == sys.getrefcount(request)
    finally:
        gc.enable()


class Emptied(RaisingCore):
    """Has no model any more where it `is_gone`, and none that serves where it is not loaded."""

    is_gone = False

    def index(self, *, ready_only: bool) -> list[IndexEntry]:
        return [] if self.is_gone else super().index(ready_only=ready_only)

    def statistics(self, name: str, version: str) -> list[ModelStatistics]:
        return [self.counters] if self.is_loaded else []


async def test_the_counters_of_a_model_that_serves_no_longer_stay_known() -> None:
    """They are those that its core kept, until the model itself is gone."""
    core = Emptied()
    target = InProcessTarget("model", core)
    await target.discover(timeout_s=1)
    core.counters.success.add(5)
    core.is_loaded = False
    assert [core.counters] == target.statistics()
    core.is_gone = True
    await target.discover(timeout_s=1)
    assert [] == target.statistics()
