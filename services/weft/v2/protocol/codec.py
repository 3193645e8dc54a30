"""Decodes ``ModelInfer`` and ``ModelStreamInfer`` messages field by field, without protobuf objects.

Tensor bytes are copied once, out of the received message. All that is around them is the same in all requests of a
shape, so it is read once and the result is kept: a message that repeats an earlier one in everything but the tensors'
bytes is cut at the same places. An unusual message (unknown fields, groups, other wire types or field order) is parsed
by protobuf first, which also rejects invalid ones.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from google.protobuf.message import DecodeError

from weft.base.core import InferCall, InferResult, RequestedOutput
from weft.base.errors import InvalidArgumentError
from weft.base.limits import MAX_NAME_CHARS, MAX_TENSORS, check_call
from weft.base.tensors import WireTensor
from weft.wire.connection.sending import Parts
from weft_protos import grpc_service_pb2 as pb

#: What has come.
Body: TypeAlias = bytes | memoryview | Parts
Read = TypeVar("Read", bound=Callable[..., Any])

#: Descriptions and other parts of messages that are kept, of each kind, and the longest of them.
MAX_KNOWN: Final = 1024
_MAX_KNOWN_BYTES: Final = 1024
#: Contents of a message whose layout is kept, at most.
_MAX_KNOWN_CONTENTS: Final = 32
#: Of a length; below 128 it has one.
_MAX_LENGTH_BYTES: Final = 5
ONE_BYTE: Final = 128

# Tags of fields: number and type, which is bytes for all. Those of contents differ.
_NAME, _VERSION, ID, _PARAMETER, _TENSOR, _OUTPUT = 0x0A, 0x12, 0x1A, 0x22, 0x2A, 0x32
INPUT_CONTENT, OUTPUT_CONTENT = 0x3A, 0x32
_DESCRIPTION: Final = frozenset((_PARAMETER, _TENSOR, _OUTPUT))
STREAM_ERROR, STREAM_RESPONSE = 0x0A, 0x12

#: The constructor of a named tuple would be a Python call.
_new: Final = tuple.__new__


class TensorHead(NamedTuple):
    """Name, datatype, shape and parameters of a tensor; ``typed``: elements in typed contents; values may be None."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: Mapping[str, Any] = {}
    typed: Any = None


@dataclass(slots=True)
class InferMessage:
    """A decoded request or response, not validated; a parameter without a value is None."""

    model_name: str
    model_version: str = ""
    request_id: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    tensors: list[TensorHead] = field(default_factory=list)
    outputs: list[RequestedOutput] = field(default_factory=list)
    contents: list[bytes] = field(default_factory=list)


class _UnusualError(Exception):
    """The message is not in the usual encoding: let protobuf normalise or reject it."""


def _read_length(data: bytes, position: int) -> tuple[int, int]:
    size = shift = 0
    for byte in data[position : position + _MAX_LENGTH_BYTES]:
        position += 1
        size |= (byte & 0x7F) << shift
        if byte < ONE_BYTE:
            return size, position
        shift += 7
    raise _UnusualError


def _cut(pieces: Sequence[bytes | bytearray | memoryview], tag: int, contents: list[bytes]) -> bytes:
    """Remove the values of one field from the message in these pieces, and append them to ``contents``."""
    waiting = iter(pieces)
    piece = memoryview(b"")
    rest: list[bytes] = []

    def take(num_bytes: int) -> bytes:
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
        while len(head) == 1 or head[-1] >= ONE_BYTE:
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


class _Description(NamedTuple):
    """Between the id of a message and its contents; ``is_plain``: no more than a call or result takes."""

    parameters: Mapping[str, Any]
    tensors: tuple[TensorHead, ...]
    outputs: tuple[RequestedOutput, ...]
    is_plain: bool


def _described_request(data: bytes) -> _Description:
    message = pb.ModelInferRequest.FromString(data)
    tensors, num_tensors = tuple(map(_head, islice(message.inputs, MAX_TENSORS))), len(message.inputs)
    outputs = tuple(
        RequestedOutput(output.name, values_of(output.parameters)) for output in islice(message.outputs, MAX_TENSORS)
    )
    is_plain = len({head.name for head in tensors}) == num_tensors and len(outputs) == len(message.outputs)
    is_plain = is_plain and not (
        message.parameters
        or any(head.parameters or head.typed is not None for head in tensors)
        or any(output.parameters for output in outputs)
    )
    if is_plain:
        try:
            inputs = {name: WireTensor(datatype, shape, b"") for name, datatype, shape, _, _ in tensors}
            check_call(InferCall("", inputs=inputs, outputs=outputs))
        except InvalidArgumentError:
            is_plain = False
    # Of more tensors than a request may have only the number matters: an object each would take a hundred times theirs.
    more_tensors = (TensorHead("", "", ()),) * (num_tensors - len(tensors))
    more_outputs = (RequestedOutput("", {}),) * (len(message.outputs) - len(outputs))
    return _Description(values_of(message.parameters), tensors + more_tensors, outputs + more_outputs, is_plain)


