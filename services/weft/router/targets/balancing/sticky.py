"""Calls of one key, or of one stateful sequence, on one replica."""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from math import ceil

from typing_extensions import override

from weft.router.targets.balancing.least_outstanding import LeastOutstanding
from weft.router.targets.balancing.rule import Loaded, PolicyType, ReplicaT, Rule

#: A replica may have so much of its fair share of the calls in flight before keys move on to the next.
MAX_SHARE = 1.25


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
