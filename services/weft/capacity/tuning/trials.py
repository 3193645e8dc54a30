"""The trials of a study, saved as they end, and Optuna's sampler, which proposes more."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import optuna

from weft.base.errors import InvalidArgumentError
from weft.capacity.tuning.measurement import OBJECTIVES
from weft.capacity.tuning.space import Configuration, SearchSpace, Value

#: What became of a trial.
SHIPPED, MEASURED, INFEASIBLE, HOPELESS, FAILED = "shipped", "measured", "infeasible", "hopeless", "failed"
_RECORD, _SETUP = "record", "setup"
_POPULATION, _NUM_RANDOM = 8, 6
#: Proposals of the sampler that were tried already, before it is taken to have none.
_MAX_ASKED = 50


@dataclass(frozen=True)
class TrialRecord:
    """One trial.

    Attributes:
        outcome: ``shipped``, ``measured``, ``infeasible`` (it breaks a limit), ``hopeless`` (given up after a short
            probe) or ``failed`` (it did not start, or ended).
        reason: Why it is not ``measured``.
        values: Objectives as measured, medians; none without a measurement.
        gains: Improvement factor over the shipped configuration, by objective: the product of comparisons in turn, from
            the shipped one through the successive best ones, so that it holds even if the machine's load changes.
        excess: Relative excess over its limits; 0 or less: it keeps them.
        level: Requests in flight; 0: planned arrivals.
        is_incumbent: It replaced the best one before.
        latency_ms: By percentile, as text: JSON has no other keys.
    """

    configuration: Configuration
    outcome: str
    reason: str = ""
    values: Mapping[str, float] = field(default_factory=dict)
    gains: Mapping[str, float] = field(default_factory=dict)
    excess: float = 1.0
    level: int = 0
    is_incumbent: bool = False
    latency_ms: Mapping[str, float] = field(default_factory=dict)


class _NoLock:
    """The folder of a study is held by its process, and a lock of Optuna's would outlive a killed one by 30 s."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        return None


class OpenTrial(NamedTuple):
    """A started trial and its configuration."""

    trial: Any
    configuration: Configuration


class Study:
    """Optuna's study in a file.

    Args:
        path: Of the file; one process at a time may use it.
        setup: Subject of the study; a study in the file must have the same.

    Raises:
        InvalidArgumentError: The file holds another study, or none.
    """

    def __init__(self, path: Path, space: SearchSpace, *, seed: int, sampler: str, setup: Mapping[str, Any]) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._space = space
        self._distributions = {
            key: optuna.distributions.CategoricalDistribution(setting.choices)
            for key, setting in space.settings.items()
        }
        if path.exists() and (content := path.read_bytes()) and not content.endswith(b"\n"):
            with path.open("rb+") as stream:  # what a killed process was writing is no trial
                stream.truncate(content.rfind(b"\n") + 1)
        try:
            backend = optuna.storages.journal.JournalFileBackend(str(path), lock_obj=_NoLock())
            self._study = optuna.create_study(
                study_name="tune",
                storage=optuna.storages.JournalStorage(backend),
                load_if_exists=True,
                directions=["maximize"] * len(OBJECTIVES),  # of gains
            )
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidArgumentError(
                f"'{path}' is no study that can be read: {error}; begin in another folder"
            ) from None
        known = self._study.user_attrs.get(_SETUP)
        if known is None:
            self._study.set_user_attr(_SETUP, dict(setup))
        elif known != dict(setup):
            differing = ", ".join(key for key in setup if known.get(key) != setup[key])
            raise InvalidArgumentError(
                f"'{path.parent}' is a study of something else ({differing} changed); begin in another folder"
            )
        # Trials that were begun when the study was interrupted are not trials.
        states = optuna.trial.TrialState
        while any(trial.state == states.WAITING for trial in self._study.get_trials(deepcopy=False)):
            self._study.ask(self._distributions)
        for trial in self._study.get_trials(deepcopy=False, states=(states.RUNNING,)):
            self._study.tell(trial.number, state=states.FAIL)
        trials = self._study.get_trials(deepcopy=False)
        self.records = [TrialRecord(**trial.user_attrs[_RECORD]) for trial in trials if _RECORD in trial.user_attrs]
        self._tried = {self._key(record.configuration) for record in self.records}
        seed += len(trials)  # a study that goes on draws what it has not drawn yet
        self._study.sampler = (
            optuna.samplers.TPESampler(seed=seed, n_startup_trials=_NUM_RANDOM)
            if sampler == "tpe"
            else optuna.samplers.NSGAIISampler(seed=seed, population_size=_POPULATION)
        )

    def was_tried(self, configuration: Configuration) -> bool:
        """Whether a trial had this configuration, or an equivalent one."""
        return self._key(configuration) in self._tried

    def propose(self) -> OpenTrial | None:
        """An untried configuration from the sampler; None: it finds none."""
        for _ in range(_MAX_ASKED):
            trial = self._study.ask(self._distributions)
            if not self.was_tried(trial.params):
                return OpenTrial(trial, self._space.canonical(trial.params))
            self._study.tell(trial, state=optuna.trial.TrialState.FAIL)
        return None

    def begin(self, configuration: Configuration) -> OpenTrial:
        """Start a trial of this configuration."""
        plain = self._space.canonical(configuration)
        self._study.enqueue_trial(plain)
        return OpenTrial(self._study.ask(self._distributions), plain)

    def end(self, trial: OpenTrial, record: TrialRecord) -> None:
        """Save the result of a trial."""
        trial.trial.set_user_attr(_RECORD, asdict(record))
        trial.trial.set_constraint("limits", record.excess)
        self._study.tell(trial.trial, [record.gains.get(name, 0.0) for name in OBJECTIVES])
        self.records.append(record)
        self._tried.add(self._key(record.configuration))

    def _key(self, configuration: Configuration) -> tuple[tuple[str, Value], ...]:
        return tuple(sorted(self._space.canonical(configuration).items()))


def pareto(records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The feasible records that no other dominates."""
    feasible = [record for record in records if record.outcome in (SHIPPED, MEASURED) and record.excess <= 0]

    def beats(one: TrialRecord, other: TrialRecord) -> bool:
        gains = [one.gains[name] - other.gains[name] for name in OBJECTIVES]
        return min(gains) >= 0 and max(gains) > 0

    return [one for one in feasible if not any(beats(other, one) for other in feasible)]
