"""Sampling of spans, and export of spans and metrics, by OpenTelemetry's SDK (`pip install 'weft-mesh[telemetry]'`)."""

import os
import socket
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult, TraceIdRatioBased
from opentelemetry.trace import Link, SpanContext, SpanKind, StatusCode, TraceFlags

from weft.base.errors import InvalidArgumentError

#: Protocol -> the last part of its package.
_PACKAGES = {"grpc": "grpc", "http/protobuf": "http"}


class _RecordAllSampler(Sampler):
    """Follows the parent's decision, or the context's, else by rate; records unsampled spans too, for errors."""

    def __init__(self, rate: float, decision: str = "") -> None:
        self._by_rate = TraceIdRatioBased(rate)
        self._decision = decision

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Mapping[str, Any] | None = None,
        links: Sequence[Link] | None = None,
        trace_state: Any = None,
    ) -> SamplingResult:
        parent = trace.get_current_span(parent_context).get_span_context()
        state = parent.trace_state if parent.is_valid else None
        if parent.is_valid:
            is_sampled = parent.trace_flags.sampled
        elif parent_context is not None and isinstance(decided := parent_context.get(self._decision), bool):
            is_sampled = decided
        else:
            is_sampled = self._by_rate.should_sample(None, trace_id, name).decision is Decision.RECORD_AND_SAMPLE
        return SamplingResult(Decision.RECORD_AND_SAMPLE if is_sampled else Decision.RECORD_ONLY, attributes, state)

    def get_description(self) -> str:
        return "parent, rate, errors"


class _ExportSampledOrFailed(SpanProcessor):
    """Passes sampled and failed spans to the batch processor."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._batch = BatchSpanProcessor(exporter)

    def on_end(self, span: ReadableSpan) -> None:
        context = span.get_span_context()
        if context is None:
            return
        if not context.trace_flags.sampled:
            if span.status.status_code is not StatusCode.ERROR:
                return
            # The batch processor drops spans whose context is not sampled.
            span._context = SpanContext(
                context.trace_id,
                context.span_id,
                context.is_remote,
                TraceFlags(TraceFlags.SAMPLED),
                context.trace_state,
            )
        self._batch.on_end(span)

    def shutdown(self) -> None:
        self._batch.shutdown()  # type: ignore[no-untyped-call]  # the SDK leaves it unannotated

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._batch.force_flush(timeout_millis)


def make_provider(service: str, decision: str) -> TracerProvider:
    """A provider that exports to the endpoint in the environment, at the rate of ``OTEL_TRACES_SAMPLER_ARG``.

    Args:
        service: ``service.name`` unless ``OTEL_SERVICE_NAME`` is set.
        decision: Key in contexts of whether a trace that starts there is sampled, whatever the rate.

    Raises:
        InvalidArgumentError: ``OTEL_TRACES_SAMPLER_ARG`` is not a number from 0 to 1, or the protocol is unknown.
    """
    rate_text = os.environ.get("OTEL_TRACES_SAMPLER_ARG") or "1"
    try:
        sampler = _RecordAllSampler(float(rate_text), decision)
    except ValueError:
        message = f"OTEL_TRACES_SAMPLER_ARG must be a number from 0 to 1, got '{rate_text}'"
        raise InvalidArgumentError(message) from None
    provider = TracerProvider(resource=_resource(service), sampler=sampler, shutdown_on_exit=False)
    provider.add_span_processor(_ExportSampledOrFailed(_exporter("TRACES", "trace_exporter.OTLPSpanExporter")))
    return provider


def make_meters(service: str) -> MeterProvider:
    """A provider that exports to the endpoint in the environment, each ``OTEL_METRIC_EXPORT_INTERVAL`` ms.

    Raises InvalidArgumentError: the protocol is unknown.
    """
    reader = PeriodicExportingMetricReader(_exporter("METRICS", "metric_exporter.OTLPMetricExporter"))
    return MeterProvider([reader], resource=_resource(service), shutdown_on_exit=False)


def _exporter(signal: str, name: str) -> Any:
    """An exporter by the protocol that the environment names, each of which is a package of its own."""
    variables = (f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = next(filter(None, map(os.environ.get, variables)), "grpc")
    if protocol not in _PACKAGES:
        raise InvalidArgumentError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL must be one of {', '.join(_PACKAGES)}, got '{protocol}'"
        )
    module, kind = name.split(".")
    return getattr(import_module(f"opentelemetry.exporter.otlp.proto.{_PACKAGES[protocol]}.{module}"), kind)()


def _resource(service: str) -> Resource:
    instance = f"{socket.gethostname()}:{os.getpid()}"
    return Resource.create(
        {"service.name": os.environ.get("OTEL_SERVICE_NAME", service), "service.instance.id": instance}
    )
