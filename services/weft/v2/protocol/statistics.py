"""Metadata and statistics of models as messages, and sums of the statistics of several processes."""

from collections.abc import Iterable
from typing import Any

from weft.base.signature import ModelSignature, TensorSpec
from weft.base.statistics import DurationCount, ModelStatistics
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


def _add_durations(total: Any, more: Any) -> None:
    for field, value in more.ListFields():
        if isinstance(value, pb.StatisticDuration):
            duration: pb.StatisticDuration = getattr(total, field.name)
            duration.count += value.count
            duration.ns += value.ns


def metadata_from_signature(signature: ModelSignature, versions: Iterable[str]) -> pb.ModelMetadataResponse:
    """The metadata message of a model with these versions; shapes include the batch dimension as a leading -1."""

    def tensor(spec: TensorSpec) -> pb.ModelMetadataResponse.TensorMetadata:
        return pb.ModelMetadataResponse.TensorMetadata(
            name=spec.name, datatype=spec.datatype, shape=signature.full_shape(spec)
        )

    return pb.ModelMetadataResponse(
        name=signature.name,
        versions=versions,
        platform=signature.platform,
        inputs=map(tensor, signature.inputs),
        outputs=map(tensor, signature.outputs),
    )


def statistics_message(entry: ModelStatistics) -> pb.ModelStatistics:
    """The message of the counters of one model version; batch sizes ascend."""
    return pb.ModelStatistics(
        name=entry.name,
        version=entry.version,
        last_inference=entry.last_inference_ms,
        inference_count=entry.inference_count,
        execution_count=entry.execution_count,
        inference_stats=_durations(pb.InferStatistics, entry),
        batch_stats=[
            _durations(pb.InferBatchStatistics, batch, batch_size=size) for size, batch in sorted(entry.batches.items())
        ],
        response_stats={
            str(number): _durations(pb.InferResponseStatistics, response)
            for number, response in list(entry.responses.items())
        },
    )


def _durations(message_class: Any, counts: object, **others: Any) -> Any:
    """A message whose durations are the attributes of ``counts`` that have the names of its fields."""
    for field in message_class.DESCRIPTOR.fields:
        if field.message_type is pb.StatisticDuration.DESCRIPTOR:
            count: DurationCount = getattr(counts, field.name)
            others[field.name] = pb.StatisticDuration(count=count.count, ns=count.total_ns)
    return message_class(**others)
