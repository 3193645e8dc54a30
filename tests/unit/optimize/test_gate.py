"""The interval of a loss, and what the gate makes of it."""

import math
import re

import numpy as np
import pytest

from weft.optimize.gate import GateCandidate, Loss, Scores, loss_of, pick, refusal


def scores(num_rows: int, num_worse: int, *, is_relative: bool = True) -> Scores:
    """Rows that score 1, of which the candidate loses some."""
    candidate = np.ones(num_rows)
    candidate[:num_worse] = 0.0
    return Scores(np.ones(num_rows), candidate, is_relative)


def test_the_interval_is_that_of_the_binomial_distribution() -> None:
    """20 of 1000 rows lost: 2 %, give or take 1.96 standard errors of 0.44 %."""
    loss = loss_of(scores(1000, 20), seed=0)
    assert (1000, 20) == (loss.num_rows, loss.num_worse)
    assert loss.value == pytest.approx(0.02)
    assert loss.low == pytest.approx(0.02 - 1.96 * 0.00443, abs=0.0012)
    assert loss.high == pytest.approx(0.02 + 1.96 * 0.00443, abs=0.0012)


def test_the_interval_covers_the_true_loss_as_often_as_it_says() -> None:
    """Of 100 samples of rows that lose 5 % in truth, 95 % or so have an interval around that."""
    random = np.random.default_rng(3)
    covered = 0
    for seed in range(100):
        candidate = (random.random(300) > 0.05).astype(float)
        loss = loss_of(Scores(np.ones(300), candidate), seed)
        covered += loss.low <= 0.05 <= loss.high
    assert 0.90 <= covered / 100 <= 0.99


def test_the_same_seed_gives_the_same_interval_and_another_another() -> None:
    """So that a report can be made again."""
    assert loss_of(scores(50, 7), seed=1) == loss_of(scores(50, 7), seed=1)
    random = np.random.default_rng(0)
    uneven = Scores(np.ones(50), random.random(50))
    assert loss_of(uneven, seed=1) != loss_of(uneven, seed=2)


def test_a_relative_loss_is_a_share_of_what_the_original_scores() -> None:
    """Half of 0.4 is 50 %, or 0.2 of a loss that is no share; of nothing nothing is lost."""
    halved = Scores(np.full(10, 0.4), np.full(10, 0.2))
    assert loss_of(halved, 0).value == pytest.approx(0.5)
    assert loss_of(halved._replace(is_relative=False), 0).value == pytest.approx(0.2)
    assert loss_of(Scores(np.zeros(10), np.zeros(10)), 0).value == 0.0


@pytest.mark.parametrize("num_rows", [1, 45, 1000])
def test_no_difference_leaves_what_the_rows_cannot_show(num_rows: int) -> None:
    """With 95 % confidence less than 3/n of all rows differ where none of n does; not more than all are lost."""
    loss = loss_of(scores(num_rows, 0), seed=0)
    assert (0.0, 0.0, min(1.0, 3 / num_rows)) == loss[:3]


@pytest.mark.parametrize("num_worse", range(1, 10))
def test_few_differences_leave_at_least_what_the_poisson_distribution_does(num_worse: int) -> None:
    """The share with which so few rows, or fewer, are worse in 5 % of draws; a bootstrap alone is below it."""
    high = loss_of(scores(1000, num_worse), seed=0).high
    mean = 1000 * high
    chance = sum(math.exp(-mean) * mean**k / math.factorial(k) for k in range(num_worse + 1))
    assert chance <= 0.0505


def test_one_tiny_difference_shows_no_more_than_none() -> None:
    """It says nothing of rows like none of these."""
    nearly = np.ones(45)
    nearly[0] -= 1e-7
    assert loss_of(Scores(np.ones(45), nearly), seed=0).high >= 3 / 45


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (Loss(0.001, 0.0, 0.005, 1000, 1), ""),
        (Loss(0.001, 0.0, 0.0051, 1000, 1), "may lose up to 0.51%"),
        (Loss(0.2, 0.1, 0.3, 1000, 200), "it loses 20.00%, 0.50% is allowed"),
        (Loss(-0.01, -0.02, 0.0, 1000, 0), ""),
    ],
)
def test_the_upper_end_of_the_interval_decides(loss: Loss, told: str) -> None:
    """A small loss over few rows is refused, and told apart from a large one."""
    found = refusal(loss, 0.005)
    assert (told in found) if told else not found


@pytest.mark.parametrize("max_loss", [0.0001, 0.003, 0.005, 0.01, 0.07, 0.35])
def test_a_gate_that_cannot_tell_refuses_and_says_how_many_rows_could(max_loss: float) -> None:
    """Also what differs in nothing passes only from 3/n on; 30000 rows show 0.01 %."""
    num_rows = math.ceil(round(3 / max_loss, 3))
    told = refusal(loss_of(scores(num_rows - 1, 0), seed=0), max_loss)
    assert f"{num_rows - 1} held-out rows cannot tell; needs {num_rows} rows" in told
    assert not refusal(loss_of(scores(num_rows, 0), seed=0), max_loss)


def test_a_gate_that_cannot_tell_of_a_small_loss_says_about_how_many_rows_could() -> None:
    """5 of 1000 rows are lost, up to 1.1 % may be: four times the rows halve that distance, and 3/n is the least."""
    loss = loss_of(scores(1000, 5), seed=0)
    needed = int(re.search(r"needs about (\d+) rows", refusal(loss, 0.007))[1])
    assert not refusal(loss_of(scores(needed, round(needed * 0.005)), seed=0), 0.0075)
    assert "no number of rows shows that" in refusal(Loss(0.0, 0.0, 0.03, 100, 0), 0.0)


def test_the_fastest_is_picked_and_of_equals_the_smallest() -> None:
    """Times that differ by less than a hundredth are equal."""
    two = [GateCandidate("a", 0.501, 90), GateCandidate("b", 0.504, 30)]
    assert ("b", "") == pick(two)
    assert ("c", "") == pick([*two, GateCandidate("c", 0.4, 900)])
    assert ("a", "") == pick([GateCandidate("a", 0.949, 90), GateCandidate("b", 0.954, 30)])  # b is no faster


@pytest.mark.parametrize(
    ("contenders", "why"),
    [
        ([], "no candidate passes the gate"),
        ([GateCandidate("a", 0.96, 1)], "is faster: the best, a, takes 0.96"),
        ([GateCandidate("a", 0.9503, 1)], "takes 0.9503 of"),
        ([GateCandidate("a", 1.4, 1)], "is faster"),
    ],
)
def test_nothing_is_picked_without_a_saving(contenders: list[GateCandidate], why: str) -> None:
    """What saves less than 5 % is within a machine's noise."""
    name, told = pick(contenders)
    assert not name
    assert why in told
