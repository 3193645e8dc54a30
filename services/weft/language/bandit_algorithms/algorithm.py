"""What a bandit algorithm is: a choice among the steps of a splitter by what their rewards have taught."""

import random
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(slots=True)
class Arm:
    """What is known of one step.

    Attributes:
        num_pulls: How often it was chosen.
        num_rewards: How often feedback was given.
        reward_sum: Of all feedback; each reward is in 0..1.
        log_weight: Of algorithms that keep a weight: relative to the best step's, whose logarithm is 0.
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


class Arms:
    """The steps of one splitter as an algorithm sees them.

    Args:
        arms: What is known of each; other bandits may share and change them.
        weights: Of each, at least 0, one of them above 0; dimensionless. A step of weight 0 is never chosen.
        epsilon: Share of requests that explore.
        generator: Source of every draw.
    """

    def __init__(self, arms: Sequence[Arm], weights: Sequence[float], epsilon: float, generator: random.Random) -> None:
        self.arms = tuple(arms)
        self.weights = tuple(weights)
        self.live = [index for index, weight in enumerate(weights) if weight > 0]
        self.epsilon = epsilon
        self.generator = generator

    def best(self, scores: Mapping[int, float]) -> int:
        """The step with the highest score; of several one drawn by weight."""
        best = max(scores.values())
        return self.by_weight([index for index, score in scores.items() if score == best])

    def by_weight(self, candidates: Sequence[int]) -> int:
        """One of these steps, drawn by weight."""
        if len(candidates) == 1:
            return candidates[0]
        return candidates[self.draw([self.weights[index] for index in candidates])]

    def draw(self, shares: Sequence[float]) -> int:
        """Index of a share, drawn with a probability in its proportion."""
        bounds = list(accumulate(shares))
        return min(bisect_right(bounds, self.generator.random() * bounds[-1]), len(bounds) - 1)


def _learn_nothing(arms: Arms, index: int, reward: float, probability: float | None) -> None:
    """Pulls and rewards of the arms say it all."""


@dataclass(frozen=True, slots=True, eq=False)
class BanditAlgorithm:
    """How a bandit chooses the next step.

    Attributes:
        name: As in ``graph.proto``.
        choose: Steps -> index of one of ``Arms.live``, and the probability that it was drawn with, 1 where ``learn``
            does not need it.
        learn: (steps, index, reward in 0..1, probability of the choice or None where that is not known): what the
            algorithm keeps beside pulls and rewards, which were counted.
        takes_epsilon: ``epsilon`` counts.
    """

    name: str
    choose: Callable[[Arms], tuple[int, float]]
    learn: Callable[[Arms, int, float, float | None], None] = _learn_nothing
    takes_epsilon: bool = False

    def __repr__(self) -> str:
        return self.name
