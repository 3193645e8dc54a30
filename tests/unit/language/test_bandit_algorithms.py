"""Bandits in simulation: which step they choose, and what they learn."""

import random
from collections.abc import Sequence

import pytest

from weft.language.bandit_algorithms import ALGORITHMS, Arm, BanditAlgorithm, BanditPlan
from weft.router.bandits.store import Bandit
from weft_protos import graph_pb2

EVERY = list(ALGORITHMS.values())
MEANS = (0.3, 0.6)
NUM_ROUNDS = 4000


def bandit(
    algorithm: BanditAlgorithm,
    arms: Sequence[Arm] = (),
    weights: Sequence[float] = (),
    *,
    epsilon: float = 0.1,
    min_pulls: int = 0,
    seed: int = 1,
) -> Bandit:
    """A bandit over steps named a, b, ...; two equal arms that nothing is known of unless others are given."""
    arms = arms or [Arm(), Arm()]
    plan = BanditPlan(algorithm, epsilon, min_pulls)
    return Bandit("abcdef"[: len(arms)], arms, weights or [1.0] * len(arms), plan, random.Random(seed))


def play(subject: Bandit, means: Sequence[float], num_rounds: int, *, delay: int = 0) -> float:
    """Regret over some rounds in which step i pays 1 with probability means[i], each reward ``delay`` rounds late."""
    chance = random.Random(7)
    pending: list[tuple[int, float, float]] = []
    regret = 0.0
    for _ in range(num_rounds):
        index, probability = subject.choose()
        regret += max(means) - means[index]
        pending.append((index, float(chance.random() < means[index]), probability))
        if len(pending) > delay:
            subject.reward(*pending.pop(0))
    return regret


def test_every_algorithm_of_the_language_is_there() -> None:
    """The table has the names of the enum in ``graph.proto``, in its order."""
    assert graph_pb2.Bandit.Algorithm.keys() == list(ALGORITHMS)


@pytest.mark.parametrize(
    ("algorithm", "bound"),
    [
        (ALGORITHMS["EPSILON_GREEDY"], 130.0),
        (ALGORITHMS["THOMPSON"], 30.0),
        (ALGORITHMS["UCB1"], 90.0),
        (ALGORITHMS["EXP3"], 220.0),
    ],
)
@pytest.mark.parametrize("seed", range(5))
def test_the_better_step_is_found(algorithm: BanditAlgorithm, bound: float, seed: int) -> None:
    """Of 0.3 and 0.6 the better one gets most requests; regret stays far below the 600 of an even split."""
    subject = bandit(algorithm, seed=seed)
    regret = play(subject, MEANS, NUM_ROUNDS)
    assert regret < bound
    assert subject.arms[1].num_pulls > 0.8 * NUM_ROUNDS


@pytest.mark.parametrize("algorithm", EVERY)
@pytest.mark.parametrize("seed", range(3))
def test_the_best_of_many_is_found(algorithm: BanditAlgorithm, seed: int) -> None:
    """Wherever it stands; by the end it gets by far the most requests."""
    means = (0.2, 0.4, 0.8, 0.5, 0.3)
    for shift in (0, 3):
        turned = means[shift:] + means[:shift]
        subject = bandit(algorithm, [Arm() for _ in means], seed=seed)
        play(subject, turned, NUM_ROUNDS)
        before = [arm.num_pulls for arm in subject.arms]
        play(subject, turned, 1000)
        last = [arm.num_pulls - count for arm, count in zip(subject.arms, before, strict=True)]
        assert last[turned.index(0.8)] > 800, last


@pytest.mark.parametrize("algorithm", EVERY)
def test_late_rewards_teach_too(algorithm: BanditAlgorithm) -> None:
    """With every reward 200 requests late the better step is still found, wherever it stands."""
    for means in (MEANS, MEANS[::-1]):
        subject = bandit(algorithm)
        play(subject, means, NUM_ROUNDS, delay=200)
        assert subject.arms[means.index(0.6)].num_pulls > 0.7 * NUM_ROUNDS


@pytest.mark.parametrize("algorithm", EVERY)
def test_a_step_that_gets_no_feedback_falls_behind(algorithm: BanditAlgorithm) -> None:
    """One whose requests fail is never rewarded, which is as good as reward 0."""
    subject = bandit(algorithm)
    for _ in range(2000):
        index, probability = subject.choose()
        if index == 1:
            subject.reward(1, 0.2, probability)
    assert subject.arms[1].num_pulls > 1600


@pytest.mark.parametrize("algorithm", EVERY)
def test_weights_decide_until_every_step_has_its_pulls(algorithm: BanditAlgorithm) -> None:
    """Shares are those of the weights, whatever the rewards say, until each step has ``min_pulls``."""
    subject = bandit(algorithm, weights=[9.0, 1.0], min_pulls=300)
    shares = [0, 0]
    while min(arm.num_pulls for arm in subject.arms) < 300:
        index, probability = subject.choose()
        assert (0.9, 0.1)[index] == pytest.approx(probability)
        shares[index] += 1
        subject.reward(index, float(index), probability)
    assert 0.08 < shares[1] / sum(shares) < 0.12
    before = subject.arms[1].num_pulls
    play(subject, (0.0, 1.0), 500)
    assert subject.arms[1].num_pulls - before > 400


@pytest.mark.parametrize("algorithm", EVERY)
def test_a_step_of_weight_0_is_never_chosen(algorithm: BanditAlgorithm) -> None:
    """It is switched off; a late reward for it is counted and changes nothing else."""
    subject = bandit(algorithm, [Arm(), Arm(), Arm()], [1.0, 0.0, 1.0], min_pulls=5)
    for _ in range(200):
        index, probability = subject.choose()
        subject.reward(index, 0.5, probability)
    subject.reward(1, 1.0)
    assert (0, 1) == (subject.arms[1].num_pulls, subject.arms[1].num_rewards)
    assert 1 not in {subject.choose()[0] for _ in range(50)}


