"""The balancing policies; those of gRPC itself choose on one channel to all replicas."""

import random
from collections.abc import Callable, Sequence
from hashlib import blake2b
from math import ceil

from typing_extensions import override

from weft.router.targets.balancing.rule import Loaded, PolicyType, ReplicaT, Rule, two_of

#: A replica may have so much of its fair share of the calls in flight before keys move on to the next.
MAX_SHARE = 1.25
#: Weights come from load reports out of band, which cost no call anything.
WEIGHTED_ROUND_ROBIN = PolicyType(
    "weighted_round_robin",
    grpc_config={
        "enableOobLoadReport": True,
        "oobReportingPeriod": "1s",
        "blackoutPeriod": "2s",
        "weightUpdatePeriod": "1s",
    },
)


class LeastOutstanding(Rule):
    """Of two replicas drawn at random the one with fewer calls in flight.

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


class LeastResponseTime(Rule):
    """Of two replicas drawn at random the one where response time x (calls in flight + 1) is less.

    One that was not measured yet counts as the other does.
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


class Sticky(Rule):
    """For a key the first replica in its rendezvous order that has room; without a key as another rule says.

    A replica has room up to ``MAX_SHARE`` of the mean of the calls in flight. When replicas come and go only the keys
    move that must.

    Args:
        otherwise: The rule without a key.

    Source:
        D. Thaler, C. Ravishankar, "A name-based mapping scheme for rendezvous", 1996;
        V. Mirrokni, M. Thorup, M. Zadimoghaddam, "Consistent hashing with bounded loads", SODA 2018.
    """

    def __init__(self, otherwise: Rule) -> None:
        self._otherwise = otherwise

    @override
    def pick(self, replicas: Sequence[ReplicaT], key: str) -> ReplicaT:
        if not key:
            return self._otherwise.pick(replicas, key)
        limit = ceil(MAX_SHARE * (sum(replica.num_inflight for replica in replicas) + 1) / len(replicas))
        score = _scores(key)
        first = min(replicas, key=score)
        if first.num_inflight < limit:
            return first
        return min((replica for replica in replicas if replica.num_inflight < limit), key=score, default=first)


def rendezvous_first(replicas: Sequence[ReplicaT], key: str) -> ReplicaT:
    """The replica that ``key`` prefers; the same in every process."""
    return min(replicas, key=_scores(key))


def _scores(key: str) -> Callable[[Loaded], tuple[bytes, str]]:
    """What orders replicas as ``key`` prefers them."""
    state = blake2b(key.encode(errors="surrogatepass"), digest_size=8)

    def score(replica: Loaded) -> tuple[bytes, str]:
        own = state.copy()
        own.update(b"\0" + replica.address.encode())
        return own.digest(), replica.address

    return score


STICKY = PolicyType("sticky", lambda generator: Sticky(LeastOutstanding(generator)), takes_key=True)
