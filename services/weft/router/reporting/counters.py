"""Updates the counters of graphs, called models and steps for each request."""

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from weft.base.core import CallContext, InferCall
from weft.base.observing import telemetry
from weft.base.statistics import (
    LATENCY_BUCKETS_S,
    MAX_COUNTED_LEVEL,
    BatchStatistics,
    LatencyHistogram,
    ModelStatistics,
)

_MAX_KEPT = 1000


def count_answer(
    counters: ModelStatistics,
    call: InferCall,
    context: CallContext,
    arrival_ns: int,
    start_ns: int,
    *,
    is_cached: bool = False,
) -> None:
    """Count a request that is answered now; the parts add up to the whole.

    ``success`` is arrival to end, ``compute_input`` arrival to start, ``compute_infer`` start to end. ``queue`` counts
    requests and no time, because there is no queue. A cached answer counts as a success and in ``cache_hit`` instead of
    ``compute_infer``, as in Triton Inference Server.
    """
    num_rows, end_ns = call.num_rows, time.monotonic_ns()
    duration_ns = end_ns - arrival_ns
    success = counters.success
    success.count += 1
    success.total_ns += duration_ns
    counters.queue.count += 1
    if is_cached:
        counters.cache_hit.add(end_ns - start_ns)
    else:
        counters.last_inference_ms = time.time_ns() // 1_000_000
        counters.inference_count += num_rows
        counters.execution_count += 1
        compute_input, compute_infer = counters.compute_input, counters.compute_infer
        compute_input.count += 1
        compute_input.total_ns += start_ns - arrival_ns
        compute_infer.count += 1
        compute_infer.total_ns += end_ns - start_ns
        counters.compute_output.count += 1
        batch = counters.batches.get(num_rows) or counters.batches.setdefault(num_rows, BatchStatistics())
        batch.add(start_ns - arrival_ns, end_ns - start_ns, 0)
    level = context.priority if context.priority < MAX_COUNTED_LEVEL else MAX_COUNTED_LEVEL
    histogram = counters.request_latency.get(level)
    if histogram is None:
        histogram = counters.request_latency[level] = LatencyHistogram()
    if context.trace_context is None:  # as ``observe`` does it, without its call
        duration_s = duration_ns / 1e9
        histogram.counts[bisect_left(LATENCY_BUCKETS_S, duration_s)] += 1
        histogram.sum_s += duration_s
    else:
        trace_id = telemetry.trace_id_of(context.trace_context)
        histogram.observe(duration_ns / 1e9, trace_id=trace_id, unix_time_s=time.time())


@dataclass(slots=True, weakref_slot=True)
class StepCounters:
    """Counters of one step of one graph.

    Attributes:
        latency: Of runs that ended with status OK; its buckets also give their number.
        failures: Other runs by status, including SKIPPED and CANCELLED.
        events: Counts of policies, fallbacks and shadows, by metric name without ``weft_graph_step_``.
        compared: Answers of a shadow that were compared, by tensor and whether it agrees.
    """

    graph: str
    version: str
    path: str
    latency: LatencyHistogram = field(default_factory=LatencyHistogram)
    failures: dict[str, int] = field(default_factory=dict)
    events: Counter[str] = field(default_factory=Counter)
    compared: Counter[tuple[str, bool]] = field(default_factory=Counter)

    def count_failure(self, status: str) -> None:
        """Count a run that did not end with OK."""
        self.failures[status] = self.failures.get(status, 0) + 1


class StepCounterTable:
    """Counters of all steps in use; those of a graph continue when it is replaced.

    Attributes:
        kept: The latest that were withdrawn by a rollback, which stay in the metrics.
    """

    def __init__(self) -> None:
        self.kept: deque[StepCounters] = deque(maxlen=_MAX_KEPT)
        self._counters: WeakValueDictionary[tuple[str, str, str], StepCounters] = WeakValueDictionary()

    def of(self, graph: str, version: str, path: str) -> StepCounters:
        """The counters of one step, made on first use."""
        key = (graph, version, path)
        found = self._counters.get(key)
        if found is None:
            found = self._counters[key] = StepCounters(graph, version, path)
        return found

    def __iter__(self) -> Iterator[StepCounters]:
        """Every step in the order of loading."""
        return iter(list(self._counters.values()))
