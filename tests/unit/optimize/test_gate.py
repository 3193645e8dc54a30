"""The interval of a loss, and what the gate makes of it."""

import numpy as np
import pytest

from weft.optimize.bootstrap import Loss, Scores, loss_of
from weft.optimize.gate import GateCandidate, caution, pick, refusal


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


def test_one_row_has_an_interval_without_width() -> None:
    """It is judged, if barely; the caution says what it is worth."""
    loss = loss_of(scores(1, 0), seed=0)
    assert (0.0, 0.0, 0.0) == loss[:3]
    assert "none of 1 rows" in caution(loss, 0.01)


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


def test_no_difference_in_few_rows_is_a_caution() -> None:
    """3/n of all rows may differ; 600 rows show 0.5 %."""
    assert "600 held-out rows would show 0.50%" in caution(Loss(0.0, 0.0, 0.0, 100, 0), 0.005)
    assert not caution(Loss(0.0, 0.0, 0.0, 600, 0), 0.005)
    assert not caution(Loss(0.001, 0.0, 0.003, 100, 1), 0.005)
    assert "no number of held-out rows" in caution(Loss(0.0, 0.0, 0.0, 100, 0), 0.0)


def test_the_cheapest_is_picked_and_of_equals_the_smallest() -> None:
    """Costs that differ by less than a hundredth are equal."""
    two = [GateCandidate("a", 0.501, 90), GateCandidate("b", 0.504, 30)]
    assert ("b", "") == pick(two)
    assert ("c", "") == pick([*two, GateCandidate("c", 0.4, 900)])


@pytest.mark.parametrize(
    ("contenders", "why"),
    [
        ([], "no candidate passes the gate"),
        ([GateCandidate("a", 0.96, 1)], "is cheaper: the best, a, needs 0.96"),
        ([GateCandidate("a", 1.4, 1)], "is cheaper"),
    ],
)
def test_nothing_is_picked_without_a_saving(contenders: list[GateCandidate], why: str) -> None:
    """What saves less than 5 % is within a machine's noise."""
    name, told = pick(contenders)
    assert not name
    assert why in told
