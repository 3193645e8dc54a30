"""How one request enters the counters of a graph or of a model that was called."""

import time

from weft_common.core import CallContext, InferCall
from weft_common.observing import telemetry
from weft_common.statistics import MAX_COUNTED_LEVEL, LatencyHistogram, ModelStatistics


def count_success(
    counters: ModelStatistics,
    call: InferCall,
    context: CallContext,
    *,
    num_rows: int,
    arrival_ns: int,
    start_ns: int,
    end_ns: int,
) -> None:
    """Count an answered request; the parts add up to the whole.

    ``success`` is arrival to end, ``compute_input`` arrival to start, ``compute_infer`` start to end. ``queue`` counts
    requests and no time: nothing here has a queue.
    """
    counters.last_inference_ms = time.time_ns() // 1_000_000
    counters.inference_count += num_rows
    counters.execution_count += 1
    counters.success.add(end_ns - arrival_ns)
    counters.queue.add(0)
    counters.compute_input.add(start_ns - arrival_ns)
    counters.compute_infer.add(end_ns - start_ns)
    counters.compute_output.add(0)
    _observe(counters, call, context, end_ns - arrival_ns)


def count_cache_hit(
    counters: ModelStatistics, call: InferCall, context: CallContext, *, start_ns: int, end_ns: int
) -> None:
    """Count a request whose answer was kept: a success and no execution, as Triton Inference Server counts it."""
    counters.success.add(end_ns - context.arrival_ns)
    counters.queue.add(0)
    counters.cache_hit.add(end_ns - start_ns)
    _observe(counters, call, context, end_ns - context.arrival_ns)


def _observe(counters: ModelStatistics, call: InferCall, context: CallContext, duration_ns: int) -> None:
    priority = call.parameters.get("priority", 0)
    level = min(max(priority, 0), MAX_COUNTED_LEVEL) if isinstance(priority, int) else 0
    histogram = counters.request_latency.get(level)
    if histogram is None:
        histogram = counters.request_latency[level] = LatencyHistogram()
    trace_id = telemetry.trace_id_of(context.trace_context)
    histogram.observe(duration_ns / 1e9, trace_id=trace_id, unix_time_s=time.time())
