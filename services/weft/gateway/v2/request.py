"""Parses bodies of inference requests: JSON, optionally followed by binary tensors."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weft.base.core import InferCall, InferResult, RequestedOutput
from weft.base.errors import InvalidArgumentError
from weft.base.tensors import (
    DATATYPES,
    FLOATS,
    INTEGERS,
    NUMPY_BY_DATATYPE,
    Array,
    WireTensor,
    decode,
    encode_bytes,
    split_bytes,
)
from weft.gateway.errors import RequestError
from weft.gateway.json_text import json_type, parse_json, whole
from weft.v2.protocol.codec import InferMessage, TensorHead
from weft.v2.protocol.encoding import fill_parameters
from weft.v2.protocol.wire import check_sendable
from weft_protos import grpc_service_pb2 as pb

BINARY_SIZE = "binary_data_size"
BINARY = "binary_data"
ALL_BINARY = "binary_data_output"
_REGION = "shared_memory_region"


@dataclass(slots=True)
class InferHead:
    """The JSON of a request.

    Attributes:
        message: The request without the data of its inputs.
        contents: For each input outside shared memory its data, or the number of bytes that follow the JSON.
        binary: Whether an output is requested in binary, by name.
        is_all_binary: The default for other outputs.
    """

    message: InferMessage
    contents: list[bytes | int] = field(default_factory=list)
    binary: dict[str, bool] = field(default_factory=dict)
    is_all_binary: bool = False

    def is_binary(self, output: str) -> bool:
        """Whether an output is requested in binary."""
        return self.binary.get(output, self.is_all_binary)

    def request(self, tail: Sequence[memoryview]) -> InferMessage:
        """Complete the request with the data that follows the JSON. Raises RequestError."""
        sizes = [content for content in self.contents if isinstance(content, int)]
        got, wanted = sum(map(len, tail)), sum(sizes)
        if got != wanted:
            raise RequestError(
                f"the body has {got} bytes behind its JSON, and the {BINARY_SIZE} of the inputs are {wanted} in all; "
                "they must be the same, and Inference-Header-Content-Length the size of the JSON"
            )
        pieces = iter(cut(tail, sizes))
        self.message.contents = [next(pieces) if isinstance(one, int) else one for one in self.contents]
        return self.message


def cut(parts: Sequence[memoryview], sizes: Sequence[int]) -> list[bytes]:
    """Cut the concatenated parts into pieces of these sizes; each byte is copied once."""
    waiting = iter(parts)
    part = memoryview(b"")
    pieces: list[bytes] = []
    for size in sizes:
        found: list[memoryview] = []
        num_missing = size
        while num_missing > len(part):
            found.append(part)
            num_missing -= len(part)
            part = next(waiting)
        found.append(part[:num_missing])
        part = part[num_missing:]
        pieces.append(b"".join(found))
    return pieces


def parse_head(data: bytes, model: str, version: str) -> InferHead:
    """Parse the JSON of a request.

    Raises RequestError if it is not JSON, or a field is missing or wrong, or InvalidArgumentError for a parameter.
    """
    body = parse_json(data, is_finite=False)
    message = InferMessage(model, version, _typed(body, "id", str, ""), _parameters(body))
    head = InferHead(message, is_all_binary=_flag(message.parameters, ALL_BINARY))
    _check(message.parameters)
    for tensor in _objects(body, "inputs"):
        _add_input(head, tensor)
    for output in _objects(body, "outputs"):
        name = _name(output, "output")
        own = _parameters(output)
        own.pop(BINARY_SIZE, None)
        if BINARY in own:
            head.binary[name] = _flag(own, BINARY)
        _check(own)
        message.outputs.append(RequestedOutput(name, own))
    return head


def _parameters(value: dict[str, Any]) -> dict[str, Any]:
    return dict(_typed(value, "parameters", dict, {}))


def _check(parameters: dict[str, Any]) -> None:
    """Raise InvalidArgumentError for a parameter that is neither a string, a number nor a boolean."""
    fill_parameters(pb.ModelInferRequest().parameters, parameters)


def _add_input(head: InferHead, tensor: dict[str, Any]) -> None:
    name = _name(tensor, "input")
    datatype = _typed(tensor, "datatype", str, None)
    shape = _typed(tensor, "shape", list, None)
    if any(type(dim) is not int or not 0 <= dim < 1 << 63 for dim in shape):
        raise RequestError(f"the shape of input '{name}' must be of integers from 0 on, got {shape!r:.80}")
    parameters = _parameters(tensor)
    size = parameters.pop(BINARY_SIZE, None)
    _check(parameters)
    head.message.tensors.append(TensorHead(name, datatype, tuple(shape), parameters))
    if sum((size is not None, "data" in tensor, _REGION in parameters)) != 1:
        raise RequestError(
            f"input '{name}' needs exactly one of 'data', the parameter '{BINARY_SIZE}' and the parameter '{_REGION}'"
        )
    if size is not None:
        if type(size) is not int or size < 0:
            raise RequestError(f"'{BINARY_SIZE}' of input '{name}' must be a number of bytes, got {size!r:.40}")
        head.contents.append(size)
    elif "data" in tensor:
        head.contents.append(bytes_of(tensor["data"], datatype, name))


def _objects(body: dict[str, Any], field_name: str) -> list[dict[str, Any]]:
    values: list[dict[str, Any]] = _typed(body, field_name, list, [])
    for index, value in enumerate(values):
        if not isinstance(value, dict):
            raise RequestError(f"'{field_name}[{index}]' must be an object, got {json_type(value)}")
    return values


def _name(value: dict[str, Any], kind: str) -> str:
    name: str = _typed(value, "name", str, None)
    if not name:
        raise RequestError(f"an {kind} has no name; give it one")
    return name


def _flag(parameters: dict[str, Any], name: str) -> bool:
    value = parameters.pop(name, False)
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"parameter '{name}' must be true or false, got {value!r:.40}")
    return value


def _typed(value: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    """A field of that type; ``default`` if absent or null; a ``default`` of None makes it required."""
    found = value.get(name)
    if found is None:
        found = default
    if found is None:
        raise RequestError(f"the field '{name}' is missing in {value!r:.80}", param=name)
    if not isinstance(found, kind):
        wanted = "a string" if kind is str else "an object" if kind is dict else "an array"
        raise RequestError(f"'{name}' must be {wanted}, got {json_type(found)}", param=name)
    if isinstance(found, str):
        whole(found, name)
    return found


_NESTED = "parameters"
_ID = "id"


def generate_request(data: bytes, metadata: bytes, version: str) -> InferCall:
    """Parse the body of a ``generate`` request.

    A field with the name of an input is its data, ``id`` the request id, any other a parameter; the fields of the
    object ``parameters`` are read in the same way. ``metadata`` is the model's metadata message, serialized.

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
    """The JSON object for one response: an output of one element is that element, others are flat arrays."""
    response: dict[str, Any] = {"model_name": result.model_name, "model_version": result.model_version}
    if result.request_id:
        response[_ID] = result.request_id
    response |= dict(result.parameters)
    for name, tensor in result.outputs.items():
        values = elements(tensor, name)
        response[name] = values[0] if len(values) == 1 else values
    return response


