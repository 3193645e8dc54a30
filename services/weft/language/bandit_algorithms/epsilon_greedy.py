"""The best step so far, except for a share of the requests that is drawn by weight.

Source: R. Sutton, A. Barto, "Reinforcement learning", 2nd edition 2018, 2.2, with a constant epsilon.
"""

from weft.language.bandit_algorithms.algorithm import Arms, BanditAlgorithm


def _choose(arms: Arms) -> tuple[int, float]:
    if arms.generator.random() < arms.epsilon:
        return arms.by_weight(arms.live), 1.0
    return arms.best({index: arms.arms[index].mean for index in arms.live}), 1.0


EPSILON_GREEDY = BanditAlgorithm("EPSILON_GREEDY", _choose, takes_epsilon=True)
