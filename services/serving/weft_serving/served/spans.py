"""Spans of queue, batch and compute, written once all their times are known; call only when telemetry is enabled."""

import time
from collections.abc import Mapping

from opentelemetry.trace import get_current_span

from weft_common.errors import WeftError
from weft_common.observing.telemetry import INTERNAL, end_span, start_span
from weft_serving.request.request import InferenceRequest
from weft_serving.scheduler.grouping import bound_in
from weft_serving.served.execution import BatchExecution


def record_queue(model: str, request: InferenceRequest, end_ns: int, error: WeftError | None = None) -> None:
    """A ``queue`` span from arrival to ``end_ns`` (``time.monotonic_ns``); status ERROR if it left with an error."""
    offset_ns = _unix_offset_ns()
    span = start_span(
        "queue",
        parent=request.context.trace_context,
        kind=INTERNAL,
        attributes={
            "weft.model": model,
            "weft.priority": request.priority,
            "weft.queue_depth": request.num_queued_at_arrival,
        },
        start_unix_ns=request.enqueue_ns + offset_ns,
    )
    end_span(span, error, end_unix_ns=end_ns + offset_ns)


def record_execution(model: str, instance: str, execution: BatchExecution) -> None:
    """A ``batch`` span that links the members' SERVER spans, and a ``queue`` and a ``compute`` span for each member."""
    requests = execution.requests
    offset_ns = _unix_offset_ns()
    bound = bound_in(requests[0].batch_key)
    bucket = {} if bound is None else {"weft.bucket": bound}
    start_ns, end_ns = execution.start_ns + offset_ns, execution.end_ns + offset_ns
    batch = start_span(
        "batch",
        parent=requests[0].context.trace_context,
        kind=INTERNAL,
        attributes={
            "weft.model": model,
            "weft.batch_size": execution.num_rows,
            "weft.num_requests": len(requests),
            "weft.instance": instance,
            **bucket,
        },
        links=[get_current_span(request.context.trace_context) for request in requests],
        start_unix_ns=start_ns,
    )
    for request, answer in zip(requests, execution.answers, strict=True):
        if answer is not None:  # else it is queued again
            record_queue(model, request, execution.start_ns)
        compute = start_span(
            "compute",
            parent=request.context.trace_context,
            kind=INTERNAL,
            attributes={
                "weft.model": model,
                "weft.batch_size": execution.num_rows,
                "weft.num_rows": request.num_rows,
            },
            links=[batch],
            start_unix_ns=start_ns,
        )
        end_span(compute, answer if isinstance(answer, WeftError) else None, end_unix_ns=end_ns)
    first = execution.answers[0]
    end_span(batch, first if execution.has_failed and isinstance(first, WeftError) else None, end_unix_ns=end_ns)


def record_generation(
    request: InferenceRequest, numbers: Mapping[str, int], first_token_ns: int, error: WeftError | None
) -> None:
    """A ``generation`` span from when the request left the queue until now, with an event at its first token.

    Args:
        request: Of a language model.
        numbers: Attributes.
        first_token_ns: ``time.monotonic_ns`` of the first token; 0: there was none.
        error: That ended it, if one did.
    """
    offset_ns = _unix_offset_ns()
    span = start_span(
        "generation",
        parent=request.context.trace_context,
        kind=INTERNAL,
        attributes={
            "weft.model": request.call.model_name,
            "weft.priority": request.priority,
            **numbers,
        },
        start_unix_ns=request.start_ns + offset_ns,
    )
    if first_token_ns:
        span.add_event("first_token", timestamp=first_token_ns + offset_ns)
    end_span(span, error, end_unix_ns=time.monotonic_ns() + offset_ns)


def _unix_offset_ns() -> int:
    """What to add to ``time.monotonic_ns`` to get Unix time now."""
    return time.time_ns() - time.monotonic_ns()
