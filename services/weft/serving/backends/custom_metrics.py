"""Metrics that models define: counters, gauges and histograms beside those of the server."""

import math
import re
import threading
from bisect import bisect_left
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from weft.base.errors import InvalidArgumentError, ResourceExhaustedError, UnsupportedError

COUNTER, GAUGE, HISTOGRAM = "COUNTER", "GAUGE", "HISTOGRAM"
KINDS = (COUNTER, GAUGE, HISTOGRAM)
#: Actions of each kind of metric.
_ACTIONS = {COUNTER: ("increment",), GAUGE: ("increment", "set"), HISTOGRAM: ("observe",)}

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*", re.ASCII)
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*", re.ASCII)
_OWN_PREFIXES = ("nv_", "weft_", "process_", "python_")
#: Behind the name of a histogram in its samples.
_SUFFIXES = ("_bucket", "_count", "_sum")

#: Limits for all models, and for one family: labels often come from clients.
MAX_FAMILIES, MAX_METRICS = 1024, 4096

Labels = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class _Value:
    """One metric: a number, or the counts of a histogram, the last for values above every bound."""

    owners: set[str] = field(default_factory=set)
    number: float = 0.0
    bounds: tuple[float, ...] = ()
    counts: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Family:
    description: str
    kind: str
    owners: set[str] = field(default_factory=set)
    values: dict[Labels, _Value] = field(default_factory=dict)


