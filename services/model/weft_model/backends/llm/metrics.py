"""The figures of an engine as Prometheus families, read when they are asked for."""

import time
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from weft_common.signature import ModelSignature
from weft_model.llm.distribution import BOUNDS_S, Distribution
from weft_model.llm.metrics import EngineMetrics, Rates
from weft_model.llm.scheduler.blocks import BlockPool

#: One in so many of the engine's buckets is shown: a doubling from one to the next.
_BUCKET_STEP = 4
#: Rates are those between two scrapes at least so far apart.
_LEAST_INTERVAL_NS = 1_000_000_000


class CountingEngine(Protocol):
    """What is read of an ``Engine``, whose module imports torch."""

    metrics: EngineMetrics

    @property
    def num_running(self) -> int:
        """Sequences with a seat."""

    @property
    def num_waiting(self) -> int:
        """Sequences without one."""

    @property
    def num_preemptions(self) -> int:
        """Seats that were taken from sequences so far."""

    @property
    def pool(self) -> BlockPool:
        """Blocks of the KV cache."""


_HISTOGRAMS: tuple[tuple[str, str, Callable[[EngineMetrics], Distribution]], ...] = (
    ("weft_llm_time_to_first_token_seconds", "From arrival to the first token", lambda m: m.ttft),
    ("weft_llm_time_per_output_token_seconds", "Mean time of each token after the first, by choice", lambda m: m.tpot),
    ("weft_llm_inter_token_latency_seconds", "From each token of a choice to its next", lambda m: m.itl),
    ("weft_llm_queue_seconds", "From arrival to the first seat in a step", lambda m: m.queue_time),
    ("weft_llm_request_seconds", "From arrival to the last token", lambda m: m.e2e),
)
_COUNTERS: tuple[tuple[str, str, Callable[[CountingEngine], float]], ...] = (
    ("weft_llm_prompt_tokens", "Tokens of prompts", lambda e: e.metrics.num_prompt_tokens),
    ("weft_llm_prefix_cache_hit_tokens", "Tokens of prompts that the cache had", lambda e: e.metrics.num_cached_tokens),
    ("weft_llm_preemptions", "Seats that were taken from sequences", lambda e: e.num_preemptions),
    ("weft_llm_generation_tokens", "New tokens", lambda e: e.metrics.num_output_tokens),
    ("weft_llm_computed_tokens", "Tokens that steps computed", lambda e: e.metrics.num_computed_tokens),
    ("weft_llm_steps", "Steps that ran", lambda e: e.metrics.num_steps),
    ("weft_llm_failed_steps", "Steps that failed, and their requests with them", lambda e: e.metrics.num_failed_steps),
    ("weft_llm_good_requests", "Requests answered as soon as promised", lambda e: e.metrics.num_good_requests),
)


class EngineExport:
    """Gives the families of one engine.

    Args:
        engine: Whose.
        signature: Of its model.
        instance: Name of its instance.
    """

    def __init__(self, engine: CountingEngine, signature: ModelSignature, instance: str) -> None:
        self._engine = engine
        self._model = (signature.name, signature.version)
        self._place = (*self._model, instance)
        self._totals = engine.metrics.totals(time.monotonic_ns())
        self._rates: Rates | None = None

    def read(self) -> Iterator[Metric]:
        """Every family, with the figures of now."""
        metrics = self._engine.metrics
        for name, text, distribution in _HISTOGRAMS:
            histogram = HistogramMetricFamily(name, text, labels=("model", "version"))
            buckets, sum_s = _shown(distribution(metrics))
            histogram.add_metric(self._model, buckets, sum_s)
            yield histogram
        for name, text, number in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=("model", "version"))
            counter.add_metric(self._model, number(self._engine))
            yield counter
        requests = CounterMetricFamily(
            "weft_llm_requests", "Requests that ended, by outcome", labels=("model", "version", "outcome")
        )
        for outcome, count in list(metrics.outcomes.items()):
            requests.add_metric((*self._model, outcome), count)
        yield requests
        yield from self._gauges()

    def _gauges(self) -> Iterator[Metric]:
        engine, pool, rates = self._engine, self._engine.pool, self._latest_rates()
        numbers: list[tuple[str, str, float | None]] = [
            ("weft_llm_running", "Sequences that run", engine.num_running),
            ("weft_llm_waiting", "Sequences that wait in the engine for a seat or for blocks", engine.num_waiting),
            (
                "weft_llm_kv_cache_usage_ratio",
                "Share of the KV cache's blocks that sequences own",
                pool.num_used / pool.capacity,
            ),
            ("weft_llm_goodput_requests_per_second", "Requests answered as soon as promised", rates.goodput_per_s),
            ("weft_llm_mfu_ratio", "Share of the device's arithmetic that steps used", rates.mfu),
            ("weft_llm_mbu_ratio", "Share of the device's memory bandwidth that steps used", rates.mbu),
        ]
        for name, text, number in numbers:
            if number is not None:
                gauge = GaugeMetricFamily(name, text, labels=("model", "version", "instance"))
                gauge.add_metric(self._place, number)
                yield gauge

    def _latest_rates(self) -> Rates:
        totals = self._engine.metrics.totals(time.monotonic_ns())
        if self._rates is None or totals.time_ns - self._totals.time_ns >= _LEAST_INTERVAL_NS:
            self._rates = self._engine.metrics.rates(self._totals, totals)
            self._totals = totals
        return self._rates


def _shown(distribution: Distribution) -> tuple[list[tuple[str, float]], float]:
    """Cumulative buckets, and the sum in seconds."""
    totals = list(accumulate(list(distribution.counts)))
    buckets = [(f"{BOUNDS_S[i]:g}", float(totals[i])) for i in range(0, len(BOUNDS_S), _BUCKET_STEP)]
    return [*buckets, ("+Inf", float(totals[-1]))], distribution.sum_s
