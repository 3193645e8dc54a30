"""What becomes of a rollout, look by look, with a clock of its own."""

import json
from dataclasses import replace

import pytest

from weft.base.errors import InvalidArgumentError
from weft.language.rollouts import RolloutPlan
from weft.router.rollouts.counts import ArmCounts
from weft.router.rollouts.machine import (
    ABORTED,
    PAUSED,
    PROMOTED,
    ROLLED_BACK,
    RUNNING,
    RolloutState,
    advance,
    apply,
    begin,
    share_now,
    weights_now,
)

S = 1_000_000_000
PLAN = RolloutPlan("new", 1, (3.0, 1.0, 1.0), (0.2, 0.5, 1.0), 60.0, {"max_error_rate": 0.02}, digest="d")


def runs(num: int, errors: int = 0, time_ms: float = 10.0) -> ArmCounts:
    arm = ArmCounts()
    for i in range(num):
        arm.count(int(time_ms * 1e6), is_ok=i >= errors)
    return arm


GOOD, BASE = runs(1000, 5), runs(4000, 20)


def look(
    state: RolloutState, mine: ArmCounts = GOOD, base: ArmCounts = BASE, at_s: float = 60.0, plan=PLAN
) -> RolloutState:
    """The state after a look, by way of JSON."""
    after = advance(plan, state, mine, base, int(at_s * S))
    assert after == RolloutState.from_json(json.loads(json.dumps(after.to_json())))
    return after


def test_a_candidate_that_keeps_its_limits_goes_through_every_share() -> None:
    """Each for its time, each with counts of its own; the verdicts have the figures."""
    state, mine, base, shares = begin(PLAN, 0), ArmCounts(), ArmCounts(), []
    for minute in range(1, 4):
        mine, base = mine + GOOD, base + BASE
        assert state.revision == look(state, mine, base, 60 * minute - 1).revision
        state = look(state, mine, base, 60 * minute)
        shares.append(share_now(PLAN, state))
    assert ([0.5, 1.0, 1.0], PROMOTED, 3, 180 * S) == (shares, state.phase, state.revision, state.changed_unix_ns)
    assert state.history[1] == (
        "goes on to 100 %: kept every limit at 50 %: errors 0.50% over 1,000 requests of the candidate, "
        "errors 0.50% over 4,000 of the baseline"
    )
    assert state == look(state, runs(9000, 9000), base, 999)


def test_too_little_traffic_waits_and_says_so() -> None:
    """However much time passes; ``min_requests`` is another number."""
    waiting = look(begin(PLAN, 0), runs(50), BASE, 9999)
    assert waiting.verdict.startswith("at 20 %, waits: 50 of ")
    assert waiting.verdict.endswith(" requests of the candidate at this share")
    assert (RUNNING, 0) == (waiting.phase, waiting.revision)
    assert 1 == look(begin(PLAN, 0), runs(50), BASE, plan=replace(PLAN, min_requests=50)).step
    scored = replace(PLAN, limits={"min_score": 0.5})
    for plan in (scored, replace(scored, min_requests=50)):  # which are no scores
        assert "waits: 0 of" in look(begin(plan, 0), GOOD, BASE, 9999, plan).verdict
    assert "waits: 20 s of this share" in look(begin(PLAN, 0), GOOD, BASE, 40).verdict


def test_the_last_share_does_not_wait_for_a_shadow_that_is_the_candidate_itself() -> None:
    """Nothing is compared any more where all answers are the candidate's; until then it is."""
    plan = replace(PLAN, limits={"min_agreement": 0.9})
    assert RUNNING == look(replace(begin(plan, 0), step=1), plan=plan).phase
    assert RUNNING == look(replace(begin(plan, 0), step=2), runs(9), plan=plan).phase
    assert PROMOTED == look(replace(begin(plan, 0), step=2), plan=plan).phase


def test_a_broken_limit_rolls_back_at_the_next_look_or_pauses() -> None:
    """Before the share's time is over; a rollout that was rolled back stays so."""
    bad = runs(400, 40)
    back = look(begin(PLAN, 0), bad, BASE, 1)
    assert (ROLLED_BACK, 0.0, (3.0, 0.0, 1.0)) == (back.phase, share_now(PLAN, back), weights_now(PLAN, back))
    assert back.verdict == (
        "rolled back at 20 %: max_error_rate is 0.02: errors 10.00% over 400 requests of the candidate, "
        "errors 0.50% over 4,000 of the baseline"
    )
    assert back is look(back, GOOD)
    plan = replace(PLAN, pauses=True)
    paused = look(begin(plan, 0), bad, BASE, 1, plan)
    assert (PAUSED, 0.2) == (paused.phase, share_now(plan, paused))
    resumed = apply("RESUME", plan, paused, bad, BASE, 2 * S)
    assert RUNNING == look(resumed, bad + runs(500), BASE + BASE, 3, plan).phase


