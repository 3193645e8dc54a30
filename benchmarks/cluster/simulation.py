"""A cluster of replicas behind routers: who gets which request, transfers from prefill to decode, and the figures."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import exp
from typing import NamedTuple

import numpy as np

from benchmarks.cluster.costs import StepCosts
from benchmarks.cluster.replica import EngineSettings, PrefixCache, Replica
from benchmarks.cluster.requests import Request
from benchmarks.simulator import Clock
from weft.base.core import InferCall
from weft.base.tensors import WireTensor
from weft.router.targets.balancing import POLICIES, least_outstanding
from weft.router.targets.balancing.rule import PolicyType, ResponseTime, Rule

_NS = 1e9


@dataclass(frozen=True, slots=True)
class Cluster:
    """What is simulated.

    Attributes:
        replicas: That compute prompts and decode them; those of ``prefill`` and ``decode`` do one of both.
        policy: How a router chooses, of ``CHOICES``: the router's own rules, and those of others for comparison.
        routers: Each sees only what it has sent itself.
        link_bytes_per_s, link_s: A prefill replica sends one prompt's keys and values after the other.
        shared_cache: One prefix cache of the sum of all, which costs nothing to read.
    """

    costs: StepCosts
    replicas: int = 0
    prefill: int = 0
    decode: int = 0
    settings: EngineSettings = field(default_factory=EngineSettings)
    policy: str = "least_outstanding"
    decode_policy: str = "least_outstanding"
    routers: int = 1
    link_bytes_per_s: float = 25e9
    link_s: float = 1e-3
    shared_cache: bool = False
    seed: int = 1


@dataclass(slots=True, eq=False)
class Seen:
    """A replica as one router sees it, with what balancing rules read."""

    replica: Replica
    address: str
    response: ResponseTime
    num_inflight: int = 0


Choose = Callable[[Sequence[Seen], Request], Seen]


def _rule(policy: PolicyType) -> Callable[[random.Random], Choose]:
    """A rule of the router, asked with the key that the router reads from calls."""
    make_rule, read_key = policy.make_rule, policy.read_key

    def make(generator: random.Random) -> Choose:
        rule: Rule = make_rule(generator) if make_rule else least_outstanding(generator)
        if read_key is None:
            return lambda seen, request: rule(seen, request.key)
        return lambda seen, request: rule(seen, read_key(_call(request)))

    return make


def _call(request: Request) -> InferCall:
    """The call of a request: a prompt of token ids, equal where the names of blocks are."""
    names = np.array(request.blocks or (id(request) & 0x7FFFFFFF,), np.int32)
    tokens = np.repeat(names, request.block_tokens)[: request.num_prompt]
    return InferCall("model", inputs={"input_ids": WireTensor("INT32", (len(tokens),), tokens.tobytes())})


def _fewest_tokens(generator: random.Random) -> Choose:
    """The replica with the fewest tokens of prompts to compute, as its engine knows it (Mooncake's load balancing)."""
    return lambda seen, request: min(seen, key=lambda one: one.replica.num_queued)


def _shortest_ttft(generator: random.Random) -> Choose:
    """The replica that is expected to give the first token first, by its true cache and queue (Mooncake's rule)."""

    def ttft_s(one: Seen, request: Request) -> float:
        replica = one.replica
        return replica.costs.prompt_s(replica.num_queued) + replica.costs.prompt_s(
            request.num_prompt, replica.num_cached(request)
        )

    return lambda seen, request: min(seen, key=lambda one: ttft_s(one, request))


CHOICES: dict[str, Callable[[random.Random], Choose]] = {
    name: _rule(policy) for name, policy in POLICIES.items() if policy.make_rule
} | {
    "random": lambda generator: lambda seen, request: seen[int(generator.random() * len(seen))],
    "fewest_tokens": _fewest_tokens,
    "shortest_ttft": _shortest_ttft,
}


class Figures(NamedTuple):
    """What came of it.

    Attributes:
        num_requests, num_complete: That arrived; whose answers were complete in the end.
        rate_per_s: Answers per second, from the first arrival to the last answer.
        tokens_per_s: Of answers.
        gap_p99_ms: Time between two tokens of an answer, over all tokens.
        hit_rate: Part of the prompts' tokens that was not computed.
        busy: Mean share of the time in steps; of prefill and decode replicas, where there are both.
        imbalance: The busiest replica's time over the mean.
    """

    num_requests: int
    num_complete: int
    rate_per_s: float
    tokens_per_s: float
    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p90_ms: float
    gap_p99_ms: float
    hit_rate: float
    busy: tuple[float, ...]
    imbalance: float


@dataclass
class Run:
    """A run of the simulation; ``requests`` have their times afterwards.

    Attributes:
        requests: In order of arrival; given without times.
    """

    cluster: Cluster
    requests: Sequence[Request]
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        one, clock = self.cluster, self.clock
        shared = None
        if one.shared_cache:
            shared = PrefixCache(one.costs.num_kv_tokens * max(one.replicas, one.prefill))
        apart = one.prefill > 0
        on_prompt = self._handed_over if apart else None
        self.fronts = [
            Replica(clock, one.costs, one.settings, self._ended, on_prompt, shared)
            for _ in range(one.prefill if apart else one.replicas)
        ]
        self.backs = [Replica(clock, one.costs, one.settings, self._ended) for _ in range(one.decode)]
        self._routers = [
            (self._seen(self.fronts), CHOICES[one.policy](random.Random(f"{one.seed} {number}")))
            for number in range(one.routers)
        ]
        self._decoders = (self._seen(self.backs), CHOICES[one.decode_policy](random.Random(f"{one.seed} decode")))
        self._sent: dict[Request, list[tuple[Seen, int]]] = {}
        self.num_complete = 0

    def run(self, until_s: float = float("inf")) -> Figures:
        """Play all arrivals, and until nothing happens any more."""
        arrivals = enumerate(self.requests)

        def follow() -> None:
            if (arrival := next(arrivals, None)) is not None:
                number, request = arrival
                self.clock.at(round(request.arrival_s * _NS), lambda: arrive(number, request))

        def arrive(number: int, request: Request) -> None:
            follow()
            self._send(request, *self._routers[number % len(self._routers)])

        follow()
        self.clock.run(round(min(until_s, 1e9) * _NS))
        return self._figures()

    def _seen(self, replicas: Sequence[Replica]) -> list[Seen]:
        return [Seen(one, str(i), ResponseTime(lambda: self.clock.now_ns)) for i, one in enumerate(replicas)]

    def _send(self, request: Request, seen: Sequence[Seen], choose: Choose) -> None:
        chosen = choose(seen, request)
        chosen.num_inflight += 1
        self._sent.setdefault(request, []).append((chosen, self.clock.now_ns))
        chosen.replica.submit(request)

    def _handed_over(self, replica: Replica, request: Request) -> None:
        """The prompt's keys and values go to a decode replica; an answer of one token needs none."""
        if request.num_output == 1:
            replica.num_tokens -= request.num_prompt
            request.end_s = request.first_s
            self._ended(request)
            return
        cluster, now_ns = self.cluster, self.clock.now_ns
        took_s = request.num_prompt * cluster.costs.kv_token_bytes / cluster.link_bytes_per_s + cluster.link_s
        replica.link_free_ns = max(replica.link_free_ns, now_ns) + round(took_s * _NS)
        self._answered(request)

        def moved() -> None:
            replica.release(request)
            self._send(request, *self._decoders)

        self.clock.at(replica.link_free_ns, moved)

    def _answered(self, request: Request) -> None:
        for seen, sent_ns in self._sent.pop(request):
            seen.num_inflight -= 1
            seen.response.measured((self.clock.now_ns - sent_ns) / _NS)

    def _ended(self, request: Request) -> None:
        self._answered(request)
        self.num_complete += 1

    def _figures(self) -> Figures:
        done = [one for one in self.requests if one.end_s]
        span_s = max((one.end_s for one in done), default=1.0) - min((one.arrival_s for one in done), default=0.0)
        ttft_ms = np.array([one.ttft_s for one in done] or [np.nan]) * 1e3
        tpot_ms = np.array([one.tpot_s for one in done if one.num_output > 1] or [np.nan]) * 1e3
        gaps: Counter[int] = Counter()
        for replica in (*self.fronts, *self.backs):
            gaps.update(replica.gaps)
        num_prompt = sum(one.num_prompt for one in done)
        busy_s = [[one.busy_ns / _NS for one in group] for group in (self.fronts, self.backs) if group]
        return Figures(
            num_requests=len(self.requests),
            num_complete=self.num_complete,
            rate_per_s=len(done) / span_s,
            tokens_per_s=sum(one.num_output for one in done) / span_s,
            ttft_mean_ms=float(ttft_ms.mean()),
            ttft_p50_ms=float(np.percentile(ttft_ms, 50)),
            ttft_p90_ms=float(np.percentile(ttft_ms, 90)),
            ttft_p99_ms=float(np.percentile(ttft_ms, 99)),
            tpot_p50_ms=float(np.percentile(tpot_ms, 50)),
            tpot_p90_ms=float(np.percentile(tpot_ms, 90)),
            gap_p99_ms=_percentile_ms(gaps, 0.99),
            hit_rate=sum(one.num_cached for one in done) / max(num_prompt, 1),
            busy=tuple(sum(group) / len(group) / span_s for group in busy_s),
            imbalance=max(busy_s[0]) / (sum(busy_s[0]) / len(busy_s[0])) if sum(busy_s[0]) else 1.0,
        )


def _percentile_ms(gaps: Counter[int], share: float) -> float:
    left = share * gaps.total()
    for number, times in sorted(gaps.items()):
        left -= times
        if left <= 0:
            return exp((number + 0.5) / 50) * 1e3
    return float("nan")
