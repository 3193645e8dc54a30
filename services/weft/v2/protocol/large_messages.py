"""Messages of ``ModelInfer`` with large tensors, without protobuf's copies of them.

Protobuf copies a tensor into a message, from there into the serialized message, and back again at the other end. Here
the raw contents stay beside the message: they are cut out of the bytes that came, and sent behind the serialized rest.
What is sent is byte for byte what protobuf would send, and whatever is unusual about what came is left to protobuf.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from weft.base.core import InferCall, InferResult
from weft.v2.protocol.shared_memory import TensorLocation
from weft.v2.protocol.wire import fill_request, fill_response
from weft.wire.connection.parts import Parts
from weft_protos import grpc_service_pb2 as pb

#: Below it protobuf alone is cheaper. At 600 kB it takes 28 us to read and 28 to write, this 11 and 2 (AMD EPYC); at
#: 8 MB 4 and 5 ms, this 0.5 and 0.002.
LARGE_BYTES: Final = 64 << 10
#: Longest beginning of a field that is read here: one byte of number and type, up to five of length.
_MAX_HEAD_BYTES: Final = 6
#: Type of a field of bytes.
_BYTES: Final = 2
_NO_LOCATIONS: Final[Mapping[str, TensorLocation]] = {}

Piece = bytes | bytearray | memoryview


class LargeRequest:
    """Reads like a ``ModelInferRequest``, whose raw contents lie beside it."""

    __slots__ = ("message", "raw_input_contents")

    def __init__(self, message: pb.ModelInferRequest, contents: Sequence[bytes]) -> None:
        self.message = message
        self.raw_input_contents = contents

    def __getattr__(self, name: str) -> Any:
        return getattr(self.message, name)


class LargeResponse:
    """Reads like a ``ModelInferResponse``, whose raw contents lie beside it."""

    __slots__ = ("message", "raw_output_contents")

    def __init__(self, message: pb.ModelInferResponse, contents: Sequence[bytes]) -> None:
        self.message = message
        self.raw_output_contents = contents

    def __getattr__(self, name: str) -> Any:
        return getattr(self.message, name)


def request_with(request: pb.ModelInferRequest, contents: Sequence[bytes]) -> pb.ModelInferRequest:
    """A request with these raw contents, of which it has none; they are beside it if they are large."""
    if sum(map(len, contents)) >= LARGE_BYTES:
        return cast(pb.ModelInferRequest, LargeRequest(request, contents))
    request.raw_input_contents.extend(contents)
    return request


def response_with(response: pb.ModelInferResponse, contents: Sequence[bytes]) -> pb.ModelInferResponse:
    """A response with these raw contents, of which it has none; they are beside it if they are large."""
    if sum(map(len, contents)) >= LARGE_BYTES:
        return cast(pb.ModelInferResponse, LargeResponse(response, contents))
    response.raw_output_contents.extend(contents)
    return response


def infer_request(call: InferCall) -> pb.ModelInferRequest:
    """The request message of a call, to be sent with ``serialize_request``."""
    request = pb.ModelInferRequest()
    contents: list[bytes] = []
    fill_request(request, call, contents)
    return request_with(request, contents)


def infer_response(
    result: InferResult, locations: Mapping[str, TensorLocation] = _NO_LOCATIONS
) -> pb.ModelInferResponse:
    """The response message of a result, to be sent with ``serialize_response``; raises as ``fill_response``."""
    response = pb.ModelInferResponse()
    contents: list[bytes] = []
    fill_response(response, result, locations, contents)
    return response_with(response, contents)


class Serializer:
    """Makes bytes of a message; on Weft's own wire pieces, of which tensors are not copied.

    Args:
        field: Name of the field of raw contents.
        number: Its number; no field of the message has a larger one, so that it comes last, as protobuf has it.
    """

    def __init__(self, field: str, number: int) -> None:
        self._field = field
        self._tag = bytes((number << 3 | _BYTES,))

    def __call__(self, message: Any) -> bytes:
        """Raises EncodeError."""
        if type(message) in _SPLIT:
            return b"".join(self._pieces(message))
        return cast(bytes, message.SerializeToString())

    def to_parts(self, message: Any) -> bytes | Parts:
        """The same, in pieces where it is large."""
        if type(message) in _SPLIT:
            return Parts(self._pieces(message))
        return cast(bytes, message.SerializeToString())

    def _pieces(self, message: Any) -> list[bytes]:
        pieces: list[bytes] = []
        head = message.message.SerializeToString()
        for content in getattr(message, self._field):
            pieces += (head + self._tag + encoded_length(len(content)), content)
            head = b""
        return pieces


class Deserializer:
    """Makes a message of bytes, or of pieces of them.

    Args:
        message_class: Class of protobuf's message.
        split_class: Class of the same with its raw contents beside it.
        number: Number of the field of raw contents.
    """

    takes_parts = True

    def __init__(self, message_class: Any, split_class: Any, number: int) -> None:
        self._read = message_class.FromString
        self._split = split_class
        self._tag = number << 3 | _BYTES

    def __call__(self, data: bytes | memoryview | Parts) -> Any:
        """Raises DecodeError, for what protobuf refuses."""
        is_whole = not isinstance(data, Parts)
        if len(data) >= LARGE_BYTES:
            found = split_contents((data,) if is_whole else data.pieces, self._tag)  # type: ignore[arg-type,union-attr]
            if found is not None:
                rest, contents = found
                return self._split(self._read(rest), contents)
        return self._read(data if is_whole else data.joined())  # type: ignore[union-attr]


def split_contents(pieces: Sequence[Piece], tag: int) -> tuple[bytes, list[bytes]] | None:
    """Cut the values of one field out of a serialized message.

    Args:
        pieces: The message.
        tag: First byte of the field: its number and its type, which is bytes.

    Returns:
        The rest of the message and the values, each copied once; None for what is unusual: truncated, or with a field
        that is not bytes or has a number above 15.
    """
    contents: list[bytes] = []
    rest: list[Piece] = []
    index, last = 0, len(pieces) - 1
    piece = pieces[0]
    start = position = 0  # start: of what is not in ``rest`` yet
    end = len(piece)
    while position < end or index < last:
        if end - position < _MAX_HEAD_BYTES and index < last:  # the beginning of a field may be in two pieces
            rest.append(piece[start:position])
            index += 1
            piece = bytes(piece[position:]) + pieces[index]
            start, position, end = 0, 0, len(piece)
            continue
        begin = position
        head = piece[position]
        size, position = _read_length(piece, position + 1)
        if head & 7 != _BYTES or not 8 <= head < 0x80 or size < 0:
            return None
        if position + size <= end:
            if head == tag:
                rest.append(piece[start:begin])
                contents.append(bytes(piece[position : position + size]))
                start = position + size
            position += size
            continue
        value = [memoryview(piece)[position:]]
        index, position = _read_on(pieces, index, value, size)
        if not position:
            return None
        if head == tag:
            rest.append(piece[start:begin])
            contents.append(b"".join(value))
        else:
            rest += (piece[start:], *value[1:])
        piece = pieces[index]
        start, end = position, len(piece)
    rest.append(piece[start:])
    return b"".join(rest), contents


def _read_length(piece: Piece, position: int) -> tuple[int, int]:
    """A length, and where its value begins; -1 where it is truncated or longer than any that is sent."""
    size = shift = 0
    for byte in piece[position : position + _MAX_HEAD_BYTES - 1]:
        position += 1
        size |= (byte & 0x7F) << shift
        if byte < 0x80:
            return size, position
        shift += 7
    return -1, position


def _read_on(pieces: Sequence[Piece], index: int, value: list[memoryview], size: int) -> tuple[int, int]:
    """Add the rest of a value of ``size`` bytes, which begins at the end of a piece, from the pieces that follow.

    Returns:
        Index of the piece that it ends in, and where; 0 where it is truncated.
    """
    num_missing = size - len(value[0])
    for number in range(index + 1, len(pieces)):
        piece = memoryview(pieces[number])
        value.append(piece[:num_missing])
        if num_missing <= len(piece):
            return number, num_missing
        num_missing -= len(piece)
    return index, 0


def encoded_length(value: int) -> bytes:
    """A length as protobuf writes it."""
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


_SPLIT: Final = frozenset((LargeRequest, LargeResponse))

serialize_request: Final = Serializer("raw_input_contents", pb.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER)
serialize_response: Final = Serializer("raw_output_contents", pb.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER)
deserialize_request: Final = Deserializer(
    pb.ModelInferRequest, LargeRequest, pb.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER
)
deserialize_response: Final = Deserializer(
    pb.ModelInferResponse, LargeResponse, pb.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER
)
