"""Calls from models to other models: through the router, or to models of this process."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Protocol

from opentelemetry.context import Context
from opentelemetry.trace import get_current_span

from weft.base.core import TIMES_HEADER, CallContext, InferCall, InferenceCore, InferResult, ParameterValue
from weft.base.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    RequestCancelledError,
    UnavailableError,
    WeftError,
)
from weft.base.observing import telemetry
from weft.base.observing.logs import get_logger
from weft.base.processes.forks import IN_COPY, is_copy
from weft.serving.request.request import InferenceRequest
from weft.serving.scheduler.admission import CALL_PATH_HEADER, longer_path, path_of
from weft.v2.client.channels import MAX_TIMEOUT_S
from weft.v2.client.v2_client import V2Client, metadata_of
from weft.v2.client.wires import WireName
from weft.v2.protocol.status import SEND_EMPTY_FINAL
from weft.v2.security.channel import ChannelSecurity

#: Headers of the calling request that go along, beside those that begin with ``x-``.
_FORWARDED = frozenset({"traceparent", "tracestate"})

_log = get_logger("weft.serving.nested")


def on_loop(coroutine: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop, too_late: str) -> "Future[Any]":
    """Run the coroutine on the event loop of another thread; cancelling the future cancels it.

    The future fails with UnavailableError if the loop is closed, or this is a forked copy of the process.
    """
    if not is_copy():
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, loop)
        except RuntimeError:  # the loop is closed
            pass
    else:
        too_late = IN_COPY
    coroutine.close()
    future: Future[Any] = Future()
    future.set_exception(UnavailableError(too_late))
    return future


class Callee(Protocol):
    """Answers nested calls: the core of this process, or a client of the router."""

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        """The answer to one call. Raises a WeftError."""

    def stream_infer(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        """The answers to one call. Raises a WeftError."""


class NestedCalls:
    """The ``ModelCaller`` of a service; it uses ``callee`` only on that one's event loop."""

    def __init__(self, callee: Callee, loop: asyncio.AbstractEventLoop) -> None:
        self._callee = callee
        self._loop = loop

    def infer(self, call: InferCall, parents: Sequence[InferenceRequest], origin: str) -> "Future[InferResult]":
        """As ``ModelCaller.infer``."""
        future = self.submit(self._infer(call, parents, origin, _parent_of(parents)))
        with_parents(parents, future)
        return future

    def stream(self, call: InferCall, parents: Sequence[InferenceRequest], origin: str) -> "NestedResponses":
        """As ``ModelCaller.stream``."""
        return NestedResponses(self, self._stream(call, parents, origin, _parent_of(parents)), parents)

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> "Future[Any]":
        """Run the coroutine on the event loop; cancelling the future cancels it."""
        return on_loop(coroutine, self._loop, "the service is stopping and calls no other models")

    async def _infer(
        self, call: InferCall, parents: Sequence[InferenceRequest], origin: str, within: Context | None
    ) -> InferResult:
        with _nested(call, parents, origin, within) as context:
            async with _within(context.deadline_ns, call):
                return await self._callee.infer(call, context)

    async def _stream(
        self, call: InferCall, parents: Sequence[InferenceRequest], origin: str, within: Context | None
    ) -> AsyncGenerator[InferResult, None]:
        with _nested(call, parents, origin, within) as context:
            async with contextlib.aclosing(self._callee.stream_infer(call, context)) as results:
                while True:
                    async with _within(context.deadline_ns, call):
                        result = await anext(results, None)
                    if result is None:
                        return
                    if result.error is not None:
                        raise result.error.with_message(result.error.message)
                    yield result


