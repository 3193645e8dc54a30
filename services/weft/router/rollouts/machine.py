"""The state of a rollout and its changes: by looks at the counts, and by people.

The candidate is not blamed for what is wrong everywhere: where the baseline breaks ``max_error_rate`` or ``max_p99_ms``
too, the rollout waits until the candidate is worse than the baseline, by a test of its own. ``max_p99_ratio`` compares
runs of the same time: at a share of 100 % there is no baseline, and nothing breaks it.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from math import ceil, log, nan
from typing import Any, NamedTuple

from weft.base.errors import InvalidArgumentError
from weft.language.rollouts import RolloutPlan
from weft.router.rollouts.counts import BINS_PER_LOG, ArmCounts
from weft.router.rollouts.evidence import (
    TAIL,
    bounds,
    log_wealth,
    log_wealth_of_slower,
    log_wealth_of_worse,
    num_needed,
)

RUNNING, PAUSED, PROMOTED, ROLLED_BACK, ABORTED = "RUNNING", "PAUSED", "PROMOTED", "ROLLED_BACK", "ABORTED"
#: Verdicts that are kept.
MAX_HISTORY = 100

#: Action -> the phase after it ("": as the next share says), and those in which it is possible.
_ACTIONS = {
    "PAUSE": (PAUSED, (RUNNING,)),
    "RESUME": (RUNNING, (PAUSED,)),
    "PROMOTE": ("", (RUNNING, PAUSED)),
    "ABORT": (ABORTED, (RUNNING, PAUSED, PROMOTED)),
}


@dataclass(frozen=True, slots=True)
class RolloutState:
    """Where a rollout stands: what its owner writes and the other routers follow.

    Attributes:
        digest: Of the definition that it belongs to (``RolloutPlan.digest``).
        phase: Name of a ``RolloutStatus.Phase``.
        step: Index of the share; with a bandit, how often the tests began anew, with each ``every_s``.
        revision: Increases with every decision; not with ``verdict`` alone.
        changed_unix_ns: Of the last decision.
        verdict: Why it stands so, or what it waits for, with the figures.
        history: Verdicts of the decisions, the latest last.
        candidate_before, baseline_before: Counts when the tests began anew.
    """

    digest: str
    phase: str = RUNNING
    step: int = 0
    revision: int = 0
    changed_unix_ns: int = 0
    verdict: str = "begins"
    history: tuple[str, ...] = ()
    candidate_before: ArmCounts = field(default_factory=ArmCounts)
    baseline_before: ArmCounts = field(default_factory=ArmCounts)

    def to_json(self) -> dict[str, Any]:
        """As JSON types; keys are the attributes."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "RolloutState":
        """Read what ``to_json`` gave, after a way through JSON. Raises ValueError: it is no such state."""
        try:
            before = {key: ArmCounts.from_json(content[key]) for key in ("candidate_before", "baseline_before")}
            return cls(**{**content, **before, "history": tuple(content["history"])})
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"no state of a rollout: {error}") from error


class GuardResult(NamedTuple):
    """What is known of one limit, as of ``GuardStatus``.

    Attributes:
        lower, upper: Bounds of the candidate's value that hold at every look at once; NaN if unknown.
        is_shared: The baseline breaks it too, and the candidate is not known to be worse.
        num, needed: Outcomes that were seen, and those that a clear fault needs to be found; ``unit`` is their name.
        figures: What was measured, in words.
    """

    limit: str
    allowed: float
    measured: float
    lower: float
    upper: float
    is_broken: bool
    is_shared: bool
    num: int
    needed: int
    unit: str
    figures: str


def begin(plan: RolloutPlan, now_unix_ns: int) -> RolloutState:
    """The state of a rollout that begins."""
    return RolloutState(plan.digest, changed_unix_ns=now_unix_ns)


def share_now(plan: RolloutPlan, state: RolloutState) -> float:
    """The candidate's share in 0..1; NaN where a bandit sets it."""
    if state.phase in (ROLLED_BACK, ABORTED):
        return 0.0
    return plan.shares[min(state.step, len(plan.shares) - 1)] if plan.shares else nan


