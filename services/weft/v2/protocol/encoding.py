"""Encodes ``ModelInfer`` and ``ModelStreamInfer`` messages, byte for byte as protobuf would."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from typing_extensions import override

from weft.base.core import InferCall, InferResult, Parameters, RequestedOutput
from weft.base.errors import InvalidArgumentError
from weft.v2.protocol.codec import (
    ID,
    INPUT_CONTENT,
    MAX_KNOWN,
    ONE_BYTE,
    OUTPUT_CONTENT,
    STREAM_ERROR,
    STREAM_RESPONSE,
    InferMessage,
    given,
)
from weft.wire.connection.sending import Parts
from weft_protos import grpc_service_pb2 as pb

#: Messages with as many bytes of tensors are sent in pieces, which are not copied.
LARGE_BYTES: Final = 64 << 10
_MIN_PIECE_BYTES: Final = 4096
_NO_PARAMETERS: Parameters = {}
#: Types of values that take little memory, and are equal only where they are the same.
_SMALL: Final = frozenset((bool, int))


class Serializer:
    """Serializes a call, a result, an ``InferMessage`` or a protobuf message.

    On Weft's wire a large message becomes pieces, whose tensors are not copied. Raises InvalidArgumentError, TypeError
    or ValueError for values that the protocol cannot carry.
    """

    def __init__(self, content_tag: int) -> None:
        self._content_tag = content_tag
        #: What precedes the only content of a message, with the requested outputs that it names.
        self._heads: dict[tuple[Any, ...], tuple[tuple[RequestedOutput, ...], bytes]] = {}

    def __call__(self, value: Any) -> bytes:
        """Serialize in one piece."""
        body = self.to_parts(value)
        return body if isinstance(body, bytes) else body.joined()

    def to_parts(self, value: Any) -> bytes | Parts:
        """Serialize; in pieces if it is large."""
        kind, usual = type(value), None
        if kind is InferMessage:
            heads = [_head_field(*one[:3]) if not one.parameters else _head_bytes(*one[:4]) for one in value.tensors]
            contents = value.contents
        elif kind is InferCall or kind is InferResult:
            tensors, outputs = (value.inputs, value.outputs) if kind is InferCall else (value.outputs, ())
            if len(tensors) == 1 and not (value.request_id or value.parameters):
                ((name, (datatype, shape, data)),) = tensors.items()
                usual = (value.model_name, value.model_version, id(outputs), name, datatype, shape, len(data))
                known = self._heads.get(usual)
                if known is not None and known[0] is outputs:
                    return b"".join((known[1], data))
            heads, contents = [], []
            for name, (datatype, shape, data) in tensors.items():
                heads.append(_head_field(name, datatype, shape))
                contents.append(data)
        else:
            return value.SerializeToString()  # type: ignore[no-any-return]
        pieces = [_model_fields(value.model_name, value.model_version)]
        if value.request_id:
            encoded = value.request_id.encode()
            pieces += (_prefix(ID, len(encoded)), encoded)
        for key, parameter in value.parameters.items():
            if type(parameter) in _SMALL and len(key) < ONE_BYTE:
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
        if num_bytes >= LARGE_BYTES:
            return Parts(_gathered(pieces))
        if usual is not None:
            if len(self._heads) >= MAX_KNOWN:
                self._heads.clear()
            self._heads[usual] = outputs, b"".join(pieces[:-1])
        return b"".join(pieces)


def _gathered(pieces: Iterable[bytes]) -> list[bytes]:
    """Join small pieces: each piece sent costs as much as some kB."""
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
    """Serializes a response of ``ModelStreamInfer``: an error message ("" if none) and the inner response."""

    @override
    def to_parts(self, value: tuple[str, InferMessage]) -> bytes | Parts:
        body = super().to_parts(value[1])
        error = value[0].encode()
        head = (_prefix(STREAM_ERROR, len(error)) + error if error else b"") + _prefix(STREAM_RESPONSE, len(body))
        return head + body if isinstance(body, bytes) else Parts((head, *body.pieces))


serialize_call: Final = Serializer(INPUT_CONTENT)
serialize_result: Final = Serializer(OUTPUT_CONTENT)
serialize_stream_answer: Final = StreamAnswerSerializer(OUTPUT_CONTENT)


def fill_parameters(message: Any, parameters: Mapping[str, Any]) -> None:
    """Write plain values into a parameter map of a message.

    ``priority`` is written as uint64, as tritonclient does; other integers as int64.
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
            elif isinstance(value, bytes):  # of a load only
                target.bytes_param = value
            else:
                target.string_param = value
        except (AttributeError, ValueError, OverflowError, TypeError) as error:
            raise InvalidArgumentError(
                f"parameter '{key}' has value {value!r}, which the protocol cannot carry"
            ) from error


@functools.lru_cache(MAX_KNOWN)
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


_head_field = functools.lru_cache(MAX_KNOWN)(_head_bytes)
_parameter_field = functools.lru_cache(MAX_KNOWN, typed=True)(_parameter_bytes)
_output_field = functools.lru_cache(MAX_KNOWN)(_output_bytes)


@functools.lru_cache(MAX_KNOWN)
def _prefix(tag: int, num_bytes: int) -> bytes:
    prefix = bytearray((tag,))
    while num_bytes >= ONE_BYTE:
        prefix.append(num_bytes & 0x7F | 0x80)
        num_bytes >>= 7
    prefix.append(num_bytes)
    return bytes(prefix)
