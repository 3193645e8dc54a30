"""Prometheus metrics of models that execute on the event loop, read at scrape time on the metrics server's thread."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from weft.base.statistics import ModelStatistics


class InlineCollector(Collector):
    """How often they held the event loop for too long.

    Args:
        statistics: Returns the counters of all models.
    """

    def __init__(self, statistics: Callable[[], Iterable[ModelStatistics]]) -> None:
        self._statistics = statistics

    def collect(self) -> Iterator[Metric]:
        """The one family, with a sample for each such model."""
        overruns = CounterMetricFamily(
            "weft_inline_overruns", "Inline executions that took longer than they may", labels=("model", "version")
        )
        for entry in self._statistics():
            if entry.inline_overrun_count is not None:
                overruns.add_metric((entry.name, entry.version), entry.inline_overrun_count)
        yield overruns
