"""Metrics that backends count themselves, read at scrape time."""

import threading
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from weft.base.observing.logs import get_logger

_log = get_logger("weft.serving.metrics")


class ExportedMetrics(Collector):
    """The families of all backends of a service; may be used from any thread.

    A family of several backends is exported once. Samples with the same labels, as of the old and the new load of a
    model while the old one drains, are added for counters and histograms; of a gauge the latest attached counts.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sources: dict[str, Callable[[], Iterable[Metric]]] = {}

    def attach(self, owner: str, read: Callable[[], Iterable[Metric]]) -> None:
        """Call ``read`` at every scrape; it replaces what the owner attached before."""
        with self._lock:
            self._sources.pop(owner, None)
            self._sources[owner] = read

    def detach(self, owner: str) -> None:
        """Remove what the owner attached."""
        with self._lock:
            self._sources.pop(owner, None)

    def collect(self) -> Iterator[Metric]:
        """Every family once; a backend that fails does not affect the others."""
        with self._lock:
            sources = list(self._sources.items())
        families: dict[str, Metric] = {}
        for owner, read in sources:
            try:
                for family in read():
                    _merge(families.setdefault(family.name, _empty(family)), family)
            except Exception:  # one backend must not fail the scrape
                _log.exception("the metrics of %s cannot be read", owner)
        return iter(families.values())


def _empty(family: Metric) -> Metric:
    return Metric(family.name, family.documentation, family.type, family.unit)


def _merge(shown: Metric, family: Metric) -> None:
    places = {(sample.name, tuple(sorted(sample.labels.items()))): i for i, sample in enumerate(shown.samples)}
    for sample in family.samples:
        place = places.get((sample.name, tuple(sorted(sample.labels.items()))))
        if place is None:
            shown.samples.append(sample)
        elif family.type == "gauge":
            shown.samples[place] = sample
        else:
            shown.samples[place] = sample._replace(value=shown.samples[place].value + sample.value)
