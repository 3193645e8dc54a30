"""A step is drawn as often as it is likely to be the best; a reward between 0 and 1 is a share of a success.

Source: S. Agrawal, N. Goyal, "Analysis of Thompson sampling for the multi-armed bandit problem", 2012, algorithm 1.
"""

import random

from weft.language.bandit_algorithms.algorithm import Arm, Arms, BanditAlgorithm


def _choose(arms: Arms) -> tuple[int, float]:
    return arms.best({index: _sample(arms.arms[index], arms.generator) for index in arms.live}), 1.0


def _sample(arm: Arm, generator: random.Random) -> float:
    """A draw from what the arm's mean may be: Beta, from a uniform prior."""
    return generator.betavariate(1.0 + arm.reward_sum, 1.0 + arm.num_trials - arm.reward_sum)


THOMPSON = BanditAlgorithm("THOMPSON", _choose)
