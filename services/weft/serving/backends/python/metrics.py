"""Metrics of a ``model.py``: ``pb_utils.MetricFamily``."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from weft.base.errors import WeftError
from weft.serving.backends.base import MetricSink
from weft.serving.backends.custom_metrics import KINDS, check_action
from weft.serving.backends.python.errors import TritonModelException

_ResultT = TypeVar("_ResultT")


class MetricFamily:
    """Metrics of one name; models, instances and loads share equal families and metrics.

    They exist until every instance that made them is unloaded.

    Args:
        name: In ``/metrics``.
        description: Help text; that of the first family of this name.
        kind: ``MetricFamily.COUNTER``, ``GAUGE`` or ``HISTOGRAM``.

    Raises:
        TritonModelException: The name is invalid, or that of a family of another kind.
    """

    COUNTER, GAUGE, HISTOGRAM = KINDS

    _sink: ClassVar[MetricSink | None] = None
    _owner: ClassVar[str] = ""

    def __init__(self, name: str, description: str, kind: str) -> None:
        if self._sink is None:
            raise TritonModelException("metrics are for a model.py: no service runs this model")
        if kind not in KINDS:
            raise TritonModelException(f"kind must be MetricFamily.COUNTER, GAUGE or HISTOGRAM, got {kind!r}")
        self._name, self._kind = str(name), kind
        _tried(self._sink.add_family, self._owner, self._name, str(description), kind)

    def Metric(  # noqa: N802  # the name that models call
        self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None
    ) -> "Metric":
        """The metric with these labels.

        Args:
            labels: Strings by name.
            buckets: Upper bounds of a histogram's buckets, rising; required there, an error elsewhere.

        Raises:
            TritonModelException: Labels or buckets are invalid.
        """
        sink = self._sink
        if sink is None:
            raise TritonModelException("metrics are for a model.py: no service runs this model")
        key = _tried(sink.add_metric, self._owner, self._name, dict(labels or {}), buckets)
        return Metric(sink, self._name, self._kind, key)


class Metric:
    """One counter, gauge or histogram; made by ``MetricFamily.Metric``. May be used from any thread."""

    def __init__(self, sink: MetricSink, name: str, kind: str, labels: Any) -> None:
        self._sink, self._name, self._kind, self._labels = sink, name, kind, labels

    def increment(self, value: float) -> None:
        """Add ``value`` to a counter or gauge; a gauge may shrink. Raises TritonModelException."""
        self._record("increment", value)

    def set(self, value: float) -> None:
        """Set a gauge. Raises TritonModelException."""
        self._record("set", value)

    def observe(self, value: float) -> None:
        """Add ``value`` to a histogram. Raises TritonModelException."""
        self._record("observe", value)

    def value(self) -> float:
        """Of a counter or gauge, of all instances together. Raises TritonModelException for a histogram."""
        return _tried(self._sink.value, self._name, self._labels)

    def _record(self, action: str, value: float) -> None:
        number = float(value)
        _tried(check_action, self._kind, action, number)
        self._sink.record(self._name, self._labels, action, number)


def _tried(function: Callable[..., _ResultT], *arguments: Any) -> _ResultT:
    try:
        return function(*arguments)
    except WeftError as error:
        raise TritonModelException(error.message) from None
