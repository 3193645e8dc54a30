"""Rates of the page from counters of a router's processes, and the requests that its viewers are told of."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.router.virtual_clock import VirtualClock

from weft.base.caching import ExpiringCache
from weft.gateway.ui import live
from weft.gateway.ui.rates import Sample, tick_of
from weft_protos import graph_service_pb2 as pb


def sample(at_s: float, *counts: dict[str, Any]) -> Sample:
    """What one or several processes tell of graph `g`."""
    return Sample(pb.ObserveResponse(count=[pb.Observed(graph="g", version="1", **one) for one in counts]), at_s)


def step(path: str, num_ok: int, **more: Any) -> dict[str, Any]:
    return {"path": path, "node": "root", "kind": "cascade", "num_ok": num_ok, "bucket": [0, num_ok, *[0] * 13], **more}


def test_counts_of_all_processes_are_rates() -> None:
    """Of graph and steps, with latencies of the interval; failures by status, skipped runs apart."""
    old = sample(10.0, {"num_ok": 5, "total_ns": 10**9}, step("root[a]", 5))
    first = {"num_ok": 15, "total_ns": 3 * 10**9, "num_inflight": 1, "bucket": [0, 10]}
    more = step("root[a]", 10, failure={"SKIPPED": 4, "UNAVAILABLE": 2}, event={"fallbacks": 2})
    new = sample(12.0, first, {"num_ok": 10, "num_inflight": 2}, step("root[a]", 15), more)
    tick = tick_of(old, new, ["g"])
    (row,) = tick["looked_at"]
    assert (10.0, 100.0, 3) == (row["rate"], row["mean_ms"], row["inflight"])
    a = row["steps"]["root[a]"]
    assert (11.0, 1.0, 2.0, {"UNAVAILABLE": 1.0}) == (a["rate"], a["errors"], a["skipped"], a["failures"])
    assert {"fallbacks": 1.0} == a["events"]
    assert (0.75, 0.99) == (a["p50_ms"], round(a["p99_ms"], 2))
    assert {"rate": 10.0, "errors": 0.0, "inflight": 3, "mean_ms": 100.0} == tick["total"]


def test_a_process_that_has_ended_makes_no_rate_negative() -> None:
    """The sum is less than before; a graph that nobody looks at, and nobody asks, is not told."""
    old, new = (sample(float(at), {"num_ok": num}, step("root[a]", num)) for at, num in ((0, 9), (1, 4)))
    tick = tick_of(old, new, ["g"])
    (row,) = tick["looked_at"]
    assert (0.0, 0.0, None) == (row["rate"], row["steps"]["root[a]"]["rate"], row["steps"]["root[a]"]["p99_ms"])
    assert not tick["graphs"]
    assert not tick_of(sample(0.0), sample(1.0, {}), [])["looked_at"]


def test_a_cascade_accepts_what_no_later_step_gets() -> None:
    """Shares are of the runs of steps, without shadows and fallbacks; the last step accepts all it gets."""
    aside = step("root[a]>c", 50, is_aside=True)
    new = sample(1.0, {}, step("root[a]", 90, failure={"INTERNAL": 10}), step("root[b]", 25), aside)
    tick = tick_of(sample(0.0), new, ["g"])
    steps = tick["looked_at"][0]["steps"]
    assert (0.8, 0.75) == (steps["root[a]"]["share"], steps["root[a]"]["accepted"])
    assert (0.2, 1.0) == (steps["root[b]"]["share"], steps["root[b]"]["accepted"])
    assert (None, None) == (steps["root[a]>c"]["share"], steps["root[a]>c"]["accepted"])


async def test_a_viewer_that_rests_misses_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its next tick may be of an answer to another viewer, who has looked since."""
    clock = VirtualClock()
    monkeypatch.setattr(live, "time", SimpleNamespace(monotonic=asyncio.get_running_loop().time))
    asked: list[pb.ObserveRequest] = []

    async def observe(method: str, request: pb.ObserveRequest, **_: Any) -> pb.ObserveResponse:
        asked.append(request)
        times = [at for at in range(0, round(clock.elapsed_ms()) + 1, 200) if at > request.requests_after_unix_ms]
        told = [{"key": str(at), "unix_ms": at} for at in times]
        answer = pb.ObserveResponse(unix_ms=clock.elapsed_ms(), request=told)  # type: ignore[arg-type]
        await asyncio.sleep(0.03 if len(asked) == 2 else 0)  # who asks then rests for 5 s
        return answer

    async def index(**_: Any) -> list[Any]:
        return []

    resources: Any = SimpleNamespace(router=SimpleNamespace(graph_service=observe, index=index), is_draining=False)
    page = live.Live(resources, live.MetricPages({}))
    page._samples = ExpiringCache(0.9, 2, asyncio.get_running_loop().time)
    told: list[list[int]] = [[], []]

    async def look(keys: list[int]) -> None:
        await asyncio.sleep(0.55 * (keys is told[1]))
        async for event in page.events((), ()):
            keys += [int(one["key"]) for one in event.get("requests", ())]
            resources.is_draining = clock.elapsed_ms() > 8000

    await asyncio.gather(*map(look, told))
    for keys in told:
        assert [*range(keys[0], keys[-1] + 1, 200)] == keys
        assert keys[-1] > 6000
