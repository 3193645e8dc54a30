"""Measurements of runs under load, latency limits, and comparisons of two configurations in turn."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple, Protocol

from weft.base.errors import InvalidArgumentError
from weft.capacity.tuning.space import Configuration, Cost

#: Percentiles of latency that a run reports and a service level objective may name.
PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9)
#: Objectives -> whether more is better.
OBJECTIVES: Mapping[str, bool] = {"throughput": True, "cpu": False, "latency": False}
#: An open loop counts as served if so much of what was offered is answered in time.
_MIN_SERVED = 0.95
_LIMIT = re.compile(r"p(?P<percent>\d+(?:\.\d+)?)=(?P<value>\d+(?:\.\d+)?)(?P<unit>us|ms|s)")
_UNITS_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
#: More requests in work at once are worth it only for so much more throughput.
_MIN_STEP_GAIN = 1.05
_MAX_CONCURRENCY = 512
#: A trial that is so many times worse in every objective is given up after a short probe.
_HOPELESS = 1.3
_PROBE_SHARE = 0.3


class LatencyLimit(NamedTuple):
    """A percentile of latency and its limit, milliseconds."""

    percent: float
    limit_ms: float

    def __str__(self) -> str:
        return f"p{self.percent:g}={self.limit_ms:g}ms"


def parse_limit(text: str) -> LatencyLimit:
    """Parse a limit such as ``p99=50ms``. Raises InvalidArgumentError."""
    found = _LIMIT.fullmatch(text.strip())
    if found is None or float(found["percent"]) not in PERCENTILES or not float(found["value"]):
        percents = ", ".join(f"p{percent:g}" for percent in PERCENTILES)
        raise InvalidArgumentError(
            f"--slo '{text}' is not of the form PERCENTILE=TIME; give one of {percents} and a time above 0 in us, ms "
            "or s, such as p99=50ms"
        )
    return LatencyLimit(float(found["percent"]), float(found["value"]) * _UNITS_MS[found["unit"]])


@dataclass(frozen=True)
class Measurement:
    """One run under load.

    Attributes:
        level: Requests in flight; 0 for an open loop.
        cpu_s_per_1000: CPU-seconds of all processes of the mesh for 1000 answers; nan without answers.
        latency_ms: By percentile; nan without answers.
        offered_per_s: Mean rate of arrivals of an open loop; 0 for a closed one.
    """

    level: int
    throughput_per_s: float
    cpu_s_per_1000: float
    latency_ms: Mapping[float, float]
    num_answers: int
    errors: Mapping[str, int] = field(default_factory=dict)
    offered_per_s: float = 0.0
    first_error: str = ""

    def latencies(self) -> dict[str, float]:
        """Milliseconds by percentile as text, since JSON has no other keys."""
        return {f"p{percent:g}": latency for percent, latency in self.latency_ms.items() if math.isfinite(latency)}


class Goal(NamedTuple):
    """The goal of a search: keep all limits, at least one, and be best in an objective."""

    limits: tuple[LatencyLimit, ...]
    objective: str

    def values(self, measured: Measurement) -> dict[str, float]:
        """The objectives of a run; ``latency`` is the percentile of the first limit."""
        latency_ms = measured.latency_ms.get(self.limits[0].percent, math.nan)
        return {"throughput": measured.throughput_per_s, "cpu": measured.cpu_s_per_1000, "latency": latency_ms}

    def violations(self, measured: Measurement) -> list[str]:
        """The limits that the run exceeded, in words; empty if it is feasible."""
        return [text for text, excess in self._excesses(measured) if excess > 0]

    def excess(self, measured: Measurement) -> float:
        """The worst relative excess over the limits; feasible if 0 or less."""
        return max(excess for _, excess in self._excesses(measured))

    def _excesses(self, measured: Measurement) -> list[tuple[str, float]]:
        found: list[tuple[str, float]] = []
        for limit in self.limits:
            got_ms = measured.latency_ms.get(limit.percent, math.nan)
            excess = got_ms / limit.limit_ms - 1 if math.isfinite(got_ms) else 1.0
            found.append((f"p{limit.percent:g} is {got_ms:.3g} ms, above {limit.limit_ms:g} ms", excess))
        num_errors = sum(measured.errors.values())
        share = num_errors / max(num_errors + measured.num_answers, 1)
        shown = ", ".join(f"{count} {status}" for status, count in sorted(measured.errors.items()))
        found.append((f"requests failed: {shown}: {measured.first_error}", share or -1.0))
        if measured.offered_per_s:
            served = measured.throughput_per_s / measured.offered_per_s
            text = f"{measured.throughput_per_s:.4g} of {measured.offered_per_s:.4g} requests a second are answered"
            found.append((text, _MIN_SERVED - served))
        return found

    def gains(self, old: Measurement, new: Measurement) -> dict[str, float]:
        """Improvement factor of the second run over the first, by objective.

        Runs side by side see the same machine state, so their ratio is valid where figures of different minutes are
        not.
        """
        before, after = self.values(old), self.values(new)
        return {
            name: _ratio(after[name], before[name]) if more_is_better else _ratio(before[name], after[name])
            for name, more_is_better in OBJECTIVES.items()
        }


def _ratio(better: float, worse: float) -> float:
    if not (math.isfinite(better) and math.isfinite(worse)) or better <= 0 or worse <= 0:
        return 1.0 if better == worse else 0.0 if not better > 0 else math.inf
    return better / worse


def _median_run(runs: Sequence[Measurement]) -> Measurement:
    """Combine the runs at one level: the median of each figure, all errors."""
    errors: Counter[str] = Counter()
    for run in runs:
        errors.update(run.errors)
    return Measurement(
        level=runs[-1].level,
        throughput_per_s=median(run.throughput_per_s for run in runs),
        cpu_s_per_1000=median(run.cpu_s_per_1000 for run in runs),
        latency_ms={percent: median(run.latency_ms.get(percent, math.nan) for run in runs) for percent in PERCENTILES},
        num_answers=sum(run.num_answers for run in runs),
        errors=errors,
        offered_per_s=median(run.offered_per_s for run in runs),
        first_error=next((run.first_error for run in runs if run.first_error), ""),
    )


class TrialError(Exception):
    """A configuration could not be measured; the message says why. The search goes on."""


class Running(Protocol):
    """A running configuration."""

    def measure(self, level: int, duration_s: float) -> Measurement:
        """Measure a run with ``level`` requests in flight, 0: at planned arrivals. Raises TrialError."""

    def costs(self) -> Mapping[str, Cost]:
        """Each model's share of the work so far. Raises TrialError."""

    def close(self) -> None:
        """Stop it."""


