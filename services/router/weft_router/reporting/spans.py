"""The span of a step."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from weft_common.errors import RequestCancelledError
from weft_common.observing import telemetry
from weft_router.reporting.path import StepRecord
from weft_router.target import Target

if TYPE_CHECKING:
    from opentelemetry.context import Context

Attributes = dict[str, str | int]


def step_attributes(name: str, path: str) -> Attributes:
    """Attributes of the span of every step."""
    return {"weft.step": name, "weft.path": path}


def call_attributes(model: str, version: str, target: Target) -> Attributes:
    """Further attributes of the span of a call."""
    return {
        "weft.model": model,
        "weft.model_version": version,
        "weft.target": target.name,
        "server.address": target.address,
        "weft.attempt": 1,
    }


def start_step_span(path: str, kind: SpanKind, attributes: Mapping[str, str | int], parent: "Context | None") -> Span:
    """The span of a step that starts."""
    return telemetry.start_span(f"step {path}", parent=parent, kind=kind, attributes=attributes)


def end_step_span(span: Span, record: StepRecord, error: BaseException | None) -> None:
    """End the span of a step with the branch that it took, and the error."""
    _tell_outcome(span, record)
    end_span(span, error)


@contextmanager
def step_span(
    path: str, kind: SpanKind, attributes: Mapping[str, str | int], parent: "Context | None"
) -> Iterator[tuple[Span, "Context"]]:
    """A span around the block, and the context for spans within; it ends with the error that leaves the block."""
    span = start_step_span(path, kind, attributes, parent)
    try:
        yield span, telemetry.context_of(span, parent)
    except BaseException as error:
        end_span(span, error)
        raise
    end_span(span, None)


def end_span(span: Span, error: BaseException | None) -> None:
    """End a span with its error, if any; a cancel is CANCELLED."""
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        error = RequestCancelledError("the step was cancelled")
    telemetry.end_span(span, error)


def _tell_outcome(span: Span, record: StepRecord) -> None:
    """The span of a step says which way it went.

    A failure that the request survived, because the step is soft, is an error of this span and of none above it.
    """
    if record.attempts:
        span.set_attribute("weft.attempt", record.attempts)
    if record.cached is not None:
        span.set_attribute("weft.cache_hit", record.cached)
    if record.fallbacks is not None:
        span.set_attribute("weft.fallback", record.fallbacks.steps[-1].name)
    if record.node is not None and (branch := record.node.form.branch(record.node.steps)):
        span.set_attribute("weft.branch", branch)
    if record.error and not record.has_answered:
        span.set_status(Status(StatusCode.ERROR, record.error))
        span.set_attribute("rpc.grpc.status", record.status)
