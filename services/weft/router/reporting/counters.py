"""How one request enters the counters of a graph or of a model that was called."""

import time

from weft.base.core import CallContext
from weft.base.observing import telemetry
from weft.base.statistics import MAX_COUNTED_LEVEL, LatencyHistogram, ModelStatistics


def count_answer(
    counters: ModelStatistics,
    context: CallContext,
    *,
    num_rows: int,
    arrival_ns: int,
    start_ns: int,
    end_ns: int,
    is_cached: bool = False,
) -> None:
    """Count an answered request; the parts add up to the whole.

    ``success`` is arrival to end, ``compute_input`` arrival to start, ``compute_infer`` start to end. ``queue`` counts
    requests and no time: nothing here has a queue. An answer that was kept is a success and no execution, as Triton
    Inference Server counts it: in place of ``compute_infer`` it counts in ``cache_hit``.
    """
    duration_ns = end_ns - arrival_ns
    parts = [(counters.success, duration_ns), (counters.queue, 0)]
    if is_cached:
        parts.append((counters.cache_hit, end_ns - start_ns))
    else:
        counters.last_inference_ms = time.time_ns() // 1_000_000
        counters.inference_count += num_rows
        counters.execution_count += 1
        parts += (
            (counters.compute_input, start_ns - arrival_ns),
            (counters.compute_infer, end_ns - start_ns),
            (counters.compute_output, 0),
        )
    for part, part_ns in parts:
        part.count += 1
        part.total_ns += part_ns
    level = min(context.priority, MAX_COUNTED_LEVEL)
    histogram = counters.request_latency.get(level)
    if histogram is None:
        histogram = counters.request_latency[level] = LatencyHistogram()
    if context.trace_context is None:
        histogram.observe(duration_ns / 1e9)
    else:
        trace_id = telemetry.trace_id_of(context.trace_context)
        histogram.observe(duration_ns / 1e9, trace_id=trace_id, unix_time_s=time.time())
