"""Counters of every step; the event loop writes them, the metrics thread reads them."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from weft.base.statistics import LatencyHistogram


@dataclass(slots=True, weakref_slot=True)
class StepCounters:
    """Counters of one step of one graph.

    Attributes:
        graph, version: The graph.
        path: Of the step.
        latency: Of the runs that ended with status OK; its buckets are their number.
        failures: Other runs by status, SKIPPED and CANCELLED among them.
        events: What policies, fallbacks and shadows count, by the name of the metric after ``weft_graph_step_``.
    """

    graph: str
    version: str
    path: str
    latency: LatencyHistogram = field(default_factory=LatencyHistogram)
    failures: dict[str, int] = field(default_factory=dict)
    events: Counter[str] = field(default_factory=Counter)

    def count_failure(self, status: str) -> None:
        """Count a run that did not end with OK."""
        self.failures[status] = self.failures.get(status, 0) + 1


class StepCounterTable:
    """Counters of the steps of a router, as long as a graph uses them: those of a graph go on when it is replaced."""

    def __init__(self) -> None:
        self._counters: WeakValueDictionary[tuple[str, str, str], StepCounters] = WeakValueDictionary()

    def of(self, graph: str, version: str, path: str) -> StepCounters:
        """The counters of one step, made on first use."""
        key = (graph, version, path)
        found = self._counters.get(key)
        if found is None:
            found = self._counters[key] = StepCounters(graph, version, path)
        return found

    def __iter__(self) -> Iterator[StepCounters]:
        """Every step in the order of loading."""
        return iter(list(self._counters.values()))
