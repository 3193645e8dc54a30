"""Converts between V2 messages and the core's types: calls, results, metadata, statistics; bytes are in ``codec``."""

from array import array
from collections.abc import Iterable, Mapping
from typing import Any

from weft.base.core import InferCall, InferResult, Parameters, RequestedOutput
from weft.base.errors import InvalidArgumentError, RemoteError, UnsupportedError
from weft.base.limits import (
    MAX_DIMS,
    MAX_PARAMETERS,
    MAX_STRINGS,
    MAX_TENSORS,
    MAX_TYPED_STRINGS,
    check_call,
    check_count,
    check_parameters,
)
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.statistics import DurationCount, ModelStatistics
from weft.base.tensors import (
    DATATYPES,
    ITEMSIZE_BYTES,
    LENGTH_BYTES,
    MAX_STRING_BYTES,
    WireTensor,
    encode_bytes,
    num_elements,
)
from weft.v2.protocol.codec import InferMessage, TensorHead, given, values_of
from weft.v2.protocol.encoding import fill_parameters
from weft.v2.protocol.shared_memory import DISABLED, REGION_PARAMETER, SharedMemory, TensorLocation, location_of
from weft_protos import grpc_service_pb2 as pb

#: Datatype -> field of InferTensorContents and type code of ``array``. FP16 and BF16 have none: raw contents only.
_CONTENTS = {
    "BOOL": ("bool_contents", "B"),
    "INT8": ("int_contents", "b"),
    "INT16": ("int_contents", "h"),
    "INT32": ("int_contents", "i"),
    "INT64": ("int64_contents", "q"),
    "UINT8": ("uint_contents", "B"),
    "UINT16": ("uint_contents", "H"),
    "UINT32": ("uint_contents", "I"),
    "UINT64": ("uint64_contents", "Q"),
    "FP32": ("fp32_contents", "f"),
    "FP64": ("fp64_contents", "d"),
    "BYTES": ("bytes_contents", ""),
}
_RESERVED_PREFIX = "triton_"
_ALLOWED_RESERVED = "triton_enable_empty_final_response"
_NO_LOCATIONS: Mapping[str, TensorLocation] = {}
_NO_PARAMETERS: Parameters = {}


def call_of(message: InferMessage, memory: SharedMemory | None = None) -> InferCall:
    """Convert a request to a call; typed contents and shared-memory tensors become raw bytes.

    Raises:
        InvalidArgumentError: Data is missing, given twice, or does not fit its datatype; a reserved parameter is set; a
            limit of ``weft.base.limits`` is exceeded.
        NotFoundError: A region of shared memory is not registered.
        UnsupportedError: An input is in shared memory, which is disabled.
    """
    model, tensors, raw = message.model_name, message.tensors, message.contents
    parameters = _checked_parameters("the request", message.parameters)
    for key in parameters:
        if key.startswith(_RESERVED_PREFIX) and not (key == _ALLOWED_RESERVED and isinstance(parameters[key], bool)):
            raise InvalidArgumentError(
                f"parameter '{key}' is reserved for Triton usage: keys that start with '{_RESERVED_PREFIX}' may not be "
                "set; use another name"
            )
    check_count("the request", len(tensors), MAX_TENSORS, "inputs")
    check_count("the request", len(message.outputs), MAX_TENSORS, "requested outputs")
    inputs: dict[str, WireTensor] = {}
    position = -1  # index among the inputs with data in the message
    for tensor in tensors:
        name = tensor.name
        if name in inputs:
            raise InvalidArgumentError(f"input '{name}' is given twice in a request for model '{model}'")
        location = None
        if tensor.parameters:
            location = location_of(memory, _checked_parameters("an input", tensor.parameters), name)
        if location is not None:
            data = _data_at(location, tensor, model)
        elif not raw:
            position += 1
            data = _typed_contents(tensor, "input", model)
        else:
            position += 1
            if tensor.typed is not None:
                raise InvalidArgumentError(
                    f"contents field must not be specified when using raw_input_contents for '{name}' for "
                    f"model '{model}'"
                )
            if position >= len(raw):
                raise InvalidArgumentError(
                    f"unable to find data for input tensor '{name}' for model '{model}' in request: "
                    f"{len(tensors)} inputs, but raw_input_contents has {len(raw)} entries"
                )
            data = raw[position]
        inputs[name] = WireTensor(tensor.datatype, tensor.shape, data)
    if len(raw) > position + 1:
        raise InvalidArgumentError(
            f"raw_input_contents has {len(raw)} entries for {position + 1} inputs of model "
            f"'{model}'; give one entry for each input that is not in shared memory"
        )
    outputs = tuple([_requested(output, is_memory_allowed=memory is not None) for output in message.outputs])
    call = InferCall(model, message.model_version, message.request_id, parameters, inputs, outputs)
    check_call(call)
    return call


