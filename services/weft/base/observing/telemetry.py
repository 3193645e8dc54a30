"""Tracing: W3C trace context, OTLP/gRPC export, errors always exported; attributes of OpenTelemetry's conventions.

Without ``OTEL_EXPORTER_OTLP_ENDPOINT`` (or ``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT``) nothing is recorded and every
function here costs one comparison. ``OTEL_TRACES_SAMPLER_ARG`` is the sampling rate (default 1); a request with a
sampled ``traceparent`` is always traced, and a span that ends with status ERROR is exported even if its request was
not sampled.
"""

import os
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.context import Context, create_key, set_value
from opentelemetry.trace import (
    INVALID_SPAN,
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from weft.base.errors import InternalError, WeftError
from weft.base.observing.logs import get_logger, request_fields
from weft.base.observing.work_span import WorkSpan

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.trace import TracerProvider

_PROPAGATOR = TraceContextTextMapPropagator()
_EMPTY = Context()
TRACE_HEADERS = ("traceparent", "tracestate")
#: Keys of contexts: no span is recorded below; whether a trace that starts below is sampled.
_OFF, _DECISION = create_key("weft-off"), create_key("weft-sampled")

#: Timeout of the last export at shutdown, in seconds; an unreachable collector must not delay the process.
SHUTDOWN_WAIT_S = 5.0

_STATUS = "rpc.grpc.status_code"
#: Names of gRPC statuses by number.
_STATUSES = (
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
    "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED",
    "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
)  # fmt: skip
_NUMBERS = {name: number for number, name in enumerate(_STATUSES)}
#: Statuses that are errors of who answers, by OpenTelemetry's conventions for gRPC; for who calls all but OK are.
_SERVER_ERRORS = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})

INTERNAL, SERVER, CLIENT = SpanKind.INTERNAL, SpanKind.SERVER, SpanKind.CLIENT


class _Telemetry:
    """Tracer state of this process."""

    service: str = ""
    meters: "MeterProvider | None" = None
    provider: "TracerProvider | None" = None
    tracer: trace.Tracer | None = None
    is_over = False


_state = _Telemetry()
_log = get_logger("weft.telemetry")


def configure(service: str) -> bool:
    """Start exporting if an OTLP endpoint is set in the environment and the SDK is installed; returns whether it does.

    Args:
        service: ``service.name`` unless ``OTEL_SERVICE_NAME`` is set, for example ``weft.router``.

    Raises:
        InvalidArgumentError: ``OTEL_TRACES_SAMPLER_ARG`` is not a number from 0 to 1.
    """
    return offer(service) and _export(service)


def offer(service: str) -> bool:
    """As ``configure``, for a process that may record no span: the SDK is imported when something asks for a tracer."""
    _state.service = service
    if not _has_endpoint("TRACES"):
        return False
    if not _provider.is_offered:
        trace.set_tracer_provider(_provider)  # once: OpenTelemetry takes no other
        _provider.is_offered = True
    return True


class _Provider(trace.TracerProvider):
    """The tracers of models and libraries: of the provider in force, which is made for the first of them."""

    is_offered = False

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def get_tracer(self, *arguments: Any, **options: Any) -> trace.Tracer:
        with self._lock:
            if _state.provider is None and not _state.is_over:
                _export(_state.service)
        return (_state.provider or trace.NoOpTracerProvider()).get_tracer(*arguments, **options)


_provider = _Provider()


def _export(service: str) -> bool:
    try:
        # It imports the SDK and gRPC, which are optional, and which checking or drawing a graph does not need.
        from weft.base.observing.trace_export import make_provider  # noqa: PLC0415
    except ModuleNotFoundError as error:
        _log.warning(
            "no traces are exported: an endpoint is set, but '%s' is not installed; pip install 'weft-mesh[telemetry]'",
            error.name,
        )
        return False
    provider = make_provider(service, _DECISION)
    _state.provider, _state.tracer = provider, provider.get_tracer("weft")
    return True


