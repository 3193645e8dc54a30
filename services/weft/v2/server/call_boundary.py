"""Start and end of every call: headers, deadline and span at the start, status and trailing metadata at the end."""

import functools
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any, TypeVar, cast

from opentelemetry.context import Context as TraceContext
from opentelemetry.context import attach
from opentelemetry.trace import INVALID_SPAN, Span

from weft.base.core import CallContext
from weft.base.errors import (
    DeadlineExceededError,
    InternalError,
    RequestCancelledError,
    ResourceExhaustedError,
    WeftError,
)
from weft.base.observing import telemetry
from weft.base.observing.logs import get_logger, request_fields
from weft.base.observing.settings import TRACE
from weft.base.security.access import CALLER, KEY_HEADERS, caller_name
from weft.v2.protocol.status import text_for_client, to_status, trailing_pairs
from weft.wire.interface import grpc

#: A client ends a call by its own clock, which may be ahead: ``grpc-timeout`` is rounded up. In nanoseconds.
CLIENT_AHEAD_NS = 20_000_000

Context = grpc.aio.ServicerContext[Any, Any]
Method = TypeVar("Method", bound=Callable[..., Awaitable[Any]])

_log = get_logger("weft.servicer")


#: The client's id of the request that a task works for.
_REQUEST_ID: ContextVar[str] = ContextVar("weft_request_id", default="")


def _log_fields() -> Mapping[str, str]:
    return {"request_id": request_id} if (request_id := _REQUEST_ID.get()) else {}


request_fields.append(_log_fields)


def name_in_logs(request_id: str, call_context: CallContext) -> None:
    """Have log lines of this task, and of those that it starts, name the request and its span from now on."""
    if request_id:
        _REQUEST_ID.set(request_id)
    if call_context.trace_context is not None:
        attach(call_context.trace_context)


class CallBoundary:
    """Starts and ends the calls of one service; its name appears in spans and log lines."""

    def __init__(self, service: str) -> None:
        self.service = service

    def begin(
        self,
        model_name: str,
        headers: Mapping[str, str],
        deadline_ns: int | None,
        parent: TraceContext | None = None,
        method: str = "ModelInfer",
    ) -> tuple[CallContext, Span]:
        """Return context and SERVER span of a new call; the span's parent is ``parent``, or taken from the headers."""
        caller = CALLER.get()
        client = "" if caller is None else caller.name
        call_context = CallContext(deadline_ns=deadline_ns, headers=headers, client_key=client)
        if not telemetry.is_enabled():
            return call_context, INVALID_SPAN
        if parent is None:
            parent = TRACE.admit(model_name, telemetry.extract(headers))
        span = telemetry.start_span(
            f"{self.service}/{model_name}",
            parent=parent,
            kind=telemetry.SERVER,
            attributes={
                "rpc.system": "grpc",
                "rpc.service": "inference.GRPCInferenceService",
                "rpc.method": method,
                "weft.model": model_name,
                **({"weft.client": client} if client else {}),
            },
        )
        call_context.trace_context = telemetry.context_of(span, parent)
        return call_context, span

    def as_weft_error(
        self, error: Exception, model_name: str = "", call_context: CallContext | None = None
    ) -> WeftError:
        """The error itself, or INTERNAL with an id for unexpected exceptions, which are logged with their traceback.

        A MemoryError is RESOURCE_EXHAUSTED.
        """
        if isinstance(error, WeftError):
            return error
        if isinstance(error, MemoryError):
            _log.warning("%s has no memory for a request", self.service, extra={"model": model_name})
            return ResourceExhaustedError(
                f"{self.service} has no memory left for a request of this size; send a smaller one, or fewer at once"
            )
        internal = InternalError(f"{self.service} failed" + (f" on model '{model_name}'" if model_name else ""))
        trace_id = telemetry.trace_id_of(call_context.trace_context) if call_context else ""
        extra = {"error_id": internal.error_id, "model": model_name, "trace_id": trace_id}
        if client := caller_name():
            extra["client"] = client
        _log.error("unexpected error", exc_info=error, extra=extra)
        return internal

    def fail(
        self,
        context: Context,
        error: Exception,
        *,
        model_name: str = "",
        call_context: CallContext | None = None,
        span: Span = INVALID_SPAN,
    ) -> None:
        """End the RPC with the status, message and trailing metadata of ``error`` when its method returns.

        The method's result is not sent. ``context.abort`` does the same by raising an exception, which gRPC keeps in a
        reference cycle with the frames it passed: sixty rejected requests of 20 MB held 1 GB.
        """
        failure = self.as_weft_error(error, model_name, call_context)
        telemetry.end_span(span, failure)
        context.set_code(to_status(failure))
        context.set_details(text_for_client(failure))
        trailing = trailing_of(failure, call_context)
        pauses_ms = [text for key, text in trailing if key == "retry-after-ms"]
        # gRPC's clients wait for this before they repeat a call by their retry policy (gRFC A6)
        context.set_trailing_metadata((*trailing, *(("grpc-retry-pushback-ms", text) for text in pauses_ms)))


def answering(rpc: Method) -> Method:
    """Decorate a method of an object with ``_edge``: any exception ends the RPC with its status."""

    @functools.wraps(rpc)
    async def answer(self: Any, request: Any, context: Context) -> Any:
        try:
            return await rpc(self, request, context)
        except Exception as error:
            model_name = getattr(request, "model_name", "") or getattr(request, "name", "")
            self._edge.fail(context, error, model_name=model_name)
            return None  # not sent

    return cast(Method, answer)


def trailing_of(failure: WeftError, call_context: CallContext | None) -> tuple[tuple[str, str], ...]:
    """Trailing metadata of a failed call: from the error, from the call, and the trace id."""
    trailing = trailing_pairs(failure)
    if call_context is not None:
        trailing += call_context.trailing_metadata
        trace_id = telemetry.trace_id_of(call_context.trace_context)
        if trace_id:
            trailing.append(("x-trace-id", trace_id))
    return sendable(trailing)


def headers_of(context: Context) -> dict[str, str]:
    """The client's ASCII metadata, without API keys."""
    headers: dict[str, str] = {}
    for key, value in context.invocation_metadata() or ():
        if isinstance(value, str) and key not in KEY_HEADERS:
            headers[key] = value
    return headers


def deadline_ns_of(context: Context) -> int | None:
    """The client's deadline by ``time.monotonic_ns``; None without one."""
    remaining_s = context.time_remaining()
    return None if remaining_s is None else time.monotonic_ns() + int(remaining_s * 1e9)


def withdrawal(call_context: CallContext) -> WeftError:
    """The error for a call that was cancelled from outside: CANCELLED or DEADLINE_EXCEEDED."""
    if call_context.deadline_ns is not None and time.monotonic_ns() >= call_context.deadline_ns - CLIENT_AHEAD_NS:
        return DeadlineExceededError("the client's deadline passed")
    return RequestCancelledError("the client cancelled")


def sendable(pairs: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Metadata with values escaped to printable ASCII, as gRPC requires."""
    return tuple([(key, _escaped(value)) for key, value in pairs])


@functools.lru_cache
def _escaped(value: str) -> str:
    if value.isascii() and value.isprintable() and "\\" not in value:
        return value
    return value.encode("unicode_escape").decode()
