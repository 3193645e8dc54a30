"""What a router keeps of requests while somebody looks."""

import asyncio
from types import SimpleNamespace

import pytest

from weft.base.core import CallContext
from weft.base.errors import NotFoundError, UnavailableError
from weft.base.signature import ModelSignature
from weft.base.statistics import ModelStatistics
from weft.language.request_scope import RequestScope
from weft.router.admission.controller import AdmissionController, AdmissionSettings
from weft.router.observe import MAX_FAILED, MAX_KEPT, MAX_RECENT, MAX_SLOWEST, MAX_STEPS, Observer
from weft.router.reporting.path import NodeRecord, StepRecord
from weft.router.repository.table import GraphTable
from weft.router.runtime import Runtime
from weft.router.steps.run import GraphRequest, Run
from weft.router.targets.catalog import TargetCatalog
from weft_protos import graph_service_pb2 as pb


class Plan:
    signature = ModelSignature("g", "1", "graph", 0, (), ())


def run_of(number: int) -> Run:
    """A request that has one step, and arrived the earlier the lower its number."""
    context = CallContext()
    context.arrival_ns -= (1000 - number) * 1_000_000_000 if number < 60 else 0
    record = NodeRecord("root", steps=[StepRecord("a", "root/a", 0)])
    return Run([], GraphRequest(RequestScope({}, {}, str(number), 0, None), {}, context), None, None, record)


@pytest.fixture
def runtime() -> Runtime:
    return Runtime({})


@pytest.fixture
def observer(runtime: Runtime) -> Observer:
    catalog = TargetCatalog([], poll_s=1.0, on_change=lambda: None)
    return Observer(GraphTable(catalog), runtime, catalog, AdmissionController(AdmissionSettings()), "none")


async def test_a_bounded_number_of_requests_is_kept(observer: Observer, runtime: Runtime) -> None:
    """The latest, the slowest and those that failed, of thousands; each can be found with its steps."""
    assert runtime.on_end is None
    wanted = pb.ObserveRequest(requests_after_unix_ms=0)
    assert not (await observer.observe(wanted)).request
    for number in range(3000):
        error = UnavailableError("no model") if number in (100, 101) else None
        runtime.on_end(Plan, run_of(number), "root.a", 0, error)
        assert len(observer._kept) <= MAX_KEPT
    kept = {one.request_id: one for one in (await observer.observe(wanted)).request}
    assert MAX_RECENT + MAX_SLOWEST <= len(kept) <= MAX_RECENT + MAX_SLOWEST + MAX_FAILED + MAX_KEPT
    assert {str(number) for number in (*range(MAX_SLOWEST), 100, 101, *range(3000 - MAX_RECENT, 3000))} <= kept.keys()
    assert ("UNAVAILABLE", "no model") == (kept["100"].status, kept["100"].error)
    after = pb.ObserveRequest(requests_after_unix_ms=kept["2998"].unix_ms)
    assert "2998" not in [one.request_id for one in (await observer.observe(after)).request]
    (found,) = (await observer.observe(pb.ObserveRequest(request_key=kept["7"].key))).request
    assert ("7", True) == (found.request_id, '"path":"root/a"' in found.steps)
    with pytest.raises(NotFoundError, match="no such request"):
        await observer.observe(pb.ObserveRequest(request_key="1-1"))


async def test_of_a_request_of_too_many_steps_they_are_not_kept(observer: Observer, runtime: Runtime) -> None:
    """So a map over thousands of rows does not fill the memory."""
    await observer.observe(pb.ObserveRequest(requests_after_unix_ms=0))
    for num_steps in (MAX_STEPS, MAX_STEPS + 1):
        run = run_of(100)
        run.record.steps *= num_steps
        runtime.on_end(Plan, run, "root.a", 0, None)
    assert [MAX_STEPS, 0] == [len(record.steps) for _, record, _ in observer._kept]


async def test_nothing_is_kept_when_nobody_looks(observer: Observer, runtime: Runtime) -> None:
    """A question for counters keeps nothing; a question for requests does so until the lease is over."""
    await observer.observe(pb.ObserveRequest(graph=["g"]))
    assert runtime.on_end is None
    await observer.observe(pb.ObserveRequest(requests_after_unix_ms=0))
    runtime.on_end(Plan, run_of(1), "root.a", 0, asyncio.CancelledError())
    observer._expire()
    assert ["CANCELLED"] == [one[0]["status"] for one in observer._kept]
    observer._kept_until_s = 0.0
    observer._expire()
    assert (None, []) == (runtime.on_end, observer._kept)


async def test_counts_are_those_of_now(observer: Observer) -> None:
    """A graph that answers or fails after it was told is told anew."""
    counts = ModelStatistics("g", "1")
    entry = SimpleNamespace(statistics=counts, serving=None, file=SimpleNamespace(name="g"))
    observer._graphs = [entry]  # type: ignore[assignment]  # all that is read of the table
    told, error = [], UnavailableError("gone")
    for change in (lambda: None, lambda: counts.success.add(7), lambda: counts.record_failure(error, 1)):
        change()
        (one,) = (await observer.observe(pb.ObserveRequest())).count
        told.append((one.graph, one.num_ok, one.total_ns, dict(one.failure)))
    assert [("g", 0, 0, {}), ("g", 1, 7, {}), ("g", 1, 7, {"BACKEND": 1})] == told


async def test_who_asks_each_second_is_told_the_latest_requests(observer: Observer, runtime: Runtime) -> None:
    """No more than are shown, in order; who asks for all gets all."""
    for wanted in (0, 1):
        asked = pb.ObserveRequest(requests_after_unix_ms=wanted)
        await observer.observe(asked)
        for number in range(100, 200):
            runtime.on_end(Plan, run_of(number), "root.a", 0, None)
        ids = [one.request_id for one in (await observer.observe(asked)).request]
        assert [str(number) for number in range(150 if wanted else 100, 200)] == ids


def test_models_are_asked_for_times_of_some_requests(runtime: Runtime) -> None:
    """Of 200 a second 20, after 50 at once: each costs the router more."""
    asked = [runtime.takes_times(10_000_000_000 + number * 5_000_000) for number in range(2000)]
    assert 20 == sum(asked[1000:1200])
    assert all(asked[:50])
    assert all(runtime.takes_times(60_000_000_000) for _ in range(50))
    assert not runtime.takes_times(60_000_000_000)
