"""Prometheus figures of every step, derived from its counters at scrape time, on the metrics server's thread."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from weft.router.policies import POLICIES
from weft.router.reporting.step_counters import StepCounters
from weft.router.steps import FALLBACK_COUNTERS, SHADOW_COUNTERS
from weft.v2.server.metrics import cumulative_buckets

_LABELS = ("graph", "version", "step")
#: (name, help) of what steps count beside their runs.
_COUNTERS = (
    *FALLBACK_COUNTERS,
    *(counter for policy in POLICIES.values() for counter in policy.counters),
    *SHADOW_COUNTERS,
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
            for status, count in ({"UNAVAILABLE": 0} | one.failures).items():
                requests.add_metric((*labels, status), count)
            latency.add_metric(labels, cumulative_buckets(one.latency), one.latency.sum_s)
        yield requests
        yield latency
        for name, text in _COUNTERS:
            family = CounterMetricFamily(f"weft_graph_step_{name}", text, labels=_LABELS)
            for one, labels in steps:
                if num_events := one.events[name]:
                    family.add_metric(labels, num_events)
            yield family
