"""Fewest calls in flight, of two replicas drawn at random."""

import random
from collections.abc import Sequence

from typing_extensions import override

from weft.router.targets.balancing.rule import PolicyType, ReplicaT, Rule, two_of


class LeastOutstanding(Rule):
    """Of two replicas drawn at random the one with fewer calls in flight.

    Args:
        generator: Source of the draws.

    Source:
        M. Mitzenmacher, "The power of two choices in randomized load balancing", IEEE TPDS 2001.
    """

    def __init__(self, generator: random.Random) -> None:
        self._generator = generator

    @override
    def pick(self, replicas: Sequence[ReplicaT], key: str) -> ReplicaT:
        if len(replicas) == 1:
            return replicas[0]
        first, second = two_of(replicas, self._generator)
        return second if second.num_inflight < first.num_inflight else first


LEAST_OUTSTANDING = PolicyType("least_outstanding", LeastOutstanding)
