"""Prometheus metrics of the admission controller; collected on the metrics server's thread."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from weft.router.admission import AdmissionController


class AdmissionCollector(Collector):
    """Families ``weft_admission_*`` by graph, or model that is called by its name; "" is the router as a whole.

    A refusal counts at the graph that the request was for, whatever limit it met.

    Args:
        admission: Of the router.
    """

    def __init__(self, admission: AdmissionController) -> None:
        self._admission = admission

    def collect(self) -> Iterator[Metric]:
        """Every family."""
        inflight = GaugeMetricFamily("weft_admission_inflight", "Requests in flight", labels=("graph",))
        limits = GaugeMetricFamily("weft_admission_limit", "Requests that may be in flight", labels=("graph",))
        waiting = GaugeMetricFamily("weft_admission_waiting", "Requests that wait for a place", labels=("graph",))
        refusals = CounterMetricFamily(
            "weft_admission_refusals", "Requests refused before any work", labels=("graph", "reason", "priority")
        )
        for name, limit in [("", self._admission.router), *self._admission.limits.items()]:
            inflight.add_metric((name,), limit.num_inflight)
            if limit.is_adaptive:
                waiting.add_metric((name,), limit.queue.num_waiting)
            if limit.limit:
                limits.add_metric((name,), limit.limit)
            for (reason, level), count in list(limit.refusals.items()):
                refusals.add_metric((name, reason, str(level)), count)
        yield from (inflight, limits, waiting, refusals)