def weights_now(plan: RolloutPlan, state: RolloutState) -> tuple[float, ...]:
    """Weights of the splitter's steps: baselines keep theirs, the candidate's makes its share.

    So a key of a sticky splitter moves to the candidate when its share rises, never between other steps.
    """
    share, weights = share_now(plan, state), list(plan.weights)
    if share == 1.0:
        weights = [0.0] * len(weights)
        weights[plan.index] = 1.0
    elif share >= 0.0:  # not NaN
        weights[plan.index] = share / (1.0 - share) * (sum(weights) - weights[plan.index])
    return tuple(weights)


def advance(
    plan: RolloutPlan, state: RolloutState, candidate: ArmCounts, baseline: ArmCounts, now_unix_ns: int
) -> RolloutState:
    """Look at the counts of the whole rollout, over all routers: decide, or say in ``verdict`` what it waits for.

    Harmless: a clock that goes back (the share's time begins anew), counts that shrink (the tests do), another digest.
    """
    if state.phase != RUNNING or state.digest != plan.digest:
        return state
    if now_unix_ns < state.changed_unix_ns:
        state = replace(state, changed_unix_ns=now_unix_ns)
    before = state.candidate_before, state.baseline_before
    if candidate.num_requests < before[0].num_requests or baseline.num_requests < before[1].num_requests:
        state = replace(state, candidate_before=candidate, baseline_before=baseline)
    results = examine(plan, state, candidate, baseline)
    at = f"at {share_now(plan, state) * 100:g} %" if plan.shares else "by feedback"
    if broken := [f"{one.limit} is {one.allowed:g}: {one.figures}" for one in results if one.is_broken]:
        phase, did = (PAUSED, "paused") if plan.pauses else (ROLLED_BACK, "rolled back")
        return _decided(state, phase, f"{did} {at}: {'; '.join(broken)}", now_unix_ns, candidate, baseline)
    num_requests = (candidate - state.candidate_before).num_requests
    if state.step and share_now(plan, state) == 1.0:  # a shadow of the candidate has nothing to be compared with
        for index, one in enumerate(results):
            if one.unit == "comparisons":
                results[index] = one._replace(num=num_requests, unit="requests")
    waits = _waits(plan, results, num_requests)
    left_s = plan.every_s - (now_unix_ns - state.changed_unix_ns) / 1e9
    if left_s > 0 and not waits:
        waits = [f"{left_s:.0f} s of this share are left"]
    if waits:
        return replace(state, verdict=f"{at}, waits: {'; '.join(waits)}")
    kept = f"kept every limit {at}: {'; '.join(dict.fromkeys(one.figures for one in results))}"
    return _to_next(plan, state, kept, now_unix_ns, candidate, baseline)


def apply(
    action: str,
    plan: RolloutPlan,
    state: RolloutState,
    candidate: ArmCounts,
    baseline: ArmCounts,
    now_unix_ns: int,
    who: str = "",
) -> RolloutState:
    """The state after PAUSE, RESUME, PROMOTE or ABORT. Raises InvalidArgumentError: not possible as it stands."""
    if action not in _ACTIONS:
        raise InvalidArgumentError(f"no action '{action}' of a rollout; give one of {', '.join(_ACTIONS)}")
    phase, possible = _ACTIONS[action]
    if state.phase not in possible:
        text = f"the rollout of '{plan.candidate}' is {state.phase}, and {action} is for: {', '.join(possible)}"
        cure = "" if state.phase in (RUNNING, PAUSED) else "; another candidate or rollout in the file begins anew"
        raise InvalidArgumentError(text + cure)
    verdict = f"{action} by {who or 'hand'}"
    if action == "PROMOTE" and plan.shares:
        return _to_next(plan, state, verdict, now_unix_ns, candidate, baseline)
    return _decided(state, phase or PROMOTED, verdict, now_unix_ns, candidate, baseline)


def _to_next(plan: RolloutPlan, state: RolloutState, why: str, now_unix_ns: int, *counts: ArmCounts) -> RolloutState:
    """To the next share, or to the end; with a bandit to the next window of the tests."""
    if state.step + 1 == len(plan.shares):
        return _decided(state, PROMOTED, f"promoted: {why}", now_unix_ns, *counts)
    state = replace(state, step=state.step + 1)
    share = f"goes on to {share_now(plan, state) * 100:g} %: " if plan.shares else ""
    return _decided(state, RUNNING, share + why, now_unix_ns, *counts)


