"""Counters of one model version, with the meaning of ``ModelStatistics`` in the V2 protocol.

Only the event loop of the service writes; readers need no lock. Durations are nanoseconds. Prometheus metrics are
derived from these at scrape time, so a request pays for one set of counters only.
"""

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from weft.base.errors import WeftError

#: Larger priority numbers count as this level, which bounds the number of metric series.
MAX_COUNTED_LEVEL = 32

LATENCY_BUCKETS_S = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
#: For quantiles to 20 %: four buckets per doubling, from 100 us to 23 minutes.
FINE_BUCKETS_S = tuple(1e-4 * 2 ** (i / 4) for i in range(96))
#: Those of vLLM's histograms of whole requests, first tokens and further tokens.
VLLM_REQUEST_BUCKETS_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
VLLM_FIRST_TOKEN_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
VLLM_TOKEN_BUCKETS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
#: The same of OpenTelemetry's conventions for generative AI.
GEN_AI_REQUEST_BUCKETS_S = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92,
)  # fmt: skip
GEN_AI_FIRST_TOKEN_BUCKETS_S = VLLM_FIRST_TOKEN_BUCKETS_S[:16]
GEN_AI_TOKEN_BUCKETS_S = VLLM_TOKEN_BUCKETS_S[:13]
#: All of them, so that each can be told exactly.
GENERATION_BUCKETS_S = tuple(
    sorted(
        {
            *FINE_BUCKETS_S,
            *VLLM_REQUEST_BUCKETS_S,
            *VLLM_FIRST_TOKEN_BUCKETS_S,
            *VLLM_TOKEN_BUCKETS_S,
            *GEN_AI_REQUEST_BUCKETS_S,
        }
    )
)


@dataclass(slots=True)
class DurationCount:
    """Number of events and their total duration."""

    count: int = 0
    total_ns: int = 0

    def add(self, duration_ns: int, count: int = 1) -> None:
        """Count ``count`` events with a total of ``duration_ns``."""
        self.count += count
        self.total_ns += duration_ns


class LatencyHistogram:
    """Latency histogram with the last exemplar of each bucket.

    Args:
        bounds_s: Upper bounds of the buckets, inclusive, ascending; one more bucket takes what is above all of them.

    Attributes:
        counts: Latencies in each bucket, not cumulative.
        exemplars: Of each bucket: trace id, seconds, and Unix time; None where there is none.
        forward: Is told each latency, in seconds, but for those that come several at once.
    """

    __slots__ = ("bounds_s", "counts", "exemplars", "forward", "sum_s")

    def __init__(self, bounds_s: Sequence[float] = LATENCY_BUCKETS_S) -> None:
        self.bounds_s = bounds_s
        self.counts = [0] * (len(bounds_s) + 1)
        self.exemplars: list[tuple[str, float, float] | None] = [None] * len(self.counts)
        self.sum_s = 0.0
        self.forward: Callable[[float], None] | None = None

    def observe(self, seconds: float, trace_id: str = "", unix_time_s: float = 0.0, count: int = 1) -> None:
        """Count ``count`` latencies of ``seconds`` each; ``trace_id`` (32 hex digits), if given, is the exemplar."""
        bucket = bisect_left(self.bounds_s, seconds)
        self.counts[bucket] += count
        self.sum_s += seconds * count
        if self.forward is not None:
            self.forward(seconds)
        if trace_id:
            self.exemplars[bucket] = (trace_id, seconds, unix_time_s)

    @property
    def count(self) -> int:
        """Number of latencies."""
        return sum(self.counts)

    def quantile(self, share: float) -> float:
        """The bound that ``share`` of the latencies do not exceed, in seconds; 0 if there are none."""
        rank = share * self.count
        for index, count in enumerate(self.counts):
            rank -= count
            if count and rank <= 0:
                return self.bounds_s[min(index, len(self.bounds_s) - 1)]
        return 0.0

    def cumulative(self) -> list[tuple[str, float]]:
        """Buckets as Prometheus has them: upper bound, and number of latencies up to it."""
        return list(zip((*map(str, self.bounds_s), "+Inf"), map(float, accumulate(list(self.counts))), strict=True))


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
    """Statistics of the n-th response, from 0, to requests of a decoupled model.

    Attributes:
        compute_infer: Time since the previous response, or the start of the execution.
        compute_output: Encoding of its outputs.
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
        success: Successful requests, with their end-to-end time in this service.
        queue, compute_input, compute_infer, compute_output: Per request; their sum never exceeds ``success``.
        responses: Of a decoupled model, by the response's number.
        failures_by_reason: REJECTED, CANCELED, BACKEND or OTHER.
        count_pending_by_level: Returns the requests in the queue now by priority level; thread-safe.
        occupancy: Returns the share of busy instances, plus the queue length relative to the requests that the
            instances process at once; thread-safe.
        restart_count: Number of times an instance was lost and reloaded.
        inline_overrun_count: Executions that held the event loop for too long; None: the model has threads.
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
    inline_overrun_count: int | None = None
    request_latency: dict[int, LatencyHistogram] = field(default_factory=dict)
    queue_latency: dict[int, LatencyHistogram] = field(default_factory=dict)
    compute_latency: dict[int, LatencyHistogram] = field(default_factory=dict)

    @property
    def pending_count(self) -> int:
        """Requests in the queue now; thread-safe."""
        return sum(self.count_pending_by_level().values())

    def record_failure(self, error: BaseException, duration_ns: int) -> None:
        """Count one failed request that took ``duration_ns``; an error that is none of Weft's is the server's fault."""
        code = error.code if isinstance(error, WeftError) else "INTERNAL"
        reason = failure_reason("CANCELLED" if isinstance(error, asyncio.CancelledError | GeneratorExit) else code)
        self.fail.add(duration_ns)
        self.failures_by_reason[reason] = self.failures_by_reason.get(reason, 0) + 1


def failure_reason(code: str) -> str:
    """Label of ``nv_inference_request_failure`` for a gRPC status name; BACKEND is the server's fault."""
    if code in ("RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"):
        return "REJECTED"
    if code == "CANCELLED":
        return "CANCELED"
    if code in ("INTERNAL", "UNKNOWN", "UNAVAILABLE"):
        return "BACKEND"
    return "OTHER"
