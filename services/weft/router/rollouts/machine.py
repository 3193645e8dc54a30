"""The state of a rollout and its changes: by looks at the counts, and by people."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from weft.language.rollouts import RolloutPlan
from weft.router.rollouts.counts import ArmCounts

RUNNING, PAUSED, PROMOTED, ROLLED_BACK, ABORTED = "RUNNING", "PAUSED", "PROMOTED", "ROLLED_BACK", "ABORTED"
#: Verdicts that are kept.
MAX_HISTORY = 100


@dataclass(frozen=True, slots=True)
class RolloutState:
    """Where a rollout stands: what its owner writes and the other routers follow.

    Attributes:
        digest: Of the definition that it belongs to (``RolloutPlan.digest``).
        phase: Name of a ``RolloutStatus.Phase``.
        step: Index of the share.
        window: How often the tests have begun anew: with each share, each resume, and, with a bandit, each ``every``.
        revision: Increases with every decision; not with ``verdict`` alone.
        changed_unix_ns: Of the last decision.
        verdict: Why it stands so, or what it waits for, with the figures.
        history: Verdicts of the decisions, the latest last.
        candidate_before, baseline_before: Counts when the tests began anew.
    """

    digest: str
    phase: str = RUNNING
    step: int = 0
    window: int = 0
    revision: int = 0
    changed_unix_ns: int = 0
    verdict: str = ""
    history: tuple[str, ...] = ()
    candidate_before: ArmCounts = field(default_factory=ArmCounts)
    baseline_before: ArmCounts = field(default_factory=ArmCounts)

    def to_json(self) -> dict[str, Any]:
        """As JSON types; keys are the attributes."""
        raise NotImplementedError

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "RolloutState":
        """Read what ``to_json`` gave, after a way through JSON. Raises ValueError: it is no such state."""
        raise NotImplementedError


class GuardResult(NamedTuple):
    """What is known of one limit, as of ``GuardStatus``; ``lower`` and ``upper`` are NaN if unknown."""

    limit: str
    allowed: float
    measured: float
    lower: float
    upper: float
    is_broken: bool


def begin(plan: RolloutPlan, now_unix_ns: int) -> RolloutState:
    """The state of a rollout that begins."""
    raise NotImplementedError


def advance(
    plan: RolloutPlan, state: RolloutState, candidate: ArmCounts, baseline: ArmCounts, now_unix_ns: int
) -> RolloutState:
    """Look at the counts of the whole rollout, over all routers: decide, or say in ``verdict`` what it waits for."""
    raise NotImplementedError


def apply(
    action: str,
    plan: RolloutPlan,
    state: RolloutState,
    candidate: ArmCounts,
    baseline: ArmCounts,
    now_unix_ns: int,
    who: str = "",
) -> RolloutState:
    """The state after PAUSE, RESUME, PROMOTE or ABORT. Raises InvalidArgumentError: no such action as it stands."""
    raise NotImplementedError


def examine(plan: RolloutPlan, state: RolloutState, candidate: ArmCounts, baseline: ArmCounts) -> list[GuardResult]:
    """What the tests say of every limit, from the counts since they began anew."""
    raise NotImplementedError


def share_now(plan: RolloutPlan, state: RolloutState) -> float:
    """The candidate's share in 0..1; NaN where a bandit sets it."""
    raise NotImplementedError


def weights_now(plan: RolloutPlan, state: RolloutState) -> tuple[float, ...]:
    """Weights of the splitter's steps: baselines keep theirs, the candidate's makes its share."""
    raise NotImplementedError
