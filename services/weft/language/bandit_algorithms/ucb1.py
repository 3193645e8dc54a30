"""The step with the highest upper confidence bound; each is tried once first.

Source: P. Auer, N. Cesa-Bianchi, P. Fischer, "Finite-time analysis of the multiarmed bandit problem", 2002.
"""

from math import log, sqrt

from weft.language.bandit_algorithms.algorithm import Arms, BanditAlgorithm


def _choose(arms: Arms) -> tuple[int, float]:
    if untried := [index for index in arms.live if not arms.arms[index].num_trials]:
        return arms.by_weight(untried), 1.0
    live = {index: arms.arms[index] for index in arms.live}
    log_total = log(sum(arm.num_trials for arm in live.values()))
    return arms.best({index: arm.mean + sqrt(2.0 * log_total / arm.num_trials) for index, arm in live.items()}), 1.0


UCB1 = BanditAlgorithm("UCB1", _choose)