class CustomMetrics(Collector):
    """The model-defined metrics of a service; thread-safe. A metric is removed when its last owner releases it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._families: dict[str, _Family] = {}

    def add_family(self, owner: str, name: str, description: str, kind: str) -> None:
        """Add a family, if it is new. Raises InvalidArgumentError, or ResourceExhaustedError for too many."""
        if not _NAME.fullmatch(name):
            raise InvalidArgumentError(
                f"metric name '{name[:80]}' must be letters, digits, '_' and ':', no digit first"
            )
        if name.startswith(_OWN_PREFIXES):
            raise InvalidArgumentError(
                f"metric name '{name}': those that begin with {', '.join(_OWN_PREFIXES)} are the server's; use another"
            )
        if not _is_text(description):
            raise InvalidArgumentError(f"the description of metric family '{name}' must be text that UTF-8 can hold")
        with self._lock:
            family = self._families.get(name)
            if family is None:
                if len(self._families) >= MAX_FAMILIES:
                    raise ResourceExhaustedError(
                        f"there are {MAX_FAMILIES} metric families, the most allowed; use labels"
                    )
                samples = {name + suffix for suffix in _SUFFIXES} if kind == HISTOGRAM else set()
                for known, other in self._families.items():
                    if known in samples or (other.kind == HISTOGRAM and name in {known + end for end in _SUFFIXES}):
                        raise InvalidArgumentError(
                            f"metric families '{name}' and '{known}' would both have samples of one name; rename one"
                        )
                family = self._families[name] = _Family(description, kind)
            if family.kind != kind:
                raise InvalidArgumentError(
                    f"Family name already exists with different type: '{name}' is {family.kind}, got {kind}"
                )
            family.owners.add(owner)

    def add_metric(self, owner: str, name: str, labels: Mapping[str, str], bounds: Sequence[float] | None) -> Labels:
        """Add a metric at 0, if it is new; returns its key in the family.

        ``bounds`` are those of a histogram's buckets, rising; an existing metric keeps its own. Raises
        InvalidArgumentError, or ResourceExhaustedError where the family has ``MAX_METRICS``.
        """
        for label, text in labels.items():
            if not isinstance(label, str) or not _LABEL.fullmatch(label) or not _is_text(text):
                raise InvalidArgumentError(
                    f"metric labels of '{name}' must be strings by name, got {label!r}: {text!r:.80}"
                )
        key = tuple(sorted(labels.items()))
        with self._lock:
            family = self._family(name)
            is_histogram = family.kind == HISTOGRAM
            if is_histogram != (bounds is not None):
                what = "needs buckets=[...]" if is_histogram else "takes no buckets"
                raise InvalidArgumentError(f"metric of '{name}', which is a {family.kind}, {what}")
            if is_histogram and "le" in labels:
                raise InvalidArgumentError(f"metric of '{name}' has label 'le', which its buckets have; use another")
            found = tuple(map(float, bounds or ()))
            if any(low >= high for low, high in pairwise(found)) or not all(map(math.isfinite, found)):
                raise InvalidArgumentError(f"buckets of '{name}' must be finite numbers that rise, got {list(found)}")
            if key not in family.values:
                if len(family.values) >= MAX_METRICS:
                    raise ResourceExhaustedError(
                        f"metric family '{name}' has {MAX_METRICS} metrics, the most allowed; use labels of few values"
                    )
                family.values[key] = _Value(bounds=found, counts=[0] * (len(found) + 1))
            family.values[key].owners.add(owner)
        return key

    def record(self, name: str, labels: Labels, action: str, number: float) -> None:
        """Update a metric. Raises as ``check_action``."""
        with self._lock:
            family = self._families.get(name)
            value = None if family is None else family.values.get(labels)
            if family is None or value is None:
                return  # its last owner has released it
            check_action(family.kind, action, number)
            if action == "set":
                value.number = number
                return
            value.number += number
            if action == "observe":
                value.counts[bisect_left(value.bounds, number)] += 1

    def value(self, name: str, labels: Labels) -> float:
        """The value of a counter or gauge. Raises UnsupportedError for a histogram."""
        with self._lock:
            family = self._family(name)
            if family.kind == HISTOGRAM:
                raise UnsupportedError("TRITONSERVER_METRIC_KIND_HISTOGRAM does not support Value")
            value = family.values.get(labels)
            return 0.0 if value is None else value.number

    def release(self, owner: str) -> None:
        """Remove the metrics that have no other owner."""
        with self._lock:
            for name, family in list(self._families.items()):
                family.owners.discard(owner)
                for labels, value in list(family.values.items()):
                    value.owners.discard(owner)
                    if not value.owners:
                        del family.values[labels]
                if not family.owners:
                    del self._families[name]

    def _family(self, name: str) -> _Family:
        family = self._families.get(name)
        if family is None:
            raise InvalidArgumentError(f"metric family '{name}' is gone: the model that made it was unloaded")
        return family

    def collect(self) -> Iterator[Metric]:
        """Every family; counters keep their names, without the ``_total`` that the Python client would add."""
        with self._lock:
            return iter([_exposed(name, family, self._families) for name, family in self._families.items()])


def check_action(kind: str, action: str, number: float) -> None:
    """Check an update of a metric. Raises UnsupportedError, or InvalidArgumentError if a counter would decrease."""
    if action not in _ACTIONS[kind]:
        raise UnsupportedError(f"TRITONSERVER_METRIC_KIND_{kind} does not support {action.capitalize()}")
    if kind == COUNTER and not number >= 0:
        raise InvalidArgumentError(
            "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by non-negative values, got "
            f"{number:g}"
        )


def _is_text(value: object) -> bool:
    """Whether it is a string without lone surrogates; one in a label would break the whole scrape."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _exposed(name: str, family: _Family, names: Container[str]) -> Metric:
    is_counter = family.kind == COUNTER
    if is_counter and name.endswith("_total") and (base := name.removesuffix("_total")) not in names:
        metric = Metric(base, family.description, "counter")
    else:
        metric = Metric(name, family.description, "unknown" if is_counter else family.kind.lower())
    for labels, value in family.values.items():
        shown = dict(labels)
        if family.kind != HISTOGRAM:
            metric.add_sample(name, shown, value.number)
            continue
        totals = list(accumulate(value.counts))
        for bound, total in zip([*map(str, value.bounds), "+Inf"], totals, strict=True):
            metric.add_sample(f"{name}_bucket", {**shown, "le": bound}, total)
        metric.add_sample(f"{name}_sum", shown, value.number)
        metric.add_sample(f"{name}_count", shown, totals[-1])
    return metric
