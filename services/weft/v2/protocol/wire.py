"""Conversion between protobuf messages and domain types; the only module that knows both."""

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


def parameters_from(message: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values of a map of InferParameter or ModelRepositoryParameter; entries without a value are omitted."""
    values: dict[str, Any] = {}
    for key, parameter in message.items():
        choice = parameter.WhichOneof("parameter_choice")
        if choice is not None:
            values[key] = getattr(parameter, choice)
    return values


def fill_parameters(message: Any, parameters: Parameters) -> None:
    """Write plain values into a parameter map of a message.

    ``priority`` is written as uint64, as tritonclient does; other integers as int64.

    Raises:
        InvalidArgumentError: An integer does not fit, or a value is of another type.
    """
    for key, value in parameters.items():
        target = message[key]
        try:
            if isinstance(value, bool):
                target.bool_param = value
            elif isinstance(value, int):
                if key == "priority" or value > 0x7FFF_FFFF_FFFF_FFFF:
                    target.uint64_param = value
                else:
                    target.int64_param = value
            elif isinstance(value, float):
                target.double_param = value
            else:
                target.string_param = value
        except (ValueError, OverflowError, TypeError) as error:
            raise InvalidArgumentError(
                f"parameter '{key}' has value {value!r}, which the protocol cannot carry"
            ) from error


def call_from_request(request: pb.ModelInferRequest, memory: SharedMemory | None = None) -> InferCall:
    """Convert a request message; typed ``contents`` and tensors in ``memory`` become raw bytes.

    Raises:
        InvalidArgumentError: Data is missing, given twice, or does not fit its datatype; a reserved parameter is set; a
            limit of ``weft.base.limits`` is exceeded.
        NotFoundError: A region of shared memory is not registered.
        UnsupportedError: An input is in shared memory, which is disabled.
    """
    parameters = _checked_parameters("the request", request.parameters) if request.parameters else {}
    for key in parameters:
        if key.startswith(_RESERVED_PREFIX) and key != _ALLOWED_RESERVED:
            raise InvalidArgumentError(
                f"parameter '{key}' is reserved: keys that start with '{_RESERVED_PREFIX}' may not be set; "
                "use another name"
            )
    tensors, requested, raw = request.inputs, request.outputs, request.raw_input_contents  # each access makes an object
    num_inputs, num_raw = len(tensors), len(raw)
    if num_inputs > MAX_TENSORS or len(requested) > MAX_TENSORS:
        check_count("the request", num_inputs, MAX_TENSORS, "inputs")
        check_count("the request", len(requested), MAX_TENSORS, "requested outputs")
    inputs: dict[str, WireTensor] = {}
    position = -1  # index among the inputs with data in the message
    for tensor in tensors:
        name = tensor.name
        if name in inputs:
            raise InvalidArgumentError(f"input '{name}' is given twice in a request for model '{request.model_name}'")
        if tensor.parameters:
            location = location_of(memory, _checked_parameters("an input", tensor.parameters), name)
            if location is not None:
                data = _data_at(location, tensor, request.model_name)
                inputs[name] = WireTensor(tensor.datatype, tuple(tensor.shape), data)
                continue
        position += 1
        if num_raw:
            if tensor.HasField("contents"):
                raise InvalidArgumentError(
                    "contents field must not be specified when using raw_input_contents for "
                    f"'{name}' for model '{request.model_name}'"
                )
            if position >= num_raw:
                raise InvalidArgumentError(
                    f"unable to find data for input tensor '{name}' for model '{request.model_name}' in request: "
                    f"{num_inputs} inputs, but raw_input_contents has {num_raw} entries"
                )
            data = raw[position]
        else:
            data = _typed_contents(tensor, "input", request.model_name)
        inputs[name] = WireTensor(tensor.datatype, tuple(tensor.shape), data)
    if num_raw > position + 1:
        raise InvalidArgumentError(
            f"raw_input_contents has {num_raw} entries for {position + 1} inputs of model "
            f"'{request.model_name}'; give one entry for each input that is not in shared memory"
        )
    outputs = tuple(
        [
            _requested_output(output, is_memory_allowed=memory is not None)
            if output.parameters
            else RequestedOutput(output.name, {})
            for output in requested
        ]
    )
    call = InferCall(request.model_name, request.model_version, request.id, parameters, inputs, outputs)
    check_call(call)
    return call


def request_from_call(call: InferCall) -> pb.ModelInferRequest:
    """The request message of a call, with raw contents."""
    request = pb.ModelInferRequest()
    fill_request(request, call)
    return request


def fill_request(request: pb.ModelInferRequest, call: InferCall, contents: list[bytes] | None = None) -> None:
    """Write a call into an empty message; raw contents are added to ``contents``, if given, in place of the message."""
    raw: Any = request.raw_input_contents if contents is None else contents
    request.model_name = call.model_name
    request.model_version = call.model_version
    request.id = call.request_id
    if call.parameters:
        fill_parameters(request.parameters, call.parameters)
    for name, tensor in call.inputs.items():
        request.inputs.add(name=name, datatype=tensor.datatype, shape=tensor.shape)
        raw.append(tensor.data if contents is not None else bytes(tensor.data))  # protobuf takes no views
    for output in call.outputs:
        message = request.outputs.add(name=output.name)
        if output.parameters:
            fill_parameters(message.parameters, output.parameters)


def output_locations(request: pb.ModelInferRequest, memory: SharedMemory) -> dict[str, TensorLocation]:
    """Shared-memory locations of requested outputs; others are sent in the message.

    Raises:
        WeftError: See ``location_of``.
    """
    locations: dict[str, TensorLocation] = {}
    for output in request.outputs:
        if output.parameters:
            parameters = parameters_from(output.parameters)
            if (location := location_of(memory, parameters, output.name)) is not None:
                if "classification" in parameters:
                    raise InvalidArgumentError(
                        f"shared memory can't be used in conjunction with classification for output '{output.name}'"
                    )
                locations[output.name] = location
    return locations


def response_from_result(
    result: InferResult, locations: Mapping[str, TensorLocation] = _NO_LOCATIONS
) -> pb.ModelInferResponse:
    """The response message of a result, see ``fill_response``."""
    response = pb.ModelInferResponse()
    fill_response(response, result, locations)
    return response


def fill_response(
    response: pb.ModelInferResponse,
    result: InferResult,
    locations: Mapping[str, TensorLocation],
    contents: list[bytes] | None = None,
) -> None:
    """Write a result into an empty message, with raw contents; outputs with a location are written there.

    Raw contents are added to ``contents``, if given, in place of the message.

    Raises:
        InvalidArgumentError: A location is too small.
    """
    response.model_name = result.model_name
    response.model_version = result.model_version
    response.id = result.request_id
    if result.parameters:
        fill_parameters(response.parameters, result.parameters)
    raw: Any = response.raw_output_contents if contents is None else contents
    for name, tensor in result.outputs.items():
        output = response.outputs.add(name=name, datatype=tensor.datatype, shape=tensor.shape)
        location = locations.get(name) if locations else None
        if location is None:
            raw.append(tensor.data)
        else:
            location.write(tensor.data, name)
            fill_parameters(output.parameters, location.parameters(len(tensor.data)))
            raw.append(b"")  # clients find their data by position


def result_from_response(response: pb.ModelInferResponse) -> InferResult:
    """Convert a response message; outputs are paired with their bytes by position.

    Raises:
        RemoteError: INTERNAL, since the client did nothing wrong: an output has no data, or data of another datatype.
    """
    raw = response.raw_output_contents
    outputs: dict[str, WireTensor] = {}
    for position, tensor in enumerate(response.outputs):
        if position < len(raw):
            data = raw[position]
        else:
            try:
                data = _typed_contents(tensor, "output", response.model_name)
            except InvalidArgumentError as error:
                message = f"bad answer of model '{response.model_name}': {error.message}"
                raise RemoteError("INTERNAL", message) from error
        outputs[tensor.name] = WireTensor(tensor.datatype, tuple(tensor.shape), data)
    return InferResult(
        response.model_name,
        response.model_version,
        response.id,
        parameters_from(response.parameters) if response.parameters else {},
        outputs,
    )


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


def _requested_output(
    output: pb.ModelInferRequest.InferRequestedOutputTensor, *, is_memory_allowed: bool
) -> RequestedOutput:
    if REGION_PARAMETER in output.parameters:
        if not is_memory_allowed:
            raise UnsupportedError(DISABLED)
        return RequestedOutput(output.name, {})
    return RequestedOutput(output.name, _checked_parameters("a requested output", output.parameters))


def _checked_parameters(what: str, message: Mapping[str, Any]) -> dict[str, Any]:
    """``parameters_from``, checked against the limits."""
    check_count(what, len(message), MAX_PARAMETERS, "parameters")
    parameters = parameters_from(message)
    check_parameters(what, parameters)
    return parameters


def _data_at(location: TensorLocation, tensor: pb.ModelInferRequest.InferInputTensor, model_name: str) -> bytes:
    """Raw bytes of an input in shared memory, which are not read if their size is none that its shape may have."""
    if tensor.HasField("contents"):
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


def _typed_contents(tensor: Any, kind: str, model_name: str) -> bytes:
    """Raw bytes of a tensor's typed contents; ``kind`` is "input" or "output"."""
    if not tensor.HasField("contents"):
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
    filled = [descriptor.name for descriptor, _ in tensor.contents.ListFields()]
    if filled and filled != [field]:
        raise InvalidArgumentError(
            f"{kind} '{tensor.name}' of datatype '{datatype}' must fill {field}, but {', '.join(filled)} is set"
        )
    if datatype == "BYTES":
        check_count(f"{kind} '{tensor.name}'", len(tensor.contents.bytes_contents), MAX_TYPED_STRINGS, "strings")
    values = getattr(tensor.contents, field)[:]
    if datatype == "BYTES":
        return encode_bytes(values)
    try:
        return array(type_code, values).tobytes()
    except OverflowError as error:
        raise InvalidArgumentError(f"{kind} '{tensor.name}' holds a value that {datatype} cannot: {error}") from error
