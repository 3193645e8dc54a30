"""Counters of models, alone and summed over workers."""

import pytest

from weft.base.errors import NotFoundError, WeftError
from weft.base.statistics import (
    FINE_BUCKETS_S,
    LATENCY_BUCKETS_S,
    DurationCount,
    LatencyHistogram,
    ModelStatistics,
    failure_reason,
)
from weft.v2.protocol.wire import summed
from weft_protos import grpc_service_pb2 as pb


@pytest.mark.parametrize("index", [0, 5, len(LATENCY_BUCKETS_S) - 1])
def test_bucket_bound_is_inclusive(index):
    """A latency equal to a bound falls into its bucket, one above it into the next, as Prometheus has it."""
    histogram = LatencyHistogram()
    histogram.observe(LATENCY_BUCKETS_S[index])
    histogram.observe(LATENCY_BUCKETS_S[index] * 1.000001)
    expected = [0] * (len(LATENCY_BUCKETS_S) + 1)
    expected[index] = expected[index + 1] = 1
    assert expected == histogram.counts


def test_last_exemplar_of_a_bucket_stays():
    """A bucket keeps the trace of its last traced request; untraced ones do not erase it."""
    histogram = LatencyHistogram()
    histogram.observe(0.003, trace_id="a" * 32, unix_time_s=1.0)
    histogram.observe(0.004, trace_id="b" * 32, unix_time_s=2.0)
    histogram.observe(0.0035)
    assert [("b" * 32, 0.004, 2.0)] == [exemplar for exemplar in histogram.exemplars if exemplar]
    assert pytest.approx(0.0105) == histogram.sum_s


def test_failure_is_counted_once_with_its_reason():
    """A failure adds to the sum and to its reason."""
    statistics = ModelStatistics("m", "1")
    statistics.record_failure(NotFoundError("no such model"), 7)
    statistics.record_failure(NotFoundError("no such version"), 8)
    assert (DurationCount(2, 15), {"OTHER": 2}) == (statistics.fail, statistics.failures_by_reason)


@pytest.mark.parametrize("cls", WeftError.__subclasses__(), ids=lambda cls: cls.__name__)
def test_every_error_has_a_reason(cls):
    """Each status falls under one of the four reasons that the metric has."""
    expected = {
        "RESOURCE_EXHAUSTED": "REJECTED",
        "DEADLINE_EXCEEDED": "REJECTED",
        "CANCELLED": "CANCELED",
        "INTERNAL": "BACKEND",
        "UNKNOWN": "BACKEND",
        "UNAVAILABLE": "BACKEND",
    }
    assert expected.get(cls.code, "OTHER") == failure_reason(cls.code)


def test_a_histogram_counts_and_finds_quantiles() -> None:
    """Sum and count are exact, a quantile is the bound of its bucket, what is above all bounds is counted, too."""
    histogram = LatencyHistogram(FINE_BUCKETS_S)
    assert 0.0 == histogram.quantile(0.5)
    histogram.observe(0.01, count=98)
    histogram.observe(1.0)
    histogram.observe(1e6)
    assert (100, pytest.approx(0.98 + 1.0 + 1e6)) == (histogram.count, histogram.sum_s)  # type: ignore[comparison-overlap]
    assert 0.01 <= histogram.quantile(0.5) < 0.012
    assert 1.0 <= histogram.quantile(0.99) < 1.2
    assert FINE_BUCKETS_S[-1] == histogram.quantile(1.0)
    assert 1 == histogram.counts[-1]


def duration(count: int) -> pb.StatisticDuration:
    return pb.StatisticDuration(count=count, ns=10 * count)


def counters(name: str, count: int, *, sizes: tuple[int, ...] = (1,)) -> pb.ModelStatistics:
    """Counters that differ by ``count``."""
    return pb.ModelStatistics(
        name=name,
        version="1",
        last_inference=count,
        inference_count=count,
        execution_count=count,
        inference_stats=pb.InferStatistics(success=duration(count), cache_hit=duration(1)),
        batch_stats=[pb.InferBatchStatistics(batch_size=size, compute_infer=duration(count)) for size in sizes],
        response_stats={"0": pb.InferResponseStatistics(success=duration(count))},
    )


def test_every_counter_is_added() -> None:
    """By version, batch size and number of the response; of the last inference the later time counts.

    The sum is a message of its own.
    """
    given = [counters("a", 2, sizes=(4, 1)), counters("b", 5), counters("a", 3, sizes=(1, 2))]
    first, second = summed(given)
    assert [counters("a", 2, sizes=(4, 1)), counters("b", 5), counters("a", 3, sizes=(1, 2))] == given
    assert counters("b", 5) == second
    assert ("a", "1", 3, 5, 5) == (
        first.name, first.version, first.last_inference, first.inference_count, first.execution_count,
    )  # fmt: skip
    assert duration(5) == first.inference_stats.success
    assert duration(2) == first.inference_stats.cache_hit
    assert [(1, 5), (2, 3), (4, 2)] == [(batch.batch_size, batch.compute_infer.count) for batch in first.batch_stats]
    assert duration(5) == first.response_stats["0"].success
