"""The compiled rollout of a splitter: the candidate's shares, and the limits that it owes."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """The rollout of a splitter.

    Attributes:
        candidate: Name of the new step; ``index`` is its place among the splitter's steps.
        weights: Of all steps, as in the file.
        shares: Of the candidate, rising, in 0..1; empty where a bandit sets the share.
        every_s: How long each share is kept at least.
        limits: Of the guard, by their names in the file.
        false_alarm_rate: Probability that a rollout of a candidate that keeps every limit is ended by mistake.
        min_requests: Runs that a share needs before the next; 0: what the tests need to find a clear fault.
        pauses: A broken limit pauses the rollout; else it rolls it back.
        digest: Of the rollout's text, the names of the steps and the candidate's definition (of all other nodes of the
            file if it runs one); another one is another rollout.
    """

    candidate: str
    index: int
    weights: tuple[float, ...]
    shares: tuple[float, ...]
    every_s: float = 0.0
    limits: Mapping[str, float] = field(default_factory=dict)
    false_alarm_rate: float = 0.05
    min_requests: int = 0
    pauses: bool = False
    digest: str = ""

    def text(self) -> str:
        """For example ``rollout of new: 5 %, 50 %, 100 %, guarded by max_error_rate 0.01``."""
        shares = ", ".join(f"{share * 100:g} %" for share in self.shares) or "by feedback"
        limits = ", ".join(f"{name} {limit:g}" for name, limit in self.limits.items())
        return f"rollout of {self.candidate}: {shares}, guarded by {limits}"