def raw_request(model: pb.ModelMetadataResponse, version: str, body: Sequence[bytes]) -> InferCall:
    """A request whose body is the raw data of the model's only input.

    Raises RequestError if the model has several inputs, or the data does not fit.
    """
    if len(model.inputs) != 1:
        raise RequestError(
            f"Raw request must only have 1 input (found 1) to be deduced but got {len(model.inputs)} inputs in "
            f"'{model.name}' model configuration; send JSON with their names"
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
    """Infer a shape for that many elements: one batch row, and one other dimension may be variable."""
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
    fault = f"input '{tensor.name}' has {num_elements} elements, which do not fit its shape {list(tensor.shape)}"
    if num_open > 1:
        why = "can not be deduced because there are more than one variable-sized dimension"
        fault = f"The shape of the raw input '{tensor.name}' {why}; send it to /infer with its shape"
    raise RequestError(fault, param=tensor.name)


def bytes_of(data: Any, datatype: str, name: str) -> bytes:
    """Wire format of the elements of an input: an array, nested or flat in row-major order, or one element.

    Raises RequestError if the data is ragged, or not of the datatype.
    """
    if datatype == "BYTES":
        return _strings(data, name)
    dtype = NUMPY_BY_DATATYPE.get(datatype)
    if dtype is None:
        raise RequestError(
            f"input '{name}' has datatype '{datatype[:40]}', which is no V2 datatype; use one of {', '.join(DATATYPES)}"
        )
    try:
        values: Array = np.asarray(data)
    except (ValueError, OverflowError):
        raise RequestError(f"the data of input '{name}' is ragged; every row must have the same length") from None
    if datatype == "UINT64" and values.dtype.kind == "f":  # numpy's type for small and large integers together
        values = np.asarray(data, np.object_)
        if all(type(value) is int and 0 <= value < 1 << 64 for value in values.ravel()):
            values = values.astype(dtype)
    if values.size == 0:
        return b""
    if datatype in INTEGERS:
        _check_integers(values, datatype, dtype, name)
    elif values.dtype.kind not in ("iuf" if datatype in FLOATS else "b"):
        raise _wrong_kind(name, datatype, values)
    with np.errstate(over="ignore"):
        return values.astype(dtype).tobytes()


def json_of(tensor: WireTensor, name: str) -> bytes:
    """JSON of an output, as a flat array in row-major order. Raises like ``elements``.

    Numbers that are not finite are NaN, Infinity and -Infinity, as Python's and Triton's readers accept them.
    """
    return json.dumps(elements(tensor, name), ensure_ascii=False, separators=(",", ":")).encode()


def elements(tensor: WireTensor, name: str) -> list[Any]:
    """The elements of an output for JSON. Raises InvalidArgumentError if a string is not UTF-8."""
    if tensor.datatype != "BYTES":
        array = decode(tensor, name=name)
        if array.dtype.kind == "V":  # bfloat16
            array = array.astype(np.float32)
        values: list[Any] = array.ravel().tolist()
        return values
    try:
        return [element.decode() for element in split_bytes(tensor.data, name=name)]
    except UnicodeDecodeError:
        raise InvalidArgumentError(
            f"output '{name}' has a string that is not UTF-8, which JSON cannot carry; ask for it with the parameter "
            '"binary_data": true'
        ) from None


def _check_integers(values: Array, datatype: str, dtype: "np.dtype[Any]", name: str) -> None:
    if values.dtype.kind not in "iu":
        raise _wrong_kind(name, datatype, values)
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    if int(values.min()) < low or int(values.max()) > high:
        got = int(values.min()) if int(values.min()) < low else int(values.max())
        raise RequestError(f"input '{name}' has the value {got}; {datatype} takes {low} to {high}")


def _wrong_kind(name: str, datatype: str, values: Array) -> RequestError:
    wanted = "integers" if datatype in INTEGERS else "numbers" if datatype in FLOATS else "true and false"
    kinds = {"b": "true or false", "f": "numbers with a fraction", "U": "strings", "O": "values of several types"}
    got = kinds.get(values.dtype.kind, "integers")
    return RequestError(f"the data of input '{name}' of datatype {datatype} must be {wanted}, got {got}")


def _strings(data: Any, name: str) -> bytes:
    found: list[str] = []
    waiting = [data]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, list):
            waiting.extend(reversed(value))
        else:
            raise RequestError(f"the data of input '{name}' of datatype BYTES must be strings, got {value!r:.40}")
    try:
        return encode_bytes(found)
    except UnicodeEncodeError:
        raise RequestError(f"input '{name}' has half of a surrogate pair; send whole characters") from None
