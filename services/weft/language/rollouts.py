"""Rollouts of a splitter: the candidate's shares and what it owes, as compiled from a graph file."""

from dataclasses import dataclass, fields

#: Probability that a rollout of a candidate that keeps every limit is ended by mistake, if the file says nothing.
FALSE_ALARM_RATE = 0.05


@dataclass(frozen=True, slots=True)
class GuardPlan:
    """Limits of a candidate, as of ``Guard`` in ``graph.proto``; None: no such limit.

    Attributes:
        min_requests: Runs that a share needs before the next; 0: what the tests need to find a clear fault.
    """

    max_error_rate: float | None = None
    max_p99_ms: float | None = None
    max_p99_ratio: float | None = None
    min_score: float | None = None
    min_agreement: float | None = None
    false_alarm_rate: float = FALSE_ALARM_RATE
    min_requests: int = 0

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are given, by their names in the file."""
        given = {one.name: getattr(self, one.name) for one in fields(self)[:5]}
        return {name: limit for name, limit in given.items() if limit is not None}


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """The compiled rollout of a splitter.

    Attributes:
        candidate: Name of the new step; ``index`` is its place among the splitter's steps.
        weights: Of all steps, as in the file.
        shares: Of the candidate, rising, in 0..1; empty where a bandit sets the share.
        every_s: How long each share is kept at least.
        pauses: A broken limit pauses the rollout; else it rolls it back.
        digest: Of the rollout's text and the candidate's definition; another one is another rollout.
    """

    candidate: str
    index: int
    weights: tuple[float, ...]
    shares: tuple[float, ...]
    every_s: float
    guard: GuardPlan
    pauses: bool = False
    digest: str = ""
