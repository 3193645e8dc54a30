"""What may go wrong with the mesh of a trial; what goes right is in the integration tests."""

import asyncio
import time

import grpc
import pytest

from weft.capacity.tuning import mesh
from weft.capacity.tuning.load import Bounds, Load, closed_loop, planned_loop
from weft.capacity.tuning.measurement import TrialError


async def test_load_ends_before_memory_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial fails with what was left, and its requests are cancelled."""
    cancelled = asyncio.Event()

    async def load() -> Load:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return Load()

    monkeypatch.setattr(mesh, "available_bytes", lambda: 5 << 20)
    with pytest.raises(TrialError, match="memory runs out: the machine has 5 MiB left"):
        await mesh._guarded(load())
    assert cancelled.is_set()


def test_cpu_time_of_a_process_is_what_it_used() -> None:
    """That of this one, in finer steps than a clock tick."""
    import os

    before_s, start_s = mesh._process_cpu_s(os.getpid()), time.process_time()
    while time.process_time() - start_s < 0.003:
        pass
    used_s = mesh._process_cpu_s(os.getpid()) - before_s
    assert used_s >= 0.003
    assert used_s <= time.process_time() - start_s + 0.001
    assert os.getpid() in mesh._process_tree(os.getppid())


async def test_closed_loop_waits_for_the_answers_of_a_percentile() -> None:
    """Beyond its duration, but not for ever; and it ends where nothing but errors comes back."""

    async def call(payload: bytes) -> bytes:
        await asyncio.sleep(0)
        if payload == b"bad":
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())  # type: ignore[call-arg]
        return payload

    load = await closed_loop(call, [b"a"], Bounds(10**6, 0.01), concurrency=4, min_answers=10**6)
    assert load.duration_s >= 0.03
    load = await closed_loop(call, [b"bad"], Bounds(10**6, 60.0), concurrency=4, max_errors=20)
    assert 20 <= load.errors["UNAVAILABLE"] <= 24


async def test_latency_of_an_open_loop_counts_from_the_planned_arrival() -> None:
    """A client that is late by itself flatters no one: both requests were planned for the start."""

    async def call(_: bytes) -> bytes:
        time.sleep(0.02)  # noqa: ASYNC251  # holds the loop up
        return b""

    load = await planned_loop(call, [(0.0, b"a"), (0.0, b"b")])
    assert load.num_planned == 2
    assert max(load.latencies_s) >= 0.04
