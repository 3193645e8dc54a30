"""Spans of steps."""

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

from opentelemetry.trace import Span, SpanKind

from weft.base.errors import RequestCancelledError
from weft.base.observing import telemetry
from weft.router.reporting.path import StepRecord
from weft.router.target import Target

if TYPE_CHECKING:
    from opentelemetry.context import Context

Attributes = dict[str, str | int]


def step_attributes(name: str, path: str) -> Attributes:
    """Span attributes common to all steps."""
    return {"weft.step": name, "weft.path": path}


def call_attributes(model: str, version: str, target: Target, *, is_stream: bool = False) -> Attributes:
    """Span attributes of a call."""
    return {
        "rpc.system": "in-process" if target.address == "in-process" else "grpc",
        "rpc.service": "inference.GRPCInferenceService",
        "rpc.method": "ModelStreamInfer" if is_stream else "ModelInfer",
        "weft.model": model,
        "weft.model_version": version,
        "weft.target": target.name,
        "server.address": target.address,
        "weft.attempt": 1,
    }


def start_step_span(path: str, kind: SpanKind, attributes: Mapping[str, str | int], parent: "Context | None") -> Span:
    """Start the span of a step."""
    return telemetry.start_span(f"step {path}", parent=parent, kind=kind, attributes=attributes)


def end_step_span(span: Span, record: StepRecord, error: BaseException | None = None) -> None:
    """End the span of a step with the branch taken and the error."""
    _set_outcome(span, record)
    end_span(span, error)


def end_span(span: Span, error: BaseException | None = None) -> None:
    """End a span with its error, if any; a cancellation is CANCELLED."""
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        error = RequestCancelledError("the step was cancelled")
    telemetry.end_span(span, error)


def _set_outcome(span: Span, record: StepRecord) -> None:
    """The branch that the step took.

    A failure that the request survived, because the step is soft, is an error of this span and of none above it.
    """
    if record.rows:
        span.set_attribute("weft.rows", record.rows)
    for name, count in record.counts.items():
        span.set_attribute(f"weft.{name}", count)
    if record.attempts:
        span.set_attribute("weft.attempt", record.attempts)
    if record.cached is not None:
        span.set_attribute("weft.cache_hit", record.cached)
    if record.fallbacks is not None:
        span.set_attribute("weft.fallback", record.fallbacks.steps[-1].name)
    if record.node is not None and (branch := record.node.form.branch(record.node.steps)):
        span.set_attribute("weft.branch", branch)
    if record.error and not record.has_answered:
        telemetry.tell_status(span, record.status, record.error)
