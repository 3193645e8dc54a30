"""The generate extension: one flat JSON object in, one out, mapped by the model's metadata."""

from collections.abc import Sequence
from typing import Any

from weft.base.core import InferCall, InferResult
from weft.base.tensors import WireTensor
from weft.gateway.errors import RequestError
from weft.gateway.json_text import json_type, parse_json, whole
from weft.gateway.v2.values import bytes_of, elements
from weft.v2.protocol.wire import check_sendable
from weft_protos import grpc_service_pb2 as pb

_NESTED = "parameters"
_ID = "id"


def generate_request(data: bytes, metadata: bytes, version: str) -> InferCall:
    """The request of a body.

    A field with the name of an input is its data, ``id`` that of the request, any other a parameter; the fields of the
    object ``parameters`` are read in the same way.

    Args:
        data: The body.
        metadata: Of the model, serialized: what is known of its inputs.
        version: Of the model; "" for any.

    Raises:
        RequestError: The body is not a JSON object, or a value does not fit its input.
        InvalidArgumentError: A parameter is neither a string, a number nor a boolean.
    """
    model = pb.ModelMetadataResponse.FromString(metadata)
    known = {tensor.name: tensor for tensor in model.inputs}
    inputs: dict[str, WireTensor] = {}
    parameters: dict[str, Any] = {}
    request_id = ""

    def read(fields: dict[str, Any], *, is_nested: bool) -> None:
        nonlocal request_id
        for name, value in fields.items():
            if name in known:
                if name in inputs:
                    raise RequestError(f"input '{name}' is given twice; give it once", param=name)
                inputs[name] = _tensor(known[name], value)
            elif name == _NESTED and not is_nested:
                if not isinstance(value, dict):
                    raise RequestError(f"'{_NESTED}' must be an object, got {json_type(value)}", param=_NESTED)
                read(value, is_nested=True)
            elif name == _ID and not is_nested:
                request_id = whole(value if isinstance(value, str) else str(value), _ID)
            elif value is not None:
                parameters[name] = value

    read(parse_json(data), is_nested=False)
    call = InferCall(model.name, version, request_id, parameters, inputs)
    check_sendable(call)
    return call


def generate_response(result: InferResult) -> dict[str, Any]:
    """The object of one response: an output of one element is that element, others are flat arrays."""
    response: dict[str, Any] = {"model_name": result.model_name, "model_version": result.model_version}
    if result.request_id:
        response[_ID] = result.request_id
    response |= dict(result.parameters)
    for name, tensor in result.outputs.items():
        values = elements(tensor, name)
        response[name] = values[0] if len(values) == 1 else values
    return response


def raw_request(model: pb.ModelMetadataResponse, version: str, body: Sequence[bytes]) -> InferCall:
    """The request whose body is the data of a model's only input.

    Args:
        model: Metadata of the model.
        version: Of the model; "" for any.
        body: The data, in parts.

    Raises:
        RequestError: The model has several inputs, or the data does not fit.
    """
    if len(model.inputs) != 1:
        raise RequestError(
            f"a body without JSON is the data of a model's only input, and model '{model.name}' has "
            f"{len(model.inputs)}; send JSON with their names"
        )
    tensor = model.inputs[0]
    size = sum(map(len, body))
    if tensor.datatype == "BYTES":
        num_elements, lead = 1, size.to_bytes(4, "little")
    else:
        item = len(bytes_of([0] if tensor.datatype != "BOOL" else [False], tensor.datatype, tensor.name))
        if size % item:
            raise RequestError(f"the body has {size} bytes, which are no whole elements of {tensor.datatype}")
        num_elements, lead = size // item, b""
    data = WireTensor(tensor.datatype, _shape(tensor, num_elements), b"".join((lead, *body)))
    return InferCall(model.name, version, inputs={tensor.name: data})


def _tensor(tensor: Any, value: Any) -> WireTensor:
    values = value if isinstance(value, list) else [value]
    data = bytes_of(values, tensor.datatype, tensor.name)
    return WireTensor(tensor.datatype, _shape(tensor, _count(values)), data)


def _count(values: list[Any]) -> int:
    count, waiting = 0, list(values)
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        else:
            count += 1
    return count


def _shape(tensor: Any, num_elements: int) -> tuple[int, ...]:
    """The shape of so many elements: the batch has one row, and one other dimension may be open."""
    shape = list(tensor.shape)
    if len(shape) > 1 and shape[0] < 0:
        shape[0] = 1
    fixed = 1
    for dim in shape:
        fixed *= dim if dim >= 0 else 1
    num_open = sum(dim < 0 for dim in shape)
    if num_open == 1 and fixed and num_elements % fixed == 0:
        return tuple(dim if dim >= 0 else num_elements // fixed for dim in shape)
    if num_open == 0 and fixed == num_elements:
        return tuple(shape)
    raise RequestError(
        f"input '{tensor.name}' has {num_elements} elements, which do not fit its shape {list(tensor.shape)}"
        + ("; several of its dimensions are open, so send it to /infer with its shape" if num_open > 1 else ""),
        param=tensor.name,
    )
