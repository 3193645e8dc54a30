"""How two configurations are measured beside each other, and how much load one is given: no I/O of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median as middle
from typing import NamedTuple, Protocol

from weft.capacity.tuning.measurement import Goal, Measurement, gains, median
from weft.capacity.tuning.space import Configuration, Cost

#: More requests in work at once are worth it only for so much more throughput.
_MIN_STEP_GAIN = 1.05
_MAX_CONCURRENCY = 512
#: A trial that is so many times worse in every objective is given up after a short probe.
_HOPELESS = 1.3
_PROBE_SHARE = 0.3


class TrialError(Exception):
    """A configuration could not be measured; the message says why. The search goes on."""


class Running(Protocol):
    """A configuration that serves."""

    def measure(self, level: int, duration_s: float) -> Measurement:
        """A run with ``level`` requests in work at once, 0: at planned arrivals. Raises TrialError."""

    def costs(self) -> Mapping[str, Cost]:
        """What each model has taken so far of the work. Raises TrialError."""

    def close(self) -> None:
        """End it."""


class Bench(Protocol):
    """Starts configurations."""

    def open(self, configuration: Configuration, *, fresh: bool = False) -> Running:
        """One that serves, ``fresh`` in processes of its own. Raises TrialError."""


class Load(NamedTuple):
    """How trials are loaded.

    Attributes:
        levels_vary: The most load that keeps the latencies is looked for, from ``level`` on; else ``level`` is all.
        level: Requests in work at once; 0: planned arrivals.
        duration_s: Of one run.
    """

    levels_vary: bool
    level: int
    duration_s: float


@dataclass(frozen=True)
class Comparison:
    """A configuration beside the one that it is to replace.

    Attributes:
        pairs: The runs, old and new.
        old, new: Medians of them.
        gains: By objective, how many times better the new one is, run by run.
        keeps_limits: The new one keeps the latencies, by the median of its runs.
    """

    pairs: Sequence[tuple[Measurement, Measurement]]
    old: Measurement
    new: Measurement
    gains: Mapping[str, Sequence[float]]
    keeps_limits: bool

    def gain(self, objective: str) -> float:
        """Median gain."""
        return float(middle(self.gains[objective]))


class Contest:
    """Measures configurations that run.

    Args:
        goal: What counts.
        load: Under which they are measured.
    """

    def __init__(self, goal: Goal, load: Load) -> None:
        self.goal = goal
        self.load = load

    def best_level(self, running: Running, start: int) -> Measurement:
        """The run with the highest throughput that keeps the limits; of none that does, that of the least load.

        It doubles or halves the requests in work from ``start`` on.

        Raises:
            TrialError: A run failed.
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
        """Why a configuration is not worth a whole trial, by short runs under the incumbent's load; "" if it is.

        Raises:
            TrialError: A run failed.
        """
        duration_s = self.load.duration_s * _PROBE_SHARE
        probe = new.measure(level, duration_s)
        if probe.errors and not probe.num_answers:
            return self.goal.violations(probe)[0]
        incumbent = old.measure(level, duration_s)
        found = {name: ratios[0] for name, ratios in gains(self.goal, [(incumbent, probe)]).items()}
        if self.goal.excess(incumbent) > 0 or any(gain * _HOPELESS > 1 for gain in found.values()):
            return ""
        shown = ", ".join(f"{name} {gain:.2f}" for name, gain in found.items())
        return f"a short probe is behind in everything, times as good as the best so far: {shown}"

    def compare(self, old: Running, old_level: int, new: Running, new_level: int, num_rounds: int) -> Comparison:
        """Both in turn, each round in the other order, so that what else the machine does meets both alike.

        Where levels vary, one that exceeds the limits by the median of its runs is compared again under half the load:
        its level was found by a single run, and was that of a good moment.

        Raises:
            TrialError: A run failed.
        """
        while True:
            pairs = [self._round(old, old_level, new, new_level, number) for number in range(num_rounds)]
            found = self.joined(pairs)
            can_ease_old = self._can_ease(found.old)
            can_ease_new = self._can_ease(found.new)
            if not (can_ease_old or can_ease_new):
                return found
            old_level = old_level // 2 if can_ease_old else old_level
            new_level = new_level // 2 if can_ease_new else new_level

    def _can_ease(self, measured: Measurement) -> bool:
        return self.load.levels_vary and measured.level > 1 and self.goal.excess(measured) > 0

    def _round(
        self, old: Running, old_level: int, new: Running, new_level: int, number: int
    ) -> tuple[Measurement, Measurement]:
        if number % 2:
            after = new.measure(new_level, self.load.duration_s)
            return old.measure(old_level, self.load.duration_s), after
        before = old.measure(old_level, self.load.duration_s)
        return before, new.measure(new_level, self.load.duration_s)

    def joined(self, pairs: Sequence[tuple[Measurement, Measurement]]) -> Comparison:
        """Pairs of runs as one comparison."""
        old, new = median([pair[0] for pair in pairs]), median([pair[1] for pair in pairs])
        return Comparison(tuple(pairs), old, new, gains(self.goal, pairs), self.goal.excess(new) <= 0)
