"""Bandit algorithms: how a splitter chooses its next step from the rewards so far.

Sources:
    EPSILON_GREEDY: R. Sutton, A. Barto, "Reinforcement learning", 2nd edition 2018, 2.2, with a constant epsilon.
    THOMPSON: S. Agrawal, N. Goyal, "Analysis of Thompson sampling for the multi-armed bandit problem", 2012, alg. 1.
    UCB1: P. Auer, N. Cesa-Bianchi, P. Fischer, "Finite-time analysis of the multiarmed bandit problem", 2002.
    EXP3: P. Auer et al., "The nonstochastic multiarmed bandit problem", 2002, figure 1; epsilon is the paper's gamma.
"""

import random
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import exp, log, sqrt


@dataclass(slots=True)
class Arm:
    """Statistics of one step.

    Attributes:
        reward_sum: Of all feedback; each reward is in 0..1.
        log_weight: For algorithms with weights: relative to the best step, whose logarithm is 0.
    """

    num_pulls: int = 0
    num_rewards: int = 0
    reward_sum: float = 0.0
    log_weight: float = 0.0

    @property
    def num_trials(self) -> int:
        """Pulls, or rewards if there are more of them: some may be for requests that another router served."""
        return max(self.num_pulls, self.num_rewards)

    @property
    def mean(self) -> float:
        """Mean reward of a pull; one without feedback counts as 0, so that a failing step falls behind."""
        return self.reward_sum / self.num_trials if self.num_trials else 0.0


class Arms:
    """The steps of one splitter, as algorithms see them.

    Args:
        weights: Of each, at least 0, one of them above 0; dimensionless. A step of weight 0 is never chosen.
        epsilon: Share of requests that explore.

    Attributes:
        known: These steps, and those of the splitter's other versions.
    """

    def __init__(self, arms: Sequence[Arm], weights: Sequence[float], epsilon: float, generator: random.Random) -> None:
        self.arms = tuple(arms)
        self.known: Collection[Arm] = self.arms
        self.weights = tuple(weights)
        self.live = [index for index, weight in enumerate(weights) if weight > 0]
        self.epsilon = epsilon
        self.generator = generator

    def best(self, scores: Mapping[int, float]) -> int:
        """The step with the highest score; ties are drawn by weight."""
        best = max(scores.values())
        return self.by_weight([index for index, score in scores.items() if score == best])

    def by_weight(self, candidates: Sequence[int]) -> int:
        """Draw one of these steps by weight."""
        if len(candidates) == 1:
            return candidates[0]
        return candidates[self.draw([self.weights[index] for index in candidates])]

    def draw(self, shares: Sequence[float]) -> int:
        """Draw an index with a probability proportional to its share."""
        bounds = list(accumulate(shares))
        return min(bisect_right(bounds, self.generator.random() * bounds[-1]), len(bounds) - 1)


def _learn_nothing(arms: Arms, index: int, reward: float, probability: float | None) -> None:
    """For algorithms that need only pulls and rewards."""


@dataclass(frozen=True, slots=True, eq=False)
class BanditAlgorithm:
    """An algorithm that chooses the next step.

    Attributes:
        choose: Steps -> index of one of ``Arms.live``, and the probability with which it was drawn (1 if ``learn`` does
            not need it).
        learn: (steps, index, reward in 0..1, probability of the choice or None if unknown): updates the algorithm's own
            state; pulls and rewards are already counted.
    """

    name: str
    choose: Callable[[Arms], tuple[int, float]]
    learn: Callable[[Arms, int, float, float | None], None] = _learn_nothing
    takes_epsilon: bool = False

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class BanditPlan:
    """The compiled bandit of a splitter.

    Attributes:
        epsilon: Share of requests that explore.
        min_pulls: Requests that each step gets before the algorithm decides.
    """

    algorithm: BanditAlgorithm
    epsilon: float
    min_pulls: int


def _epsilon_greedy(arms: Arms) -> tuple[int, float]:
    """The best step so far, but for a share of requests split by weight."""
    if arms.generator.random() < arms.epsilon:
        return arms.by_weight(arms.live), 1.0
    return arms.best({index: arms.arms[index].mean for index in arms.live}), 1.0


def _thompson(arms: Arms) -> tuple[int, float]:
    """Picks each step with its probability of being the best; a reward in [0, 1] is a fraction of a success."""
    return arms.best({index: _sample(arms.arms[index], arms.generator) for index in arms.live}), 1.0


def _sample(arm: Arm, generator: random.Random) -> float:
    """Sample from the posterior of the arm's mean: Beta, from a uniform prior."""
    return generator.betavariate(1.0 + arm.reward_sum, 1.0 + arm.num_trials - arm.reward_sum)


def _ucb1(arms: Arms) -> tuple[int, float]:
    """The step with the highest upper confidence bound; each is tried once first."""
    if untried := [index for index in arms.live if not arms.arms[index].num_trials]:
        return arms.by_weight(untried), 1.0
    live = {index: arms.arms[index] for index in arms.live}
    log_total = log(sum(arm.num_trials for arm in live.values()))
    return arms.best({index: arm.mean + sqrt(2.0 * log_total / arm.num_trials) for index, arm in live.items()}), 1.0


def _exp3(arms: Arms) -> tuple[int, float]:
    """Exponential weights, for rewards that change with time."""
    shares = _shares(arms)
    at = arms.draw(shares)
    return arms.live[at], shares[at]


def _learn_exp3(arms: Arms, index: int, reward: float, probability: float | None) -> None:
    if not arms.weights[index] > 0:
        return
    if probability is None:
        probability = _shares(arms)[arms.live.index(index)]
    step = arms.epsilon * reward / (probability * len(arms.live))
    arms.arms[index].log_weight += min(step, 1.0)  # a draw by weight may be rarer, and its step above 1
    best = max(arm.log_weight for arm in arms.known)
    for arm in arms.known:
        arm.log_weight -= best


def _shares(arms: Arms) -> list[float]:
    """Probability of each live step; at least epsilon / number of steps."""
    best = max(arms.arms[index].log_weight for index in arms.live)
    weights = [arms.weights[index] * exp(arms.arms[index].log_weight - best) for index in arms.live]
    total = sum(weights)
    return [(1.0 - arms.epsilon) * weight / total + arms.epsilon / len(weights) for weight in weights]


#: By the names of the values of ``Bandit.Algorithm`` in ``graph.proto``.
ALGORITHMS: dict[str, BanditAlgorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        BanditAlgorithm("EPSILON_GREEDY", _epsilon_greedy, takes_epsilon=True),
        BanditAlgorithm("THOMPSON", _thompson),
        BanditAlgorithm("UCB1", _ucb1),
        BanditAlgorithm("EXP3", _exp3, _learn_exp3, takes_epsilon=True),
    )
}
