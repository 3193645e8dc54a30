"""Updates ``ModelStatistics`` and records spans; queue and compute times never exceed a request's whole time."""

import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence

from opentelemetry.trace import Span, get_current_span

from weft.base.core import TIMES_HEADER
from weft.base.errors import WeftError
from weft.base.observing.logs import get_logger
from weft.base.observing.telemetry import INTERNAL, end_span, start_span, trace_id_of
from weft.base.statistics import (
    LATENCY_BUCKETS_S,
    MAX_COUNTED_LEVEL,
    BatchStatistics,
    LatencyHistogram,
    ModelStatistics,
    ResponseStatistics,
)
from weft.serving.queues.settings import bound_in
from weft.serving.request.request import InferenceRequest, Work
from weft.serving.request.stream import Sent
from weft.serving.runtime.execution import BatchExecution

_NS_PER_S = 1e9
#: Responses of one request that have counters of their own; later ones share the last.
_MAX_COUNTED_RESPONSES = 1024


#: Of requests, their time in the queue, and their execution.
_Histograms = tuple[LatencyHistogram, LatencyHistogram, LatencyHistogram]
#: Longest execution of a model that declares that it executes inline; everything else waits meanwhile.
LIMIT_NS = 5_000_000
#: Least time between two log lines of one model, as a busy machine can make every model late.
_PAUSE_NS = 10_000_000_000
_LOG = get_logger("weft.serving")


