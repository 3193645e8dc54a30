"""Spans of a served model, collected in memory."""

import asyncio
import time
from collections import Counter
from dataclasses import replace

import pytest
from opentelemetry.trace import StatusCode
from tests.unit.serving.builders import make_call
from tests.unit.serving.fake_backends import Echo, Raises

from weft.base.core import CallContext
from weft.base.errors import WeftError
from weft.base.observing import telemetry
from weft.base.statistics import MAX_COUNTED_LEVEL
from weft.serving.backends.base import InstanceContext
from weft.serving.backends.layout import BatchLayout
from weft.serving.queues.settings import LengthBuckets, SchedulerSettings, WaitPolicy
from weft.serving.runtime import recorder
from weft.serving.runtime.model import ServedModel


def _server():
    """A started server span and the context of a call within it."""
    span = telemetry.start_span("server", parent=None, kind=telemetry.SERVER)
    return span, CallContext(trace_context=telemetry.context_of(span))


def _by_name(exporter):
    spans = {}
    for span in exporter.get_finished_spans():
        spans.setdefault(span.name, []).append(span)
    return spans


class Clocks:
    """Both clocks of ``time``, for a thread that is held up for 5 ms after one of its readings."""

    UNIX_NS = 1_700_000_000_000_000_000

    def __init__(self, held_up_after: int) -> None:
        self._held_up_after = held_up_after
        self._num_readings = self._now_ns = 0

    def monotonic_ns(self) -> int:
        now_ns = self._now_ns
        self._num_readings += 1
        self._now_ns += 5_000_000 if self._num_readings == self._held_up_after else 100
        return now_ns

    def time_ns(self) -> int:
        return self.UNIX_NS + self.monotonic_ns()


@pytest.mark.parametrize("held_up_after", range(1, 10))
def test_spans_begin_where_others_end_on_a_busy_machine(monkeypatch, held_up_after):
    """Times of one request on the clock of Weft are as far from one another as on that of its spans."""
    monkeypatch.setattr(recorder, "time", Clocks(held_up_after))
    assert abs(recorder._unix_offset_ns() - Clocks.UNIX_NS) < 1_000


async def test_spans_of_a_batch(serve, gate, exporter):
    """Each member has a queue and a compute span of its own trace; the batch links them all."""
    before_ns = time.time_ns()
    model = await serve(gate.backend, is_batching=True)
    servers, contexts = zip(*(_server() for _ in range(3)), strict=True)
    first = asyncio.create_task(model.infer(make_call(0), contexts[0]))
    await gate.entered()
    rest = [asyncio.create_task(model.infer(make_call(value, rows=2), contexts[value])) for value in (1, 2)]
    await asyncio.sleep(0)
    gate.open()
    await asyncio.gather(first, *rest)
    spans = _by_name(exporter)
    assert {"queue": 3, "compute": 3, "batch": 2} == {name: len(found) for name, found in spans.items()}

    batch = spans["batch"][1]
    assert servers[1].get_span_context().span_id == batch.parent.span_id
    assert [server.get_span_context() for server in servers[1:]] == [link.context for link in batch.links]
    assert {"weft.model": "echo", "weft.batch_size": 4, "weft.num_requests": 2, "weft.instance": "echo_0"} == dict(
        batch.attributes
    )
    for server, queue, compute in zip(servers[1:], spans["queue"][1:], spans["compute"][1:], strict=True):
        parent = server.get_span_context()
        assert parent.span_id == queue.parent.span_id == compute.parent.span_id
        assert parent.trace_id == queue.context.trace_id
        assert [batch.context] == [link.context for link in compute.links]
        assert {"weft.model": "echo", "weft.batch_size": 4, "weft.num_rows": 2} == dict(compute.attributes)
        assert before_ns <= queue.start_time <= queue.end_time <= compute.end_time <= time.time_ns()
        assert abs(queue.end_time - compute.start_time) < 1_000_000
    assert [0, 0, 1] == [queue.attributes["weft.queue_depth"] for queue in spans["queue"]]