class NestedResponses:
    """The ``NestedStream`` of one call that is made on behalf of ``parents``."""

    def __init__(
        self, calls: NestedCalls, results: AsyncGenerator[InferResult, None], parents: Sequence[InferenceRequest]
    ) -> None:
        self._calls = calls
        self._results = results
        self._parents = parents
        self._awaited: Future[InferResult | None] | None = None

    def next(self) -> "Future[InferResult | None]":
        """As ``NestedStream.next``."""
        future = self._awaited = self._calls.submit(self._next())
        with_parents(self._parents, future)
        return future

    def cancel(self) -> None:
        """As ``NestedStream.cancel``."""
        if self._awaited is not None:
            self._awaited.cancel()
        self._calls.submit(self._close())

    async def _next(self) -> InferResult | None:
        try:
            return await anext(self._results, None)
        except asyncio.CancelledError:
            await self._results.aclose()
            raise

    async def _close(self) -> None:
        with contextlib.suppress(RuntimeError):  # a response is awaited; cancelling that closes it
            await self._results.aclose()


def with_parents(parents: Sequence[InferenceRequest], future: "Future[Any]") -> None:
    """Cancel ``future`` when the callers of all of ``parents`` have left."""
    if not parents:
        return

    def leave() -> None:
        if all(parent.is_cancelled for parent in parents):
            future.cancel()

    def forget(_: "Future[Any]") -> None:
        for parent in parents:
            parent.forget(leave)

    for parent in parents:
        parent.when_cancelled(leave)
    future.add_done_callback(forget)


@contextlib.contextmanager
def _nested(
    call: InferCall, parents: Sequence[InferenceRequest], origin: str, within: Context | None
) -> Iterator[CallContext]:
    """Context of the call, in a span within ``within``; an unexpected error becomes INTERNAL, with an id in the log."""
    headers: dict[str, str] = {}
    for parent in parents:
        for key, value in parent.context.headers.items():
            if (key.startswith("x-") and key != TIMES_HEADER) or (key in _FORWARDED and not telemetry.is_enabled()):
                headers.setdefault(key, value)
    path = longer_path((path_of(parent.context.headers) for parent in parents), origin, call.model_name)
    headers[CALL_PATH_HEADER] = path
    if "priority" not in call.parameters and (priority := _highest(parents)):
        call.parameters = {**call.parameters, "priority": priority}
    span = telemetry.start_span(
        call.model_name, parent=within, kind=telemetry.CLIENT, attributes={"weft.model": call.model_name}
    )
    deadlines = [parent.context.deadline_ns for parent in parents]
    known = [deadline_ns for deadline_ns in deadlines if deadline_ns is not None]
    error: BaseException | None = None
    try:
        yield CallContext(
            deadline_ns=max(known) if known and len(known) == len(parents) else None,
            headers=headers,
            trace_context=telemetry.context_of(span, within),
        )
    except WeftError as raised:
        raised.is_refused = False  # the request that made this call had started
        error = raised
        raise
    except asyncio.CancelledError:
        error = RequestCancelledError("the call was cancelled")
        raise
    except Exception as raised:
        error = InternalError(f"the call of model '{call.model_name}' failed")
        _log.error(error.message, exc_info=raised, extra={"error_id": error.error_id, "model": call.model_name})
        raise error from raised
    finally:
        telemetry.end_span(span, error)


def _parent_of(parents: Sequence[InferenceRequest]) -> Context | None:
    """Context of the current span, in which a call is made, if it is of the trace of the calling request."""
    asked = parents[0].context.trace_context if parents else None
    if not telemetry.is_enabled():
        return asked
    current = get_current_span()
    context = current.get_span_context()
    if not parents:
        return telemetry.context_of(current) if context.is_valid else None
    asking = parents[0].span or get_current_span(asked)
    is_own = context.is_valid and context.trace_id == asking.get_span_context().trace_id
    return telemetry.context_of(current if is_own else asking, asked)  # which may say that no spans are recorded


def _highest(parents: Sequence[InferenceRequest]) -> int:
    asked = [parent.call.parameters.get("priority", 0) for parent in parents]
    return min((level for level in asked if isinstance(level, int) and level > 0), default=0)


@contextlib.asynccontextmanager
async def _within(deadline_ns: int | None, call: InferCall) -> AsyncGenerator[None, None]:
    left_s = None if deadline_ns is None else max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)
    try:
        async with asyncio.timeout(left_s):
            yield
    except TimeoutError:
        raise DeadlineExceededError(f"the deadline passed before model '{call.model_name}' answered") from None