class Bench(Protocol):
    """Starts configurations."""

    def open(self, configuration: Configuration, *, fresh: bool = False) -> Running:
        """Start a configuration, with ``fresh`` in new processes. Raises TrialError."""


class TrialLoad(NamedTuple):
    """Load of the trials.

    Attributes:
        levels_vary: Search for the highest load that keeps the latencies, starting at ``level``; else use ``level``.
        level: Requests in flight; 0: planned arrivals.
    """

    levels_vary: bool
    level: int
    duration_s: float


@dataclass(frozen=True)
class Comparison:
    """A configuration compared with the one that it may replace.

    Attributes:
        pairs: The runs, old and new.
        gains: By objective, improvement factors, run by run.
        keeps_limits: The new one keeps the latencies, by the median of its runs.
    """

    pairs: Sequence[tuple[Measurement, Measurement]]
    old: Measurement
    new: Measurement
    gains: Mapping[str, Sequence[float]]
    keeps_limits: bool

    def gain(self, objective: str) -> float:
        """Median gain."""
        return median(self.gains[objective])


class Contest(NamedTuple):
    """Measures running configurations under a given load and goal."""

    goal: Goal
    load: TrialLoad

    def best_level(self, running: Running, start: int) -> Measurement:
        """The run with the highest throughput that keeps the limits; if none does, that of the least load.

        Doubles or halves the requests in flight from ``start`` on. Raises TrialError: a run failed.
        """
        best = running.measure(start, self.load.duration_s)
        if not self.load.levels_vary:
            return best
        if self.goal.excess(best) > 0:
            while best.level > 1 and self.goal.excess(best) > 0:
                best = running.measure(best.level // 2, self.load.duration_s)
            return best
        while best.level * 2 <= _MAX_CONCURRENCY:
            more = running.measure(best.level * 2, self.load.duration_s)
            if self.goal.excess(more) > 0 or more.throughput_per_s < _MIN_STEP_GAIN * best.throughput_per_s:
                if self.goal.excess(more) <= 0 and more.throughput_per_s > best.throughput_per_s:
                    return more
                break
            best = more
        return best

    def is_hopeless(self, old: Running, level: int, new: Running) -> str:
        """Probe a configuration with short runs; return why it is not worth a full trial, "" if it is.

        Raises:
            TrialError: A run failed.
        """
        duration_s = self.load.duration_s * _PROBE_SHARE
        probe = new.measure(level, duration_s)
        if probe.errors and not probe.num_answers:
            return self.goal.violations(probe)[0]
        incumbent = old.measure(level, duration_s)
        found = self.goal.gains(incumbent, probe)
        if self.goal.excess(incumbent) > 0 or any(gain * _HOPELESS > 1 for gain in found.values()):
            return ""
        shown = ", ".join(f"{name} {gain:.2f}" for name, gain in found.items())
        return f"a short probe is behind in everything, times as good as the best so far: {shown}"

    def compare(self, old: Running, old_level: int, new: Running, new_level: int, num_rounds: int) -> Comparison:
        """Measure both in turn, in alternating order, so that other work on the machine affects both alike.

        If levels vary, a configuration that exceeds the limits by the median of its runs is compared again under half
        the load: its level was found by a single, possibly lucky, run.

        Raises:
            TrialError: A run failed.
        """
        while True:
            pairs = []
            for number in range(num_rounds):
                if number % 2:
                    after = new.measure(new_level, self.load.duration_s)
                    pairs.append((old.measure(old_level, self.load.duration_s), after))
                else:
                    before = old.measure(old_level, self.load.duration_s)
                    pairs.append((before, new.measure(new_level, self.load.duration_s)))
            found = self.joined(pairs)
            can_ease = [
                self.load.levels_vary and run.level > 1 and self.goal.excess(run) > 0 for run in (found.old, found.new)
            ]
            if not any(can_ease):
                return found
            old_level, new_level = old_level >> can_ease[0], new_level >> can_ease[1]

    def joined(self, pairs: Sequence[tuple[Measurement, Measurement]]) -> Comparison:
        """Pairs of runs as one comparison."""
        old, new = (_median_run([pair[side] for pair in pairs]) for side in (0, 1))
        ratios = [self.goal.gains(*pair) for pair in pairs]
        gains = {name: [each[name] for each in ratios] for name in OBJECTIVES}
        return Comparison(tuple(pairs), old, new, gains, self.goal.excess(new) <= 0)
