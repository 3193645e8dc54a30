"""Settings of logs and traces that clients change while a process runs, by Triton Inference Server's names.

They are this process's own, and last until it ends. The servicer of each service reads and changes them; a router also
passes a change on to its targets, and a gateway takes it over.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakSet

from opentelemetry import context as otel
from opentelemetry import trace

from weft.base.errors import InvalidArgumentError, UnsupportedError
from weft.base.observing import telemetry
from weft.base.observing.logs import use_plain_lines

LogValue = bool | int | str
_LEVELS = {"log_error": logging.ERROR, "log_warning": logging.WARNING, "log_info": logging.INFO}
_VERBOSE, _FORMAT = "log_verbose_level", "log_format"
_FORMATS = ("default", "ISO8601")
_OFF, _LEVEL, _RATE, _COUNT = "OFF", "trace_level", "trace_rate", "trace_count"
_TRACE_LEVELS = (_OFF, "TIMESTAMPS", "TENSORS")
#: Least value of each trace setting that is a number; the greatest is that of Triton Inference Server's own type.
_NUMBERS = {_RATE: 0, _COUNT: -1, "log_frequency": 0}
_MAX_NUMBER = 2**31 - 1


def _check_name(kind: str, name: str, known: Sequence[str]) -> None:
    if name == f"{kind}_file":
        raise UnsupportedError(
            f"{kind} file location can not be updated through network protocol; standard error or OTLP is where it goes"
        )
    if name not in known:
        raise InvalidArgumentError(f"unknown {kind} setting '{name[:80]}'; use one of: {', '.join(known)}")


class LogSettings(logging.Filter):
    """Which lines a process logs, and in which form; ``values`` are those of Triton Inference Server.

    Args:
        logger: Whose level, and whose handlers' filter, change; None: the root logger.

    Attributes:
        given: All settings but ``log_file``, once one has changed.
        followers: Processes of models; ``follow_log`` of each is told a change.
    """

    def __init__(self, logger: logging.Logger | None = None) -> None:
        super().__init__()
        self._logger = logging.getLogger() if logger is None else logger
        self.given: dict[str, LogValue] = {}
        self.followers: WeakSet[Any] = WeakSet()

    def values(self) -> dict[str, LogValue]:
        """The settings in force; before any change those of ``--log-level``."""
        level = self._logger.getEffectiveLevel()
        found: dict[str, LogValue] = {name: level <= number for name, number in _LEVELS.items()}
        found |= {_VERBOSE: int(level <= logging.DEBUG), _FORMAT: _FORMATS[0]}
        return {"log_file": "", **found, **self.given}

    def update(self, changes: Mapping[str, LogValue | None]) -> None:
        """Change settings, all or none. Raises InvalidArgumentError, or UnsupportedError for ``log_file``."""
        fresh = self.values()
        del fresh["log_file"]
        for name, value in changes.items():
            _check_name("log", name, [*_LEVELS, _VERBOSE, _FORMAT])
            if name in _LEVELS:
                is_right, wanted = isinstance(value, bool), "true or false"
            elif name == _VERBOSE:
                is_right, wanted = isinstance(value, int) and not isinstance(value, bool) and value >= 0, "0 or more"
            else:
                is_right, wanted = value in _FORMATS, f"one of {', '.join(_FORMATS)}"
            if not is_right or value is None:
                raise InvalidArgumentError(f"log setting '{name}' must be {wanted}, got {value!r:.80}")
            fresh[name] = value
        self.given = fresh
        self._apply()
        for follower in list(self.followers):
            follower.follow_log(changes)

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is of a level that is on."""
        for name, level in _LEVELS.items():
            if record.levelno >= level:
                return bool(self.given[name])
        return bool(self.given[_VERBOSE])

    def _apply(self) -> None:
        on = [level for name, level in _LEVELS.items() if self.given[name]]
        # Of a name, which processes of models get; what is above it is left to the filter.
        self._logger.setLevel(logging.DEBUG if self.given[_VERBOSE] else min(on, default=logging.CRITICAL))
        for handler in self._logger.handlers:
            handler.addFilter(self)
        use_plain_lines(is_plain=self.given[_FORMAT] != _FORMATS[0])


