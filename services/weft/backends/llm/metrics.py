"""Engine metrics as Prometheus families, collected on scrape."""

import time
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from weft.base.signature import ModelSignature
from weft.base.statistics import LatencyHistogram
from weft.llm.metrics import EngineMetrics, Rates
from weft.llm.scheduler.blocks import BlockPool
from weft.llm.speculation.speculator import Speculator

#: Every fourth of the engine's buckets is exported: bounds double from one to the next.
_BUCKET_STEP = 4
#: Minimum interval between two scrapes that rates are computed over.
_LEAST_INTERVAL_NS = 1_000_000_000


class ObservableEngine(Protocol):
    """The part of ``Engine`` that is read here; its module imports torch."""

    metrics: EngineMetrics
    speculator: Speculator | None

    @property
    def num_running(self) -> int:
        """Sequences with a slot."""

    @property
    def num_waiting(self) -> int:
        """Sequences without one."""

    @property
    def num_preemptions(self) -> int:
        """Preemptions so far."""

    @property
    def pool(self) -> BlockPool:
        """Blocks of the KV cache."""


_HISTOGRAMS: tuple[tuple[str, str, Callable[[EngineMetrics], LatencyHistogram]], ...] = (
    ("weft_llm_time_to_first_token_seconds", "From arrival to the first token", lambda m: m.ttft),
    ("weft_llm_time_per_output_token_seconds", "Mean time of each token after the first, by choice", lambda m: m.tpot),
    ("weft_llm_inter_token_latency_seconds", "From each token of a choice to its next", lambda m: m.itl),
    ("weft_llm_queue_seconds", "From arrival to the first slot in the engine", lambda m: m.queue_time),
    ("weft_llm_request_seconds", "From arrival to the last token", lambda m: m.e2e),
)
_COUNTERS: tuple[tuple[str, str, Callable[[ObservableEngine], float]], ...] = (
    ("weft_llm_prompt_tokens", "Prompt tokens", lambda e: e.metrics.num_prompt_tokens),
    (
        "weft_llm_prefix_cache_hit_tokens",
        "Prompt tokens found in the prefix cache",
        lambda e: e.metrics.num_cached_tokens,
    ),
    (
        "weft_llm_kv_offload_hit_tokens",
        "Tokens found in the second tier of the KV cache and loaded",
        lambda e: (e.pool.tier.num_loaded - e.pool.tier.num_failed) * e.pool.block_size,
    ),
    (
        "weft_llm_kv_offload_saved_bytes",
        "Bytes saved to the second tier of the KV cache",
        lambda e: e.pool.tier.num_saved * e.pool.tier.block_bytes,
    ),
    (
        "weft_llm_kv_offload_loaded_bytes",
        "Bytes loaded from the second tier of the KV cache",
        lambda e: e.pool.tier.num_loaded * e.pool.tier.block_bytes,
    ),
    (
        "weft_llm_kv_offload_evictions",
        "Blocks that the second tier of the KV cache evicted",
        lambda e: e.pool.tier.num_evicted,
    ),
    (
        "weft_llm_kv_offload_failed_loads",
        "Blocks that could not be loaded from the second tier of the KV cache, and were computed instead",
        lambda e: e.pool.tier.num_failed,
    ),
    ("weft_llm_preemptions", "Sequences preempted for others", lambda e: e.num_preemptions),
    ("weft_llm_generation_tokens", "New tokens", lambda e: e.metrics.num_output_tokens),
    ("weft_llm_computed_tokens", "Tokens that steps computed", lambda e: e.metrics.num_computed_tokens),
    ("weft_llm_steps", "Steps that ran", lambda e: e.metrics.num_steps),
    ("weft_llm_failed_steps", "Steps that failed, and their requests with them", lambda e: e.metrics.num_failed_steps),
    ("weft_llm_non_finite_logits", "Requests whose logits were NaN or infinite", lambda e: e.metrics.num_non_finite),
    ("weft_llm_good_requests", "Requests that met their latency objectives", lambda e: e.metrics.num_good_requests),
)
_DRAFT_COUNTERS: tuple[tuple[str, str, Callable[[Speculator], float]], ...] = (
    ("weft_llm_draft_tokens", "Drafts that steps computed", lambda s: s.num_drafts),
    ("weft_llm_accepted_draft_tokens", "Drafts that became output", lambda s: s.num_accepted),
)


class EngineExport:
    """Exports the metric families of one engine.

    Args:
        engine: The engine.
        signature: Signature of its model.
        instance: Name of its instance.
    """

    def __init__(self, engine: ObservableEngine, signature: ModelSignature, instance: str) -> None:
        self._engine = engine
        self._model = (signature.name, signature.version)
        self._place = (*self._model, instance)
        self._totals = engine.metrics.totals(time.monotonic_ns())
        self._rates: Rates | None = None

    def read(self) -> Iterator[Metric]:
        """Every family, with current values."""
        metrics = self._engine.metrics
        for name, text, read in _HISTOGRAMS:
            histogram = HistogramMetricFamily(name, text, labels=("model", "version"))
            buckets, sum_s = _cumulative(read(metrics))
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
        yield from self._speculation()
        yield from self._gauges()

    def _speculation(self) -> Iterator[Metric]:
        """Counts of drafts, of an engine with speculation."""
        speculator = self._engine.speculator
        if speculator is None:
            return
        for name, text, read in _DRAFT_COUNTERS:
            counter = CounterMetricFamily(name, text, labels=("model", "version", "proposer"))
            counter.add_metric((*self._model, speculator.name), read(speculator))
            yield counter
        gauge = GaugeMetricFamily(
            "weft_llm_mean_accepted_length",
            "New tokens per step of a sequence with drafts",
            labels=("model", "version", "instance", "proposer"),
        )
        gauge.add_metric((*self._place, speculator.name), speculator.mean_accepted_len)
        yield gauge

    def _gauges(self) -> Iterator[Metric]:
        engine, pool, rates = self._engine, self._engine.pool, self._latest_rates()
        numbers: list[tuple[str, str, float | None]] = [
            ("weft_llm_running", "Sequences that run", engine.num_running),
            ("weft_llm_waiting", "Sequences that wait in the engine for a slot or for blocks", engine.num_waiting),
            (
                "weft_llm_kv_cache_usage_ratio",
                "Share of the KV cache's blocks that sequences own",
                pool.num_used / pool.capacity,
            ),
            (
                "weft_llm_kv_offload_usage_ratio",
                "Share of the second tier of the KV cache that holds a block",
                pool.tier.num_used / pool.tier.num_slots if pool.tier.num_slots else None,
            ),
            ("weft_llm_goodput_requests_per_second", "Requests that met their latency objectives", rates.goodput_per_s),
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


def _cumulative(histogram: LatencyHistogram) -> tuple[list[tuple[str, float]], float]:
    """Cumulative buckets, and the sum in seconds."""
    totals = list(accumulate(list(histogram.counts)))
    bounds_s = histogram.bounds_s
    buckets = [(f"{bounds_s[i]:g}", float(totals[i])) for i in range(0, len(bounds_s), _BUCKET_STEP)]
    return [*buckets, ("+Inf", float(totals[-1]))], histogram.sum_s
