"""The codec of ``ModelInfer`` and ``ModelStreamInfer``: from bytes to calls and results and back, field by field.

Tensors are cut out of the bytes that came, which copies each once, and are sent as they are. The descriptions of
tensors, which requests repeat, are read and written by protobuf once and kept. A message out of the ordinary, with
unknown fields, groups or other wire types, is put in order by protobuf first, which also refuses what is no message.
What is written is byte for byte what protobuf would write.

One tensor of 64 bytes, AMD EPYC: a request is read in 2.1 us and written in 0.8, by protobuf's objects in 5.5 and 2.8.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from google.protobuf.message import DecodeError
from typing_extensions import override

from weft.base.core import InferCall, InferResult, Parameters, RequestedOutput
from weft.base.errors import InvalidArgumentError
from weft.base.limits import MAX_NAME_CHARS, MAX_TENSORS, check_call
from weft.base.tensors import WireTensor
from weft.wire.connection.parts import Parts
from weft_protos import grpc_service_pb2 as pb

#: What has come.
Body: TypeAlias = bytes | memoryview | Parts
Read = TypeVar("Read", bound=Callable[..., Any])

#: Messages with as many bytes of tensors are sent in pieces, which are not copied.
LARGE_BYTES: Final = 64 << 10
_MIN_PIECE_BYTES: Final = 4096
#: Descriptions and other parts of messages that are kept, of each kind, and the longest of them.
_MAX_KNOWN: Final = 1024
_MAX_KNOWN_BYTES: Final = 512
#: Of a length; below 128 it has one.
_MAX_LENGTH_BYTES: Final = 5
_ONE_BYTE: Final = 128

# Tags of fields: number and type, which is bytes for all. Those of contents differ.
_NAME, _VERSION, _ID, _PARAMETER, _TENSOR, _OUTPUT = 0x0A, 0x12, 0x1A, 0x22, 0x2A, 0x32
_INPUT_CONTENT, _OUTPUT_CONTENT = 0x3A, 0x32
_STREAM_ERROR, _STREAM_RESPONSE = 0x0A, 0x12

#: The constructor of a named tuple would be a Python call.
_new: Final = tuple.__new__
_NO_PARAMETERS: Parameters = {}
#: Types of values that take little memory, and are equal only where they are the same.
_SMALL: Final = frozenset((bool, int))


class TensorHead(NamedTuple):
    """The description of a tensor.

    Attributes:
        name: Of the input or output.
        datatype: As given.
        shape: As given.
        parameters: Of the tensor; one without a value is None.
        typed: Elements that lie in the description; None: there are none.
        is_plain: A request may have it as it is: neither parameters nor elements lie here, and no limit is exceeded.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: Mapping[str, Any] = {}
    typed: Any = None
    is_plain: bool = False


@dataclass(slots=True)
class InferMessage:
    """A request or a response as it is on the wire, valid or not.

    Attributes:
        model_name: Model or graph.
        model_version: "" for any.
        request_id: The client's.
        parameters: Of the message; one without a value is None.
        tensors: Inputs of a request, outputs of a response.
        outputs: Requested ones.
        contents: Data of tensors, by position.
    """

    model_name: str
    model_version: str = ""
    request_id: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    tensors: list[TensorHead] = field(default_factory=list)
    outputs: list[RequestedOutput] = field(default_factory=list)
    contents: list[bytes] = field(default_factory=list)


# From bytes.