def output_locations(message: InferMessage, memory: SharedMemory) -> dict[str, TensorLocation]:
    """Shared-memory locations of requested outputs; others are sent in the message. Raises as ``location_of``."""
    locations: dict[str, TensorLocation] = {}
    for name, parameters in message.outputs:
        if parameters and (location := location_of(memory, given(parameters), name)) is not None:
            if "classification" in given(parameters):
                raise InvalidArgumentError(
                    f"shared memory can't be used in conjunction with classification for output '{name}'"
                )
            locations[name] = location
    return locations


def result_of(response: InferResult | InferMessage) -> InferResult:
    """Convert a response to a result; raise RemoteError (INTERNAL, not the client's fault) if an output has no data."""
    if isinstance(response, InferResult):
        return response
    raw = response.contents
    outputs: dict[str, WireTensor] = {}
    for position, tensor in enumerate(response.tensors):
        if position < len(raw):
            data = raw[position]
        else:
            try:
                data = _typed_contents(tensor, "output", response.model_name)
            except InvalidArgumentError as error:
                message = f"bad answer of model '{response.model_name}': {error.message}"
                raise RemoteError("INTERNAL", message) from error
        outputs[tensor.name] = WireTensor(tensor.datatype, tensor.shape, data)
    return InferResult(
        response.model_name, response.model_version, response.request_id, given(response.parameters), outputs
    )


def _requested(output: RequestedOutput, *, is_memory_allowed: bool) -> RequestedOutput:
    if not output.parameters:
        return output
    if REGION_PARAMETER in output.parameters:
        if not is_memory_allowed:
            raise UnsupportedError(DISABLED)
        return RequestedOutput(output.name, {})
    return RequestedOutput(output.name, _checked_parameters("a requested output", output.parameters))


