"""The interface of balancing policies, and what several of them use."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import exp
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from weft.base.core import InferCall

#: Time constant of the mean response time, in seconds.
RESPONSE_DECAY_S = 10.0


class ResponseTime:
    """Mean response time of a replica that rises at once and falls slowly (peak EWMA)."""

    __slots__ = ("_at_ns", "_clock_ns", "_mean_s")

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self._clock_ns = clock_ns
        self._at_ns = 0
        self._mean_s: float | None = None

    @property
    def mean_s(self) -> float | None:
        """The mean in seconds; it decays without measurements, so that a slow replica is tried again."""
        return None if self._mean_s is None else self._mean_s * self._weight()

    def measured(self, duration_s: float) -> None:
        """Add the duration of a successful call."""
        mean_s = self._mean_s
        if mean_s is not None and duration_s < mean_s:
            weight = self._weight()
            duration_s = mean_s * weight + duration_s * (1 - weight)
        self._mean_s = duration_s
        self._at_ns = self._clock_ns()

    def _weight(self) -> float:
        return exp(-(self._clock_ns() - self._at_ns) / (RESPONSE_DECAY_S * 1e9))


class Loaded(Protocol):
    """Load of a replica as rules see it: address, calls in flight, response time."""

    address: str
    num_inflight: int
    response: ResponseTime


ReplicaT = TypeVar("ReplicaT", bound=Loaded)


class Rule(Protocol):
    """Chooses a replica for a call."""

    def __call__(self, replicas: Sequence[ReplicaT], key: Any) -> ReplicaT:
        """One of those that may answer, at least one; calls of one ``key`` belong together, "" belongs to no other.

        The key is a text, or what ``PolicyType.read_key`` gives.
        """


@dataclass(frozen=True, slots=True, eq=False)
class PolicyType:
    """A balancing policy.

    Attributes:
        make_rule: Makes the router's own rule, given a random generator; None: gRPC chooses.
        grpc_config: If gRPC chooses, the policy's configuration in a service config.
        takes_key: Calls with the same value of a parameter or header may be kept together: ``NAME:header=x-user``.
        read_key: Gives the key of a call; None: it is that parameter or header.
    """

    name: str
    make_rule: Callable[[random.Random], Rule] | None = None
    grpc_config: Mapping[str, object] | None = None
    takes_key: bool = False
    read_key: "Callable[[InferCall], object] | None" = None


def two_of(replicas: Sequence[ReplicaT], generator: random.Random) -> tuple[ReplicaT, ReplicaT]:
    """Two different ones; ``generator.sample`` takes 1.8 us for it."""
    first = int(generator.random() * len(replicas))
    second = int(generator.random() * (len(replicas) - 1))
    return replicas[first], replicas[second + (second >= first)]


def least_outstanding(generator: random.Random) -> Rule:
    """Of two random replicas, the one with fewer calls in flight.

    Source:
        M. Mitzenmacher, "The power of two choices in randomized load balancing", IEEE TPDS 2001.
    """

    def pick(replicas: Sequence[ReplicaT], key: str) -> ReplicaT:
        if len(replicas) == 1:
            return replicas[0]
        first, second = two_of(replicas, generator)
        return second if second.num_inflight < first.num_inflight else first

    return pick


def scores(key: str) -> Callable[[Loaded], tuple[bytes, str]]:
    """The rendezvous order of ``key``, to sort replicas by."""
    state = blake2b(key.encode(errors="surrogatepass"), digest_size=8)

    def score(replica: Loaded) -> tuple[bytes, str]:
        own = state.copy()
        own.update(b"\0" + replica.address.encode())
        return own.digest(), replica.address

    return score
