"""Writes ``ModelStatistics`` so that their sums add up: queue and compute never exceed a request's whole time."""

import time

from weft_common.errors import WeftError
from weft_common.statistics import BatchStatistics, LatencyHistogram, ModelStatistics, failure_reason
from weft_common.telemetry import trace_id_of
from weft_serving.instance import Execution
from weft_serving.request import InferenceRequest

#: Priority levels above this share a histogram: clients choose the level, so the number of levels has no bound.
MAX_HISTOGRAM_LEVEL = 32

_NS_PER_S = 1e9


class Recorder:
    """The only writer of one model's statistics, apart from ``pending_count``."""

    def __init__(self, statistics: ModelStatistics) -> None:
        self._statistics = statistics

    def executed(self, execution: Execution) -> None:
        """Count a batch that answered at least one member."""
        statistics = self._statistics
        statistics.execution_count += 1
        statistics.last_inference_ms = time.time_ns() // 1_000_000
        batch = statistics.batches.get(execution.num_rows)
        if batch is None:
            batch = statistics.batches[execution.num_rows] = BatchStatistics()
        batch.compute_input.add(execution.infer_start_ns - execution.start_ns)
        batch.compute_infer.add(execution.infer_end_ns - execution.infer_start_ns)
        batch.compute_output.add(execution.end_ns - execution.infer_end_ns)

    def succeeded(self, request: InferenceRequest, execution: Execution, now_ns: int) -> None:
        """Count a request that is answered at ``now_ns`` with what ``execution`` gave."""
        statistics = self._statistics
        start_ns, infer_start_ns = execution.start_ns, execution.infer_start_ns
        infer_end_ns, end_ns = execution.infer_end_ns, execution.end_ns
        arrival_ns = min(request.context.arrival_ns, request.enqueue_ns)
        statistics.inference_count += request.num_rows
        statistics.success.add(now_ns - arrival_ns)
        statistics.queue.add(start_ns - request.enqueue_ns)
        statistics.compute_input.add(infer_start_ns - start_ns)
        statistics.compute_infer.add(infer_end_ns - infer_start_ns)
        statistics.compute_output.add(end_ns - infer_end_ns)
        level = min(request.priority, MAX_HISTOGRAM_LEVEL)
        trace_id = trace_id_of(request.context.trace_context)
        unix_time_s = time.time() if trace_id else 0.0
        for histograms, duration_ns in (
            (statistics.request_latency, now_ns - arrival_ns),
            (statistics.queue_latency, start_ns - request.enqueue_ns),
            (statistics.compute_latency, end_ns - start_ns),
        ):
            histogram = histograms.get(level)
            if histogram is None:
                histogram = histograms[level] = LatencyHistogram()
            histogram.observe(duration_ns / _NS_PER_S, trace_id=trace_id, unix_time_s=unix_time_s)

    def failed(self, error: WeftError, arrival_ns: int, now_ns: int) -> None:
        """Count a request that is answered at ``now_ns`` with an error."""
        self._statistics.record_failure(failure_reason(error.code), now_ns - arrival_ns)