class RouterCallee:
    """Calls the router over one channel; create it on the event loop that uses it. It connects at the first call."""

    def __init__(self, address: str, security: ChannelSecurity | None = None, *, wire: WireName | None = None) -> None:
        self._client = V2Client(address, where=f"the router ({address})", security=security, wire=wire)

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        """The answer of a graph or model. Raises as ``V2Client``."""
        return await self._client.infer(call, timeout_s=_timeout_s(context), metadata=metadata_of(context))

    def stream_infer(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        """The responses of a graph or model, which may be decoupled. Raises as ``V2Client``."""
        request = replace(call, parameters={**call.parameters, SEND_EMPTY_FINAL: True})
        return self._client.stream(request, timeout_s=_timeout_s(context), metadata=metadata_of(context))

    async def close(self) -> None:
        """Close the channel, which cancels calls in flight."""
        await self._client.close()


def _timeout_s(context: CallContext) -> float | None:
    if context.deadline_ns is None:
        return None
    return max(0.0, min((context.deadline_ns - time.monotonic_ns()) / 1e9, MAX_TIMEOUT_S))


class ModelControl:
    """The ``RepositoryControl`` of a service; thread-safe. ``core`` and its ``load`` run only on ``loop``."""

    def __init__(
        self, core: InferenceCore, load: Callable[..., Coroutine[Any, Any, None]], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._core = core
        self._load_model = load
        self._loop = loop
        #: Models that each model loads or unloads now.
        self._waits_for: dict[str, list[str]] = {}
        self._unloads: set[asyncio.Task[None]] = set()

    def load(self, asker: str, name: str, parameters: Mapping[str, ParameterValue | bytes]) -> "Future[None]":
        """Load ``name`` for the model ``asker``, which waits meanwhile; the future fails with a WeftError."""
        return self._submit(self._load(asker, name, parameters))

    def unload(self, asker: str, name: str, *, unload_dependents: bool) -> "Future[None]":
        """Unload a model; a model that unloads itself is not awaited."""
        return self._submit(self._unload(asker, name, unload_dependents))

    def is_ready(self, name: str, version: str) -> "Future[bool]":
        """Whether the version ("" = any) serves; False for an unknown one."""
        return self._submit(self._is_ready(name, version))

    async def _load(self, asker: str, name: str, parameters: Mapping[str, ParameterValue | bytes]) -> None:
        with self._waiting("load", asker, name):
            await self._load_model(name, parameters)

    async def _unload(self, asker: str, name: str, unload_dependents: bool) -> None:
        if asker != name:
            with self._waiting("unload", asker, name):
                await self._core.unload(name, unload_dependents=unload_dependents)
            return
        task = asyncio.create_task(self._core.unload(name, unload_dependents=unload_dependents))
        await asyncio.wait([task], timeout=0)  # it ends after this request is answered; faults are known at once
        if task.done():
            await task
        else:
            self._unloads.add(task)
            task.add_done_callback(self._unloads.discard)

    async def _is_ready(self, name: str, version: str) -> bool:
        try:
            return self._core.is_model_ready(name, version)
        except NotFoundError:
            return False

    @contextlib.contextmanager
    def _waiting(self, action: str, asker: str, name: str) -> Iterator[None]:
        awaited = {name}
        while more := {after for model in awaited for after in self._waits_for.get(model, ())} - awaited:
            awaited |= more
        if asker in awaited:
            raise InvalidArgumentError(
                f"failed to {action} '{name}': model '{asker}', which asks for it, would wait for itself; a model can "
                "load neither itself nor one that loads it, nor unload that"
            )
        self._waits_for.setdefault(asker, []).append(name)
        try:
            yield
        finally:
            self._waits_for[asker].remove(name)
            if not self._waits_for[asker]:
                del self._waits_for[asker]

    def _submit(self, coroutine: Coroutine[Any, Any, Any]) -> "Future[Any]":
        return on_loop(coroutine, self._loop, "the service is stopping; it loads and unloads no models")
