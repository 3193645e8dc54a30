"""A target in the router's own process: no socket and no serialization, but the same answers as over gRPC."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

from opentelemetry.trace import INVALID_SPAN, Span
from typing_extensions import override

from weft.base.core import CallContext, InferCall, InferenceCore, InferResult
from weft.base.errors import DeadlineExceededError, RemoteError, WeftError
from weft.base.observing import telemetry
from weft.base.security.access import caller_name
from weft.base.signature import ModelSignature
from weft.base.statistics import ModelStatistics
from weft.router.target import Target, TargetModel, is_to_come, named, too_late
from weft.v2.protocol.status import text_for_client
from weft.v2.server.call_boundary import CLIENT_AHEAD_NS, CallBoundary, withdrawal
from weft.wire.event_loop import NARROWEST_S, DeadlineQueue

T = TypeVar("T")


class InProcessTarget(Target):
    """A target over any ``InferenceCore``; the creator of the core closes it.

    Tensors of calls and answers are passed without copies; their bytes are immutable. Each call is a SERVER span of the
    service; errors have the codes and texts that a ``GrpcTarget`` would raise.

    Args:
        service: Name of the core for spans and log lines; by default ``weft.`` and the target's name.
    """

    def __init__(
        self, name: str, core: InferenceCore, *, service: str = "", clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.name = name
        self.address = "in-process"
        self._core = core
        self._edge = CallBoundary(service or f"weft.{name}")
        self._clock_ns = clock_ns
        self._deadlines = Deadlines() if clock_ns is time.monotonic_ns else Deadlines(narrowest_s=2**-30)
        self._known: dict[tuple[str, str], TargetModel] = {}
        #: Of models that have served here; replaced as a whole, as the metrics thread reads it.
        self._counters: dict[tuple[str, str], ModelStatistics] = {}

    @override
    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        inner, span, given_s = self._begin(call, context)
        deadline_ns = inner.deadline_ns
        try:
            if deadline_ns is None:
                result = await self._core.infer(call, inner)
            else:
                result = await self._in_time(lambda: self._core.infer(call, inner), deadline_ns)
        except BaseException as error:
            self._fail(error, call, inner, span, given_s, "{} did not answer")
            raise
        if span is not INVALID_SPAN:
            telemetry.end_span(span)
        return result

    @override
    async def stream_infer(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        inner, span, given_s = self._begin(call, context)
        try:
            async with contextlib.aclosing(self._core.stream_infer(call, inner)) as results:
                while (result := await self._in_time(lambda: anext(results, None), inner.deadline_ns)) is not None:
                    if result.error is not None:  # between services the first error ends a stream
                        raise result.error
                    yield result
        except BaseException as error:
            self._fail(error, call, inner, span, given_s, "the stream of {} did not end")
            raise
        telemetry.end_span(span)

    @override
    async def discover(self, *, timeout_s: float) -> list[TargetModel]:
        known: dict[tuple[str, str], TargetModel] = {}
        undescribed: list[TargetModel] = []
        for entry in self._core.index(ready_only=False):
            key = entry.name, entry.version
            model = self._known.get(key)
            try:
                config = self._core.config(*key)
            except WeftError:  # it failed to load, or is not ready now
                if model is None:
                    if is_to_come(entry.state, entry.reason):
                        undescribed.append(TargetModel.undescribed(*key, entry.state, entry.reason))
                    continue
            else:
                if model is None or model.config is not config:
                    model = TargetModel(
                        ModelSignature.from_config(config, entry.version), is_ready=False, config=config
                    )
            is_ready = entry.state == "READY"
            known[key] = model._replace(is_ready=is_ready, reason="" if is_ready else entry.reason)
        self._known = known
        self._counters = {key: counters for key, counters in self._counters.items() if key in known} | self._current()
        return [*known.values(), *undescribed]

    def statistics(self) -> list[ModelStatistics]:
        """The core's own counters of models in service, and the last ones of models that were."""
        return list((self._counters | self._current()).values())

    def _current(self) -> dict[tuple[str, str], ModelStatistics]:
        return {(counters.name, counters.version): counters for counters in self._core.statistics("", "") or ()}

    @override
    async def close(self) -> None:
        self._deadlines.close()

    def _begin(self, call: InferCall, context: CallContext) -> tuple[CallContext, Span, float | None]:
        """Context of the call at the core, its span, and its time limit in seconds.

        Without tracing the given context is used: the caller made it for this call. Raises DeadlineExceededError.
        """
        given_s = None if context.deadline_ns is None else (context.deadline_ns - self._clock_ns()) / 1e9
        if given_s is not None and given_s <= 0:
            raise too_late(named(self, call), given_s)
        if context.trace_context is None and not telemetry.is_enabled():
            context.client_key, context.arrival_ns = caller_name(), time.monotonic_ns()
            return context, INVALID_SPAN, given_s
        inner, span = self._edge.begin(call.model_name, context.headers, context.deadline_ns, context.trace_context)
        span.set_attribute("rpc.system", self.address)
        return inner, span, given_s

    def _fail(
        self, error: BaseException, call: InferCall, inner: CallContext, span: Span, given_s: float | None, late: str
    ) -> None:
        """Raise the error of a failed or withdrawn call as a remote service would have returned it.

        ``late`` is the message for a passed deadline, with ``{}`` for the model.
        """
        if not isinstance(error, Exception):
            telemetry.end_span(span, withdrawal(inner))
            return
        failure = self._edge.as_weft_error(error, call.model_name, inner)
        telemetry.end_span(span, failure)
        message = text_for_client(failure) or f"{named(self, call)} answered {failure.code}"
        is_late = inner.deadline_ns is not None and self._clock_ns() >= inner.deadline_ns - CLIENT_AHEAD_NS
        if is_late and failure.code == "DEADLINE_EXCEEDED" and given_s is not None:
            message = f"{late.format(named(self, call))} within the {given_s * 1e3:.0f} ms that were left"
        try:
            raise _remote(failure, message) from error
        finally:
            del failure  # it holds the frames that it passed, and with them the tensors

    async def _in_time(self, ask: Callable[[], Awaitable[T]], deadline_ns: int | None) -> T:
        if deadline_ns is None:
            return await ask()
        left_s = (deadline_ns - self._clock_ns()) / 1e9
        if left_s > 0:
            return await self._deadlines.within(ask(), left_s, _passed)
        raise _passed()