@pytest.mark.parametrize("algorithm", EVERY)
def test_one_step_is_always_chosen(algorithm: BanditAlgorithm) -> None:
    """A single step needs no luck."""
    subject = bandit(algorithm, [Arm()])
    assert {0} == {subject.choose()[0] for _ in range(20)}


def test_epsilon_is_the_share_that_explores() -> None:
    """The rest goes to the best step; explorers are drawn by weight."""
    arms = [Arm(100, 100, 90.0), Arm(100, 100, 10.0), Arm(100, 100, 10.0)]
    subject = bandit(ALGORITHMS["EPSILON_GREEDY"], arms, [1.0, 3.0, 1.0], epsilon=0.5)
    chosen = [subject.choose()[0] for _ in range(10_000)]
    assert 0.57 < chosen.count(0) / 10_000 < 0.63  # 0.5 + 0.5 / 5
    assert 0.27 < chosen.count(1) / 10_000 < 0.33  # 0.5 * 3 / 5


def test_ucb1_tries_a_step_that_was_never_tried_first() -> None:
    """However well the others do."""
    assert 1 == bandit(ALGORITHMS["UCB1"], [Arm(50, 50, 50.0), Arm()]).choose()[0]


def test_ucb1_takes_the_highest_bound() -> None:
    """Mean + sqrt(2 ln N / n): a step that was tried little may be ahead of one with a better mean."""
    few, many = Arm(10, 10, 4.0), Arm(1000, 1000, 500.0)  # 0.4 + 1.18 against 0.5 + 0.12
    assert 0 == bandit(ALGORITHMS["UCB1"], [few, many]).choose()[0]
    few.num_pulls, few.reward_sum = 900, 360.0  # 0.4 + 0.13 against 0.5 + 0.12
    assert 1 == bandit(ALGORITHMS["UCB1"], [few, many]).choose()[0]


@pytest.mark.parametrize(("mean", "expected"), [(0.62, 0), (0.68, 1)])
def test_ucb1_explores_as_much_as_its_formula_says(mean: float, expected: int) -> None:
    """0.4 + sqrt(2 ln 1100 / 100) = 0.774 lies between the bounds 0.738 and 0.798 of these means of 1000."""
    arms = [Arm(100, 100, 40.0), Arm(1000, 1000, 1000 * mean)]
    assert expected == bandit(ALGORITHMS["UCB1"], arms).choose()[0]


def test_thompson_chooses_a_step_as_often_as_it_is_likely_to_be_best() -> None:
    """Beta(4, 2) beats Beta(2, 4) with probability 0.8968."""
    counts = [0, 0]
    for seed in range(4000):
        counts[bandit(ALGORITHMS["THOMPSON"], [Arm(4, 4, 3.0), Arm(4, 4, 1.0)], seed=seed).choose()[0]] += 1
    assert 0.8968 == pytest.approx(counts[0] / 4000, abs=0.015)


def test_exp3_weighs_a_reward_by_the_probability_of_its_pull() -> None:
    """The logarithm of a weight grows by epsilon * reward / (probability * steps); only differences are kept."""
    subject = bandit(ALGORITHMS["EXP3"], epsilon=0.2)
    subject.reward(1, 0.5, 0.25)
    assert (-0.2, 0.0) == pytest.approx(tuple(arm.log_weight for arm in subject.arms))
    subject.reward(0, 1.0)  # the probability is what it is now
    e = 2.718281828459045**-0.2
    share = 0.8 * e / (1 + e) + 0.1
    assert -0.2 + 0.2 / (share * 2) == pytest.approx(subject.arms[0].log_weight - subject.arms[1].log_weight)


def test_exp3_begins_with_the_weights() -> None:
    """Before any reward the shares are those of the weights, but for what explores evenly."""
    subject = bandit(ALGORITHMS["EXP3"], [Arm(), Arm()], [3.0, 1.0], epsilon=0.2)
    assert {0.7, 0.3} == {round(subject.choose()[1], 12) for _ in range(100)}


def test_exp3_learns_on_when_the_best_step_is_switched_off() -> None:
    """Those that are left are compared with one another, however far they are behind it."""
    arms = [Arm(), Arm(log_weight=-2000.0), Arm(log_weight=-2001.0)]
    subject = bandit(ALGORITHMS["EXP3"], arms, [0.0, 1.0, 1.0], epsilon=0.2)
    share = 0.8 / (1 + 2.718281828459045**-1) + 0.1
    assert {round(share, 9), round(1 - share, 9)} == {round(subject.choose()[1], 9) for _ in range(100)}


def test_exp3_stays_finite_for_ever() -> None:
    """A step that was far behind comes back when rewards change sides."""
    subject = bandit(ALGORITHMS["EXP3"], epsilon=0.2)
    for _ in range(20_000):
        subject.reward(0, 1.0, 0.9)
    assert -2e3 > subject.arms[1].log_weight
    assert 0.1 == pytest.approx(min(subject.choose()[1] for _ in range(200)))
    for _ in range(3000):
        subject.reward(1, 1.0)
    assert 0.0 == subject.arms[1].log_weight


def test_more_rewards_than_pulls_count_as_trials() -> None:
    """Feedback for requests that another router served gives no mean above 1 and no bad draw."""
    arm = Arm(num_pulls=1, num_rewards=4, reward_sum=4.0)
    assert (4, 1.0) == (arm.num_trials, arm.mean)
    for algorithm in EVERY:
        assert bandit(algorithm, [arm, Arm()]).choose()[0] in (0, 1)
