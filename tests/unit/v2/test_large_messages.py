"""Messages of ``ModelInfer`` whose raw contents lie beside them."""

import itertools
import random
from typing import Any

import pytest
from google.protobuf.message import DecodeError

from weft.base.core import InferCall
from weft.base.tensors import WireTensor
from weft.v2.protocol import large_messages
from weft.v2.protocol.large_messages import (
    Deserializer,
    LargeRequest,
    LargeResponse,
    deserialize_request,
    deserialize_response,
    infer_request,
    request_with,
    response_with,
    serialize_request,
    serialize_response,
    split_contents,
)
from weft.v2.protocol.wire import call_from_request, request_from_call
from weft.wire.connection.parts import Parts
from weft_protos import grpc_service_pb2 as pb

_REQUEST_TAG, _RESPONSE_TAG = 7 << 3 | 2, 6 << 3 | 2


@pytest.fixture(autouse=True)
def every_size_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small messages take the way of large ones."""
    monkeypatch.setattr(large_messages, "LARGE_BYTES", 1)


def _field(number: int, value: bytes, kind: int = 2) -> bytes:
    return bytes((number << 3 | kind, len(value))) + value if kind == 2 else bytes((number << 3 | kind,)) + value


def _random_bytes(rng: random.Random) -> bytes:
    return rng.randbytes(rng.choice((0, 1, 3, 60, 127, 128, 300)))


def _random_message(rng: random.Random, message: Any, contents: Any) -> bytes:
    """A valid message, or nearly: its fields in any order, some twice, some unknown, some cut off."""
    message.model_name = "m" * rng.randrange(200)
    message.id = str(rng.randrange(100))
    message.parameters["p"].int64_param = rng.randrange(1 << 40)
    tensors = message.inputs if isinstance(message, pb.ModelInferRequest) else message.outputs
    for _ in range(rng.randrange(4)):
        tensors.add(name="t" * rng.randrange(150), datatype="FP32", shape=[rng.randrange(1 << 20)])
    for _ in range(rng.randrange(4)):
        contents.append(_random_bytes(rng))
    fields = [message.SerializeToString()]
    for _ in range(rng.randrange(4)):
        fields.append(
            rng.choice(
                (
                    _field(rng.choice((6, 7)), rng.randbytes(rng.randrange(100))),
                    _field(rng.choice((1, 3)), b"again"),
                    _field(rng.randrange(8, 16), rng.randbytes(5)),
                    bytes((9 << 3,)) + b"\x05",
                    b"\xa2\x01\x03abc",
                    _field(5, b""),
                    b"\x02\x00",
                    b"\x0a\x81\x80\x00x",
                )
            )
        )
    rng.shuffle(fields)
    data = b"".join(fields)
    return data[: rng.randrange(len(data) + 1)] if rng.random() < 0.2 else data


def _cut(rng: random.Random, data: bytes) -> Parts:
    places = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(8)))
    bounds = [0, *places, len(data)]
    pieces: list[bytes | memoryview] = [data[a:b] for a, b in itertools.pairwise(bounds)]
    return Parts([memoryview(piece) if rng.random() < 0.5 else piece for piece in pieces])


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    ("message_class", "field", "deserialize"),
    [
        (pb.ModelInferRequest, "raw_input_contents", deserialize_request),
        (pb.ModelInferResponse, "raw_output_contents", deserialize_response),
    ],
)
def test_what_is_read_is_what_protobuf_reads(seed: int, message_class: Any, field: str, deserialize: Deserializer):
    """Whole or in pieces, any message has the fields that protobuf finds, or is refused as protobuf refuses it."""
    rng = random.Random(seed)
    for _ in range(100):
        message = message_class()
        data = _random_message(rng, message, getattr(message, field))
        try:
            expected = message_class.FromString(data)
        except DecodeError:
            expected = None
        for form in (data, memoryview(data), _cut(rng, data)):
            if expected is None:
                with pytest.raises(DecodeError):
                    deserialize(form)
                continue
            found = deserialize(form)
            contents = list(getattr(found, field))
            assert contents == list(getattr(expected, field))
            assert all(type(content) is bytes for content in contents)
            if isinstance(found, LargeRequest | LargeResponse):
                again: Any = message_class()
                again.CopyFrom(found.message)
                getattr(again, field).extend(contents)
                found = again
            assert found == expected


@pytest.mark.parametrize("sizes", [(0,), (1, 0, 70_000), (127, 128, 16_384), (3_000_000,)])
def test_what_is_sent_is_what_protobuf_sends(sizes: tuple[int, ...]):
    """Split messages give the bytes of whole ones, also in pieces."""
    contents = [random.Random(size).randbytes(size) for size in sizes]
    request = pb.ModelInferRequest(model_name="m", id="7")
    response = pb.ModelInferResponse(model_name="m", id="7")
    whole_request = pb.ModelInferRequest(model_name="m", id="7", raw_input_contents=contents).SerializeToString()
    whole_response = pb.ModelInferResponse(model_name="m", id="7", raw_output_contents=contents).SerializeToString()
    for serialize, message, whole in (
        (serialize_request, request_with(request, contents), whole_request),
        (serialize_response, response_with(response, contents), whole_response),
    ):
        assert serialize(message) == whole
        parts = serialize.to_parts(message)
        assert (parts.joined() if isinstance(parts, Parts) else parts) == whole


def test_tensors_are_sent_without_a_copy():
    """The pieces of a split message hold the very bytes of its tensors."""
    tensor = bytes(70_000)
    parts = serialize_request.to_parts(
        infer_request(InferCall("m", "", "", {}, {"IN": WireTensor("BOOL", (7,), tensor)}))
    )
    assert isinstance(parts, Parts)
    assert any(piece is tensor for piece in parts.pieces)


def test_a_call_survives_the_way():
    """A call with tensors and requested outputs is the same after its way through pieces."""
    inputs = {
        "A": WireTensor("UINT8", (3,), b"abc"),
        "B": WireTensor("UINT8", (0,), b""),
        "C": WireTensor("UINT8", (1,), b"d"),
    }
    call = InferCall("m", "2", "id", {"p": 1}, inputs)
    data = serialize_request.to_parts(infer_request(call))
    assert isinstance(data, Parts)
    assert call_from_request(deserialize_request(data)).inputs == inputs
    assert data.joined() == request_from_call(call).SerializeToString()


def test_small_messages_are_left_to_protobuf(monkeypatch: pytest.MonkeyPatch):
    """Below the threshold a message is protobuf's own, in both directions."""
    monkeypatch.setattr(large_messages, "LARGE_BYTES", 100)
    request = request_with(pb.ModelInferRequest(), [b"x" * 90])
    assert isinstance(request, pb.ModelInferRequest)
    assert isinstance(deserialize_request(request.SerializeToString()), pb.ModelInferRequest)


@pytest.mark.parametrize(
    "data",
    [
        b"\x08\x01",
        b"\x00",
        b"\x02\x00",
        b"\xa2\x01\x01x",
        b"\x3a",
        b"\x3a\x05abc",
        b"\x3a\x81\x80\x80\x80\x80\x00x",
        b"\x3a\xff",
    ],
)
def test_what_is_unusual_is_not_split(data: bytes):
    """Other types, high numbers, and what is truncated or longer than needed are left to protobuf."""
    assert split_contents((data,), _REQUEST_TAG) is None
    assert split_contents([data[i : i + 1] for i in range(len(data))], _REQUEST_TAG) is None


def test_pieces_of_one_byte_are_split_too():
    """However a message is cut, its rest and its contents are the same."""
    data = _field(1, b"name") + _field(6, b"first") + _field(5, b"") + _field(6, b"") + _field(3, b"id")
    pieces = [data[i : i + 1] for i in range(len(data))]
    expected = (_field(1, b"name") + _field(5, b"") + _field(3, b"id"), [b"first", b""])
    assert split_contents(pieces, _RESPONSE_TAG) == split_contents((data,), _RESPONSE_TAG) == expected
