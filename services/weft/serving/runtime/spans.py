"""Spans of queue, batch and compute, written once all their times are known; call only when telemetry is enabled."""

import time
from collections.abc import Mapping, Sequence

from opentelemetry.trace import Span, get_current_span

from weft.base.errors import WeftError
from weft.base.observing.telemetry import INTERNAL, end_span, start_span
from weft.serving.request.request import InferenceRequest, Work
from weft.serving.runtime.execution import BatchExecution
from weft.serving.scheduler.grouping import bound_in


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


def record_execution(model: str, instance: str, execution: BatchExecution, *, is_decoupled: bool) -> None:
    """A ``batch`` span that links the members' SERVER spans, and a ``queue`` and a ``compute`` span for each member.

    ``batch`` is the whole execution: inputs gathered, model run, outputs scattered. ``compute`` is the model's part of
    it; that of a decoupled model lasts until the last response, and is ``record_stream``. A backend that describes its
    work, as that of language models does, has only been handed the requests: there is no ``batch``.
    """
    requests = execution.requests
    offset_ns = _unix_offset_ns()
    for request, answer in zip(requests, execution.answers, strict=True):
        if answer is not None:  # else it is queued again
            record_queue(model, request, execution.start_ns)
    if is_decoupled and all(request.describe is not None for request in requests):
        return
    bound = bound_in(requests[0].batch_key)
    bucket = {} if bound is None else {"weft.bucket": bound}
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
        start_unix_ns=execution.start_ns + offset_ns,
    )
    for request, answer in zip(requests, execution.answers, strict=True) if not is_decoupled else ():
        _record_compute(
            request,
            {"weft.model": model, "weft.batch_size": execution.num_rows, "weft.num_rows": request.num_rows},
            (execution.infer_start_ns + offset_ns, execution.infer_end_ns + offset_ns),
            answer if isinstance(answer, WeftError) else None,
            links=[batch],
        )
    first = execution.answers[0]
    failure = first if execution.has_failed and isinstance(first, WeftError) else None
    end_span(batch, failure, end_unix_ns=execution.end_ns + offset_ns)


def record_stream(model: str, request: InferenceRequest, num_responses: int, error: WeftError | None) -> None:
    """A ``compute`` span of a request of a decoupled model that has ended: from when it left the queue until now."""
    if request.start_ns:  # else it never left the queue
        now_ns, offset_ns = time.time_ns(), _unix_offset_ns()
        attributes = {"weft.model": model, "weft.num_rows": request.num_rows, "weft.num_responses": num_responses}
        _record_compute(request, attributes, (request.start_ns + offset_ns, now_ns), error)


def _record_compute(
    request: InferenceRequest,
    attributes: Mapping[str, object],
    times_ns: tuple[int, int],
    error: WeftError | None,
    links: Sequence[Span] = (),
) -> None:
    work = Work("compute", {}) if request.describe is None else request.describe()
    start_ns, end_ns = times_ns
    span = start_span(
        work.name,
        parent=request.context.trace_context,
        kind=INTERNAL,
        attributes={**attributes, **work.attributes},
        links=links,
        start_unix_ns=start_ns,
    )
    offset_ns = _unix_offset_ns()
    for name, at_ns, more in work.events:
        span.add_event(name, more, timestamp=at_ns + offset_ns)
    end_span(span, error, end_unix_ns=end_ns)


def _unix_offset_ns() -> int:
    return min(_read_clocks() for _ in range(3))[1]


def _read_clocks() -> tuple[int, int]:
    """How long reading the clocks took, which is much where another thread ran meanwhile, and how they differ."""
    before_ns, unix_ns, after_ns = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
    return after_ns - before_ns, unix_ns - after_ns
