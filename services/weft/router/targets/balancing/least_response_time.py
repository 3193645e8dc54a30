"""Shortest expected wait, of two replicas drawn at random."""

import random
from collections.abc import Sequence

from typing_extensions import override

from weft.router.targets.balancing.rule import PolicyType, ReplicaT, Rule, two_of


class LeastResponseTime(Rule):
    """Of two replicas drawn at random the one where response time x (calls in flight + 1) is less.

    One that was not measured yet counts as the other does.

    Args:
        generator: Source of the draws.
    """

    def __init__(self, generator: random.Random) -> None:
        self._generator = generator

    @override
    def pick(self, replicas: Sequence[ReplicaT], key: str) -> ReplicaT:
        if len(replicas) == 1:
            return replicas[0]
        first, second = two_of(replicas, self._generator)
        first_s, second_s = first.response.mean_s, second.response.mean_s
        if first_s is None or second_s is None:
            first_s = second_s = 1.0
        is_second = second_s * (second.num_inflight + 1) < first_s * (first.num_inflight + 1)
        return second if is_second else first


LEAST_RESPONSE_TIME = PolicyType("least_response_time", LeastResponseTime)