def _described_response(data: bytes) -> _Description:
    message = pb.ModelInferResponse.FromString(data)
    return _Description(values_of(message.parameters), tuple(map(_head, message.outputs)), (), not message.parameters)


def _head(tensor: Any) -> TensorHead:
    typed = tensor.contents if tensor.HasField("contents") else None
    return TensorHead(tensor.name, tensor.datatype, tuple(tensor.shape), values_of(tensor.parameters), typed)


class _Layout(NamedTuple):
    """What all messages of some size have that begin with the same bytes, up to their first content.

    Attributes:
        between: What precedes each further content, and where.
        contents: Where the contents are.
    """

    num_bytes: int
    name: str
    version: str
    about: _Description
    between: tuple[tuple[slice, bytes], ...]
    contents: tuple[slice, ...]


class _Reader:
    """Reads messages of one kind: the class of protobuf, the tag of contents, and how descriptions are read."""

    def __init__(self, message_class: Any, content_tag: int, describe: Callable[[bytes], _Description]) -> None:
        self._class = message_class
        self._content_tag = content_tag
        self._describe = describe
        self._known = functools.lru_cache(MAX_KNOWN)(describe)
        self._layouts: dict[bytes, _Layout] = {}  # by what is before the first content
        self._num_before: dict[int, int] = {}  # bytes before the first content, by those of the message

    def read(  # noqa: PLR0915  # a function a field costs more than its field
        self, data: Body, *, is_ordered: bool = False
    ) -> tuple[str, str, str, _Description, list[bytes]]:
        """Name and version of the model, id, description, contents. Raises DecodeError, as protobuf does."""
        rest = data
        if type(rest) is bytes:
            layout = self._layouts.get(rest[: self._num_before.get(len(rest), 0)])
            if layout is not None and layout[0] == len(rest):
                _, name, version, about, between, spans = layout
                for span, expected in between:
                    if rest[span] != expected:
                        break
                else:
                    return name, version, "", about, [*map(rest.__getitem__, spans)]
        try:
            name = version = request_id = ""
            contents: list[bytes] = []
            content_tag = self._content_tag
            if not isinstance(rest, bytes):
                rest = _cut(rest.pieces if isinstance(rest, Parts) else (rest,), content_tag, contents)
            position, end = 0, len(rest)
            while position < end and (tag := rest[position]) <= ID:
                size = rest[position + 1]
                position += 2
                if size >= ONE_BYTE:
                    size, position = _read_length(rest, position - 1)
                text = rest[position : position + size].decode()
                position += size
                if tag == _NAME:
                    name = text
                elif tag == ID:
                    request_id = text
                elif tag == _VERSION:
                    version = text
                else:
                    raise _UnusualError
            begin = position
            while position < end and (tag := rest[position]) != content_tag:
                if tag not in _DESCRIPTION:
                    raise _UnusualError
                size = rest[position + 1]
                position += 2
                if size >= ONE_BYTE:
                    size, position = _read_length(rest, position - 1)
                position += size
            description = rest[begin:position]
            stops = [position]
            while position < end:
                if rest[position] != content_tag:
                    raise _UnusualError
                size = rest[position + 1]
                position += 2
                if size >= ONE_BYTE:
                    size, position = _read_length(rest, position - 1)
                contents.append(rest[position : position + size])
                position += size
                stops.append(position)
            if position != end:
                raise _UnusualError
            known = self._known if len(description) <= _MAX_KNOWN_BYTES else self._describe
            about = known(description)
            is_usual = 0 < len(contents) <= _MAX_KNOWN_CONTENTS and stops[0] <= _MAX_KNOWN_BYTES
            if is_usual and rest is data and not request_id:
                self._note(rest, name, version, about, contents, stops)
            return name, version, request_id, about, contents
        except (_UnusualError, DecodeError, IndexError, UnicodeDecodeError):
            if is_ordered:
                raise
            message = self._class.FromString(data.joined() if isinstance(data, Parts) else data)
        message.DiscardUnknownFields()
        return self.read(message.SerializeToString(), is_ordered=True)

    def _note(
        self, data: bytes, name: str, version: str, about: _Description, contents: list[bytes], stops: list[int]
    ) -> None:
        """Keep the layout of a message if one of its size with as much before the first content came before."""
        spans = [slice(stop - len(content), stop) for content, stop in zip(contents, stops[1:], strict=True)]
        num_before = spans[0].start
        if self._num_before.get(len(data)) != num_before:
            if len(self._num_before) >= MAX_KNOWN:
                self._num_before.clear()
            self._num_before[len(data)] = num_before
            return
        if len(self._layouts) >= MAX_KNOWN:
            self._layouts.clear()
        gaps = [slice(stop, span.start) for stop, span in zip(stops[1:], spans[1:], strict=False)]
        between = tuple((gap, data[gap]) for gap in gaps)
        self._layouts[data[:num_before]] = _Layout(len(data), name, version, about, between, tuple(spans))

    def message(self, data: Body) -> InferMessage:
        return _message(*self.read(data))


