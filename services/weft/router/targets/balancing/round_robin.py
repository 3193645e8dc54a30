"""One replica after the other."""

import random
from collections.abc import Sequence

from typing_extensions import override

from weft.router.targets.balancing.rule import PolicyType, ReplicaT, Rule


class RoundRobin(Rule):
    """The replicas take turns.

    gRPC's own policy of this name would leave out replicas that answer badly without a word of it, and for longer.

    Args:
        generator: Draws who is first, so that routers do not go round together.
    """

    def __init__(self, generator: random.Random) -> None:
        self._turn = int(generator.random() * 1024)

    @override
    def pick(self, replicas: Sequence[ReplicaT], key: str) -> ReplicaT:
        self._turn += 1
        return replicas[self._turn % len(replicas)]


ROUND_ROBIN = PolicyType("round_robin", RoundRobin)
