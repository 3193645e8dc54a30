"""The load generator, and figures of what it measured as table and JSON."""

import asyncio
import itertools
import json
import math
import os
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import grpc
import pytest
from benchmarks import machine, requests, run
from benchmarks.report import make_row, render, write_json

from weft.capacity.tuning.load import Bounds, Load, arrivals_s, closed_loop, open_loop
from weft_protos import grpc_service_pb2 as pb

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


LOAD = Load(latencies_s=[0.001] * 8, errors=Counter({"UNAVAILABLE": 2}), duration_s=2.0)
MACHINE = {"cpu": "Z80", "num_cores": 1, "memory_gib": 0.1, "gpu": "none", "system": "CP/M", "python": "3.11"}


def test_cpu_time_is_for_1000_requests_failed_ones_included() -> None:
    """5 CPU-seconds for 10 requests are 500 for 1000."""
    row = make_row("w", "closed, 1 at once", LOAD, {"router": 5.0})
    assert row.cpu_s_per_1000 == {"router": 500.0}
    assert (row.num_answers, row.num_errors, row.errors) == (8, 2, {"UNAVAILABLE": 2})
    assert row.rate_per_s == 4.0
    assert row.latency_ms == {"p50": 1.0, "p90": 1.0, "p99": 1.0, "max": 1.0}


def test_the_table_has_a_line_for_each_row() -> None:
    """Hardware and versions first, then the rows; a run without answers shows dashes."""
    rows = [make_row("echo", "open, 5/s", LOAD, {"router": 1.0, "client": 2.0}), make_row("none", "-", Load(), {})]
    text = render(rows, {**MACHINE, "packages": {"grpcio": "1.85.1"}})
    assert "Z80, 1 cores, 0.1 GiB" in text
    assert "grpcio 1.85.1" in text
    header, *lines = text.splitlines()[-3:]
    assert header.split()[-2:] == ["router", "client"]
    assert lines[0].split()[:4] == ["echo", "open,", "5/s", "8"]
    assert lines[1].split() == ["none", "-", "0", "0", "0", "-", "-", "-", "0.00", "0.00"]


def test_json_holds_machine_and_rows(tmp_path: Path) -> None:
    """One file for each time, in a folder that is made."""
    row = make_row("w", "m", LOAD, {})
    path = write_json(tmp_path / "results", [row], MACHINE, now=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC))
    assert path.name == "20260102T030405Z.json"
    document = json.loads(path.read_text())
    assert document["machine"] == MACHINE
    assert document["rows"][0]["latency_ms"]["p99"] == 1.0


def test_cpu_time_of_this_process_grows_with_work() -> None:
    """What /proc says is what the process itself counts, within two clock ticks."""
    while time.process_time() < 0.1:
        pass
    before_s = time.process_time()
    counted_s = machine.cpu_seconds({"me": os.getpid()})["me"]
    assert before_s - 0.02 <= counted_s <= time.process_time() + 0.02


def test_the_machine_is_described() -> None:
    """Processor, cores and versions are known on every Linux."""
    described = machine.describe()
    assert described["cpu"]
    assert described["num_cores"] == len(os.sched_getaffinity(0))
    assert "grpcio" in described["packages"]  # type: ignore[operator]


def test_texts_have_mixed_lengths_and_are_repeatable() -> None:
    """Lengths cover 5 to 200 words; the same seed gives the same texts."""
    lengths = [len(text.split()) for text in requests.texts(500)]
    assert min(lengths) >= requests.MIN_WORDS
    assert max(lengths) <= requests.MAX_WORDS
    assert max(lengths) - min(lengths) > 150
    assert requests.texts(10) == requests.texts(10)


@pytest.mark.parametrize("workload", run.WORKLOADS, ids=lambda workload: workload.name)
def test_every_workload_sends_requests_of_the_protocol(workload: run.Workload) -> None:
    """Each payload is a `ModelInferRequest` with as many raw tensors as inputs."""
    for payload in workload.make_requests():
        request = pb.ModelInferRequest.FromString(payload)
        assert request.model_name in workload.name
        assert len(request.inputs) == len(request.raw_input_contents) > 0
