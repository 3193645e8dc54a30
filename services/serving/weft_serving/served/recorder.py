"""Writes ``ModelStatistics`` so that queue and compute never exceed a request's whole time."""

import time

from weft_common.errors import WeftError
from weft_common.observing.telemetry import trace_id_of
from weft_common.statistics import (
    MAX_COUNTED_LEVEL,
    BatchStatistics,
    LatencyHistogram,
    ModelStatistics,
    ResponseStatistics,
    failure_reason,
)
from weft_serving.request.request import InferenceRequest
from weft_serving.request.stream import Sent
from weft_serving.served.execution import BatchExecution

_NS_PER_S = 1e9
#: Responses of one request that have counters of their own; later ones share the last.
_MAX_COUNTED_RESPONSES = 1024


class Recorder:
    """The only writer of one model's counters."""

    def __init__(self, statistics: ModelStatistics) -> None:
        self._statistics = statistics
        self._counters = (
            statistics.success,
            statistics.queue,
            statistics.compute_input,
            statistics.compute_infer,
            statistics.compute_output,
        )
        self._histograms: dict[int, tuple[LatencyHistogram, ...]] = {}  # by level: request, queue, compute

    def executed(self, execution: BatchExecution) -> None:
        """Count a batch that answered at least one member."""
        statistics = self._statistics
        statistics.execution_count += 1
        statistics.last_inference_ms = time.time_ns() // 1_000_000
        batch = statistics.batches.get(execution.num_rows)
        if batch is None:
            batch = statistics.batches[execution.num_rows] = BatchStatistics()
        batch.add(
            execution.infer_start_ns - execution.start_ns,
            execution.infer_end_ns - execution.infer_start_ns,
            execution.end_ns - execution.infer_end_ns,
        )

    def succeeded(self, request: InferenceRequest, execution: BatchExecution, now_ns: int) -> None:
        """Count a request that is answered at ``now_ns`` with what ``execution`` gave."""
        start_ns, infer_start_ns = execution.start_ns, execution.infer_start_ns
        infer_end_ns, end_ns = execution.infer_end_ns, execution.end_ns
        total_ns = now_ns - min(request.context.arrival_ns, request.enqueue_ns)
        queue_ns = start_ns - request.enqueue_ns
        self._statistics.inference_count += request.num_rows
        success, queue, compute_input, compute_infer, compute_output = self._counters
        success.count += 1
        success.total_ns += total_ns
        queue.count += 1
        queue.total_ns += queue_ns
        compute_input.count += 1
        compute_input.total_ns += infer_start_ns - start_ns
        compute_infer.count += 1
        compute_infer.total_ns += infer_end_ns - infer_start_ns
        compute_output.count += 1
        compute_output.total_ns += end_ns - infer_end_ns
        level = min(request.priority, MAX_COUNTED_LEVEL)
        trace_context = request.context.trace_context
        trace_id = "" if trace_context is None else trace_id_of(trace_context)
        unix_time_s = time.time() if trace_id else 0.0
        histograms = self._histograms.get(level)
        if histograms is None:
            histograms = self._histograms[level] = self._make_histograms(level)
        for histogram, duration_ns in zip(histograms, (total_ns, queue_ns, end_ns - start_ns), strict=True):
            histogram.observe(duration_ns / _NS_PER_S, trace_id=trace_id, unix_time_s=unix_time_s)

    def responded(self, request: InferenceRequest, number: int, sent: Sent, before_ns: int) -> None:
        """Count a response of a decoupled model; the one before it was sent at ``before_ns``."""
        response = self._response(number)
        infer_ns = sent.sent_ns - max(before_ns, request.start_ns)
        if isinstance(sent.answer, WeftError) or sent.answer.error is not None:
            response.fail.add(infer_ns + sent.encode_ns)
        elif sent.answer.is_null:
            response.empty_response.add(infer_ns)
        else:
            response.compute_infer.add(infer_ns)
            response.compute_output.add(sent.encode_ns)
            response.success.add(infer_ns + sent.encode_ns)

    def dropped(self, number: int, since_ns: int, now_ns: int) -> None:
        """Count a response of a decoupled model whose caller has left."""
        self._response(number).cancel.add(now_ns - since_ns)

    def failed(self, error: WeftError, arrival_ns: int, now_ns: int) -> None:
        """Count a request that is answered at ``now_ns`` with an error."""
        self._statistics.record_failure(failure_reason(error.code), now_ns - arrival_ns)

    def _response(self, number: int) -> ResponseStatistics:
        return self._statistics.responses.setdefault(min(number, _MAX_COUNTED_RESPONSES - 1), ResponseStatistics())

    def _make_histograms(self, level: int) -> tuple[LatencyHistogram, ...]:
        statistics = self._statistics
        return tuple(
            histograms.setdefault(level, LatencyHistogram())
            for histograms in (statistics.request_latency, statistics.queue_latency, statistics.compute_latency)
        )