def _decided(state: RolloutState, phase: str, verdict: str, now_unix_ns: int, *counts: ArmCounts) -> RolloutState:
    """The state after a decision; where the rollout runs, its tests begin anew."""
    if phase == RUNNING:
        state = replace(state, candidate_before=counts[0], baseline_before=counts[1])
    history = (*state.history, verdict)[-MAX_HISTORY:]
    revision = state.revision + 1
    return replace(state, phase=phase, revision=revision, changed_unix_ns=now_unix_ns, verdict=verdict, history=history)


def _waits(plan: RolloutPlan, results: list[GuardResult], num_requests: int) -> list[str]:
    """What the candidate still needs for its next share, besides time."""
    waits = [f"{one.figures}; {one.limit} is {one.allowed:g}, and neither keeps it" for one in results if one.is_shared]
    needs = {one.unit: (one.num, one.needed) for one in sorted(results, key=lambda one: one.needed)}
    if plan.min_requests:
        needs["requests"] = num_requests, plan.min_requests
    texts = [f"{num:,} of {needed:,} {unit}" for unit, (num, needed) in needs.items() if num < needed]
    return waits + [f"{text} of the candidate at this share" for text in texts]


def examine(plan: RolloutPlan, state: RolloutState, candidate: ArmCounts, baseline: ArmCounts) -> list[GuardResult]:
    """What the tests say of every limit, from the counts since they began anew.

    The rate of false alarms is divided among the limits, and among the shares; with a bandit the n-th window gets
    1 / (n (n + 1)) of it.
    """
    num_windows = len(plan.shares) or (state.step + 1) * (state.step + 2)
    log_level = log(plan.false_alarm_rate / (len(plan.limits) * num_windows))
    sides = candidate - state.candidate_before, baseline - state.baseline_before
    return [_examined(name, allowed, *sides, log_level) for name, allowed in plan.limits.items()]


def _examined(name: str, allowed: float, candidate: ArmCounts, baseline: ArmCounts, log_level: float) -> GuardResult:
    bad, num, unit, measured, text = _outcomes(name, allowed, candidate)
    base_bad, num_base, _, base, base_text = _outcomes(name, allowed, baseline)
    is_p99, is_least, is_shared = name.startswith("max_p99"), name.startswith("min"), False
    rate = TAIL if is_p99 else 1.0 - allowed if is_least else allowed
    if name == "max_p99_ratio":
        wealth = log_wealth_of_slower(candidate.runs_by_bin, baseline.runs_by_bin, allowed) if num_base else 0.0
        measured /= base
    else:
        wealth = float(log_wealth(bad, num, rate))
        is_shared = wealth >= -log_level and not is_least and base_bad > rate * num_base
        is_shared = is_shared and log_wealth_of_worse(bad, num, base_bad, num_base) < -log_level
    lower, upper = (nan, nan) if is_p99 else bounds(bad, num, log_level)
    bound = (1.0 - upper, 1.0 - lower) if is_least else (lower, upper)
    figures = f"{text} over {num:,} {unit} of the candidate"
    figures += f", {base_text} over {num_base:,} of the baseline" if num_base else ""
    is_broken, needed = wealth >= -log_level and not is_shared, num_needed(rate, log_level)
    return GuardResult(name, allowed, measured, *bound, is_broken, is_shared, num, needed, unit, figures)


def _outcomes(name: str, allowed: float, arm: ArmCounts) -> tuple[float, int, str, float, str]:
    """Of one side: outcomes that the limit is against, all outcomes and their name, its value, and that in words."""
    if name.startswith("max_p99"):
        first, p99_ms = ceil(log(allowed * 1e6) * BINS_PER_LOG), arm.quantile_ms(1.0 - TAIL)
        bad = sum(count for at, count in arm.runs_by_bin.items() if at >= first)  # in bins above the limit as a whole
        return bad, arm.num_requests, "requests", p99_ms, f"p99 {p99_ms:.4g} ms"
    if name == "max_error_rate":
        rate = arm.num_errors / arm.num_requests if arm.num_requests else nan
        return arm.num_errors, arm.num_requests, "requests", rate, f"errors {rate:.2%}"
    good, num, unit, what = arm.score_sum, arm.num_scores, "scores", "score"
    if name == "min_agreement":
        good, num, unit, what = arm.num_agreed, arm.num_compared, "comparisons", "agreement"
    mean = good / num if num else nan
    return num - good, num, unit, mean, f"{what} {mean:.3f}"
