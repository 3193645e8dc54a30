"""Bandit algorithms: how a splitter that learns from feedback chooses its next step. One module each."""

from weft.language.bandit_algorithms.algorithm import Arm, Arms, BanditAlgorithm
from weft.language.bandit_algorithms.epsilon_greedy import EPSILON_GREEDY
from weft.language.bandit_algorithms.exp3 import EXP3
from weft.language.bandit_algorithms.thompson import THOMPSON
from weft.language.bandit_algorithms.ucb1 import UCB1

#: By the names of the values of ``Bandit.Algorithm`` in ``graph.proto``.
ALGORITHMS: dict[str, BanditAlgorithm] = {
    algorithm.name: algorithm for algorithm in (EPSILON_GREEDY, THOMPSON, UCB1, EXP3)
}

__all__ = ["ALGORITHMS", "Arm", "Arms", "BanditAlgorithm"]
