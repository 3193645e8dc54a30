"""The sequential tests: false alarms at the stated level however often one looks, and faults that are found."""

from math import log
from typing import Any

import numpy as np
import pytest
from benchmarks.rollout_power import P99_MS, Truth, requests_needed, simulate

from weft.router.rollouts.evidence import bounds, log_wealth, log_wealth_of_slower, log_wealth_of_worse, num_needed

LEVEL = 0.05


def looks_at(outcomes: Any) -> tuple[Any, Any]:
    """Bad outcomes so far, and all outcomes, after each one."""
    return outcomes.cumsum(axis=-1), np.arange(1, outcomes.shape[-1] + 1)


@pytest.mark.parametrize("rate", [0.01, 0.2, 0.5])
def test_a_rate_at_its_limit_is_refused_at_the_level_at_most(rate: float) -> None:
    """Of 1,000 candidates, looked at after each of 1,000 outcomes."""
    generator, refused = np.random.default_rng(1), 0
    for _ in range(10):
        wealth = log_wealth(*looks_at(generator.random((100, 1000)) < rate), rate)
        refused += int((wealth.max(axis=-1) >= -log(LEVEL)).sum())
    assert refused <= LEVEL * 1000


def test_a_mean_of_scores_at_its_limit_is_refused_at_the_level_at_most() -> None:
    """Scores between 0 and 1, of which only the sum is known; a mean that is 0.1 lower is found."""
    generator = np.random.default_rng(2)
    for mean, least, most in ((0.6, 0, 10), (0.5, 195, 200)):
        bad, total = looks_at(1.0 - generator.beta(2.0 * mean, 2.0 * (1.0 - mean), (200, 1500)))
        refused = int((log_wealth(bad, total, 0.4).max(axis=-1) >= -log(LEVEL)).sum())
        assert least <= refused <= most


def test_a_rate_like_the_base_s_is_refused_at_the_level_at_most() -> None:
    """With nine times as many outcomes of the base, whatever the rate; a rate three times as high is found."""
    generator, refused, found = np.random.default_rng(3), 0, 0
    for _ in range(200):
        base, mine, worse = (
            generator.random(shape) < rate for shape, rate in ((9000, 0.05), (1000, 0.05), (1000, 0.15))
        )
        counts = [(base[: 9 * at].sum(), 9 * at, mine[:at].sum(), worse[:at].sum(), at) for at in range(100, 1001, 100)]
        refused += any(log_wealth_of_worse(k, n, b, m) >= -log(LEVEL) for b, m, k, _, n in counts)
        found += any(log_wealth_of_worse(k, n, b, m) >= -log(LEVEL) for b, m, _, k, n in counts)
    assert refused <= LEVEL * 200
    assert found >= 0.95 * 200


def test_a_percentile_like_the_base_s_is_not_refused_and_a_slower_one_is() -> None:
    """Also where the other side has few runs, or none."""
    generator, alarms = np.random.default_rng(4), 0
    for _ in range(200):
        mine, base = (Truth().draw(num, generator).runs_by_bin for num in (500, 2000))
        alarms += log_wealth_of_slower(mine, base, 1.0) >= -log(LEVEL)
        assert log_wealth_of_slower(mine, {}, 1.0) < 0.0 > log_wealth_of_slower({}, base, 1.0)
    assert alarms <= LEVEL * 200
    slow, usual = (Truth(slowdown=by).draw(2000, generator).runs_by_bin for by in (1.5, 1.0))
    wealth = [log_wealth_of_slower(slow, usual, ratio) for ratio in (0.5, 1.0, 1.2, 1.6)]
    assert wealth == sorted(wealth, reverse=True)
    assert wealth[2] > -log(LEVEL) > wealth[3]


def test_bounds_have_the_rate_between_them_at_every_look() -> None:
    """And come closer to it."""
    bad = (np.random.default_rng(5).random(20_000) < 0.1).cumsum()
    found = [bounds(bad[at - 1], at, log(0.01)) for at in (10, 100, 1000, 20_000)]
    assert all(lower < 0.1 < upper for lower, upper in found)
    widths = [upper - lower for lower, upper in found]
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] < 0.03


def test_no_failure_is_allowed_where_the_limit_is_none_at_all() -> None:
    """And none of the outcomes can break a limit that allows all."""
    assert (np.inf, 0.0) == (log_wealth(1, 1000, 0.0), log_wealth(0, 0, 0.0))
    assert log_wealth(1000, 1000, 1.0) < 0.1
    assert 1 < num_needed(0.0, log(LEVEL)) < 10_000


def test_the_outcomes_that_are_asked_for_find_a_clear_fault() -> None:
    """If as many are bad as are expected; one fewer does not."""
    for allowed in (0.001, 0.01, 0.05):
        num = num_needed(allowed, log(LEVEL))
        assert log_wealth(3 * allowed * num, num, allowed) >= -log(LEVEL)
        assert log_wealth(3 * allowed * num * 0.9, num * 0.9, allowed) < -log(LEVEL)


def test_rollouts_of_an_equal_candidate_are_promoted_and_of_a_bad_one_rolled_back() -> None:
    """A part of ``benchmarks/rollout_power.py``: all limits as tight as what serves allows."""
    limits = {"max_error_rate": 0.01, "max_p99_ms": P99_MS, "max_p99_ratio": 1.0}
    ends = [simulate(limits, Truth(), seed=seed, shares=(0.3, 1.0), batch=1000, looks=4)[0] for seed in range(10)]
    assert [end.phase for end in ends].count("PROMOTED") >= 9
    for bad, most in (({"max_error_rate": 0.01}, 2500), ({"max_p99_ratio": 1.0}, 3000)):
        median, p95, missed = requests_needed(bad, Truth(error_rate=0.03, slowdown=1.5), 0.5, 5)
        assert (0, True) == (missed, median <= p95 <= most)
