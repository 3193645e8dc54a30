"""The load generator."""

import asyncio
import itertools
import math
import time
from collections import Counter

import grpc
import pytest

from weft.capacity.tuning.load import Bounds, Load, arrivals_s, closed_loop, open_loop

FOREVER_S = 60.0


class _Server:
    """Answers at once, or when told to; counts what comes."""

    def __init__(self) -> None:
        self.seen: Counter[bytes] = Counter()
        self.num_inflight = 0
        self.max_inflight = 0
        self.has_20 = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()

    async def call(self, request: bytes) -> bytes:
        self.seen[request] += 1
        self.num_inflight += 1
        self.max_inflight = max(self.max_inflight, self.num_inflight)
        if self.num_inflight == 20:
            self.has_20.set()
        await asyncio.sleep(0)
        await self.gate.wait()
        self.num_inflight -= 1
        if request == b"bad":
            raise grpc.aio.AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.aio.Metadata(), grpc.aio.Metadata())  # type: ignore[call-arg]
        return request


async def test_a_closed_loop_sends_what_it_was_told() -> None:
    """The count is exact, requests are taken in turn, and no more than the concurrency are in work."""
    server = _Server()
    load = await closed_loop(server.call, [b"a", b"b", b"c"], Bounds(10, FOREVER_S), concurrency=4)
    assert server.seen == {b"a": 4, b"b": 3, b"c": 3}
    assert server.max_inflight == 4
    assert len(load.latencies_s) == 10
    assert load.duration_s > 0
    assert load.rate_per_s == 10 / load.duration_s


async def test_a_closed_loop_ends_by_time() -> None:
    """When the time is over, no further request is sent."""
    load = await asyncio.wait_for(closed_loop(_Server().call, [b"a"], Bounds(10**9, 0.05), concurrency=2), 30)
    assert 0 < len(load.latencies_s) < 10**9


async def test_errors_are_counted_by_status_and_have_no_latency() -> None:
    """A refused request is an error, not a fast answer."""
    load = await closed_loop(_Server().call, [b"good", b"bad"], Bounds(10, FOREVER_S), concurrency=1)
    assert load.errors == {"RESOURCE_EXHAUSTED": 5}
    assert len(load.latencies_s) == 5


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    """Every request is sent though none is answered."""
    server = _Server()
    server.gate.clear()
    running = asyncio.create_task(open_loop(server.call, [b"a"], Bounds(20, FOREVER_S), rate_per_s=10_000, seed=1))
    await asyncio.wait_for(server.has_20.wait(), 30)
    assert not running.done()
    server.gate.set()
    load = await running
    assert len(load.latencies_s) == 20


async def test_latency_in_an_open_loop_counts_from_the_planned_arrival() -> None:
    """Requests that are sent late, because the loop was busy when they were due, have the delay in their latency."""
    stall_s = 0.1
    bounds = Bounds(4, FOREVER_S)

    async def call(request: bytes) -> bytes:
        end_s = time.perf_counter() + stall_s
        while request == b"first" and time.perf_counter() < end_s:
            pass
        return request

    load = await open_loop(call, [b"first", b"a", b"b", b"c"], bounds, rate_per_s=10_000, seed=1)
    planned_s = list(arrivals_s(10_000, bounds, 1))
    assert len(load.latencies_s) == 4
    assert min(load.latencies_s) >= stall_s - (planned_s[-1] - planned_s[0])


def test_arrivals_are_poisson_and_repeatable() -> None:
    """The same seed gives the same times; their mean gap is 1/rate; both bounds hold."""
    times = list(arrivals_s(100.0, Bounds(20_000, math.inf), 7))
    assert times == list(arrivals_s(100.0, Bounds(20_000, math.inf), 7))
    assert times != list(arrivals_s(100.0, Bounds(20_000, math.inf), 8))
    gaps = [after - before for before, after in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert mean == pytest.approx(0.01, rel=0.05)
    assert variance == pytest.approx(0.01**2, rel=0.1)  # an exponential's deviation equals its mean
    assert all(time <= 0.5 for time in arrivals_s(100.0, Bounds(20_000, 0.5), 7))


@pytest.mark.parametrize(("percent", "expected_ms"), [(0, 1), (50, 50), (90, 90), (99, 99), (100, 100)])
def test_percentiles_are_nearest_rank(percent: float, expected_ms: float) -> None:
    """Of 1 to 100 ms, the p-th percentile is p ms, whatever the order of the answers."""
    load = Load(latencies_s=[ms / 1000 for ms in range(100, 0, -1)])
    assert load.percentile_ms(percent) == pytest.approx(expected_ms)


def test_no_answers_have_no_percentile() -> None:
    """Without an answer a percentile is nan and the rate 0, not an error."""
    assert math.isnan(Load().percentile_ms(50))
    assert Load().rate_per_s == 0
