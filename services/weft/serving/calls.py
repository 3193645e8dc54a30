"""Calls that models make of other models: through the router, or of the models of this process."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Protocol

from weft.base.core import CallContext, InferCall, InferResult
from weft.base.errors import DeadlineExceededError, InternalError, RequestCancelledError, WeftError
from weft.base.observing import telemetry
from weft.base.observing.logs import get_logger
from weft.serving.lifecycle.background import on_loop
from weft.serving.request.call_path import CALL_PATH_HEADER, longer_path, path_of
from weft.serving.request.request import InferenceRequest
from weft.v2.client.channels import MAX_TIMEOUT_S
from weft.v2.client.v2_client import V2Client, metadata_of
from weft.v2.client.wires import WireName
from weft.v2.protocol.status import SEND_EMPTY_FINAL
from weft.v2.security.channel import ChannelSecurity

#: Headers of the calling request that go along, beside those that begin with ``x-``.
_FORWARDED = frozenset({"traceparent", "tracestate"})

_log = get_logger("weft.serving.nested")


class Callee(Protocol):
    """Answers nested calls: the core of this process, or a client of the router."""

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        """The answer to one call. Raises a WeftError."""

    def stream_infer(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        """The answers to one call. Raises a WeftError."""


class NestedCalls:
    """The ``ModelCaller`` of a service.

    Args:
        callee: Answers the calls; used on the event loop alone.
        loop: The event loop of the callee.
    """

    def __init__(self, callee: Callee, loop: asyncio.AbstractEventLoop) -> None:
        self._callee = callee
        self._loop = loop

    def infer(self, call: InferCall, parents: Sequence[InferenceRequest], origin: str) -> "Future[InferResult]":
        """As ``ModelCaller.infer``."""
        future = self.submit(self._infer(call, parents, origin))
        with_parents(parents, future)
        return future

    def stream(self, call: InferCall, parents: Sequence[InferenceRequest], origin: str) -> "NestedResponses":
        """As ``ModelCaller.stream``."""
        return NestedResponses(self, self._stream(call, parents, origin), parents)

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> "Future[Any]":
        """Run the coroutine on the event loop; cancelling the future cancels it."""
        return on_loop(coroutine, self._loop, "the service is stopping and calls no other models")

    async def _infer(self, call: InferCall, parents: Sequence[InferenceRequest], origin: str) -> InferResult:
        with _nested(call, parents, origin) as context:
            async with _within(context.deadline_ns, call):
                return await self._callee.infer(call, context)

    async def _stream(
        self, call: InferCall, parents: Sequence[InferenceRequest], origin: str
    ) -> AsyncGenerator[InferResult, None]:
        with _nested(call, parents, origin) as context:
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
    """The ``NestedStream`` of one call.

    Args:
        parents: Requests on whose behalf the call is made.
    """

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
def _nested(call: InferCall, parents: Sequence[InferenceRequest], origin: str) -> Iterator[CallContext]:
    """The context of the call, within its span; an unexpected error becomes INTERNAL, with an id in the log."""
    headers: dict[str, str] = {}
    for parent in parents:
        for key, value in parent.context.headers.items():
            if key.startswith("x-") or (key in _FORWARDED and not telemetry.is_enabled()):
                headers.setdefault(key, value)
    path = longer_path((path_of(parent.context.headers) for parent in parents), origin, call.model_name)
    headers[CALL_PATH_HEADER] = path
    if "priority" not in call.parameters and (priority := _highest(parents)):
        call.parameters = {**call.parameters, "priority": priority}
    parent_context = parents[0].context.trace_context if parents else None
    span = telemetry.start_span(
        call.model_name, parent=parent_context, kind=telemetry.CLIENT, attributes={"weft.model": call.model_name}
    )
    deadlines = [parent.context.deadline_ns for parent in parents]
    known = [deadline_ns for deadline_ns in deadlines if deadline_ns is not None]
    error: BaseException | None = None
    try:
        yield CallContext(
            deadline_ns=max(known) if known and len(known) == len(parents) else None,
            headers=headers,
            trace_context=telemetry.context_of(span, parent_context),
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


def _highest(parents: Sequence[InferenceRequest]) -> int:
    asked = [parent.call.parameters.get("priority", 0) for parent in parents]
    return min((level for level in asked if isinstance(level, int) and level > 0), default=0)


@contextlib.asynccontextmanager
async def _within(deadline_ns: int | None, call: InferCall) -> AsyncGenerator[None, None]:
    """Raise DeadlineExceededError when the deadline passes within the block."""
    left_s = None if deadline_ns is None else max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)
    try:
        async with asyncio.timeout(left_s):
            yield
    except TimeoutError:
        raise DeadlineExceededError(f"the deadline passed before model '{call.model_name}' answered") from None


class RouterCallee:
    """The router behind one channel; make it on the event loop that uses it. It connects at the first call.

    Args:
        address: ``host:port``.
        security: TLS and key; None: plaintext without a key.
        wire: Implementation of gRPC; None: ``default_wire``.
    """

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
