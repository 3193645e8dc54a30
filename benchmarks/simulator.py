"""``python -m benchmarks.simulator --rate-per-s 2000 --routers 4 --replicas 16``: a mesh in virtual time.

The rules are the real ones (the balancing rule of the router; queue and batcher of the model service). Time, sockets
and models are not: a router and a service's event loop take so much CPU for a request, one after the other, and an
instance takes ``base_ms + row_ms * rows`` for a batch. So it shows what waits for what at sizes that no single machine
has. It knows nothing of retries and failures, and of networks only their latency.
"""

import argparse
import heapq
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import count
from math import inf
from typing import NamedTuple

from benchmarks.report import table
from weft.base.core import CallContext, InferCall
from weft.capacity.tuning import load
from weft.capacity.tuning.load import Bounds
from weft.router.targets.balancing import POLICIES
from weft.router.targets.balancing.rule import ResponseTime, Rule
from weft.serving.queues.priority_levels import PriorityQueue
from weft.serving.queues.settings import SchedulerSettings
from weft.serving.request.request import InferenceRequest
from weft.serving.scheduler.batcher import make_batcher

RULES: dict[str, Callable[[random.Random], Rule]] = {
    name: policy.make_rule for name, policy in POLICIES.items() if policy.make_rule and not policy.takes_key
}
_NS = 1e9


@dataclass(frozen=True, slots=True)
class Topology:
    """What is simulated; times are of one request unless said otherwise.

    Attributes:
        rate_per_s: Requests that arrive in a second, as a Poisson process.
        routers: Event loops that clients spread their requests over, in turn.
        replicas: Of the model service.
        router_cpu_ms: CPU of a router, half of it on the way in.
        service_cpu_ms: CPU of the model service's event loop, half of it on the way in.
        network_ms: One way, between client and router, and between router and service.
        instances: Of the model, in each replica.
        base_ms, row_ms: An execution takes ``base_ms + row_ms * rows``.
        max_batch_size: Most requests in an execution; 1: no batching.
        max_queue_delay_us: How long a request waits for others.
        rule: How a router chooses a replica, by the calls that it has in flight itself.
        duration_s: Simulated time; the first fifth is not counted.
        seed: Of arrivals and draws.
    """

    rate_per_s: float
    routers: int = 1
    replicas: int = 1
    router_cpu_ms: float = 1.0
    service_cpu_ms: float = 0.5
    network_ms: float = 0.1
    instances: int = 1
    base_ms: float = 5.0
    row_ms: float = 0.5
    max_batch_size: int = 32
    max_queue_delay_us: int = 0
    rule: str = "least_outstanding"
    duration_s: float = 20.0
    seed: int = 1


class Figures(NamedTuple):
    """What came of it.

    Attributes:
        rate_per_s: Answers in a second.
        p50_ms, p99_ms: Seen by the client.
        mean_batch: Requests of one execution.
        router_busy, service_busy, instance_busy: Share of the time, mean of all.
    """

    rate_per_s: float
    p50_ms: float
    p99_ms: float
    mean_batch: float
    router_busy: float
    service_busy: float
    instance_busy: float