class Recorder:
    """The only writer of one model's counters."""

    def __init__(self, statistics: ModelStatistics, *, is_inline: bool = False) -> None:
        self._statistics = statistics
        if is_inline:
            statistics.inline_overrun_count = statistics.inline_overrun_count or 0
        self._logged_ns = -_PAUSE_NS
        self._counters = (
            statistics.success,
            statistics.queue,
            statistics.compute_input,
            statistics.compute_infer,
            statistics.compute_output,
        )
        self._histograms: dict[int, _Histograms] = {}  # by level: request, queue, compute

    def executed(self, execution: BatchExecution) -> None:
        """Count an executed batch, successful or not."""
        statistics = self._statistics
        statistics.execution_count += 1
        statistics.last_inference_ms = time.time_ns() // 1_000_000
        batch = statistics.batches.get(execution.num_rows)
        if batch is None:
            batch = statistics.batches[execution.num_rows] = BatchStatistics()
        infer_start_ns, infer_end_ns = execution.infer_start_ns, execution.infer_end_ns
        batch.add(infer_start_ns - execution.start_ns, infer_end_ns - infer_start_ns, execution.end_ns - infer_end_ns)

    def succeeded(self, requests: Sequence[InferenceRequest], execution: BatchExecution, now_ns: int) -> None:
        """Count requests that are answered at ``now_ns`` with results of ``execution``."""
        start_ns, end_ns = execution.start_ns, execution.end_ns
        compute_s = (end_ns - start_ns) / _NS_PER_S
        compute_bucket = bisect_left(LATENCY_BUCKETS_S, compute_s)
        num_rows = total_ns = queue_ns = 0
        for request in requests:
            context, enqueue_ns = request.context, request.enqueue_ns
            arrival_ns = context.arrival_ns
            own_total_ns = now_ns - (arrival_ns if arrival_ns < enqueue_ns else enqueue_ns)
            if TIMES_HEADER in context.headers:
                times = f"{(start_ns - enqueue_ns) / 1e6:.3f},{(end_ns - start_ns) / 1e6:.3f}"
                batch = f"{execution.num_rows},{len(execution.requests)},{start_ns}"
                context.trailing_metadata.append((TIMES_HEADER, f"{times},{batch}"))
            num_rows += request.num_rows
            total_ns += own_total_ns
            queue_ns += start_ns - enqueue_ns
            level = request.priority if request.priority < MAX_COUNTED_LEVEL else MAX_COUNTED_LEVEL
            histograms = self._histograms.get(level)
            if histograms is None:
                histograms = self._histograms[level] = self._make_histograms(level)
            of_request, of_queue, of_compute = histograms
            total_s, queue_s = own_total_ns / _NS_PER_S, (start_ns - enqueue_ns) / _NS_PER_S
            if context.trace_context is None:  # as ``observe`` does it, without its calls
                of_request.counts[bisect_left(LATENCY_BUCKETS_S, total_s)] += 1
                of_request.sum_s += total_s
                of_queue.counts[bisect_left(LATENCY_BUCKETS_S, queue_s)] += 1
                of_queue.sum_s += queue_s
                of_compute.counts[compute_bucket] += 1
                of_compute.sum_s += compute_s
                continue
            trace_id, unix_time_s = trace_id_of(context.trace_context), time.time()
            of_request.observe(total_s, trace_id, unix_time_s)
            of_queue.observe(queue_s, trace_id, unix_time_s)
            of_compute.observe(compute_s, trace_id, unix_time_s)
        num_requests = len(requests)
        self._statistics.inference_count += num_rows
        success, queue, compute_input, compute_infer, compute_output = self._counters
        success.count += num_requests
        success.total_ns += total_ns
        queue.count += num_requests
        queue.total_ns += queue_ns
        compute_input.count += num_requests
        compute_input.total_ns += num_requests * (execution.infer_start_ns - start_ns)
        compute_infer.count += num_requests
        compute_infer.total_ns += num_requests * (execution.infer_end_ns - execution.infer_start_ns)
        compute_output.count += num_requests
        compute_output.total_ns += num_requests * (end_ns - execution.infer_end_ns)

    def responded(self, request: InferenceRequest, number: int, sent: Sent, before_ns: int) -> None:
        """Count a response of a decoupled model; the one before it was sent at ``before_ns``."""
        response = self._response(number)
        infer_ns = sent.sent_ns - max(before_ns, request.start_ns)
        response.compute_infer.add(infer_ns)
        if not isinstance(sent.answer, WeftError) and sent.answer.error is None and sent.answer.is_null:
            response.empty_response.add(infer_ns)
            return
        response.compute_output.add(sent.encode_ns)
        if number == 0 and TIMES_HEADER in request.context.headers and not isinstance(sent.answer, WeftError):
            times = f"{(request.start_ns - request.enqueue_ns) / 1e6:.3f},{infer_ns / 1e6:.3f}"
            sent.answer.parameters = {**sent.answer.parameters, TIMES_HEADER: times}
        whole = (
            response.fail if isinstance(sent.answer, WeftError) or sent.answer.error is not None else response.success
        )
        whole.add(infer_ns + sent.encode_ns)

    def dropped(self, number: int, since_ns: int, now_ns: int) -> None:
        """Count a response of a decoupled model whose caller has left."""
        self._response(number).cancel.add(now_ns - since_ns)

    def failed(self, error: WeftError, arrival_ns: int, now_ns: int) -> None:
        """Count a request that is answered at ``now_ns`` with an error."""
        self._statistics.record_failure(error, now_ns - arrival_ns)

    def overran(self, duration_ns: int, now_ns: int) -> None:
        """Count an inline execution that took too long, and log it unless another was logged within ten seconds."""
        statistics = self._statistics
        count = statistics.inline_overrun_count = (statistics.inline_overrun_count or 0) + 1
        if now_ns - self._logged_ns >= _PAUSE_NS:
            self._logged_ns = now_ns
            _LOG.warning(
                "model '%s' held the event loop for %.1f ms, %d times so far; EXECUTION inline is for models that take "
                "at most %g ms",
                statistics.name,
                duration_ns / 1e6,
                count,
                LIMIT_NS / 1e6,
                extra={"model": statistics.name},
            )

    def _response(self, number: int) -> ResponseStatistics:
        return self._statistics.responses.setdefault(min(number, _MAX_COUNTED_RESPONSES - 1), ResponseStatistics())

    def _make_histograms(self, level: int) -> _Histograms:
        statistics = self._statistics
        return (
            statistics.request_latency.setdefault(level, LatencyHistogram()),
            statistics.queue_latency.setdefault(level, LatencyHistogram()),
            statistics.compute_latency.setdefault(level, LatencyHistogram()),
        )


def record_queue(model: str, request: InferenceRequest, end_ns: int, error: WeftError | None = None) -> None:
    """Record a ``queue`` span from arrival to ``end_ns`` (``time.monotonic_ns``); ERROR if it left with an error."""
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
    """Record a ``batch`` span linked to the members' SERVER spans, and their ``queue`` and ``compute`` spans.

    ``batch`` is the whole execution: inputs gathered, model run, outputs scattered. ``compute`` is the model's part of
    it; for a decoupled model it lasts until the last response (``record_stream``). There is no ``batch`` for a backend
    that describes its work itself, like that of language models, which has only been handed the requests.
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
    """Record the ``compute`` span of an ended request of a decoupled model, from when it left the queue until now."""
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
        reserved=request.span,
    )
    offset_ns = _unix_offset_ns()
    for name, at_ns, more in work.events:
        span.add_event(name, more, timestamp=at_ns + offset_ns)
    end_span(span, error, end_unix_ns=end_ns)


def _unix_offset_ns() -> int:
    return min(_read_clocks() for _ in range(3))[1]


def _read_clocks() -> tuple[int, int]:
    """How long reading the clocks took (long if another thread ran meanwhile), and their difference."""
    before_ns, unix_ns, after_ns = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
    return after_ns - before_ns, unix_ns - after_ns
