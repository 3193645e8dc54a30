"""Prometheus figures of every step, derived from its counters at scrape time, on the metrics server's thread."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from weft_common.server.metrics import cumulative_buckets
from weft_router.reporting.step_counters import StepCounters

_LABELS = ("graph", "version", "step")
_COUNTERS: tuple[tuple[str, str, Callable[[StepCounters], int]], ...] = (
    ("retries", "Attempts after the first", lambda c: c.num_retries),
    ("hedges", "Calls started because the one before took long", lambda c: c.num_hedges),
    ("retries_refused", "Retries and hedges that the retry budget did not allow", lambda c: c.num_refused),
    ("fallbacks", "Runs in which a fallback was tried", lambda c: c.num_fallbacks),
    ("cache_hits", "Answers that were there, or on their way to an equal request", lambda c: c.num_cache_hits),
    ("cache_misses", "Answers that were not in the cache", lambda c: c.num_cache_misses),
    ("stale_answers", "Expired answers, given because the call was UNAVAILABLE", lambda c: c.num_stale_answers),
    ("shadows_sent", "Copies of requests that were sent", lambda c: c.num_shadows_sent),
    ("shadows_failed", "Copies of requests that failed", lambda c: c.num_shadows_failed),
    ("shadows_dropped", "Copies that were not sent: the step or the router was busy", lambda c: c.num_shadows_dropped),
)


class StepCollector(Collector):
    """Families ``weft_graph_step_*`` with the labels graph, version and step, the step's path.

    A step has figures of the policies that it has used, and no zeros of the others.

    Args:
        counters: Gives those of every step; called at each scrape.
    """

    def __init__(self, counters: Callable[[], Iterable[StepCounters]]) -> None:
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        """Every family."""
        steps = [(one, (one.graph, one.version, one.path)) for one in self._counters()]
        requests = CounterMetricFamily(
            "weft_graph_step_requests",
            "Runs by gRPC status; SKIPPED where 'when' does not hold",
            labels=(*_LABELS, "status"),
        )
        latency = HistogramMetricFamily(
            "weft_graph_step_latency_seconds", "Time of the runs with status OK, attempts included", labels=_LABELS
        )
        for one, labels in steps:
            num_ok = sum(one.latency.counts)
            requests.add_metric((*labels, "OK"), num_ok)
            for status, count in list(one.failures.items()):
                requests.add_metric((*labels, status), count)
            latency.add_metric(labels, cumulative_buckets(one.latency), one.latency.sum_s)
        yield requests
        yield latency
        for name, text, value in _COUNTERS:
            family = CounterMetricFamily(f"weft_graph_step_{name}", text, labels=_LABELS)
            for one, labels in steps:
                if count := value(one):
                    family.add_metric(labels, count)
            yield family