def _message(name: str, version: str, request_id: str, about: _Description, contents: list[bytes]) -> InferMessage:
    parameters, tensors, outputs, _ = about
    return InferMessage(name, version, request_id, dict(parameters), list(tensors), list(outputs), contents)


_requests: Final = _Reader(pb.ModelInferRequest, INPUT_CONTENT, _described_request)
_responses: Final = _Reader(pb.ModelInferResponse, OUTPUT_CONTENT, _described_response)


def values_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a parameter map of a message to plain values; a parameter without a value is None."""
    return {key: _value_of(parameter) for key, parameter in parameters.items()}


def given(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Keep the parameters that have a value."""
    return {key: value for key, value in parameters.items() if value is not None}


def _value_of(parameter: Any) -> Any:
    choice = parameter.WhichOneof("parameter_choice")
    return None if choice is None else getattr(parameter, choice)


def takes_parts(read: Read) -> Read:
    """Decorate a deserializer that takes messages in pieces; it raises DecodeError for invalid messages."""
    setattr(read, "takes_parts", True)  # noqa: B010  # functions have no such attribute for mypy
    return read


@takes_parts
def deserialize_call(data: Body) -> InferCall | InferMessage:
    """Decode a request: to a call if it is valid and has no parameters, else to a message for ``call_of``."""
    found = name, version, request_id, about, contents = _requests.read(data)
    _, tensors, outputs, is_plain = about
    if not is_plain or len(tensors) != len(contents) or not name.isprintable():
        return _message(*found)
    if len(data) > MAX_NAME_CHARS and max(len(name), len(version), len(request_id)) > MAX_NAME_CHARS:
        return _message(*found)
    return InferCall(name, version, request_id, {}, _tensors(tensors, contents), outputs)


@takes_parts
def deserialize_result(data: Body) -> InferResult | InferMessage:
    """Decode a response: to a result if it is valid and has no parameters, else to a message for ``result_of``."""
    found = name, version, request_id, about, contents = _responses.read(data)
    if not about.is_plain or len(about.tensors) != len(contents):
        return _message(*found)
    return InferResult(name, version, request_id, {}, _tensors(about.tensors, contents))


def _tensors(heads: Sequence[TensorHead], contents: list[bytes]) -> dict[str, WireTensor]:
    tensors: dict[str, WireTensor] = {}
    for (name, datatype, shape, _, _), content in zip(heads, contents):  # noqa: B905  # the check costs 0.2 us
        tensors[name] = _new(WireTensor, (datatype, shape, content))
    return tensors


@takes_parts
def deserialize_request(data: Body) -> InferMessage:
    """Decode a request to a message."""
    return _requests.message(data)


@takes_parts
def deserialize_response(data: Body) -> InferMessage:
    """Decode a response to a message."""
    return _responses.message(data)


def deserialize_stream_answer(data: bytes) -> tuple[str, InferMessage]:
    """Decode a response of ``ModelStreamInfer``: its error message ("" if none) and the inner response."""
    try:
        if data[0] == STREAM_RESPONSE:  # and nothing else
            size, begin = _read_length(data, 1)
            if begin + size == len(data):
                return "", _responses.message(data[begin:])
    except (_UnusualError, DecodeError, IndexError):
        pass
    answer = pb.ModelStreamInferResponse.FromString(data)
    return answer.error_message, _responses.message(answer.infer_response.SerializeToString())
