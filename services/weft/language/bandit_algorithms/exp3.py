"""Exponential weights, for rewards that change with time; epsilon is the paper's gamma.

Source: P. Auer et al., "The nonstochastic multiarmed bandit problem", 2002, figure 1.
"""

from math import exp

from weft.language.bandit_algorithms.algorithm import Arms, BanditAlgorithm


def _choose(arms: Arms) -> tuple[int, float]:
    shares = _shares(arms)
    at = arms.draw(shares)
    return arms.live[at], shares[at]


def _learn(arms: Arms, index: int, reward: float, probability: float | None) -> None:
    if not arms.weights[index] > 0:
        return
    if probability is None:
        probability = _shares(arms)[arms.live.index(index)]
    step = arms.epsilon * reward / (probability * len(arms.live))
    arms.arms[index].log_weight += min(step, 1.0)  # a draw by weight may be rarer, and its step above 1
    best = max(arm.log_weight for arm in arms.arms)
    for arm in arms.arms:
        arm.log_weight -= best


def _shares(arms: Arms) -> list[float]:
    """Probability of each live step; at least epsilon / number of steps."""
    best = max(arms.arms[index].log_weight for index in arms.live)
    weights = [arms.weights[index] * exp(arms.arms[index].log_weight - best) for index in arms.live]
    total = sum(weights)
    return [(1.0 - arms.epsilon) * weight / total + arms.epsilon / len(weights) for weight in weights]


EXP3 = BanditAlgorithm("EXP3", _choose, _learn, takes_epsilon=True)
