"""How one request enters the counters of a graph or of a model that was called."""

import time

from weft_common import telemetry
from weft_common.core import CallContext, InferCall
from weft_common.statistics import LatencyHistogram, ModelStatistics

#: Requests of higher priority numbers share the histogram of this one, so that clients cannot make any number of them.
MAX_HISTOGRAM_LEVEL = 10


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
    now_ns = time.time_ns()
    counters.last_inference_ms = now_ns // 1_000_000
    counters.inference_count += num_rows
    counters.execution_count += 1
    counters.success.add(end_ns - arrival_ns)
    counters.queue.add(0)
    counters.compute_input.add(start_ns - arrival_ns)
    counters.compute_infer.add(end_ns - start_ns)
    counters.compute_output.add(0)
    priority = call.parameters.get("priority", 0)
    level = min(max(priority, 0), MAX_HISTOGRAM_LEVEL) if isinstance(priority, int) else 0
    histogram = counters.request_latency.get(level)
    if histogram is None:
        histogram = counters.request_latency[level] = LatencyHistogram()
    trace_id = telemetry.trace_id_of(context.trace_context)
    histogram.observe((end_ns - arrival_ns) / 1e9, trace_id=trace_id, unix_time_s=now_ns / 1e9)
