"""Counters of a served model, whose sums must add up."""

import asyncio
import time

import pytest
from tests.unit.serving.builders import make_call
from tests.unit.serving.fake_backends import Echo, FailsFirst, Raises, RaisesOwnError, TooFewOutcomes

from weft.base.core import CallContext
from weft.base.errors import InvalidArgumentError, WeftError
from weft.base.statistics import MAX_COUNTED_LEVEL
from weft.serving.queues.settings import WaitPolicy


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


@pytest.mark.parametrize(
    ("bad", "reason"), [(Raises, "BACKEND"), (TooFewOutcomes, "BACKEND"), (RaisesOwnError, "OTHER")]
)
async def test_failures_by_reason(serve, bad, reason):
    """A failed request counts as a failure of its kind, not as an inference; its batch as an execution."""
    model = await serve(bad)
    with pytest.raises(WeftError):
        await model.infer(make_call(), CallContext())
    statistics = model.statistics
    assert ({reason: 1}, 1) == (statistics.failures_by_reason, statistics.fail.count)
    assert (0, 0, 1) == (statistics.success.count, statistics.inference_count, statistics.execution_count)
    assert {1: 1} == {size: batch.compute_infer.count for size, batch in statistics.batches.items()}


async def test_partly_failed_batch(serve):
    """A batch of which one member failed is an execution; only its answered rows are inferences."""
    model = await serve(FailsFirst, is_batching=True)
    calls = [model.infer(make_call(value), CallContext()) for value in range(3)]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(outcomes[0], InvalidArgumentError)
    statistics = model.statistics
    assert (1, 2, 2) == (statistics.execution_count, statistics.inference_count, statistics.success.count)
    assert {3} == set(statistics.batches)


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
