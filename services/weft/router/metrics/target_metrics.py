"""Prometheus figures of the targets, read at scrape time, on the metrics server's thread."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from weft.router.targets.catalog import TargetCatalog


class TargetCollector(Collector):
    """How far each target is there, by its name; every series exists from the start, so that ``rate()`` sees the first.

    Args:
        catalog: Knows the targets.
    """

    def __init__(self, catalog: TargetCatalog) -> None:
        self._catalog = catalog

    def collect(self) -> Iterator[Metric]:
        """Every family."""
        serving = GaugeMetricFamily(
            "weft_target_serving_replicas",
            "Replicas that take calls; of a target that is one server 1 while it answers",
            labels=("target",),
        )
        unavailable = CounterMetricFamily(
            "weft_target_unavailable",
            "Requests that the target was not there for: calls that ended UNAVAILABLE, and, while it does not answer, "
            "requests for graphs and models that are not known",
            labels=("target",),
        )
        for target, num_serving, num_unavailable in self._catalog.availability():
            serving.add_metric((target,), num_serving)
            unavailable.add_metric((target,), num_unavailable)
        yield from (serving, unavailable)
