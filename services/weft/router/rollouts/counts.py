"""What routers count of each side of a rollout."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import exp, log, nan
from typing import Any

#: Bins of the latency histogram for each factor of e; a bin is 1 % wide.
BINS_PER_LOG = 1.0 / log(1.01)


@dataclass(slots=True)
class ArmCounts:
    """Additive counts of one side: the candidate, or all other steps, the baseline.

    Attributes:
        num_requests: Runs that answered or failed; not those that the client cancelled, or that were skipped.
        num_errors: Runs that failed themselves, also where a fallback answered.
        runs_by_bin: Number of runs by the bin of their time (``edge_ms``); of a stream, the time to its first response.
        num_scores, score_sum: Of the rewards of its requests.
        num_compared, num_agreed: Answers that were compared with a shadow's, and those that agreed.
    """

    num_requests: int = 0
    num_errors: int = 0
    runs_by_bin: dict[int, int] = field(default_factory=dict)
    num_scores: int = 0
    score_sum: float = 0.0
    num_compared: int = 0
    num_agreed: int = 0

    def count(self, duration_ns: int, *, is_ok: bool) -> None:
        """Count a run."""
        self.num_requests += 1
        if not is_ok:
            self.num_errors += 1
        at = int(log(duration_ns) * BINS_PER_LOG) if duration_ns > 1 else 0
        self.runs_by_bin[at] = self.runs_by_bin.get(at, 0) + 1

    def count_score(self, reward: float) -> None:
        """Count a reward in 0..1."""
        self.num_scores += 1
        self.score_sum += reward

    def __add__(self, other: "ArmCounts") -> "ArmCounts":
        return self._changed(other, 1)

    def __sub__(self, other: "ArmCounts") -> "ArmCounts":
        """What was counted since ``other``; at least 0 of each."""
        return self._changed(other, -1)

    def quantile_ms(self, q: float) -> float:
        """Upper edge of the bin with the quantile of the runs' times; NaN without runs."""
        left = q * self.num_requests
        for at, count in sorted(self.runs_by_bin.items()):
            left -= count
            if left <= 0:
                return edge_ms(at + 1)
        return nan

    def to_json(self) -> dict[str, Any]:
        """As JSON types that do not change with the counts; keys are the attributes."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return values | {"runs_by_bin": dict(self.runs_by_bin)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "ArmCounts":
        """Read what ``to_json`` gave, after a way through JSON; unknown keys are ignored."""
        found = cls(**{one.name: content[one.name] for one in fields(cls) if one.name in content})
        found.runs_by_bin = {int(at): count for at, count in found.runs_by_bin.items()}
        return found

    def _changed(self, other: "ArmCounts", sign: int) -> "ArmCounts":
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        bins, more = Counter(values.pop("runs_by_bin")), Counter(other.runs_by_bin)
        numbers = {name: max(value + sign * getattr(other, name), 0) for name, value in values.items()}
        return ArmCounts(runs_by_bin=dict(bins + more if sign > 0 else bins - more), **numbers)


def edge_ms(at: int) -> float:
    """Lower edge of a bin of the latency histogram."""
    return exp(at / BINS_PER_LOG) / 1e6