def _passed() -> DeadlineExceededError:
    return DeadlineExceededError("the deadline passed")


def _remote(error: WeftError, message: str) -> RemoteError:
    remote = RemoteError(
        error.code,
        message,
        retry_after_ms=getattr(error, "retry_after_ms", None),
        error_id=getattr(error, "error_id", None),
    )
    is_own_refusal = error.is_refused and not isinstance(error, RemoteError)
    return remote.refused() if is_own_refusal else remote


class Deadlines:
    """Cancels awaited work at its deadline, up to ``narrowest_s`` late, on one event loop; a fake clock is exact."""

    def __init__(self, narrowest_s: float = NARROWEST_S) -> None:
        self._queue = DeadlineQueue(asyncio.get_running_loop(), narrowest_s)

    async def within(self, awaitable: Awaitable[T], left_s: float, late: Callable[[], Exception]) -> T:
        """Await the awaitable for at most ``left_s``; then cancel it and raise the error of ``late``."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a deadline needs a task")
        num_cancels, is_expired = task.cancelling(), False

        def expire() -> None:
            nonlocal is_expired
            is_expired = True
            task.cancel()

        deadline = self._queue.add(left_s, expire)
        try:
            return await awaitable
        except asyncio.CancelledError as error:
            was_expired, is_expired = is_expired, False
            if was_expired and task.uncancel() <= num_cancels:
                raise late() from error
            raise
        finally:
            if is_expired:  # it ended otherwise in the same turn of the event loop
                task.uncancel()
            deadline.cancel()

    def close(self) -> None:
        """Cancel the timer; nothing may be awaited afterwards."""
        self._queue.close()