def _has_endpoint(signal: str) -> bool:
    given = os.environ.get
    is_off = given("OTEL_SDK_DISABLED", "").lower() == "true" or given(f"OTEL_{signal}_EXPORTER") == "none"
    return not is_off and bool(given("OTEL_EXPORTER_OTLP_ENDPOINT") or given(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT"))


def histogram(name: str, bounds_s: Sequence[float], attributes: Mapping[str, str]) -> Callable[[float], None] | None:
    """A function that records seconds in a histogram, which is exported each minute; None without an OTLP endpoint."""
    if not _has_endpoint("METRICS"):
        return None
    if _state.meters is None:
        try:
            from weft.base.observing.trace_export import make_meters  # noqa: PLC0415
        except ModuleNotFoundError:  # ``configure`` has said so
            return None
        _state.meters = make_meters(_state.service)
    meter = _state.meters.get_meter("weft")
    instrument = meter.create_histogram(name, "s", explicit_bucket_boundaries_advisory=list(bounds_s))
    return lambda seconds: instrument.record(seconds, attributes)


def is_enabled() -> bool:
    """Whether spans are recorded; check before building attributes on a hot path."""
    return _state.tracer is not None


def shutdown() -> None:
    """Export pending spans and metrics and stop; blocks for at most ``SHUTDOWN_WAIT_S`` each, then drops the rest."""
    for provider in (_state.provider, _state.meters):
        if provider is not None:
            last_export = threading.Thread(target=provider.shutdown, name="last-export", daemon=True)
            last_export.start()
            last_export.join(SHUTDOWN_WAIT_S)
    _state.provider = _state.tracer = _state.meters = None
    _state.is_over = True


def extract(headers: Mapping[str, str]) -> Context:
    """Trace context of incoming metadata; empty without ``traceparent`` or while disabled."""
    if _state.tracer is None or "traceparent" not in headers:
        return _EMPTY
    return _PROPAGATOR.extract(headers, context=_EMPTY)


def inject(context: Context | None) -> dict[str, str]:
    """Metadata (``traceparent``, ``tracestate``) that propagates ``context`` to the next service.

    Below ``without_spans``, where there is no trace, it is one that is not sampled: else the next would start its own.
    """
    if _state.tracer is None or context is None:
        return {}
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context=context)
    if not carrier and _OFF in context:
        trace_id, span_id = random.getrandbits(128) or 1, random.getrandbits(64) or 1  # no secrets
        return {"traceparent": f"00-{trace_id:032x}-{span_id:016x}-00"}
    return carrier


def start_span(
    name: str,
    *,
    parent: Context | None,
    kind: SpanKind = INTERNAL,
    attributes: Mapping[str, Any] | None = None,
    links: Sequence[Span] = (),
    start_unix_ns: int | None = None,
    reserved: WorkSpan | None = None,
) -> Span:
    """Start a span; ``INVALID_SPAN`` while disabled.

    Args:
        parent: Context of the parent span; None starts a trace.
        start_unix_ns: Unix time in nanoseconds; now if absent.
        reserved: Of ``reserve``, with the same parent; the span gets its id and what a model has added to it.
    """
    if _state.tracer is None or (parent is not None and _OFF in parent):
        return INVALID_SPAN
    span = _state.tracer.start_span(
        name,
        context=parent if parent is not None else _EMPTY,
        kind=kind,
        attributes=attributes,
        links=[Link(span.get_span_context()) for span in links],
        start_time=start_unix_ns,
    )
    if reserved is not None:
        reserved.write_to(span)
    return span


def reserve(parent: Context | None) -> WorkSpan | None:
    """A span within ``parent`` that is recorded later, by ``start_span``; None while disabled, or without a trace."""
    around = trace.get_current_span(parent).get_span_context()
    return None if _state.tracer is None or parent is None or not around.is_valid else WorkSpan.within(around)


def carrier_of(span: Span | None, received: Mapping[str, str] | None = None) -> dict[str, str]:
    """``traceparent`` and ``tracestate`` of a span, as W3C Trace Context has them, else those among ``received``."""
    carrier: dict[str, str] = {}
    if span is not None:
        _PROPAGATOR.inject(carrier, context=context_of(span))
    if not carrier and received and "traceparent" in received:
        carrier = {name: received[name] for name in TRACE_HEADERS if name in received}
    return carrier


def span_of(carrier: Mapping[str, str]) -> Span:
    """The span that ``carrier_of`` has told, which another process records."""
    return trace.get_current_span(_PROPAGATOR.extract(carrier, context=_EMPTY))


def _log_fields() -> Mapping[str, str]:
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return {}
    return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}


request_fields.append(_log_fields)


def context_of(span: Span, parent: Context | None = None) -> Context:
    """Context whose current span is ``span``; the parent of child spans."""
    if parent is not None and _OFF in parent:
        return parent
    return trace.set_span_in_context(span, parent if parent is not None else _EMPTY)


def end_span(span: Span, error: BaseException | None = None, *, end_unix_ns: int | None = None) -> None:
    """End ``span``; with an error, set its gRPC status, an exception event, and where it is one status ERROR.

    In a CLIENT span every error is one. In others those are not that the caller made, such as NOT_FOUND, or asked for,
    such as CANCELLED.
    """
    if span.is_recording():
        if error is not None:
            _tell(span, error)
        elif "rpc.system" in (attributes := getattr(span, "attributes", ())) and _STATUS not in attributes:
            span.set_attribute(_STATUS, 0)
    span.end(end_time=end_unix_ns)


def tell_status(span: Span, code: str, message: str) -> None:
    """Set the gRPC status of a span, by its name, and status ERROR if that counts as one for the span's kind."""
    span.set_attribute(_STATUS, _NUMBERS.get(code, _NUMBERS["UNKNOWN"]))
    if code in _SERVER_ERRORS or getattr(span, "kind", INTERNAL) is CLIENT:
        span.set_status(Status(StatusCode.ERROR, message))
        span.set_attribute("error.type", code)


def unsampled(context: Context | None) -> Context | None:
    """The same trace and parent for spans that are exported only with an error, here and in the next services."""
    parent = trace.get_current_span(context).get_span_context()
    if not parent.is_valid:
        return context
    flags = TraceFlags(parent.trace_flags & ~TraceFlags.SAMPLED)
    silent = SpanContext(parent.trace_id, parent.span_id, parent.is_remote, flags, parent.trace_state)
    return trace.set_span_in_context(NonRecordingSpan(silent), context)


def without_spans(context: Context) -> Context:
    """The same trace for the next services; nothing is recorded here."""
    return set_value(_OFF, True, context)


def with_decision(context: Context, *, is_sampled: bool) -> Context:
    """A context in which a new trace is sampled or not, whatever the sampler's rate."""
    return set_value(_DECISION, is_sampled, context)


def _tell(span: Span, error: BaseException) -> None:
    """Record an error on the span."""
    code, message = (error.code, error.message) if isinstance(error, WeftError) else ("UNKNOWN", type(error).__name__)
    tell_status(span, code, message)
    if code != "CANCELLED":
        span.record_exception(error, escaped=False)
    if isinstance(error, InternalError):
        span.set_attribute("weft.error_id", error.error_id)


def trace_id_of(context: Context | None) -> str:
    """32 hex digits of the trace, or "" without one."""
    if _state.tracer is None or context is None:
        return ""
    span_context = trace.get_current_span(context).get_span_context()
    return f"{span_context.trace_id:032x}" if span_context.is_valid else ""
