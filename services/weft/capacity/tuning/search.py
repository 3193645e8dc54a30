"""The search: which configuration to try next, when it replaces the best so far, and when to stop."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from weft.base.errors import InvalidArgumentError, WeftError
from weft.capacity.tuning.measurement import OBJECTIVES, Bench, Comparison, Contest, Measurement, Running, TrialError
from weft.capacity.tuning.space import Configuration, Cost, SearchSpace
from weft.capacity.tuning.trials import FAILED, HOPELESS, INFEASIBLE, MEASURED, SHIPPED, OpenTrial, Study, TrialRecord

#: A trial replaces the incumbent if its objective is so many times better, in the median of all rounds.
_MIN_GAIN = 1.03
#: And better at all in so many of them, as a share: one lucky round of a busy machine is not a gain.
_MIN_ROUNDS_WON = 0.8
#: A changed setting stays only if it is worth so much.
_MIN_WORTH = 1.02
#: Rounds of every trial, and more of one that seems better.
_NUM_ROUNDS, _NUM_MORE_ROUNDS = 2, 3
#: Of so many trials in a row, behind the first steps, one is the sampler's, the others are steps from the incumbent.
_SAMPLER_EVERY, _NUM_FIRST_STEPS = 3, 4


class SearchResult(NamedTuple):
    """Result of a search.

    Attributes:
        pick: The best configuration; the shipped one if nothing was better.
        confirmation: The pick compared with the shipped configuration; None if they are the same.
        why: Why the search ended, and why the pick is the shipped one, if it is.
    """

    pick: Configuration
    confirmation: Comparison | None
    why: str


#: Whether a trial replaces the incumbent beside which it was measured.
_Rule: TypeAlias = Callable[[Comparison], bool]


@dataclass
class Search:
    """Searches; the incumbent, the best configuration so far, keeps running.

    Attributes:
        budget_s: For everything, including the confirmation, seconds.
        num_confirmations: Final rounds of the shipped configuration against the pick.
    """

    space: SearchSpace
    bench: Bench
    contest: Contest
    study: Study
    num_trials: int
    budget_s: float
    num_confirmations: int
    clock_s: Callable[[], float]
    on_trial: Callable[[TrialRecord], None] = lambda _: None
    _incumbent: TrialRecord = field(init=False)
    _running: Running = field(init=False)
    _measured: Measurement = field(init=False)

    def __post_init__(self) -> None:
        self._goal = self.contest.goal
        self._start_s = self.clock_s()
        self._open_s = self._trial_s = 0.0
        self._num_tries = 0

    def run(self) -> SearchResult:
        """Search until a limit is met.

        Raises:
            InvalidArgumentError: The shipped configuration cannot be measured.
            WeftError: No requests can be made.
        """
        self._begin()
        try:
            costs = self._running.costs()
            while not (why := self._stop_reason()):
                if (trial := self._next(costs)) is None:
                    why = "no configuration is left that was not tried"
                    break
                self._try(trial, self._is_better)
            self._simplify()
        finally:
            self._running.close()
        return self._confirmed(why)

    def _begin(self) -> None:
        """The previous incumbent; else the shipped configuration, the first trial."""
        for record in reversed([record for record in self.study.records if record.is_incumbent]):
            with contextlib.suppress(TrialError):
                self._running = self._open(record.configuration)
                self._incumbent, self._measured = record, self._best_level(record.level)
                return
        trial = self.study.begin(self.space.shipped)
        try:
            self._running = self._open(self.space.shipped)
        except TrialError as error:
            raise InvalidArgumentError(f"the configuration as it is shipped cannot be measured: {error}") from None
        self._measured = self._best_level(self.contest.load.level)
        if not self._measured.num_answers:
            self._running.close()
            raise InvalidArgumentError(
                f"no request is answered as the graph is shipped: {self._measured.first_error or 'no arrivals'}; "
                "--data FILE gives requests that it takes"
            )
        gains = dict.fromkeys(OBJECTIVES, 1.0)
        self._incumbent = self._record(self.space.shipped, SHIPPED, self._measured, gains, is_incumbent=True)
        self._end(trial, self._incumbent)

    def _best_level(self, level: int) -> Measurement:
        try:
            return self.contest.best_level(self._running, level)
        except BaseException:
            self._running.close()
            raise

    def _open(self, configuration: Configuration, *, fresh: bool = False) -> Running:
        before_s = self.clock_s()
        try:
            return self.bench.open(configuration, fresh=fresh)
        finally:
            self._open_s = max(self._open_s, self.clock_s() - before_s)

    def _stop_reason(self) -> str:
        """Why the search stops: the remaining time is needed to simplify and confirm the incumbent."""
        best = self._incumbent.configuration
        simpler = ({**best, key: shipped} for key, (shipped, _) in self.space.changes(best).items())
        num_left = sum(not self.study.was_tried(one) for one in simpler)
        if len(self.study.records) + num_left >= self.num_trials:
            return f"{self.num_trials} trials are done"
        if self._left_s() < (num_left + 1) * self._trial_s:
            return f"the budget of {self.budget_s:g} s is spent"
        return ""

    def _left_s(self) -> float:
        """Time until the pick must be confirmed, seconds."""
        runs_s = 2 * self.num_confirmations * self.contest.load.duration_s
        return self.budget_s - (self.clock_s() - self._start_s) - 2 * self._open_s - runs_s

    def _simplify(self) -> None:
        """Revert changes that gain nothing, as far as the limits allow."""
        for key, (shipped, _) in self.space.changes(self._incumbent.configuration).items():
            simpler = {**self._incumbent.configuration, key: shipped}
            has_trials = len(self.study.records) < self.num_trials
            if has_trials and self._left_s() >= self._trial_s and not self.study.was_tried(simpler):
                self._try(self.study.begin(simpler), self._is_as_good)

    def _next(self, costs: Mapping[str, Cost]) -> OpenTrial | None:
        """A step from the incumbent; later, every third time, the sampler's proposal if there is one."""
        self._num_tries += 1
        is_samplers = self._num_tries > _NUM_FIRST_STEPS and self._num_tries % _SAMPLER_EVERY == 0
        if is_samplers and (proposed := self.study.propose()) is not None:
            return proposed
        steps = self.space.steps(self._incumbent.configuration, costs)
        untried = next((step for step in steps if not self.study.was_tried(step)), None)
        return self.study.propose() if untried is None else self.study.begin(untried)

    def _try(self, trial: OpenTrial, replaces: _Rule) -> None:
        """Measure a trial; it becomes the incumbent if it ``replaces`` it. The other one is closed."""
        before_s = self.clock_s()
        loser: Running | None = None
        try:
            running = loser = self._open(trial.configuration)
            if why := self.contest.is_hopeless(self._running, self._measured.level, running):
                self._end(trial, TrialRecord(trial.configuration, HOPELESS, why))
                return
            found = self._compared(running, replaces)
            gains = {name: self._incumbent.gains[name] * found.gain(name) for name in OBJECTIVES}
            outcome = MEASURED if found.keeps_limits else INFEASIBLE
            is_incumbent = replaces(found)
            record = self._record(trial.configuration, outcome, found.new, gains, is_incumbent=is_incumbent)
            self._end(trial, record)
            self._measured = found.old
            if is_incumbent:
                loser = self._running
                self._incumbent, self._running, self._measured = record, running, found.new
        except (TrialError, WeftError) as error:
            if loser is not None and isinstance(error, WeftError):  # no fault of the trial
                raise
            self._end(trial, TrialRecord(trial.configuration, FAILED, str(error)))
            self._check_incumbent()
        finally:
            if loser is not None:
                loser.close()
                self._trial_s = max(self._trial_s, self.clock_s() - before_s)

    def _compared(self, running: Running, replaces: _Rule) -> Comparison:
        contest, old, old_level = self.contest, self._running, self._measured.level
        level = contest.best_level(running, old_level).level if contest.load.levels_vary else old_level
        found = contest.compare(old, old_level, running, level, _NUM_ROUNDS)
        if not replaces(found):
            return found
        more = contest.compare(old, found.old.level, running, found.new.level, _NUM_MORE_ROUNDS)
        if (more.old.level, more.new.level) != (found.old.level, found.new.level):
            return more
        return contest.joined([*found.pairs, *more.pairs])

    def _is_better(self, found: Comparison) -> bool:
        if not found.keeps_limits:
            return False
        if self._goal.excess(found.old) > 0 and self._goal.excess(self._measured) > 0:  # twice, so it was no bad moment
            return True
        rounds = found.gains[self._goal.objective]
        won = sum(gain > 1 for gain in rounds) / len(rounds)
        return found.gain(self._goal.objective) >= _MIN_GAIN and won >= _MIN_ROUNDS_WON

    def _is_as_good(self, found: Comparison) -> bool:
        return found.keeps_limits and found.gain(self._goal.objective) * _MIN_WORTH >= 1

    def _record(
        self,
        configuration: Configuration,
        outcome: str,
        measured: Measurement,
        gains: Mapping[str, float],
        *,
        is_incumbent: bool,
    ) -> TrialRecord:
        return TrialRecord(
            configuration=configuration,
            outcome=outcome,
            reason="; ".join(self._goal.violations(measured)),
            values=_finite(self._goal.values(measured)),
            gains=_finite(gains),
            excess=min(self._goal.excess(measured), 1e9),
            level=measured.level,
            is_incumbent=is_incumbent,
            latency_ms=measured.latencies(),
        )

    def _check_incumbent(self) -> None:
        """Restart the incumbent if it ended together with the failed trial, as when memory runs out."""
        with contextlib.suppress(TrialError):
            if self._running.measure(self._measured.level, self.contest.load.duration_s / 4).num_answers:
                return
        self._running.close()
        try:
            self._running = self._open(self._incumbent.configuration)
        except TrialError as error:
            raise InvalidArgumentError(f"the best configuration so far does not start again: {error}") from None

    def _confirmed(self, why: str) -> SearchResult:
        """Compare the incumbent with the shipped configuration, in additional rounds."""
        shipped, best = self.space.shipped, self._incumbent.configuration
        if not self.space.changes(best):
            return SearchResult(shipped, None, f"{why}; nothing was better than what is shipped")
        level = next(record.level for record in self.study.records if record.outcome == SHIPPED)
        try:
            with (
                contextlib.closing(self._open(shipped, fresh=True)) as old,
                contextlib.closing(self._open(best, fresh=True)) as new,
            ):
                found = self.contest.compare(old, level, new, self._measured.level, self.num_confirmations)
        except TrialError as error:
            return SearchResult(shipped, None, f"{why}; the best trial could not be measured again: {error}")
        was_feasible = self._goal.excess(found.old) <= 0
        if found.keeps_limits and (not was_feasible or found.gain(self._goal.objective) > 1):
            return SearchResult(best, found, why)
        return SearchResult(shipped, found, f"{why}; the best trial was no better when it was measured again")

    def _end(self, trial: OpenTrial, record: TrialRecord) -> None:
        self.study.end(trial, record)
        self.on_trial(record)


def _finite(figures: Mapping[str, float]) -> dict[str, float]:
    """Figures that JSON and the sampler accept."""
    return {name: figure if abs(figure) < 1e9 else 1e9 for name, figure in figures.items()}
