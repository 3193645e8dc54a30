"""Which step of a splitter runs, learned from rewards. Plain policy: chance comes from outside, nothing is awaited."""

import random
from collections.abc import Sequence

from weft.language.bandit_algorithms import Arm, Arms, BanditPlan


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
        self._min_pulls = plan.min_pulls
        self._algorithm = plan.algorithm
        self._arms = Arms(arms, weights, plan.epsilon, generator)

    def choose(self) -> tuple[int, float]:
        """Index of the next step, which counts as pulled, and the probability that it was drawn with.

        The probability goes back with the reward; an algorithm that does not need it gives 1.
        """
        arms = self._arms
        if any(self.arms[index].num_trials < self._min_pulls for index in arms.live):
            shares = [arms.weights[index] for index in arms.live]
            at = arms.draw(shares)
            index, probability = arms.live[at], shares[at] / sum(shares)
        else:
            index, probability = self._algorithm.choose(arms)
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
        self._algorithm.learn(self._arms, index, reward, probability)
