"""Which of several replicas answers a call: plain rules over what the router has counted itself."""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from hashlib import blake2b
from math import ceil, exp
from typing import Protocol, TypeVar

#: Time constant of the mean response time, in seconds.
RESPONSE_DECAY_S = 10.0
#: A replica may have so much of its fair share of the calls in flight before keys move on to the next.
MAX_SHARE = 1.25


class ResponseTime:
    """Mean response time of one replica that follows a rise at once and a fall slowly (peak EWMA).

    Args:
        clock_ns: Monotonic.
    """

    __slots__ = ("_at_ns", "_clock_ns", "_mean_s")

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self._clock_ns = clock_ns
        self._at_ns = 0
        self._mean_s: float | None = None

    @property
    def mean_s(self) -> float | None:
        """In seconds; it falls while nothing is measured, so that a replica that was slow is tried again."""
        return None if self._mean_s is None else self._mean_s * self._weight()

    def measured(self, duration_s: float) -> None:
        """A call has succeeded after so many seconds."""
        mean_s = self._mean_s
        if mean_s is not None and duration_s < mean_s:
            weight = self._weight()
            duration_s = mean_s * weight + duration_s * (1 - weight)
        self._mean_s = duration_s
        self._at_ns = self._clock_ns()

    def _weight(self) -> float:
        return exp(-(self._clock_ns() - self._at_ns) / (RESPONSE_DECAY_S * 1e9))


class Loaded(Protocol):
    """What is known of a replica.

    Attributes:
        address: Its name.
        num_inflight: Calls that wait for its answer.
        response: How long its answers take.
    """

    address: str
    num_inflight: int
    response: ResponseTime


ReplicaT = TypeVar("ReplicaT", bound=Loaded)


class Rule(ABC):
    """Chooses a replica."""

    @abstractmethod
    def pick(self, replicas: Sequence[ReplicaT], key: str) -> ReplicaT:
        """One of ``replicas``, of which there is at least one.

        Args:
            replicas: Those that may answer.
            key: Calls of one key belong together; "": the call belongs to no other.
        """


class LeastOutstanding(Rule):
    """Of two replicas drawn at random the one with fewer calls in flight.

    Args:
        generator: Source of the draws.

    Source:
        M. Mitzenmacher, "The power of two choices in randomized load balancing", IEEE TPDS 2001.
    """

    def __init__(self, generator: random.Random) -> None:
        self._generator = generator

    def pick(self, replicas: Sequence[ReplicaT], key: str) -> ReplicaT:
        """As ``Rule.pick``."""
        if len(replicas) == 1:
            return replicas[0]
        first, second = _two_of(replicas, self._generator)
        return second if second.num_inflight < first.num_inflight else first


class LeastResponseTime(Rule):
    """Of two replicas drawn at random the one where response time x (calls in flight + 1) is less.

    One that was not measured yet counts as the other does.

    Args:
        generator: Source of the draws.
    """

    def __init__(self, generator: random.Random) -> None:
        self._generator = generator

    def pick(self, replicas: Sequence[ReplicaT], key: str) -> ReplicaT:
        """As ``Rule.pick``."""
        if len(replicas) == 1:
            return replicas[0]
        first, second = _two_of(replicas, self._generator)
        first_s, second_s = first.response.mean_s, second.response.mean_s
        if first_s is None or second_s is None:
            first_s = second_s = 1.0
        is_second = second_s * (second.num_inflight + 1) < first_s * (first.num_inflight + 1)
        return second if is_second else first


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

    def pick(self, replicas: Sequence[ReplicaT], key: str) -> ReplicaT:
        """As ``Rule.pick``."""
        if not key:
            return self._otherwise.pick(replicas, key)
        limit = ceil(MAX_SHARE * (sum(replica.num_inflight for replica in replicas) + 1) / len(replicas))
        score = _scores(key)
        first = min(replicas, key=score)
        if first.num_inflight < limit:
            return first
        return min((replica for replica in replicas if replica.num_inflight < limit), key=score, default=first)


def _two_of(replicas: Sequence[ReplicaT], generator: random.Random) -> tuple[ReplicaT, ReplicaT]:
    """Two different ones; ``generator.sample`` takes 1.8 us for it."""
    first = int(generator.random() * len(replicas))
    second = int(generator.random() * (len(replicas) - 1))
    return replicas[first], replicas[second + (second >= first)]


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
