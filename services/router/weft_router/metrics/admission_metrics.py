"""Prometheus figures of the door: limits, what is in flight, what was refused; on the metrics server's thread."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from weft_router.admission import Door


class AdmissionCollector(Collector):
    """Families ``weft_admission_*`` by graph, or model that is called by its name; "" is the router as a whole.

    A refusal counts at the graph that the request was for, whatever limit it met.

    Args:
        door: Of the router.
    """

    def __init__(self, door: Door) -> None:
        self._door = door

    def collect(self) -> Iterator[Metric]:
        """Every family."""
        inflight = GaugeMetricFamily("weft_admission_inflight", "Requests in flight", labels=("graph",))
        limit = GaugeMetricFamily("weft_admission_limit", "Requests that may be in flight", labels=("graph",))
        waiting = GaugeMetricFamily("weft_admission_waiting", "Requests that wait for a place", labels=("graph",))
        refusals = CounterMetricFamily(
            "weft_admission_refusals", "Requests refused before any work", labels=("graph", "reason", "priority")
        )
        for name, gate in [("", self._door.router), *self._door.gates.items()]:
            inflight.add_metric((name,), gate.num_inflight)
            if gate.is_adaptive:
                waiting.add_metric((name,), len(gate.line))
            if gate.limit:
                limit.add_metric((name,), gate.limit)
            for (reason, level), count in list(gate.refusals.items()):
                refusals.add_metric((name, reason, str(level)), count)
        yield from (inflight, limit, waiting, refusals)
