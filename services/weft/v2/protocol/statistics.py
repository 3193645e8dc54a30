"""Sums of ``ModelStatistics`` of several processes."""

from collections.abc import Iterable

from weft_protos import grpc_service_pb2 as pb


def summed(messages: Iterable[pb.ModelStatistics]) -> list[pb.ModelStatistics]:
    """The counters of each model version, summed, in the order in which they come first."""
    sums: dict[tuple[str, str], pb.ModelStatistics] = {}
    for message in messages:
        total = sums.setdefault((message.name, message.version), pb.ModelStatistics())
        if not total.name:
            total.CopyFrom(message)
        else:
            _add(total, message)
    return list(sums.values())


def _add(total: pb.ModelStatistics, more: pb.ModelStatistics) -> None:
    total.last_inference = max(total.last_inference, more.last_inference)
    total.inference_count += more.inference_count
    total.execution_count += more.execution_count
    _add_durations(total.inference_stats, more.inference_stats)
    batches = {batch.batch_size: batch for batch in total.batch_stats}
    for batch in more.batch_stats:
        if batch.batch_size in batches:
            _add_durations(batches[batch.batch_size], batch)
        else:
            total.batch_stats.append(batch)
    total.batch_stats.sort(key=lambda batch: batch.batch_size)
    for number, response in more.response_stats.items():
        _add_durations(total.response_stats[number], response)


def _add_durations(
    total: pb.InferStatistics | pb.InferBatchStatistics | pb.InferResponseStatistics,
    more: pb.InferStatistics | pb.InferBatchStatistics | pb.InferResponseStatistics,
) -> None:
    """Add every field that is a number of events and their duration."""
    for field, value in more.ListFields():
        if isinstance(value, pb.StatisticDuration):
            duration: pb.StatisticDuration = getattr(total, field.name)
            duration.count += value.count
            duration.ns += value.ns
