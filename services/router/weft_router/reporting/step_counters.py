"""Counters of every step; the event loop writes them, the metrics thread reads them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from weft_common.statistics import LatencyHistogram


@dataclass(slots=True, weakref_slot=True)
class StepCounters:
    """Counters of one step of one graph.

    Attributes:
        graph, version: The graph.
        path: Of the step.
        latency: Of the runs that ended with status OK; its buckets are their number.
        failures: Other runs by status, SKIPPED and CANCELLED among them.
        num_retries, num_hedges: Further calls.
        num_refused: Retries and hedges that the retry budget did not allow.
        num_fallbacks: Runs in which a fallback was tried.
        num_cache_hits, num_cache_misses: Answers with and without a call.
        num_stale_answers: Expired ones of the cache, in place of a call that was UNAVAILABLE.
        num_shadows_sent, num_shadows_failed: Copies.
        num_shadows_dropped: Copies that were not sent, because the step or the router was busy.
    """

    graph: str
    version: str
    path: str
    latency: LatencyHistogram = field(default_factory=LatencyHistogram)
    failures: dict[str, int] = field(default_factory=dict)
    num_retries: int = 0
    num_hedges: int = 0
    num_refused: int = 0
    num_fallbacks: int = 0
    num_cache_hits: int = 0
    num_cache_misses: int = 0
    num_stale_answers: int = 0
    num_shadows_sent: int = 0
    num_shadows_failed: int = 0
    num_shadows_dropped: int = 0

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
