"""The metrics of several workers as those of one service.

Counters and histograms are summed, also those of workers that have ended, so that a sum never falls; series of a model
version that no worker has any more are left out. Some families, which every worker has whole, are the greatest instead.
What the process itself is measured by (``process_*``) stays apart, with the label ``worker``.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Exemplar, Sample

_SUMMED_FOR_EVER = ("counter", "histogram", "summary", "unknown")
_PROCESS = "process_"
_LABEL = "worker"

#: Name of a sample and its labels.
Key: TypeAlias = tuple[str, frozenset[tuple[str, str]]]


@dataclass(slots=True)
class _Total:
    documentation: str
    kind: str
    samples: dict[Key, Sample] = field(default_factory=dict)


class MetricSums:
    """Sums of the latest metrics of each worker; of the families in ``greatest`` the greatest value counts."""

    def __init__(self, greatest: Collection[str] = ()) -> None:
        self._greatest = frozenset(greatest)
        self._latest: dict[int, list[Metric]] = {}
        self._ended: dict[str, _Total] = {}

    def update(self, worker: int, families: list[Metric]) -> None:
        """The metrics of a worker are these now."""
        self._latest[worker] = families

    def end(self, worker: int) -> None:
        """A worker has ended: what it had counted when it was last asked stays."""
        for family in self._latest.pop(worker, ()):
            is_sum = family.type in _SUMMED_FOR_EVER and family.name not in self._greatest
            if is_sum and not family.name.startswith(_PROCESS):
                self._add(self._ended, family)

    def families(self) -> Iterator[Metric]:
        """The metrics of all."""
        sums: dict[str, _Total] = {}
        live = {_version_of(s) for families in self._latest.values() for family in families for s in family.samples}
        for name, ended in self._ended.items():
            kept = {key: s for key, s in ended.samples.items() if live <= {None} or _version_of(s) in {*live, None}}
            sums[name] = _Total(ended.documentation, ended.kind, kept)
        for worker, families in sorted(self._latest.items()):
            for family in families:
                more = {_LABEL: str(worker)} if family.name.startswith(_PROCESS) else {}
                self._add(sums, family, more)
        for name, total in sums.items():
            metric = Metric(name, total.documentation, total.kind)
            metric.samples = list(total.samples.values())
            yield metric

    def _add(self, sums: dict[str, _Total], family: Metric, more: Mapping[str, str] = {}) -> None:
        total = sums.setdefault(family.name, _Total(family.documentation, family.type))
        for sample in family.samples:
            labels = {**sample.labels, **more}
            key = sample.name, frozenset(labels.items())
            known = total.samples.get(key)
            if known is None:
                total.samples[key] = sample._replace(labels=labels)
            else:
                is_greatest = family.name in self._greatest
                value = max(known.value, sample.value) if is_greatest else known.value + sample.value
                total.samples[key] = known._replace(value=value, exemplar=_newer(known.exemplar, sample.exemplar))


def _version_of(sample: Sample) -> tuple[str | None, str] | None:
    """Name and version of the model or graph that it tells of; None: of none."""
    labels = sample.labels
    return (labels.get("graph", labels.get("model")), labels["version"]) if "version" in labels else None


def _newer(one: Exemplar | None, other: Exemplar | None) -> Exemplar | None:
    if one is None or other is None:
        return one or other
    return max(one, other, key=lambda exemplar: exemplar.timestamp or 0)
