"""The search: which configuration is tried next, when it replaces the best so far, and when it is enough."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from weft.base.errors import InvalidArgumentError, WeftError
from weft.capacity.tuning.measurement import OBJECTIVES, Bench, Comparison, Contest, Measurement, Running, TrialError
from weft.capacity.tuning.space import Configuration, Cost, SearchSpace, Value
from weft.capacity.tuning.trials import (
    FAILED,
    HOPELESS,
    INFEASIBLE,
    MEASURED,
    SHIPPED,
    OpenTrial,
    TrialLog,
    TrialRecord,
    latencies,
)

#: A trial replaces the incumbent if its objective is so many times better, in the median of all rounds.
_MIN_GAIN = 1.03
#: And better at all in so many of them, as a share: one lucky round of a busy machine is not a gain.
_MIN_ROUNDS_WON = 0.8
#: A changed setting stays only if it is worth so much.
_MIN_WORTH = 1.02
#: Rounds of every trial, and more of one that seems better.
_NUM_ROUNDS = 2
_NUM_MORE_ROUNDS = 3
#: Of so many trials in a row, behind the first steps, one is the sampler's, the others are steps from the incumbent.
_SAMPLER_EVERY = 3
_NUM_FIRST_STEPS = 4


class SearchLimits(NamedTuple):
    """When a search is over.

    Attributes:
        num_trials: The shipped configuration is the first.
        budget_s: For everything, the confirmation included, seconds.
        num_confirmations: Rounds of the shipped configuration against the pick, at the end.
    """

    num_trials: int
    budget_s: float
    num_confirmations: int


class SearchResult(NamedTuple):
    """What a search found.

    Attributes:
        pick: The best configuration; the shipped one if nothing was better.
        confirmation: The pick beside the shipped configuration; None if they are the same.
        why: Why the search is over, and why the pick is the shipped one, if it is.
    """

    pick: Configuration
    confirmation: Comparison | None
    why: str


class _Incumbent:
    """The best configuration so far, running."""

    def __init__(self, record: TrialRecord, running: Running, measured: Measurement) -> None:
        self.record = record
        self.running = running
        self.measured = measured


#: Whether a trial replaces the incumbent beside which it was measured.
_Rule: TypeAlias = Callable[[Comparison, _Incumbent], bool]


class Search:
    """Searches.

    Args:
        space: What may be tried.
        bench: Starts configurations.
        contest: Measures them.
        trials: Those of before, and where new ones are kept.
        limits: When it is over.
        clock_s: Monotonic.
        on_trial: Called as a trial ends.
    """

    def __init__(
        self,
        space: SearchSpace,
        bench: Bench,
        contest: Contest,
        trials: TrialLog,
        limits: SearchLimits,
        *,
        clock_s: Callable[[], float],
        on_trial: Callable[[TrialRecord], None] = lambda _: None,
    ) -> None:
        self._space = space
        self._bench = bench
        self._contest = contest
        self._trials = trials
        self._limits = limits
        self._clock_s = clock_s
        self._on_trial = on_trial
        self._start_s = clock_s()
        self._open_s = self._trial_s = 0.0
        self._num_tries = 0

    def run(self) -> SearchResult:
        """Search until a limit is met.

        Raises:
            InvalidArgumentError: The shipped configuration cannot be measured.
            WeftError: No requests can be made.
        """
        incumbent = self._first()
        try:
            costs = incumbent.running.costs()
            why = self._stop_reason(incumbent)
            while not why:
                trial = self._next(incumbent.record.configuration, costs)
                if trial is None:
                    why = "no configuration is left that was not tried"
                    break
                incumbent = self._try(trial, incumbent, self._is_better)
                why = self._stop_reason(incumbent)
            incumbent = self._simplified(incumbent)
        finally:
            incumbent.running.close()
        return self._confirmed(incumbent, why)

    def _first(self) -> _Incumbent:
        """The incumbent of before; else the shipped configuration, the first trial."""
        known = [record for record in self._trials.records if record.is_incumbent]
        for record in reversed(known):
            with contextlib.suppress(TrialError):
                running = self._open(record.configuration)
                return _Incumbent(record, running, self._measured(running, record.level))
        trial = self._trials.begin(self._space.shipped)
        try:
            running = self._open(self._space.shipped)
        except TrialError as error:
            raise InvalidArgumentError(f"the configuration as it is shipped cannot be measured: {error}") from None
        measured = self._measured(running, self._contest.load.level)
        goal = self._contest.goal
        if not measured.num_answers:
            running.close()
            raise InvalidArgumentError(
                f"no request is answered as the graph is shipped: {measured.first_error or 'no arrivals'}; --data FILE "
                "gives requests that it takes"
            )
        record = TrialRecord(
            configuration=self._space.shipped,
            outcome=SHIPPED,
            reason="; ".join(goal.violations(measured)),
            values=goal.values(measured),
            gains=dict.fromkeys(OBJECTIVES, 1.0),
            excess=goal.excess(measured),
            level=measured.level,
            is_incumbent=True,
            latency_ms=latencies(measured),
        )
        self._end(trial, record)
        return _Incumbent(record, running, measured)

    def _measured(self, running: Running, level: int) -> Measurement:
        try:
            return self._contest.best_level(running, level)
        except BaseException:
            running.close()
            raise

    def _open(self, configuration: Configuration, *, fresh: bool = False) -> Running:
        before_s = self._clock_s()
        try:
            return self._bench.open(configuration, fresh=fresh)
        finally:
            self._open_s = max(self._open_s, self._clock_s() - before_s)

    def _stop_reason(self, incumbent: _Incumbent) -> str:
        """Why it is over: what is left is needed to simplify the incumbent, and to confirm it."""
        num_left = len(self._simpler(incumbent.record.configuration))
        if len(self._trials.records) + num_left >= self._limits.num_trials:
            return f"{self._limits.num_trials} trials are done"
        if self._left_s() < (num_left + 1) * self._trial_s:
            return f"the budget of {self._limits.budget_s:g} s is spent"
        return ""

    def _left_s(self) -> float:
        """Time until the pick must be confirmed, seconds."""
        runs_s = 2 * self._limits.num_confirmations * self._contest.load.duration_s
        return self._limits.budget_s - (self._clock_s() - self._start_s) - 2 * self._open_s - runs_s

    def _simpler(self, configuration: Configuration) -> list[dict[str, Value]]:
        """The configuration with one of its changes taken back, if that was not tried."""
        changes = self._space.changes(configuration)
        found = [{**configuration, key: shipped} for key, (shipped, _) in changes.items()]
        return [one for one in found if not self._trials.was_tried(one)]

    def _simplified(self, incumbent: _Incumbent) -> _Incumbent:
        """The incumbent without the changes that are worth nothing, as far as the limits allow."""
        for key in list(self._space.changes(incumbent.record.configuration)):
            simpler = {**incumbent.record.configuration, key: self._space.settings[key].shipped}
            has_trials = len(self._trials.records) < self._limits.num_trials
            if has_trials and self._left_s() >= self._trial_s and not self._trials.was_tried(simpler):
                incumbent = self._try(self._trials.begin(simpler), incumbent, self._is_as_good)
        return incumbent

    def _next(self, incumbent: Configuration, costs: Mapping[str, Cost]) -> OpenTrial | None:
        """A step from the incumbent, later every third time what the sampler proposes, whichever there is."""
        self._num_tries += 1
        is_samplers = self._num_tries > _NUM_FIRST_STEPS and self._num_tries % _SAMPLER_EVERY == 0
        if is_samplers and (proposed := self._trials.propose()) is not None:
            return proposed
        steps: Iterator[Configuration] = self._space.steps(incumbent, costs)
        untried = next((step for step in steps if not self._trials.was_tried(step)), None)
        return self._trials.propose() if untried is None else self._trials.begin(untried)

    def _try(self, trial: OpenTrial, incumbent: _Incumbent, replaces: _Rule) -> _Incumbent:
        """The incumbent, or the trial if it ``replaces`` it, running; the other one is closed."""
        before_s = self._clock_s()
        try:
            return self._tried(trial, incumbent, replaces)
        finally:
            self._trial_s = max(self._trial_s, self._clock_s() - before_s)

    def _tried(self, trial: OpenTrial, incumbent: _Incumbent, replaces: _Rule) -> _Incumbent:
        try:
            running = self._open(trial.configuration)
        except (TrialError, WeftError) as error:
            self._end(trial, TrialRecord(trial.configuration, FAILED, str(error)))
            return self._checked(incumbent)
        winner = None
        try:
            if why := self._contest.is_hopeless(incumbent.running, incumbent.measured.level, running):
                self._end(trial, TrialRecord(trial.configuration, HOPELESS, why))
                return incumbent
            found = self._compared(running, incumbent, replaces)
            record = self._record(trial.configuration, found, incumbent, is_incumbent=replaces(found, incumbent))
            self._end(trial, record)
            if record.is_incumbent:
                winner = _Incumbent(record, running, found.new)
            else:
                incumbent.measured = found.old
        except TrialError as error:
            self._end(trial, TrialRecord(trial.configuration, FAILED, str(error)))
            return self._checked(incumbent)
        finally:
            (running if winner is None else incumbent.running).close()
        return winner or incumbent

    def _compared(self, running: Running, incumbent: _Incumbent, replaces: _Rule) -> Comparison:
        contest = self._contest
        level = incumbent.measured.level
        if contest.load.levels_vary:
            level = contest.best_level(running, level).level
        found = contest.compare(incumbent.running, incumbent.measured.level, running, level, _NUM_ROUNDS)
        if not replaces(found, incumbent):
            return found
        more = contest.compare(incumbent.running, found.old.level, running, found.new.level, _NUM_MORE_ROUNDS)
        if (more.old.level, more.new.level) != (found.old.level, found.new.level):
            return more
        return contest.joined([*found.pairs, *more.pairs])

    def _is_better(self, found: Comparison, incumbent: _Incumbent) -> bool:
        if not found.keeps_limits:
            return False
        goal = self._contest.goal
        if goal.excess(found.old) > 0 and goal.excess(incumbent.measured) > 0:  # twice, so it was no bad moment
            return True
        rounds = found.gains[goal.objective]
        won = sum(gain > 1 for gain in rounds) / len(rounds)
        return found.gain(goal.objective) >= _MIN_GAIN and won >= _MIN_ROUNDS_WON

    def _is_as_good(self, found: Comparison, _: _Incumbent) -> bool:
        return found.keeps_limits and found.gain(self._contest.goal.objective) * _MIN_WORTH >= 1

    def _record(
        self, configuration: Configuration, found: Comparison, incumbent: _Incumbent, *, is_incumbent: bool
    ) -> TrialRecord:
        goal, before = self._contest.goal, incumbent.record
        gains = {name: before.gains[name] * found.gain(name) for name in OBJECTIVES}
        return TrialRecord(
            configuration=configuration,
            outcome=MEASURED if found.keeps_limits else INFEASIBLE,
            reason="; ".join(goal.violations(found.new)),
            values=goal.values(found.new),
            gains=gains,
            excess=goal.excess(found.new),
            level=found.new.level,
            is_incumbent=is_incumbent,
            latency_ms=latencies(found.new),
        )

    def _checked(self, incumbent: _Incumbent) -> _Incumbent:
        """The incumbent, started again if it has ended with the trial that failed, as when memory ran out."""
        with contextlib.suppress(TrialError):
            run = incumbent.running.measure(incumbent.measured.level, self._contest.load.duration_s / 4)
            if run.num_answers:
                return incumbent
        incumbent.running.close()
        try:
            incumbent.running = self._open(incumbent.record.configuration)
        except TrialError as error:
            raise InvalidArgumentError(f"the best configuration so far does not start again: {error}") from None
        return incumbent

    def _confirmed(self, incumbent: _Incumbent, why: str) -> SearchResult:
        """The incumbent beside the shipped configuration, in rounds of their own."""
        shipped = self._space.shipped
        if not self._space.changes(incumbent.record.configuration):
            return SearchResult(shipped, None, f"{why}; nothing was better than what is shipped")
        level = next(record.level for record in self._trials.records if record.outcome == SHIPPED)
        try:
            with (
                contextlib.closing(self._open(shipped, fresh=True)) as old,
                contextlib.closing(self._open(incumbent.record.configuration, fresh=True)) as new,
            ):
                found = self._contest.compare(old, level, new, incumbent.measured.level, self._limits.num_confirmations)
        except TrialError as error:
            return SearchResult(shipped, None, f"{why}; the best trial could not be measured again: {error}")
        was_feasible = self._contest.goal.excess(found.old) <= 0
        if found.keeps_limits and (not was_feasible or found.gain(self._contest.goal.objective) > 1):
            return SearchResult(incumbent.record.configuration, found, why)
        return SearchResult(shipped, found, f"{why}; the best trial was no better when it was measured again")

    def _end(self, trial: OpenTrial, record: TrialRecord) -> None:
        plain = replace(
            record, gains=_finite(record.gains), values=_finite(record.values), excess=min(record.excess, 1e9)
        )
        trial.end(plain)
        self._on_trial(plain)


def _finite(figures: Mapping[str, float]) -> dict[str, float]:
    """Figures that JSON and the sampler take."""
    return {name: figure if abs(figure) < 1e9 else 1e9 for name, figure in figures.items()}
