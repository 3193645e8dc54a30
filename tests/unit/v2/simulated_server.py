"""A server with a known capacity behind an adaptive limit, in simulated time."""

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from weft.base.limits import AdaptiveLimit, Outcome

#: Draws how long one request takes, in seconds.
Service = Callable[[random.Random], float]


def constant(seconds: float) -> Service:
    """Every request takes as long."""
    return lambda draw: seconds


def exponential(mean_s: float) -> Service:
    """The mean is known, and nothing else."""
    return lambda draw: draw.expovariate(1 / mean_s)


def mixed(cheap_s: float, dear_s: float, dear_share: float) -> Service:
    """Some are cheap and some are dear."""
    return lambda draw: dear_s if draw.random() < dear_share else cheap_s


@dataclass(slots=True)
class Load:
    """What comes, and what is there to answer it.

    Attributes:
        duration_s: How long it lasts.
        num_workers: Requests that are worked on at once; the others wait, first come, first served.
        service: How long one takes.
        rate_per_s: Of Poisson arrivals; those that find the limit reached go away.
        spoil: Gives how long a request stays, and how it ends, from what it would have taken.
    """

    duration_s: float
    num_workers: int
    service: Service
    rate_per_s: float
    spoil: Callable[[random.Random, float], tuple[float, Outcome]] = lambda draw, s: (s, Outcome.ANSWERED)


@dataclass(slots=True)
class Seen:
    """What a load led to.

    Attributes:
        limits: The limit at each arrival in the second half.
        rate_per_s: Requests that were answered, in the whole of it.
    """

    limits: list[int] = field(default_factory=list)
    rate_per_s: float = 0.0

    @property
    def mean_limit(self) -> float:
        """Over the second half."""
        return sum(self.limits) / len(self.limits)


def run(limit: AdaptiveLimit, loads: list[Load], seed: int = 1) -> list[Seen]:
    """The loads, one after another, on one server."""
    draw = random.Random(seed)
    now_s = end_s = 0.0
    ends: list[tuple[float, int, float, Outcome]] = []
    waiting: deque[tuple[float, float, Outcome]] = deque()
    num_inflight = num_working = serial = 0
    seen = []
    for load in loads:
        start_s, end_s = now_s, end_s + load.duration_s
        arrival_s = now_s + draw.expovariate(load.rate_per_s)
        result = Seen()
        num_answers = 0
        while now_s < end_s:
            if ends and ends[0][0] < arrival_s:
                now_s, _, came_s, outcome = heapq.heappop(ends)
                num_inflight, num_working = num_inflight - 1, num_working - 1
                num_answers += outcome is Outcome.ANSWERED
                limit.leave(int((now_s - came_s) * 1e9), int(now_s * 1e9), outcome)
            else:
                now_s = arrival_s
                arrival_s += draw.expovariate(load.rate_per_s)
                if num_inflight < limit.limit:
                    num_inflight += 1
                    limit.enter(int(now_s * 1e9))
                    waiting.append((now_s, *load.spoil(draw, load.service(draw))))
                if now_s > end_s - load.duration_s / 2:
                    result.limits.append(limit.limit)
            while waiting and num_working < load.num_workers:
                came_s, stays_s, outcome = waiting.popleft()
                num_working, serial = num_working + 1, serial + 1
                heapq.heappush(ends, (now_s + stays_s, serial, came_s, outcome))
        result.rate_per_s = num_answers / (now_s - start_s)
        seen.append(result)
    return seen