class TraceSettings:
    """Which requests start a trace: settings of all models, and of one, which fall back to those of all.

    ``trace_rate`` N: each Nth request; 0: none. ``trace_count`` N: N requests, then none. A request with a
    ``traceparent`` is recorded as that says, but with ``trace_level`` OFF nothing is. Without a change the rate is that
    of ``OTEL_TRACES_SAMPLER_ARG``. ``TENSORS`` records what ``TIMESTAMPS`` does; ``log_frequency`` has no effect.

    Attributes:
        given: The changed settings by model; "": of all.
    """

    def __init__(self) -> None:
        self.given: dict[str, dict[str, list[str]]] = {}
        self._seen: dict[str, list[int]] = {}  # requests, and traces that may still start; by model as above

    def values(self, model: str = "") -> dict[str, list[str]]:
        """The settings in force for a model, "" for all."""
        # Where traces are exported, it was found to be a number as the process started.
        rate = float(os.environ.get("OTEL_TRACES_SAMPLER_ARG") or 1) if telemetry.is_enabled() else 1.0
        found = {
            "trace_mode": ["opentelemetry"],
            _LEVEL: ["TIMESTAMPS" if telemetry.is_enabled() else _OFF],
            _RATE: [str(round(min(1 / rate, _MAX_NUMBER)) if rate else 0)],
            _COUNT: ["-1"],
            "log_frequency": ["0"],
        }
        found |= self.given.get("", {}) | self.given.get(model, {})
        scope = model if model in self.given else ""
        if scope in self._seen:
            found[_COUNT] = [str(self._seen[scope][1])]
        return found

    def update(self, model: str, changes: Mapping[str, Sequence[str]]) -> None:
        """Change settings of a model, or with "" of all; a setting without a value is cleared. All change, or none.

        Raises InvalidArgumentError, or UnsupportedError for ``trace_file``.
        """
        fresh = dict(self.given.get(model, {}))
        for name, values in changes.items():
            _check_name("trace", name, [_LEVEL, *_NUMBERS])
            if not values:
                fresh.pop(name, None)
                continue
            fresh[name] = list(values)
            if name == _LEVEL:
                self._check_level(values)
            elif len(values) != 1 or not _is_number(values[0], _NUMBERS[name]):
                least = _NUMBERS[name]
                shown = ", ".join(values)[:80]
                wanted = f"one whole number from {least} to {_MAX_NUMBER}"
                raise InvalidArgumentError(f"trace setting '{name}' must be {wanted}, got '{shown}'")
        self.given[model] = fresh
        if model and not fresh:
            del self.given[model]
        for scope in [model] if model else list(self._seen):
            self._seen.pop(scope, None)

    def admit(self, model: str, parent: otel.Context, *, is_inference: bool = True) -> otel.Context:
        """The context in which the span of a request starts: decides whether it is recorded, and counts it.

        Where a rate or count is set, a request that is no inference starts no trace.
        """
        if not self.given:
            return parent
        scope = model if model in self.given else ""
        given = self.given.get("", {}) | self.given.get(scope, {})
        if given.get(_LEVEL) == [_OFF]:
            return telemetry.without_spans(parent)
        if not {_RATE, _COUNT} & given.keys() or trace.get_current_span(parent).get_span_context().is_valid:
            return parent
        if not is_inference:
            return telemetry.with_decision(parent, is_sampled=False)
        values = self.values(model)
        seen = self._seen.setdefault(scope, [0, int(values[_COUNT][0])])
        seen[0] += 1
        rate = int(values[_RATE][0])
        is_sampled = bool(rate and seen[1] and seen[0] % rate == 0)
        seen[1] -= is_sampled and seen[1] > 0
        return telemetry.with_decision(parent, is_sampled=is_sampled)

    def _check_level(self, values: Sequence[str]) -> None:
        if unknown := [value for value in values if value not in _TRACE_LEVELS]:
            allowed = ", ".join(_TRACE_LEVELS)
            raise InvalidArgumentError(f"trace setting '{_LEVEL}' must be of {allowed}, got '{unknown[0][:80]}'")
        if _OFF in values and len(values) > 1:
            raise InvalidArgumentError(f"trace setting '{_LEVEL}' must be '{_OFF}' alone, or other levels without it")
        if _OFF not in values and not telemetry.is_enabled():
            raise InvalidArgumentError(
                f"trace setting '{_LEVEL}' cannot be {values[0]}: no traces are exported here; set "
                "OTEL_EXPORTER_OTLP_ENDPOINT before the service starts"
            )


def _is_number(text: str, least: int) -> bool:
    digits = text.removeprefix("-")
    return digits.isascii() and digits.isdecimal() and len(digits) < 12 and least <= int(text) <= _MAX_NUMBER


#: Those of this process.
LOG = LogSettings()
TRACE = TraceSettings()
