"""Prometheus metrics of models that load on demand, computed at scrape time on the thread of the metrics server."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from weft.serving.lifecycle.warm_pool import WarmPool
from weft.v2.server.metrics import cumulative_buckets


class WarmPoolCollector(Collector):
    """Loaded models, durations of loads, and reasons of unloads.

    Args:
        pool: Read as it is.
    """

    def __init__(self, pool: WarmPool) -> None:
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        """Every family."""
        yield GaugeMetricFamily("weft_warm_models", "Model versions that are loaded", value=self._pool.num_warm)
        yield GaugeMetricFamily("weft_warm_model_bytes", "Size of their files", value=self._pool.num_warm_bytes)
        starts = HistogramMetricFamily(
            "weft_cold_start_seconds", "Loads because a request asked for the model", labels=("model", "version")
        )
        failures = CounterMetricFamily(
            "weft_cold_start_failures", "Such loads that failed", labels=("model", "version")
        )
        unloads = CounterMetricFamily(
            "weft_warm_model_unloads", "Unloads to make room, or after idle time", labels=("model", "version", "reason")
        )
        for labels, counters in list(self._pool.cold_starts.items()):
            starts.add_metric(labels, cumulative_buckets(counters.seconds), counters.seconds.sum_s)
            failures.add_metric(labels, counters.num_failed)
            unloads.add_metric((*labels, "evicted"), counters.num_evicted)
            unloads.add_metric((*labels, "idle"), counters.num_idled)
        yield from (starts, failures, unloads)