async def test_spans_tell_level_and_bucket(model_context, exporter):
    """A queue span has the level that its request waited in, a batch span the bucket that it was made of."""
    context = replace(model_context, layout=BatchLayout(LengthBuckets((4, 8), {"IN": 0})))
    settings = SchedulerSettings(8, is_batching=True, priority_levels=3, default_priority_level=2)
    model = ServedModel(context, Echo, settings, [InstanceContext("echo_0")])
    await model.start()
    calls = [make_call(1, columns=columns, priority=level) for columns, level in ((3, 3), (4, 0), (9, 1))]
    await asyncio.gather(*(model.infer(call, _server()[1]) for call in calls))
    await model.stop(grace_s=5)
    spans = _by_name(exporter)
    assert {1: 1, 2: 1, 3: 1} == Counter(span.attributes["weft.priority"] for span in spans["queue"])
    assert {(9, 1), (4, 2)} == {
        (span.attributes["weft.bucket"], span.attributes["weft.num_requests"]) for span in spans["batch"]
    }


async def test_left_in_the_queue(serve, gate, exporter):
    """Expired and cancelled requests have a queue span with their status and no compute span; a cancel is no error."""
    model = await serve(
        gate.backend,
        is_batching=True,
        default_policy=WaitPolicy(default_timeout_us=60_000_000, allow_timeout_override=True),
    )
    first = asyncio.create_task(model.infer(make_call(), CallContext()))
    await gate.entered()
    cancelled = asyncio.create_task(model.infer(make_call(), _server()[1]))
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(WeftError):
        await model.infer(make_call(timeout=2000), _server()[1])
    gate.open()
    await first
    spans = _by_name(exporter)
    assert [StatusCode.UNSET, StatusCode.ERROR, StatusCode.UNSET] == [
        span.status.status_code for span in spans["queue"]
    ]
    assert [1, 4] == [span.attributes["rpc.grpc.status_code"] for span in spans["queue"][:2]]
    assert 1 == len(spans["compute"])


async def test_cancelled_while_it_runs(serve, gate, exporter):
    """A request that is cancelled while it runs has waited in the queue once, and its wait was no error."""
    model = await serve(gate.backend)
    task = asyncio.create_task(model.infer(make_call(), _server()[1]))
    await gate.entered()
    task.cancel()
    await asyncio.wait([task])
    gate.open()
    await model.stop(grace_s=5)
    spans = _by_name(exporter)
    assert [StatusCode.UNSET] == [span.status.status_code for span in spans["queue"]]


async def test_failed_batch(serve, exporter):
    """A failure is on compute and batch, with the error id that the client gets."""
    model = await serve(Raises)
    with pytest.raises(WeftError) as raised:
        await model.infer(make_call(), _server()[1])
    spans = _by_name(exporter)
    assert [raised.value.error_id] * 2 == [spans[name][0].attributes["weft.error_id"] for name in ("compute", "batch")]  # type: ignore[attr-defined]


async def test_exemplars(serve, exporter):
    """A latency bucket points to the trace that fell into it last."""
    model = await serve(Echo)
    server, context = _server()
    await model.infer(make_call(), context)
    (exemplar,) = filter(None, model.statistics.request_latency[0].exemplars)
    assert f"{server.get_span_context().trace_id:032x}" == exemplar[0]
    assert abs(exemplar[2] - time.time()) < 60


async def test_nothing_when_off(serve):
    """Without telemetry no exemplar is kept."""
    model = await serve(Echo)
    await model.infer(make_call(), CallContext())
    assert [] == [exemplar for exemplar in model.statistics.request_latency[0].exemplars if exemplar]


