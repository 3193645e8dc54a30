"""Load on one method: a closed loop (fixed concurrency) and an open loop (fixed rate), bounded in time and count."""

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import NamedTuple, TypeVar

import grpc

from benchmarks.floor import METHOD, SERVICE

#: Sends one serialized request and gives the serialized answer.
Call = Callable[[bytes], Awaitable[bytes]]

Request = TypeVar("Request")

#: Requests of an open loop that may wait for an answer at once; beyond it a request is counted as an error.
MAX_OPEN_INFLIGHT = 2048
CALL_TIMEOUT_S = 30.0


class Bounds(NamedTuple):
    """When to stop sending: after a count of requests or a time in seconds, whichever is met first."""

    num_requests: int
    duration_s: float


@dataclass(slots=True)
class Load:
    """What one run measured.

    Attributes:
        latencies_s: Of answered requests, in order of their ends, seconds.
        errors: Failed requests by gRPC status name.
        duration_s: From the first request to the last answer, seconds.
    """

    latencies_s: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    duration_s: float = 0.0

    @property
    def rate_per_s(self) -> float:
        """Answered requests per second; 0 where none was."""
        return len(self.latencies_s) / self.duration_s if self.duration_s > 0 else 0.0

    @property
    def mean_ms(self) -> float:
        """Of the latencies, milliseconds; nan without answers."""
        return sum(self.latencies_s) / len(self.latencies_s) * 1e3 if self.latencies_s else math.nan

    def percentile_ms(self, percent: float) -> float:
        """Smallest latency that ``percent`` of the answers do not exceed, milliseconds; nan without answers."""
        if not self.latencies_s:
            return math.nan
        ordered = sorted(self.latencies_s)
        return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] * 1e3


def caller(channel: grpc.aio.Channel) -> Call:
    """Bytes in, bytes out: the load generator spends nothing on protobuf."""
    method = channel.unary_unary(f"/{SERVICE}/{METHOD}", request_serializer=bytes, response_deserializer=bytes)

    async def call(request: bytes) -> bytes:
        answer: bytes = await method(request, timeout=CALL_TIMEOUT_S)
        return answer

    return call


async def closed_loop(
    call: Callable[[Request], Awaitable[object]], requests: Sequence[Request], bounds: Bounds, *, concurrency: int
) -> Load:
    """Keep ``concurrency`` requests in work until a bound is met.

    Args:
        call: What is loaded; a failure is an ``AioRpcError``.
        requests: Sent in turn, again from the start when all were sent.
        concurrency: Requests in work at once; each waits for its answer before the next.
        bounds: When to stop sending.
    """
    load = Load()
    start_s = time.perf_counter()
    supply = _supply(requests, bounds.num_requests, start_s + bounds.duration_s)

    async def worker() -> None:
        for request in supply:
            await _measure(call, request, load, time.perf_counter())

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    load.duration_s = time.perf_counter() - start_s
    return load


async def open_loop(call: Call, requests: Sequence[bytes], bounds: Bounds, *, rate_per_s: float, seed: int) -> Load:
    """Send requests at Poisson arrival times, whatever the answers do; latency counts from the planned arrival.

    Args:
        call: What is loaded.
        requests: Sent in turn.
        rate_per_s: Mean rate of arrivals, 1/s.
        bounds: When to stop sending.
        seed: Of the arrival times.
    """
    load = Load()
    running: set[asyncio.Task[None]] = set()
    start_s = time.perf_counter()
    for request, offset_s in zip(cycle(requests), arrivals_s(rate_per_s, bounds, seed), strict=False):
        arrival_s = start_s + offset_s
        await asyncio.sleep(max(0.0, arrival_s - time.perf_counter()))
        if len(running) >= MAX_OPEN_INFLIGHT:
            load.errors["CLIENT_LIMIT"] += 1
            continue
        task = asyncio.create_task(_measure(call, request, load, arrival_s))
        running.add(task)
        task.add_done_callback(running.discard)
    await asyncio.gather(*running)
    load.duration_s = time.perf_counter() - start_s
    return load


def arrivals_s(rate_per_s: float, bounds: Bounds, seed: int) -> Iterator[float]:
    """Arrival times of a Poisson process from 0, seconds; ends at either bound."""
    draw = random.Random(seed)
    arrival_s = 0.0
    for _ in range(bounds.num_requests):
        arrival_s += draw.expovariate(rate_per_s)
        if arrival_s > bounds.duration_s:
            return
        yield arrival_s


def _supply(requests: Sequence[Request], num_requests: int, end_s: float) -> Iterator[Request]:
    """Requests in turn until a bound is met; shared by the workers, which each take the next."""
    for _, request in zip(range(num_requests), cycle(requests), strict=False):
        if time.perf_counter() >= end_s:
            return
        yield request


async def _measure(call: Callable[[Request], Awaitable[object]], request: Request, load: Load, start_s: float) -> None:
    try:
        await call(request)
    except grpc.aio.AioRpcError as error:
        load.errors[error.code().name] += 1
    else:
        load.latencies_s.append(time.perf_counter() - start_s)