class Clock:
    """Virtual time and what happens in it."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._order = count()
        self._events: list[tuple[int, int, Callable[[], None]]] = []

    def at(self, when_ns: int, act: Callable[[], None]) -> None:
        """``act`` is called at that time."""
        heapq.heappush(self._events, (when_ns, next(self._order), act))

    def run(self, until_ns: int) -> None:
        """Everything that happens before that time has happened."""
        while self._events and self._events[0][0] < until_ns:
            self.now_ns, _, act = heapq.heappop(self._events)
            act()


@dataclass(slots=True)
class Loop:
    """One event loop: work is done one piece after the other, in the order in which it came."""

    clock: Clock
    busy_ns: int = 0
    _free_ns: int = 0

    def work(self, cost_ns: int, then: Callable[[], None]) -> None:
        """``then`` happens when the work is done."""
        self._free_ns = max(self._free_ns, self.clock.now_ns) + cost_ns
        self.busy_ns += cost_ns
        self.clock.at(self._free_ns, then)


class Replica:
    """A model service, with queue and batcher as they are."""

    def __init__(self, clock: Clock, topology: Topology) -> None:
        self.loop = Loop(clock)
        self.num_executions = 0
        self.busy_ns = 0
        self._clock = clock
        self._topology = topology
        settings = SchedulerSettings(
            topology.max_batch_size,
            is_batching=topology.max_batch_size > 1,
            max_queue_delay_us=topology.max_queue_delay_us,
        )
        self._queue, self._batcher = PriorityQueue(settings), make_batcher(settings)
        self._num_free = topology.instances
        self._then: dict[InferenceRequest, Callable[[], None]] = {}
        self._wake_ns = inf

    def infer(self, then: Callable[[], None]) -> None:
        """``then`` happens when the answer leaves."""
        half_ns = round(self._topology.service_cpu_ms * 1e6 / 2)

        def queue() -> None:
            request = InferenceRequest(InferCall("model"), CallContext(arrival_ns=self._clock.now_ns), 1, 0)
            self._then[request] = lambda: self.loop.work(half_ns, then)
            self._queue.add(request, self._clock.now_ns)
            self._execute()

        self.loop.work(half_ns, queue)

    def _execute(self) -> None:
        """Free instances have what the batcher gives them."""
        while self._num_free:
            now_ns = self._clock.now_ns
            decision = self._batcher.next_batch(self._queue, now_ns)
            if not decision.requests:
                if decision.wait_until_ns is not None and decision.wait_until_ns < self._wake_ns:
                    self._wake_ns = decision.wait_until_ns
                    self._clock.at(decision.wait_until_ns, self._woken)
                return
            self._queue.take(decision.requests, now_ns)
            self._num_free -= 1
            took_ns = round((self._topology.base_ms + self._topology.row_ms * len(decision.requests)) * 1e6)
            self.num_executions += 1
            self.busy_ns += took_ns
            self._clock.at(now_ns + took_ns, lambda requests=decision.requests: self._executed(requests))

    def _woken(self) -> None:
        self._wake_ns = inf
        self._execute()

    def _executed(self, requests: Sequence[InferenceRequest]) -> None:
        self._num_free += 1
        for request in requests:
            self._then.pop(request)()
        self._execute()


@dataclass(slots=True)
class _Seen:
    """A replica as one router sees it."""

    replica: Replica
    address: str
    response: ResponseTime
    num_inflight: int = 0


@dataclass(slots=True)
class Router:
    """Chooses a replica for each request, by what it has sent itself."""

    loop: Loop
    rule: Rule
    seen: list[_Seen] = field(default_factory=list)


def simulate(topology: Topology, arrivals_s: Iterable[float] | None = None) -> Figures:
    """The figures of a topology; the same for the same seed.

    Args:
        topology: What is simulated.
        arrivals_s: Times of the arrivals; by default those of a Poisson process.
    """
    clock, generator = Clock(), random.Random(topology.seed)
    replicas = [Replica(clock, topology) for _ in range(topology.replicas)]
    routers = [Router(Loop(clock), RULES[topology.rule](generator)) for _ in range(topology.routers)]
    for router in routers:
        router.seen = [_Seen(r, str(i), ResponseTime(lambda: clock.now_ns)) for i, r in enumerate(replicas)]
    network_ns, half_ns = round(topology.network_ms * 1e6), round(topology.router_cpu_ms * 1e6 / 2)
    end_ns = round(topology.duration_s * _NS)
    warm_ns = end_ns // 5
    latencies_ns: list[int] = []
    bounds = Bounds(sys.maxsize, topology.duration_s)
    arrivals = enumerate(arrivals_s or load.arrivals_s(topology.rate_per_s, bounds, topology.seed))

    def follow() -> None:
        if (arrival := next(arrivals, None)) is not None:
            number, when_s = arrival
            clock.at(round(when_s * _NS), lambda: arrive(number))

    def arrive(number: int) -> None:
        begin_ns = clock.now_ns
        follow()
        router = routers[number % len(routers)]

        def call() -> None:
            chosen = router.rule(router.seen, "")
            chosen.num_inflight += 1
            called_ns = clock.now_ns

            def answered() -> None:
                chosen.num_inflight -= 1
                chosen.response.measured((clock.now_ns - called_ns) / _NS)
                router.loop.work(half_ns, lambda: clock.at(clock.now_ns + network_ns, finished))

            there = clock.now_ns + network_ns
            clock.at(there, lambda: chosen.replica.infer(lambda: clock.at(clock.now_ns + network_ns, answered)))

        def finished() -> None:
            if clock.now_ns >= warm_ns:
                latencies_ns.append(clock.now_ns - begin_ns)

        clock.at(begin_ns + network_ns, lambda: router.loop.work(half_ns, call))

    follow()
    clock.run(end_ns)
    latencies_ns.sort()
    num_answers = len(latencies_ns)
    num_executed = sum(replica.num_executions for replica in replicas)
    num_requests = sum(replica.loop.busy_ns for replica in replicas) / max(topology.service_cpu_ms * 1e6, 1)

    def percentile_ms(share: float) -> float:
        return latencies_ns[min(int(share * num_answers), num_answers - 1)] / 1e6 if latencies_ns else inf

    return Figures(
        rate_per_s=num_answers / ((end_ns - warm_ns) / _NS),
        p50_ms=percentile_ms(0.5),
        p99_ms=percentile_ms(0.99),
        mean_batch=num_requests / max(num_executed, 1),
        router_busy=sum(router.loop.busy_ns for router in routers) / len(routers) / end_ns,
        service_busy=sum(replica.loop.busy_ns for replica in replicas) / len(replicas) / end_ns,
        instance_busy=sum(r.busy_ns for r in replicas) / len(replicas) / topology.instances / end_ns,
    )


def sweep(topology: Topology, shares: Sequence[float]) -> str:
    """A table of the figures at shares of the topology's rate."""
    lines = [["1/s asked", "1/s", "p50 ms", "p99 ms", "batch", "router", "service", "instance"]]
    for share in shares:
        rate_per_s = topology.rate_per_s * share
        found = simulate(replace(topology, rate_per_s=rate_per_s))
        busy = (found.router_busy, found.service_busy, found.instance_busy)
        lines.append(
            [f"{rate_per_s:.0f}", f"{found.rate_per_s:.0f}", f"{found.p50_ms:.2f}", f"{found.p99_ms:.2f}",
             f"{found.mean_batch:.1f}", *(f"{min(share, 1.0):.0%}" for share in busy)]
        )  # fmt: skip
    return table(lines, left_columns=())


def main(argv: Sequence[str] | None = None) -> int:
    """0 when the table is printed."""
    parser = argparse.ArgumentParser(prog="benchmarks.simulator", description="A mesh in virtual time.")
    for setting in fields(Topology):
        name = f"--{setting.name.replace('_', '-')}"
        if setting.name == "rule":
            parser.add_argument(name, choices=RULES, default=setting.default)
        elif setting.name == "rate_per_s":
            parser.add_argument(name, type=float, required=True, metavar="N")
        else:
            kind = type(setting.default)
            parser.add_argument(name, type=kind, default=setting.default, metavar="N", help="default: %(default)s")
    print(sweep(Topology(**vars(parser.parse_args(argv))), (0.25, 0.5, 0.75, 0.9, 1.0)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
