"""Counters of one model version, with the meaning that ``ModelStatistics`` of the V2 protocol gives them.

One owner writes (the event loop of the service); readers take them as they are. Durations are nanoseconds.
Prometheus figures are derived from these at scrape time, so a request pays for one set of counters only.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

#: Requests of higher priority numbers are counted with this level, so that clients cannot make any number of series.
MAX_COUNTED_LEVEL = 32

LATENCY_BUCKETS_S = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip


@dataclass(slots=True)
class DurationCount:
    """How often something happened and how long it took in sum."""

    count: int = 0
    total_ns: int = 0

    def add(self, duration_ns: int, count: int = 1) -> None:
        """Count ``count`` happenings that took ``duration_ns`` together."""
        self.count += count
        self.total_ns += duration_ns


class LatencyHistogram:
    """Cumulative-bucket latency histogram with the last exemplar of each bucket.

    Buckets are ``LATENCY_BUCKETS_S`` and +Inf; ``counts`` are per bucket, not cumulative.
    """

    __slots__ = ("counts", "exemplars", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(LATENCY_BUCKETS_S) + 1)
        self.exemplars: list[tuple[str, float, float] | None] = [None] * len(self.counts)
        self.sum_s = 0.0

    def observe(self, seconds: float, *, trace_id: str = "", unix_time_s: float = 0.0) -> None:
        """Count one latency; ``trace_id`` (32 hex digits), if given, becomes the bucket's exemplar."""
        bucket = bisect_left(LATENCY_BUCKETS_S, seconds)
        self.counts[bucket] += 1
        self.sum_s += seconds
        if trace_id:
            self.exemplars[bucket] = (trace_id, seconds, unix_time_s)


@dataclass(slots=True)
class BatchStatistics:
    """Executions of one batch size."""

    compute_input: DurationCount = field(default_factory=DurationCount)
    compute_infer: DurationCount = field(default_factory=DurationCount)
    compute_output: DurationCount = field(default_factory=DurationCount)

    def add(self, input_ns: int, infer_ns: int, output_ns: int) -> None:
        """Count one execution."""
        self.compute_input.count += 1
        self.compute_input.total_ns += input_ns
        self.compute_infer.count += 1
        self.compute_infer.total_ns += infer_ns
        self.compute_output.count += 1
        self.compute_output.total_ns += output_ns


@dataclass(slots=True)
class ResponseStatistics:
    """The responses of one number, from 0, to requests of a decoupled model.

    Attributes:
        compute_infer: From the response before it, or the start of the execution.
        compute_output: Encoding of its outputs.
        success, fail: Both together.
        empty_response: Only said that none follows.
        cancel: Nobody waited for it any longer.
    """

    compute_infer: DurationCount = field(default_factory=DurationCount)
    compute_output: DurationCount = field(default_factory=DurationCount)
    success: DurationCount = field(default_factory=DurationCount)
    fail: DurationCount = field(default_factory=DurationCount)
    empty_response: DurationCount = field(default_factory=DurationCount)
    cancel: DurationCount = field(default_factory=DurationCount)


@dataclass(slots=True)
class ModelStatistics:
    """Counters of one model version.

    Attributes:
        last_inference_ms: Unix time of the last inference in milliseconds; 0 before the first.
        inference_count: Rows inferred (a request of batch size 3 counts 3).
        execution_count: Batches executed.
        success: Requests answered, with their end-to-end time in this service.
        fail: Requests answered with an error.
        queue, compute_input, compute_infer, compute_output: Per request; their sum never exceeds ``success``.
        batches: By batch size in rows.
        responses: Of a decoupled model, by the response's number.
        failures_by_reason: REJECTED, CANCELED, BACKEND or OTHER.
        count_pending_by_level: Gives the requests in the queue now by priority level; may be called from any thread.
        occupancy: Gives the share of the instances that are busy, plus what waits in relation to what they take at
            once; may be called from any thread.
        restart_count: How often an instance was lost and loaded again.
        request_latency, queue_latency, compute_latency: By priority level.
    """

    name: str
    version: str
    last_inference_ms: int = 0
    inference_count: int = 0
    execution_count: int = 0
    success: DurationCount = field(default_factory=DurationCount)
    fail: DurationCount = field(default_factory=DurationCount)
    queue: DurationCount = field(default_factory=DurationCount)
    compute_input: DurationCount = field(default_factory=DurationCount)
    compute_infer: DurationCount = field(default_factory=DurationCount)
    compute_output: DurationCount = field(default_factory=DurationCount)
    cache_hit: DurationCount = field(default_factory=DurationCount)
    cache_miss: DurationCount = field(default_factory=DurationCount)
    batches: dict[int, BatchStatistics] = field(default_factory=dict)
    responses: dict[int, ResponseStatistics] = field(default_factory=dict)
    failures_by_reason: dict[str, int] = field(default_factory=dict)
    count_pending_by_level: Callable[[], Mapping[int, int]] = dict
    occupancy: Callable[[], float] = float
    restart_count: int = 0
    request_latency: dict[int, LatencyHistogram] = field(default_factory=dict)
    queue_latency: dict[int, LatencyHistogram] = field(default_factory=dict)
    compute_latency: dict[int, LatencyHistogram] = field(default_factory=dict)

    @property
    def pending_count(self) -> int:
        """Requests in the queue now; may be asked from any thread."""
        return sum(self.count_pending_by_level().values())

    def record_failure(self, reason: str, duration_ns: int) -> None:
        """Count one request that was answered with an error after ``duration_ns``."""
        self.fail.add(duration_ns)
        self.failures_by_reason[reason] = self.failures_by_reason.get(reason, 0) + 1


def failure_reason(code: str) -> str:
    """Label of ``nv_inference_request_failure`` for a gRPC status name."""
    if code in ("RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"):
        return "REJECTED"
    if code == "CANCELLED":
        return "CANCELED"
    if code in ("INTERNAL", "UNKNOWN"):
        return "BACKEND"
    return "OTHER"