def test_the_candidate_is_not_blamed_for_what_is_wrong_everywhere() -> None:
    """It waits; a candidate that is worse still is blamed, and so is one that is alone."""
    everywhere = look(begin(PLAN, 0), runs(1000, 300), runs(4000, 1200))
    assert RUNNING == everywhere.phase
    assert "errors 30.00% over 1,000 requests of the candidate, errors 30.00% over 4,000" in everywhere.verdict
    assert "neither keeps it" in everywhere.verdict
    assert ROLLED_BACK == look(begin(PLAN, 0), runs(1000, 600), runs(4000, 1200)).phase
    assert ROLLED_BACK == look(begin(PLAN, 0), runs(1000, 300), ArmCounts()).phase


@pytest.mark.parametrize(
    ("limits", "mine"),
    [
        ({"max_p99_ms": 20.0}, runs(500, time_ms=21.0)),
        ({"max_p99_ratio": 1.2}, runs(500, time_ms=13.0)),
        ({"min_score": 0.8}, ArmCounts(500, num_scores=500, score_sum=300.0)),
        ({"min_agreement": 0.9}, ArmCounts(500, num_compared=500, num_agreed=350)),
    ],
)
def test_each_limit_is_watched(limits: dict[str, float], mine: ArmCounts) -> None:
    """A candidate that breaks it by far is rolled back, one like the baseline goes on."""
    plan, base = replace(PLAN, limits=limits), runs(4000)
    equal = ArmCounts(2000, 0, runs(2000).runs_by_bin, 2000, 1800.0, 2000, 1950)
    phases = [look(begin(plan, 0), counts, base, 60, plan).phase for counts in (mine, equal)]
    assert [ROLLED_BACK, RUNNING] == phases
    assert 1 == look(begin(plan, 0), equal, base, 60, plan).step


def test_people_decide_where_that_makes_sense() -> None:
    """Each action is refused where it does not, with what would."""
    running = begin(PLAN, 0)
    counts = (GOOD, BASE, 5 * S, "ann")
    paused = apply("PAUSE", PLAN, running, *counts)
    assert (PAUSED, "PAUSE by ann", 0.2) == (paused.phase, paused.verdict, share_now(PLAN, paused))
    assert paused is look(paused, runs(1000, 900))
    on = apply("PROMOTE", PLAN, paused, *counts)
    assert (RUNNING, 1, "goes on to 50 %: PROMOTE by ann") == (on.phase, on.step, on.verdict)
    over = apply("PROMOTE", PLAN, apply("PROMOTE", PLAN, on, *counts), *counts)
    aborted = apply("ABORT", PLAN, over, *counts)
    assert (PROMOTED, ABORTED, 5) == (over.phase, aborted.phase, aborted.revision)
    for action, state, text in (
        ("RESUME", running, "the rollout of 'new' is RUNNING, and RESUME is for: PAUSED"),
        (
            "PAUSE",
            aborted,
            "is ABORTED, and PAUSE is for: RUNNING; another candidate or rollout in the file begins anew",
        ),
        ("STOP", running, "no action 'STOP' of a rollout; give one of PAUSE, RESUME, PROMOTE, ABORT"),
    ):
        with pytest.raises(InvalidArgumentError, match=text):
            apply(action, PLAN, state, *counts)


def test_a_clock_that_goes_back_and_counts_that_shrink_do_no_harm() -> None:
    """The share's time, or its tests, begin anew; the counts of another definition are passed over."""
    late = replace(begin(PLAN, 1_000_000 * S), candidate_before=runs(3000), baseline_before=runs(9000))
    earlier = look(late, runs(100, 90), runs(50), 5)
    assert (RUNNING, 5 * S, 0) == (earlier.phase, earlier.changed_unix_ns, earlier.revision)
    assert 1 == look(earlier, runs(100, 90) + GOOD, runs(50) + BASE, 65).step
    other = replace(begin(PLAN, 0), digest="another")
    assert other is look(other, runs(1000, 900))


def test_a_bandit_s_rollout_has_windows_in_place_of_shares() -> None:
    """Each begins the tests anew; a broken limit takes the candidate's weight, and only people promote it."""
    plan = replace(PLAN, shares=())
    state = look(begin(plan, 0), plan=plan)
    assert (RUNNING, 1, plan.weights) == (state.phase, state.step, weights_now(plan, state))
    assert PROMOTED == apply("PROMOTE", plan, state, GOOD, BASE, 0).phase
    back = look(state, GOOD + runs(500, 100), BASE + BASE, 61, plan)
    assert (ROLLED_BACK, (3.0, 0.0, 1.0)) == (back.phase, weights_now(plan, back))


def test_a_share_is_the_candidate_s_part_of_all_weights() -> None:
    """The others keep theirs, so that keys only move to the candidate; at 100 % they have none."""
    states = [replace(begin(PLAN, 0), step=step) for step in range(3)]
    assert [(3.0, 1.0, 1.0), (3.0, 4.0, 1.0), (0.0, 1.0, 0.0)] == [weights_now(PLAN, state) for state in states]


def test_a_damaged_state_is_told() -> None:
    """Whatever the file of a state has in place of one."""
    for content in ({}, {**begin(PLAN, 0).to_json(), "colour": 1}, {"candidate_before": 1}):
        with pytest.raises(ValueError, match="no state of a rollout"):
            RolloutState.from_json(content)