class _UnusualError(Exception):
    """The message is not as every client writes it: protobuf puts it in order, or refuses it."""


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Tags of one byte, and the values behind them."""
    position, end = 0, len(data)
    while position < end:
        tag, size = data[position], data[position + 1]
        position += 2
        if size >= _ONE_BYTE:
            size, position = _read_length(data, position - 1)
        start, position = position, position + size
        yield tag, data[start:position]
    if position != end:
        raise _UnusualError


def _read_length(data: bytes, position: int) -> tuple[int, int]:
    """A length of several bytes, and where its value begins."""
    size = shift = 0
    for byte in data[position : position + _MAX_LENGTH_BYTES]:
        position += 1
        size |= (byte & 0x7F) << shift
        if byte < _ONE_BYTE:
            return size, position
        shift += 7
    raise _UnusualError


def _cut(pieces: Sequence[bytes | bytearray | memoryview], tag: int, contents: list[bytes]) -> bytes:
    """The message in these pieces without the values of one field, which are added to ``contents``."""
    waiting = iter(pieces)
    piece = memoryview(b"")
    rest: list[bytes] = []

    def take(num_bytes: int) -> bytes:
        """The next bytes; fewer at the end."""
        nonlocal piece
        found: list[memoryview] = []
        while num_bytes > len(piece):
            found.append(piece)
            num_bytes -= len(piece)
            following = next(waiting, None)
            piece = memoryview(following or b"")
            if following is None:
                return b"".join(found)
        found.append(piece[:num_bytes])
        piece = piece[num_bytes:]
        return b"".join(found)

    while head := take(1):
        while len(head) == 1 or head[-1] >= _ONE_BYTE:
            byte = take(1)
            if not byte or len(head) > _MAX_LENGTH_BYTES:
                raise _UnusualError
            head += byte
        size, _ = _read_length(head, 1)
        value = take(size)
        if len(value) != size:
            raise _UnusualError
        if head[0] == tag:
            contents.append(value)
        else:
            rest += (head, value)
    return b"".join(rest)


def _read(data: Body, message_class: Any, content_tag: int, max_items: int = 1 << 31) -> tuple[Any, ...]:
    """The fields of a message in the order of those of ``InferMessage``.

    Args:
        data: The message.
        message_class: Of protobuf.
        content_tag: Tag of contents.
        max_items: Most objects to make of one field; more are counted, for the message of the limit.

    Raises:
        DecodeError: Protobuf refuses it.
    """
    try:
        return _read_ordered(data, content_tag, max_items)
    except (_UnusualError, DecodeError, IndexError, UnicodeDecodeError):
        message = message_class.FromString(data.joined() if isinstance(data, Parts) else data)
    message.DiscardUnknownFields()
    return _read_ordered(message.SerializeToString(), content_tag, max_items)


def _read_ordered(data: Body, content_tag: int, max_items: int) -> tuple[Any, ...]:
    name = version = request_id = ""
    parameters: dict[str, Any] = {}
    tensors: list[TensorHead] = []
    outputs: list[RequestedOutput] = []
    contents: list[bytes] = []
    if not isinstance(data, bytes):
        data = _cut(data.pieces if isinstance(data, Parts) else (data,), content_tag, contents)
    position, end = 0, len(data)
    while position < end:
        tag, size = data[position], data[position + 1]
        position += 2
        if size >= _ONE_BYTE:
            size, position = _read_length(data, position - 1)
        value = data[position : position + size]
        position += size
        if tag == content_tag:
            contents.append(value)
        elif tag == _TENSOR:
            if len(tensors) >= max_items:
                tensors.append(_NO_HEAD)
            else:
                tensors.append(_known_head(value) if size <= _MAX_KNOWN_BYTES else _read_head(value))
        elif tag == _NAME:
            name = value.decode()
        elif tag == _ID:
            request_id = value.decode()
        elif tag == _VERSION:
            version = value.decode()
        elif tag == _OUTPUT:
            if len(outputs) >= max_items:
                outputs.append(_NO_OUTPUT)
            else:
                outputs.append(_known_output(value) if size <= _MAX_KNOWN_BYTES else _read_output(value))
        elif tag == _PARAMETER:
            parameters |= _known_parameter(value) if size <= _MAX_KNOWN_BYTES else _read_parameter(value)
        else:
            raise _UnusualError
    if position != end:
        raise _UnusualError
    return name, version, request_id, parameters, tensors, outputs, contents


def _read_head(value: bytes) -> TensorHead:
    tensor = pb.ModelInferRequest.InferInputTensor.FromString(value)  # outputs of responses have the same fields
    name, datatype, shape = tensor.name, tensor.datatype, tuple(tensor.shape)
    typed = tensor.contents if tensor.HasField("contents") else None
    is_plain = typed is None and not tensor.parameters
    try:
        check_call(InferCall("", inputs={name: WireTensor(datatype, shape, b"")}))
    except InvalidArgumentError:
        is_plain = False
    return TensorHead(name, datatype, shape, values_of(tensor.parameters), typed, is_plain)


def _read_output(value: bytes) -> RequestedOutput:
    output = pb.ModelInferRequest.InferRequestedOutputTensor.FromString(value)
    return RequestedOutput(output.name, values_of(output.parameters))


def _read_parameter(value: bytes) -> dict[str, Any]:
    """As part of a message: protobuf drops some entries of a map that it would read by themselves."""
    return values_of(pb.ModelInferRequest.FromString(_prefix(_PARAMETER, len(value)) + value).parameters)


def values_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values of a map of InferParameter or ModelRepositoryParameter; one without a value is None."""
    return {key: _value_of(parameter) for key, parameter in parameters.items()}


