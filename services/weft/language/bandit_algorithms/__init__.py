"""Bandit algorithms: how a splitter that learns from feedback chooses its next step. One module each."""

from dataclasses import dataclass

from weft.language.bandit_algorithms.algorithm import Arm, Arms, BanditAlgorithm
from weft.language.bandit_algorithms.epsilon_greedy import EPSILON_GREEDY
from weft.language.bandit_algorithms.exp3 import EXP3
from weft.language.bandit_algorithms.thompson import THOMPSON
from weft.language.bandit_algorithms.ucb1 import UCB1

#: By the names of the values of ``Bandit.Algorithm`` in ``graph.proto``.
ALGORITHMS: dict[str, BanditAlgorithm] = {
    algorithm.name: algorithm for algorithm in (EPSILON_GREEDY, THOMPSON, UCB1, EXP3)
}


@dataclass(frozen=True, slots=True)
class BanditPlan:
    """A splitter that learns from feedback.

    Attributes:
        algorithm: How the next step is chosen.
        epsilon: Share of requests that explore, of an algorithm that takes it.
        min_pulls: Requests that each step gets first.
    """

    algorithm: BanditAlgorithm
    epsilon: float
    min_pulls: int


__all__ = ["ALGORITHMS", "Arm", "Arms", "BanditAlgorithm", "BanditPlan"]
