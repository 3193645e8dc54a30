"""Metrics that backends count themselves, read when Prometheus asks."""

import threading
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from weft_common.observing.logs import get_logger

_log = get_logger("weft.serving.metrics")


class ExportedMetrics(Collector):
    """The families of all backends of a service; may be used from any thread.

    A family that several backends have is shown once. Where two have a sample with the same labels, as the old and the
    new load of a model do while the old one drains, counters and histograms are added up, and of a gauge the latest
    attached is shown.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sources: dict[str, Callable[[], Iterable[Metric]]] = {}

    def attach(self, owner: str, read: Callable[[], Iterable[Metric]]) -> None:
        """``read`` is called at every scrape; it replaces what the owner attached before."""
        with self._lock:
            self._sources.pop(owner, None)
            self._sources[owner] = read

    def detach(self, owner: str) -> None:
        """What the owner attached is shown no longer."""
        with self._lock:
            self._sources.pop(owner, None)

    def collect(self) -> Iterator[Metric]:
        """Every family once; a backend that fails to give its own costs the others nothing."""
        with self._lock:
            sources = list(self._sources.items())
        families: dict[str, Metric] = {}
        for owner, read in sources:
            try:
                for family in read():
                    _merge(families.setdefault(family.name, _empty(family)), family)
            except Exception:  # the scrape is everybody's
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
