"""What may go wrong with the mesh of a trial; what goes right is in the integration tests."""

import asyncio
import time

import pytest

from weft.capacity.tuning import mesh_bench, staged_mesh
from weft.capacity.tuning.contest import TrialError
from weft.capacity.tuning.traffic import Traffic, closed_loop, open_loop


async def test_load_ends_before_memory_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial fails with what was left, and its requests are cancelled."""
    cancelled = asyncio.Event()

    async def load() -> Traffic:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return Traffic()

    monkeypatch.setattr(mesh_bench, "available_bytes", lambda: 5 << 20)
    with pytest.raises(TrialError, match="memory runs out: the machine has 5 MiB left"):
        await mesh_bench._guarded(load())
    assert cancelled.is_set()


def test_cpu_time_of_a_process_is_what_it_used() -> None:
    """That of this one, in finer steps than a clock tick."""
    import os

    before_s, start_s = staged_mesh._process_cpu_s(os.getpid()), time.process_time()
    while time.process_time() - start_s < 0.003:
        pass
    used_s = staged_mesh._process_cpu_s(os.getpid()) - before_s
    assert used_s >= 0.003
    assert used_s <= time.process_time() - start_s + 0.001
    assert os.getpid() in staged_mesh._process_tree(os.getppid())


async def test_closed_loop_keeps_so_many_in_work() -> None:
    """Never more, and each of the requests in turn; it waits for the answers that a percentile needs."""
    now = most = 0
    seen: list[bytes] = []

    async def call(payload: bytes) -> None:
        nonlocal now, most
        now, most = now + 1, max(most, now + 1)
        seen.append(payload)
        await asyncio.sleep(0)
        now -= 1

    traffic = await closed_loop(call, [b"a", b"b", b"c"], concurrency=4, duration_s=0.0, min_answers=0)
    assert not traffic.latencies_s
    traffic = await closed_loop(call, [b"a", b"b", b"c"], concurrency=4, duration_s=0.01, min_answers=1)
    assert most == 4
    assert seen[:6] == [b"a", b"b", b"c"] * 2
    assert len(traffic.latencies_s) == len(seen)


async def test_latency_of_an_open_loop_counts_from_the_planned_arrival() -> None:
    """A client that is late by itself flatters no one: both requests were planned for the start."""

    async def call(_: bytes) -> None:
        time.sleep(0.02)  # noqa: ASYNC251  # holds the loop up

    traffic = await open_loop(call, [(0.0, b"a"), (0.0, b"b")])
    assert traffic.num_planned == 2
    assert max(traffic.latencies_s) >= 0.04
