"""Which step of a splitter runs, learned from rewards. Plain policy: chance comes from outside, nothing is awaited."""

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import exp, log, sqrt

from weft_router.graph.plan import BanditAlgorithm, BanditPlan


@dataclass(slots=True)
class Arm:
    """What is known of one step.

    Attributes:
        num_pulls: How often it was chosen.
        num_rewards: How often feedback was given.
        reward_sum: Of all feedback; each reward is in 0..1.
        log_weight: EXP3's weight, relative to the best step's, whose logarithm is 0.
    """

    num_pulls: int = 0
    num_rewards: int = 0
    reward_sum: float = 0.0
    log_weight: float = 0.0

    @property
    def num_trials(self) -> int:
        """Pulls, or rewards where more of them came: for requests that another router served."""
        return max(self.num_pulls, self.num_rewards)

    @property
    def mean(self) -> float:
        """Reward of a pull; one without feedback counts as 0, so that a step which fails falls behind."""
        return self.reward_sum / self.num_trials if self.num_trials else 0.0


class Bandit:
    """Chooses among the steps of one splitter and learns from rewards.

    Until each step has ``min_pulls`` the weights alone decide; then the algorithm does. A step of weight 0 is never
    chosen.

    Args:
        names: Of the steps.
        arms: What is known of the steps, in the same order. Other bandits may share and change them.
        weights: At least 0, one of them above 0; dimensionless.
        plan: The algorithm and its settings.
        generator: Source of every draw.

    Source:
        Epsilon-greedy, with a constant epsilon: R. Sutton, A. Barto, "Reinforcement learning", 2nd edition 2018, 2.2.
        UCB1: P. Auer, N. Cesa-Bianchi, P. Fischer, "Finite-time analysis of the multiarmed bandit problem", 2002.
        Thompson: S. Agrawal, N. Goyal, "Analysis of Thompson sampling for the multi-armed bandit problem", 2012,
        algorithm 1; a reward between 0 and 1 is a share of a success. EXP3, with epsilon for its gamma: P. Auer et al.,
        "The nonstochastic multiarmed bandit problem", 2002, figure 1.
    """

    def __init__(
        self,
        names: Sequence[str],
        arms: Sequence[Arm],
        weights: Sequence[float],
        plan: BanditPlan,
        generator: random.Random,
    ) -> None:
        self.names = tuple(names)
        self.arms = tuple(arms)
        self._weights = tuple(weights)
        self._live = [index for index, weight in enumerate(weights) if weight > 0]
        self._plan = plan
        self._generator = generator

    def choose(self) -> tuple[int, float]:
        """Index of the next step, which counts as pulled, and the probability that it was drawn with.

        The probability is EXP3's, which needs it with the reward; the other algorithms give 1.
        """
        index, probability = self._choose()
        self.arms[index].num_pulls += 1
        return index, probability

    def reward(self, index: int, reward: float, probability: float | None = None) -> None:
        """A pull of step ``index`` was worth ``reward``, in 0..1.

        Args:
            index: Of the step.
            reward: In 0..1.
            probability: What ``choose`` gave with the pull; None where that is not known: the probability now.
        """
        arm = self.arms[index]
        arm.num_rewards += 1
        arm.reward_sum += reward
        if self._plan.algorithm is BanditAlgorithm.EXP3 and self._weights[index] > 0:
            if probability is None:
                probability = self._exp3_shares()[self._live.index(index)]
            step = self._plan.epsilon * reward / (probability * len(self._live))
            arm.log_weight += min(step, 1.0)  # a draw by weight may be rarer than any of EXP3's, whose steps are <= 1
            best = max(other.log_weight for other in self.arms)
            for other in self.arms:
                other.log_weight -= best

    def _choose(self) -> tuple[int, float]:
        arms, live = self.arms, self._live
        if any(arms[index].num_trials < self._plan.min_pulls for index in live):
            shares = [self._weights[index] for index in live]
            at = self._draw(shares)
            return live[at], shares[at] / sum(shares)
        match self._plan.algorithm:
            case BanditAlgorithm.EPSILON_GREEDY:
                if self._generator.random() < self._plan.epsilon:
                    return self._by_weight(live), 1.0
                return self._best({index: arms[index].mean for index in live}), 1.0
            case BanditAlgorithm.THOMPSON:
                return self._best({index: self._sample(arms[index]) for index in live}), 1.0
            case BanditAlgorithm.UCB1:
                untried = [index for index in live if not arms[index].num_trials]
                return self._by_weight(untried) if untried else self._best(self._upper_bounds()), 1.0
            case BanditAlgorithm.EXP3:
                shares = self._exp3_shares()
                at = self._draw(shares)
                return live[at], shares[at]

    def _sample(self, arm: Arm) -> float:
        """A draw from what the arm's mean may be: Beta, from a uniform prior."""
        return self._generator.betavariate(1.0 + arm.reward_sum, 1.0 + arm.num_trials - arm.reward_sum)

    def _upper_bounds(self) -> dict[int, float]:
        log_total = log(sum(self.arms[index].num_trials for index in self._live))
        return {index: (arm := self.arms[index]).mean + sqrt(2.0 * log_total / arm.num_trials) for index in self._live}

    def _exp3_shares(self) -> list[float]:
        """Probability of each live step; at least epsilon / number of steps."""
        best = max(self.arms[index].log_weight for index in self._live)
        weights = [self._weights[index] * exp(self.arms[index].log_weight - best) for index in self._live]
        total, epsilon = sum(weights), self._plan.epsilon
        return [(1.0 - epsilon) * weight / total + epsilon / len(weights) for weight in weights]

    def _best(self, scores: dict[int, float]) -> int:
        """The step with the highest score; of several one drawn by weight."""
        best = max(scores.values())
        return self._by_weight([index for index, score in scores.items() if score == best])

    def _by_weight(self, candidates: Sequence[int]) -> int:
        if len(candidates) == 1:
            return candidates[0]
        return candidates[self._draw([self._weights[index] for index in candidates])]

    def _draw(self, shares: Sequence[float]) -> int:
        bounds = list(accumulate(shares))
        return min(bisect_right(bounds, self._generator.random() * bounds[-1]), len(bounds) - 1)