def given(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that have a value."""
    return {key: value for key, value in parameters.items() if value is not None}


def _value_of(parameter: Any) -> Any:
    choice = parameter.WhichOneof("parameter_choice")
    return None if choice is None else getattr(parameter, choice)


_known_head = functools.lru_cache(_MAX_KNOWN)(_read_head)
_known_output = functools.lru_cache(_MAX_KNOWN)(_read_output)
_known_parameter = functools.lru_cache(_MAX_KNOWN)(_read_parameter)
_NO_HEAD: Final = TensorHead("", "", ())
_NO_OUTPUT: Final = RequestedOutput("", {})


def takes_parts(read: Read) -> Read:
    """Decorator of a deserializer that takes messages in pieces; it raises DecodeError for what protobuf refuses."""
    setattr(read, "takes_parts", True)  # noqa: B010  # functions have no such attribute for mypy
    return read


@takes_parts
def deserialize_call(data: Body) -> InferCall | InferMessage:
    """The call of a valid request without parameters, and of any other its message: see ``call_of``."""
    fields = _read(data, pb.ModelInferRequest, _INPUT_CONTENT, MAX_TENSORS)
    name, version, request_id, parameters, tensors, outputs, contents = fields
    if parameters or len(tensors) != len(contents) or len(outputs) > MAX_TENSORS:
        return InferMessage(*fields)
    inputs: dict[str, WireTensor] = {}
    for (tensor, datatype, shape, _, _, is_plain), content in zip(tensors, contents):  # noqa: B905  # a check of what is so costs 0.2 us
        if not is_plain:
            return InferMessage(*fields)
        inputs[tensor] = _new(WireTensor, (datatype, shape, content))
    for output, own in outputs:
        if own or not output.isprintable() or len(output) > MAX_NAME_CHARS:
            return InferMessage(*fields)
    if len(inputs) != len(tensors) or not name.isprintable():
        return InferMessage(*fields)
    if len(data) > MAX_NAME_CHARS and max(len(name), len(version), len(request_id)) > MAX_NAME_CHARS:
        return InferMessage(*fields)
    return InferCall(name, version, request_id, {}, inputs, tuple(outputs))


@takes_parts
def deserialize_result(data: Body) -> InferResult | InferMessage:
    """The result of a valid response without parameters, and of any other its message: see ``result_of``."""
    fields = _read(data, pb.ModelInferResponse, _OUTPUT_CONTENT)
    name, version, request_id, parameters, tensors, _, contents = fields
    if parameters or len(tensors) != len(contents):
        return InferMessage(*fields)
    outputs: dict[str, WireTensor] = {}
    for (tensor, datatype, shape, _, _, _), content in zip(tensors, contents):  # noqa: B905  # a check of what is so costs 0.2 us
        outputs[tensor] = _new(WireTensor, (datatype, shape, content))
    return InferResult(name, version, request_id, {}, outputs)


@takes_parts
def deserialize_request(data: Body) -> InferMessage:
    """Any request."""
    return InferMessage(*_read(data, pb.ModelInferRequest, _INPUT_CONTENT, MAX_TENSORS))


@takes_parts
def deserialize_response(data: Body) -> InferMessage:
    """Any response."""
    return InferMessage(*_read(data, pb.ModelInferResponse, _OUTPUT_CONTENT))


def deserialize_stream_answer(data: bytes) -> tuple[str, InferMessage]:
    """The error message of an answer of ``ModelStreamInfer``, "" for none, and its response."""
    error, response = b"", None
    try:
        for tag, value in _fields(data):
            if tag == _STREAM_RESPONSE and response is None:
                response = value
            elif tag == _STREAM_ERROR:
                error = value
            else:
                raise _UnusualError
        return error.decode(), deserialize_response(response or b"")
    except (_UnusualError, DecodeError, IndexError, UnicodeDecodeError):
        answer = pb.ModelStreamInferResponse.FromString(data)
        return answer.error_message, deserialize_response(answer.infer_response.SerializeToString())


# To bytes.


class Serializer:
    """Makes bytes of a call or result, of its message, or of one of protobuf.

    On Weft's own wire it makes pieces of a large one, whose tensors are not copied. It raises InvalidArgumentError,
    TypeError or ValueError for what the protocol cannot carry.

    Args:
        content_tag: Tag of contents.
    """

    def __init__(self, content_tag: int) -> None:
        self._content_tag = content_tag

    def __call__(self, value: Any) -> bytes:
        """In one piece."""
        body = self.to_parts(value)
        return body if isinstance(body, bytes) else body.joined()

    def to_parts(self, value: Any) -> bytes | Parts:
        """In pieces if it is large."""
        kind = type(value)
        if kind is InferMessage:
            heads = [_head_field(*one[:3]) if not one.parameters else _head_bytes(*one[:4]) for one in value.tensors]
            contents = value.contents
        elif kind is InferCall or kind is InferResult:
            tensors = value.inputs if kind is InferCall else value.outputs
            heads, contents = [], []
            for name, (datatype, shape, data) in tensors.items():
                heads.append(_head_field(name, datatype, shape))
                contents.append(data)
        else:
            return value.SerializeToString()  # type: ignore[no-any-return]
        pieces = [_model_fields(value.model_name, value.model_version)]
        if value.request_id:
            encoded = value.request_id.encode()
            pieces += (_prefix(_ID, len(encoded)), encoded)
        for key, parameter in value.parameters.items():
            if type(parameter) in _SMALL and len(key) < _ONE_BYTE:
                pieces.append(_parameter_field(key, parameter))
            elif parameter is not None:
                pieces.append(_parameter_bytes(key, parameter))
        pieces += heads
        if kind is not InferResult:
            for output in value.outputs:
                pieces.append(_output_bytes(*output) if output.parameters else _output_field(output.name))
        num_bytes = 0
        for content in contents:
            size = len(content)
            num_bytes += size
            pieces += (_prefix(self._content_tag, size), content)
        return b"".join(pieces) if num_bytes < LARGE_BYTES else Parts(_gathered(pieces))


def _gathered(pieces: Iterable[bytes]) -> list[bytes]:
    """The same bytes in fewer pieces: small ones are joined, for each piece that is sent costs as much as some kB."""
    gathered: list[bytes] = []
    small: list[bytes] = []
    for piece in pieces:
        if len(piece) < _MIN_PIECE_BYTES:
            small.append(piece)
        else:
            gathered += (b"".join(small), piece)
            small = []
    return [*gathered, b"".join(small)] if small else gathered


class StreamAnswerSerializer(Serializer):
    """Makes bytes of the error message of an answer of ``ModelStreamInfer``, "" for none, and its response."""

    @override
    def to_parts(self, value: tuple[str, InferMessage]) -> bytes | Parts:
        body = super().to_parts(value[1])
        error = value[0].encode()
        head = (_prefix(_STREAM_ERROR, len(error)) + error if error else b"") + _prefix(_STREAM_RESPONSE, len(body))
        return head + body if isinstance(body, bytes) else Parts((head, *body.pieces))


serialize_call: Final = Serializer(_INPUT_CONTENT)
serialize_result: Final = Serializer(_OUTPUT_CONTENT)
serialize_stream_answer: Final = StreamAnswerSerializer(_OUTPUT_CONTENT)


def fill_parameters(message: Any, parameters: Mapping[str, Any]) -> None:
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


@functools.lru_cache(_MAX_KNOWN)
def _model_fields(name: str, version: str) -> bytes:
    return pb.ModelInferRequest(model_name=name, model_version=version).SerializeToString()


def _head_bytes(name: str, datatype: str, shape: Sequence[int], parameters: Parameters = _NO_PARAMETERS) -> bytes:
    message = pb.ModelInferRequest()
    fill_parameters(message.inputs.add(name=name, datatype=datatype, shape=shape).parameters, given(parameters))
    return message.SerializeToString()


def _output_bytes(name: str, parameters: Parameters = _NO_PARAMETERS) -> bytes:
    message = pb.ModelInferRequest()
    fill_parameters(message.outputs.add(name=name).parameters, given(parameters))
    return message.SerializeToString()


def _parameter_bytes(key: str, value: Any) -> bytes:
    message = pb.ModelInferRequest()
    fill_parameters(message.parameters, {key: value})
    return message.SerializeToString()


_head_field = functools.lru_cache(_MAX_KNOWN)(_head_bytes)
_parameter_field = functools.lru_cache(_MAX_KNOWN, typed=True)(_parameter_bytes)
_output_field = functools.lru_cache(_MAX_KNOWN)(_output_bytes)


@functools.lru_cache(_MAX_KNOWN)
def _prefix(tag: int, num_bytes: int) -> bytes:
    """A tag, and the length of the value that follows."""
    prefix = bytearray((tag,))
    while num_bytes >= _ONE_BYTE:
        prefix.append(num_bytes & 0x7F | 0x80)
        num_bytes >>= 7
    prefix.append(num_bytes)
    return bytes(prefix)
