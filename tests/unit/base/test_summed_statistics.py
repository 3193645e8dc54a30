"""Counters of a model at several processes, as one."""

from weft.v2.protocol.wire import summed
from weft_protos import grpc_service_pb2 as pb


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
    """By version, batch size and number of the response; of the last inference the later time counts."""
    first, second = summed([counters("a", 2, sizes=(4, 1)), counters("b", 5), counters("a", 3, sizes=(1, 2))])
    assert counters("b", 5) == second
    assert ("a", "1", 3, 5, 5) == (
        first.name, first.version, first.last_inference, first.inference_count, first.execution_count,
    )  # fmt: skip
    assert duration(5) == first.inference_stats.success
    assert duration(2) == first.inference_stats.cache_hit
    assert [(1, 5), (2, 3), (4, 2)] == [(batch.batch_size, batch.compute_infer.count) for batch in first.batch_stats]
    assert duration(5) == first.response_stats["0"].success


def test_nothing_given_is_changed() -> None:
    """The sum is a message of its own."""
    one = counters("a", 1)
    summed([one, counters("a", 1)])
    assert counters("a", 1) == one