def _checked_parameters(what: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    check_count(what, len(parameters), MAX_PARAMETERS, "parameters")
    values = given(parameters)
    check_parameters(what, values)
    return values


def _data_at(location: TensorLocation, tensor: TensorHead, model_name: str) -> bytes:
    """Raw bytes of an input in shared memory; not read if the size does not fit the shape."""
    if tensor.typed is not None:
        raise InvalidArgumentError(f"input '{tensor.name}' lies in shared memory and has contents; give one of them")
    check_count(f"the shape of input '{tensor.name}'", len(tensor.shape), MAX_DIMS, "dimensions")
    if min(tensor.shape, default=0) < 0:
        raise InvalidArgumentError(f"input '{tensor.name}' has shape {list(tensor.shape)}; sizes are at least 0")
    count, got = num_elements(tensor.shape), location.byte_size
    itemsize_bytes = ITEMSIZE_BYTES.get(tensor.datatype)
    if tensor.datatype not in DATATYPES:
        raise InvalidArgumentError(f"datatype '{tensor.datatype:.80}' of input '{tensor.name}' is no V2 datatype")
    if itemsize_bytes is None:
        check_count(f"input '{tensor.name}'", count, MAX_STRINGS, "strings")
        least, most = count * LENGTH_BYTES, count * (LENGTH_BYTES + MAX_STRING_BYTES)
    else:
        least = most = count * itemsize_bytes
    if not least <= got <= most:
        raise InvalidArgumentError(
            f"input byte size mismatch for input '{tensor.name}' for model '{model_name}'. Expected "
            f"{least if least == most else f'{least} to {most}'}, got {got}"
        )
    return location.read()


def _typed_contents(tensor: TensorHead, kind: str, model_name: str) -> bytes:
    """Raw bytes of a tensor's typed contents; ``kind`` is "input" or "output"."""
    if tensor.typed is None:
        if 0 in tensor.shape:
            return b""
        raise InvalidArgumentError(
            f"unable to find data for {kind} tensor '{tensor.name}' for model '{model_name}': neither "
            f"contents nor raw_{kind}_contents is set"
        )
    datatype = tensor.datatype
    if datatype not in _CONTENTS:
        raise InvalidArgumentError(
            f"datatype '{datatype}' of {kind} '{tensor.name}' has no typed contents; "
            + (f"send it in raw_{kind}_contents" if datatype in DATATYPES else "it is no V2 datatype")
        )
    field, type_code = _CONTENTS[datatype]
    filled = [descriptor.name for descriptor, _ in tensor.typed.ListFields()]
    if filled and filled != [field]:
        raise InvalidArgumentError(
            f"{kind} '{tensor.name}' of datatype '{datatype}' must fill {field}, but {', '.join(filled)} is set"
        )
    if datatype == "BYTES":
        check_count(f"{kind} '{tensor.name}'", len(tensor.typed.bytes_contents), MAX_TYPED_STRINGS, "strings")
    values = getattr(tensor.typed, field)[:]
    if datatype == "BYTES":
        return encode_bytes(values)
    try:
        return array(type_code, values).tobytes()
    except OverflowError as error:
        raise InvalidArgumentError(f"{kind} '{tensor.name}' holds a value that {datatype} cannot: {error}") from error


def message_of_call(call: InferCall) -> InferMessage:
    """Convert a call to a request."""
    tensors = [_head(name, tensor) for name, tensor in call.inputs.items()]
    contents = [tensor.data for tensor in call.inputs.values()]
    parameters = dict(call.parameters)
    return InferMessage(
        call.model_name, call.model_version, call.request_id, parameters, tensors, list(call.outputs), contents
    )


def check_sendable(call: InferCall) -> None:
    """Raise InvalidArgumentError if the protocol cannot carry a parameter of a call."""
    for parameters in (call.parameters, *(output.parameters for output in call.outputs)):
        if parameters:
            fill_parameters(pb.ModelInferRequest().parameters, parameters)


def message_of_result(result: InferResult, locations: Mapping[str, TensorLocation] = _NO_LOCATIONS) -> InferMessage:
    """Convert a result to a response; write outputs with a location there. Raises InvalidArgumentError."""
    parameters = dict(result.parameters)
    if parameters:
        fill_parameters(pb.ModelInferResponse().parameters, parameters)  # raises now, not when it is sent
    message = InferMessage(result.model_name, result.model_version, result.request_id, parameters)
    for name, tensor in result.outputs.items():
        location = locations.get(name)
        if location is None:
            message.tensors.append(_head(name, tensor))
            message.contents.append(tensor.data)
        else:
            location.write(tensor.data, name)
            message.tensors.append(_head(name, tensor, location.parameters(len(tensor.data))))
            message.contents.append(b"")  # clients find their data by position
    return message


def _head(name: str, tensor: WireTensor, parameters: Mapping[str, Any] = _NO_PARAMETERS) -> TensorHead:
    return TensorHead(name, tensor.datatype, tensor.shape, parameters)


def parameters_from(message: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a parameter map of a message to plain values; entries without a value are omitted."""
    return given(values_of(message))


def summed(messages: Iterable[pb.ModelStatistics]) -> list[pb.ModelStatistics]:
    """Sum the counters of each model version over several messages, in order of first appearance."""
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


def signature_from_metadata(name: str, version: str, metadata: pb.ModelMetadataResponse) -> ModelSignature:
    """The signature that metadata tell: dims are full shapes, no input is optional and the model not decoupled."""
    inputs, outputs = (
        tuple(TensorSpec(tensor.name, tensor.datatype, tuple(tensor.shape)) for tensor in tensors)
        for tensors in (metadata.inputs, metadata.outputs)
    )
    return ModelSignature(name, version, metadata.platform, 0, inputs, outputs)


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
    """Fill a message of durations from the attributes of ``counts`` with the names of its fields."""
    for field in message_class.DESCRIPTOR.fields:
        if field.message_type is pb.StatisticDuration.DESCRIPTOR:
            count: DurationCount = getattr(counts, field.name)
            others[field.name] = pb.StatisticDuration(count=count.count, ns=count.total_ns)
    return message_class(**others)
