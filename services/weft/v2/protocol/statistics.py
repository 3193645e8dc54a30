"""Metadata and statistics of models as messages, and sums of the statistics of several processes."""

from collections.abc import Iterable

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
        inference_stats=pb.InferStatistics(
            success=_duration(entry.success),
            fail=_duration(entry.fail),
            queue=_duration(entry.queue),
            compute_input=_duration(entry.compute_input),
            compute_infer=_duration(entry.compute_infer),
            compute_output=_duration(entry.compute_output),
            cache_hit=_duration(entry.cache_hit),
            cache_miss=_duration(entry.cache_miss),
        ),
        batch_stats=[
            pb.InferBatchStatistics(
                batch_size=size,
                compute_input=_duration(batch.compute_input),
                compute_infer=_duration(batch.compute_infer),
                compute_output=_duration(batch.compute_output),
            )
            for size, batch in sorted(entry.batches.items())
        ],
        response_stats={
            str(number): pb.InferResponseStatistics(
                compute_infer=_duration(response.compute_infer),
                compute_output=_duration(response.compute_output),
                success=_duration(response.success),
                fail=_duration(response.fail),
                empty_response=_duration(response.empty_response),
                cancel=_duration(response.cancel),
            )
            for number, response in list(entry.responses.items())
        },
    )


def _duration(count: DurationCount) -> pb.StatisticDuration:
    return pb.StatisticDuration(count=count.count, ns=count.total_ns)
