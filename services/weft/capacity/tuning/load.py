"""Load on one method: a closed loop (fixed concurrency) and an open loop (planned arrivals), with bounds."""

import asyncio
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import NamedTuple, TypeVar

import grpc

#: Sends one serialized request and gives the serialized answer.
Call = Callable[[bytes], Awaitable[bytes]]
Request = TypeVar("Request")

#: Requests of an open loop without an answer yet; the next counts as failed, so that a stalled server ends the run.
MAX_OPEN_INFLIGHT = 2048
CALL_TIMEOUT_S = 30.0
#: A closed loop goes on for so many times its duration until it has the answers that a percentile needs.
_MAX_STRETCH = 3.0
_METHOD = "/inference.GRPCInferenceService/ModelInfer"


class Bounds(NamedTuple):
    """When to stop sending: after a count of requests or a time in seconds, whichever is met first."""

    num_requests: int
    duration_s: float


@dataclass(slots=True)
class Load:
    """What one run measured.

    Attributes:
        latencies_s: Of answered requests, in order of their ends; of an open loop from the planned arrival.
        errors: Failed requests by gRPC status name.
        first_error: Message of the first of them.
        duration_s: From the first request to the last answer.
        num_planned: Arrivals of an open loop.
    """

    latencies_s: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    first_error: str = ""
    duration_s: float = 0.0
    num_planned: int = 0

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

    def _fail(self, status: str, message: str) -> None:
        self.errors[status] += 1
        self.first_error = self.first_error or message


def caller(channel: grpc.aio.Channel) -> Call:
    """Bytes in, bytes out: the load generator spends nothing on protobuf."""
    method = channel.unary_unary(_METHOD, request_serializer=bytes, response_deserializer=bytes)

    async def call(request: bytes) -> bytes:
        answer: bytes = await method(request, timeout=CALL_TIMEOUT_S)
        return answer

    return call


async def closed_loop(
    call: Callable[[Request], Awaitable[object]],
    requests: Sequence[Request],
    bounds: Bounds,
    *,
    concurrency: int,
    min_answers: int = 0,
    max_errors: int = sys.maxsize,
) -> Load:
    """Keep ``concurrency`` requests in work until a bound is met.

    Args:
        call: What is loaded; a failure is an ``AioRpcError``.
        requests: Sent in turn, again from the start when all were sent.
        bounds: When to stop sending.
        concurrency: Requests in work at once; each waits for its answer before the next.
        min_answers: With fewer it goes on, for three times the duration at most.
        max_errors: It ends after so many failed requests.
    """
    load = Load()
    start_s = time.perf_counter()

    def supply() -> Iterator[Request]:
        for _, request in zip(range(bounds.num_requests), cycle(requests), strict=False):
            stretch = 1.0 if len(load.latencies_s) >= min_answers else _MAX_STRETCH
            if time.perf_counter() - start_s >= bounds.duration_s * stretch or load.errors.total() >= max_errors:
                return
            yield request

    shared = supply()  # the workers each take the next

    async def worker() -> None:
        for request in shared:
            await _measure(call, request, load, time.perf_counter())

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    load.duration_s = time.perf_counter() - start_s
    return load


async def open_loop(call: Call, requests: Sequence[bytes], bounds: Bounds, *, rate_per_s: float, seed: int) -> Load:
    """Send requests in turn at Poisson arrival times of a mean rate, whatever the answers do."""
    return await planned_loop(call, zip(arrivals_s(rate_per_s, bounds, seed), cycle(requests), strict=False))


async def planned_loop(call: Call, planned: Iterable[tuple[float, bytes]]) -> Load:
    """Send each request at its time, seconds from 0, whatever the answers do."""
    load = Load()
    running: set[asyncio.Task[None]] = set()
    start_s = time.perf_counter()
    for offset_s, request in planned:
        arrival_s = start_s + offset_s
        await asyncio.sleep(max(0.0, arrival_s - time.perf_counter()))
        load.num_planned += 1
        if len(running) >= MAX_OPEN_INFLIGHT:
            load._fail("CLIENT_LIMIT", f"more than {MAX_OPEN_INFLIGHT} requests without an answer")
            continue
        task = asyncio.create_task(_measure(call, request, load, arrival_s))
        running.add(task)
        task.add_done_callback(running.discard)
    await asyncio.gather(*running)
    load.duration_s = time.perf_counter() - start_s
    return load


def arrivals_s(rate_per_s: float, bounds: Bounds, seed: int) -> Iterator[float]:
    """Arrival times of a Poisson process from 0, seconds; ends at either bound."""
    draw = random.Random(seed)  # noqa: S311
    arrival_s = 0.0
    for _ in range(bounds.num_requests):
        arrival_s += draw.expovariate(rate_per_s)
        if arrival_s > bounds.duration_s:
            return
        yield arrival_s


async def _measure(call: Callable[[Request], Awaitable[object]], request: Request, load: Load, start_s: float) -> None:
    try:
        await call(request)
    except grpc.aio.AioRpcError as error:
        load._fail(error.code().name, error.details() or "")
        await asyncio.sleep(0)  # what refuses at once is not asked in a loop that nothing else enters
    else:
        load.latencies_s.append(time.perf_counter() - start_s)