async def _serve_batches(serve, gate, **settings):
    """A model that executed one request of 1 row, then two of 3 rows as one batch."""
    model = await serve(gate.backend, is_batching=True, **settings)
    first = asyncio.create_task(model.infer(make_call(0), CallContext()))
    await gate.entered()
    rest = [asyncio.create_task(model.infer(make_call(value, rows=3), CallContext())) for value in (1, 2)]
    await asyncio.sleep(0)
    assert (2, {0: 2}) == (model.statistics.pending_count, model.statistics.count_pending_by_level())
    gate.open()
    await asyncio.gather(first, *rest)
    return model.statistics


async def test_counts(serve, gate):
    """Requests, rows, executions and batch sizes are counted each for itself."""
    before_ms = time.time_ns() // 1_000_000
    statistics = await _serve_batches(serve, gate)
    assert (3, 7, 2) == (statistics.success.count, statistics.inference_count, statistics.execution_count)
    assert {1: 1, 6: 1} == {size: batch.compute_infer.count for size, batch in statistics.batches.items()}
    assert [3] * 4 == [
        duration.count
        for duration in (
            statistics.queue,
            statistics.compute_input,
            statistics.compute_infer,
            statistics.compute_output,
        )
    ]
    assert before_ms <= statistics.last_inference_ms <= time.time_ns() // 1_000_000
    assert (0, 0) == (statistics.pending_count, statistics.fail.count)


async def test_durations_add_up(serve, gate):
    """Queue and compute together never exceed the whole, and members of a batch count its compute each."""
    statistics = await _serve_batches(serve, gate)
    parts = (statistics.queue, statistics.compute_input, statistics.compute_infer, statistics.compute_output)
    assert 0 < sum(part.total_ns for part in parts) <= statistics.success.total_ns
    for part in ("compute_input", "compute_infer", "compute_output"):
        by_batch = {size: getattr(batch, part).total_ns for size, batch in statistics.batches.items()}
        assert getattr(statistics, part).total_ns == by_batch[1] + 2 * by_batch[6]


async def test_latency_by_priority(serve):
    """Latencies are kept by priority level, and levels without end share a histogram."""
    model = await serve(Echo, is_batching=True, priority_levels=2**64 - 1, default_priority_level=2)
    for priority in (0, 1, 2**60, 2**61):
        await model.infer(make_call(priority=priority), CallContext())
    for histograms in (
        model.statistics.request_latency,
        model.statistics.queue_latency,
        model.statistics.compute_latency,
    ):
        assert {1: 1, 2: 1, MAX_COUNTED_LEVEL: 2} == {
            level: sum(histogram.counts) for level, histogram in histograms.items()
        }


async def test_histograms_agree_with_the_counters(serve, gate):
    """The sums of the histograms are those of the whole, of the queue, and of the three parts of compute."""
    statistics = await _serve_batches(serve, gate)
    compute = (statistics.compute_input, statistics.compute_infer, statistics.compute_output)
    expected = (statistics.success.total_ns, statistics.queue.total_ns, sum(part.total_ns for part in compute))
    histograms = (statistics.request_latency, statistics.queue_latency, statistics.compute_latency)
    assert pytest.approx(expected) == tuple(by_level[0].sum_s * 1e9 for by_level in histograms)


async def test_latency_without_levels(serve):
    """A model without levels keeps its latencies under 0."""
    model = await serve(Echo)
    await model.infer(make_call(priority=3), CallContext())
    assert [0] == list(model.statistics.request_latency)


async def test_refused_requests_are_rejected(serve, gate):
    """A queue timeout counts as REJECTED, with the time that it took."""
    model = await serve(
        gate.backend,
        is_batching=True,
        default_policy=WaitPolicy(default_timeout_us=60_000_000, allow_timeout_override=True),
    )
    first = asyncio.create_task(model.infer(make_call(), CallContext()))
    await gate.entered()
    with pytest.raises(WeftError):
        await model.infer(make_call(timeout=2000), CallContext())
    gate.open()
    await first
    assert {"REJECTED": 1} == model.statistics.failures_by_reason
    assert 2_000_000 <= model.statistics.fail.total_ns
