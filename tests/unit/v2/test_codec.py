"""The codec of ``ModelInfer`` beside protobuf: what it reads and writes, and what it takes and refuses."""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.message import DecodeError

from weft.base.core import InferCall, InferResult, RequestedOutput
from weft.base.errors import WeftError
from weft.base.tensors import WireTensor
from weft.v2.protocol import codec, encoding
from weft.v2.protocol.codec import (
    InferMessage,
    TensorHead,
    deserialize_call,
    deserialize_request,
    deserialize_response,
    deserialize_result,
    deserialize_stream_answer,
)
from weft.v2.protocol.encoding import serialize_call, serialize_result, serialize_stream_answer
from weft.v2.protocol.wire import call_of, message_of_call, message_of_result, result_of
from weft.wire.connection.sending import Parts
from weft_protos import grpc_service_pb2 as pb

_IDS = ("", "a", "7" * 127, "8" * 128, "Größe")


def _filled(message: Any, tensors: Any, contents: Any, value: InferCall | InferResult) -> Any:
    """The message of a call or a result, by protobuf alone."""
    message.model_name, message.model_version, message.id = value.model_name, value.model_version, value.request_id
    encoding.fill_parameters(message.parameters, value.parameters)
    for name, tensor in (value.inputs if isinstance(value, InferCall) else value.outputs).items():
        tensors.add(name=name, datatype=tensor.datatype, shape=tensor.shape)
        contents.append(tensor.data)
    for output in value.outputs if isinstance(value, InferCall) else ():
        encoding.fill_parameters(message.outputs.add(name=output.name).parameters, output.parameters)
    return message


def _request(call: InferCall) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest()
    return _filled(message, message.inputs, message.raw_input_contents, call)


def _response(result: InferResult) -> pb.ModelInferResponse:
    message = pb.ModelInferResponse()
    return _filled(message, message.outputs, message.raw_output_contents, result)


def _tensors(rng: random.Random, names: list[str]) -> dict[str, WireTensor]:
    sizes = [rng.choice((0, 1, 3, 120, 128, 300, 70_000 if rng.random() < 0.05 else 4)) for _ in names]
    return {name: WireTensor("UINT8", (1, size), rng.randbytes(size)) for name, size in zip(names, sizes, strict=True)}


def _parameters(rng: random.Random) -> dict[str, Any]:
    return dict(
        rng.sample((("p", 1.5), ("priority", 3), ("s", "t"), ("b", False), ("n", -7)), rng.choice((0, 0, 0, 1)))
    )


def _call(rng: random.Random) -> InferCall:
    names = rng.sample(("IN", "B", "a long name " * 12), rng.randrange(4))
    outputs = tuple(RequestedOutput(name, _parameters(rng)) for name in rng.sample(("OUT", "P", "Q"), rng.randrange(3)))
    version, request_id = rng.choice(("", "1", "12")), rng.choice(_IDS)
    return InferCall(rng.choice("mn"), version, request_id, _parameters(rng), _tensors(rng, names), outputs)


def _result(rng: random.Random) -> InferResult:
    names = rng.sample(("OUT", "B", "C"), rng.randrange(4))
    return InferResult(rng.choice("mn"), "1", rng.choice(_IDS), _parameters(rng), _tensors(rng, names))


def _mutated(rng: random.Random, data: bytes) -> bytes:
    """Bytes that a client could send in place of a message: flipped, cut out, doubled, put in."""
    changed = bytearray(data)
    odd = (b"\x1a\x01z", b"\x0a\x01n", b"\x22\x00", b"\x80\x01", b"\x3a\x00", b"\xa2\x01\x03abc", b"\x4b\x08\x01\x4c")
    for _ in range(rng.randrange(1, 4)):
        place = rng.randrange(len(changed) + 1)
        match rng.randrange(4):
            case 0 if changed:
                changed[place % len(changed)] ^= 1 << rng.randrange(8)
            case 1:
                del changed[place : place + rng.randrange(5)]
            case 2:
                changed[place:place] = changed[place : place + rng.randrange(20)]
            case _:
                changed[place:place] = rng.choice(odd)
    return bytes(changed)


def _cut(rng: random.Random, data: bytes) -> Parts:
    places = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(8)))
    pieces = [data[a:b] for a, b in itertools.pairwise([0, *places, len(data)])]
    return Parts([memoryview(piece) if rng.random() < 0.5 else piece for piece in pieces])


def _outcome(read: Callable[[Any], Any], data: Any) -> Any:
    try:
        return read(data)
    except DecodeError as error:
        return str(error)
    except WeftError as error:
        return error.code, error.message


def _called(found: InferCall | InferMessage) -> InferCall:
    return found if isinstance(found, InferCall) else call_of(found)


def _message_of(message: Any) -> InferMessage:
    """What protobuf has read, as the codec gives it."""
    is_request = isinstance(message, pb.ModelInferRequest)
    tensors = [
        TensorHead(
            one.name, one.datatype, tuple(one.shape), codec.values_of(one.parameters),
            one.contents if one.HasField("contents") else None,
        )
        for one in (message.inputs if is_request else message.outputs)
    ]  # fmt: skip
    outputs = (
        [RequestedOutput(one.name, codec.values_of(one.parameters)) for one in message.outputs] if is_request else []
    )
    return InferMessage(
        message.model_name, message.model_version, message.id, codec.values_of(message.parameters), tensors, outputs,
        list(message.raw_input_contents if is_request else message.raw_output_contents),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(10))
def test_messages_are_read_and_written_as_by_protobuf(seed: int) -> None:
    """Random calls and results, large ones and with parameters too, give the same bytes, and come back the same."""
    rng = random.Random(seed)
    for _ in range(300):
        for make, serialize, read, to_message in (
            (_call, serialize_call, lambda data: _called(deserialize_call(data)), message_of_call),
            (_result, serialize_result, lambda data: result_of(deserialize_result(data)), message_of_result),
        ):
            value: Any = make(rng)
            data = (_request if make is _call else _response)(value).SerializeToString()
            parts = serialize.to_parts(value)
            assert data == serialize(value) == (parts.joined() if isinstance(parts, Parts) else parts)
            assert data == serialize(to_message(value))  # type: ignore[operator]
            for form in (data, memoryview(data), _cut(rng, data)):
                assert value == read(form)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    ("make", "message_class", "deserialize"),
    [
        (lambda rng: _request(_call(rng)), pb.ModelInferRequest, deserialize_request),
        (lambda rng: _response(_result(rng)), pb.ModelInferResponse, deserialize_response),
    ],
)
def test_whatever_comes_means_what_protobuf_says(seed: int, make: Any, message_class: Any, deserialize: Any) -> None:
    """Mutated messages, whole or in pieces, are read or refused as by protobuf, also after the sound one."""
    rng, num_refused = random.Random(seed), 0
    for _ in range(200):
        data = make(rng).SerializeToString()
        for _ in range(rng.randrange(4)):  # from the third time on it is cut as before
            assert _message_of(message_class.FromString(data)) == deserialize(data)
        data = _mutated(rng, data)
        expected = _outcome(lambda data: _message_of(message_class.FromString(data)), data)
        num_refused += isinstance(expected, str)
        for form in (data, memoryview(data), _cut(rng, data)):
            found = _outcome(deserialize, form)
            assert expected == found
    assert 20 < num_refused < 180


def test_a_call_is_that_of_its_message() -> None:
    """Requests that are valid make a call at once, all others a message: both ways have one outcome."""
    rng, num_errors = random.Random(3), 0
    for _ in range(4000):
        data = _mutated(rng, _request(_call(rng)).SerializeToString())
        expected = _outcome(lambda data: call_of(deserialize_request(data)), data)
        assert expected == _outcome(lambda data: _called(deserialize_call(data)), data)
        num_errors += not isinstance(expected, InferCall)
        data = _mutated(rng, _response(_result(rng)).SerializeToString())
        expected = _outcome(lambda data: result_of(deserialize_response(data)), data)
        assert expected == _outcome(lambda data: result_of(deserialize_result(data)), data)
    assert 400 < num_errors < 3600


@pytest.mark.parametrize("change", ["parameters", "input parameters", "output parameters", "typed contents", "a name"])
def test_what_is_more_than_tensors_is_a_message(change: str) -> None:
    """Parameters anywhere, typed contents and names that no request may have are left to whoever checks them."""
    call = InferCall("m", inputs={"IN": WireTensor("UINT8", (1,), b"x")}, outputs=(RequestedOutput("OUT", {}),))
    request = _request(call)
    assert call == deserialize_call(request.SerializeToString())
    if change == "parameters":
        request.parameters["priority"].uint64_param = 1
    elif change == "input parameters":
        request.inputs[0].parameters["shared_memory_region"].string_param = "r"
    elif change == "output parameters":
        request.outputs[0].parameters["classification"].int64_param = 1
    elif change == "typed contents":
        request.inputs[0].contents.uint_contents.append(1)
        del request.raw_input_contents[:]
    else:
        request.outputs[0].name = "\n"
    for _ in range(2):
        found = deserialize_call(request.SerializeToString())
        assert isinstance(found, InferMessage)
        assert _message_of(request) == found


def test_tensors_are_sent_without_a_copy() -> None:
    """The pieces of a large message hold the very bytes of its tensors; a small one is in one piece."""
    large, small = bytes(70_000), bytes(60_000)
    parts = serialize_call.to_parts(InferCall("m", inputs={"IN": WireTensor("BOOL", (7,), large)}))
    assert isinstance(parts, Parts)
    assert any(piece is large for piece in parts.pieces)
    assert isinstance(serialize_call.to_parts(InferCall("m", inputs={"IN": WireTensor("BOOL", (7,), small)})), bytes)


def test_descriptions_of_tensors_are_read_once() -> None:
    """A second request with the same inputs is read and written without protobuf, whatever its id and its data."""
    call = InferCall("m", "1", "first", {}, {"once": WireTensor("FP32", (1, 2), b"12345678")})
    assert call == deserialize_call(serialize_call(call))
    caches = (codec._requests._known, encoding._head_field, encoding._model_fields)
    misses = [cache.cache_info().misses for cache in caches]
    other = replace(call, request_id="the second", inputs={"once": WireTensor("FP32", (1, 2), b"abcdefgh")})
    assert other == deserialize_call(serialize_call(other))
    assert misses == [cache.cache_info().misses for cache in caches]


def test_a_message_like_one_before_is_written_anew_where_it_differs() -> None:
    """Two calls with one tensor that differ in one field alone are each written as protobuf does, in any order."""
    first = InferCall("m", "1", inputs={"IN": WireTensor("INT8", (2,), b"ab")}, outputs=(RequestedOutput("A", {}),))
    others = [
        replace(first, model_name="n"), replace(first, model_version=""), replace(first, request_id="7"),
        replace(first, parameters={"priority": 1}), replace(first, outputs=()),
        replace(first, outputs=(RequestedOutput("B", {}),)), replace(first, outputs=(RequestedOutput("A", {"c": 2}),)),
        *(
            replace(first, inputs=inputs)
            for inputs in (
                {}, {"IN2": WireTensor("INT8", (2,), b"ab")}, {"IN": WireTensor("UINT8", (2,), b"ab")},
                {"IN": WireTensor("INT8", (1, 2), b"ab")}, {"IN": WireTensor("INT8", (2,), b"abc")},
                {"IN": WireTensor("INT8", (2,), b"cd")}, {"IN": WireTensor("INT8", (2,), memoryview(b"ef"))},  # type: ignore[arg-type]
            )
        ),
    ]  # fmt: skip
    for call in (first, *others, first, *others):
        assert _request(replace(call, inputs=_in_bytes(call))).SerializeToString() == serialize_call(call)


def _in_bytes(call: InferCall) -> dict[str, WireTensor]:
    return {name: tensor._replace(data=bytes(tensor.data)) for name, tensor in call.inputs.items()}


def test_what_is_kept_and_made_is_bounded() -> None:
    """Clients that vary names and shapes cost no memory, nor does a message with a million inputs."""
    for number in range(3000):
        call = InferCall("m", inputs={f"I{number}": WireTensor("UINT8", (number,), b"x" * number)})
        assert call == deserialize_call(serialize_call(call))
    for cache in (codec._requests._known, encoding._head_field, encoding._prefix):
        assert cache.cache_info().currsize <= codec.MAX_KNOWN
    assert len(serialize_call._heads) <= codec.MAX_KNOWN
    before = codec._requests._known.cache_info().misses
    long = InferCall("m", inputs={"n" * 1024: WireTensor("UINT8", (1,), b"x")})
    assert long == deserialize_call(serialize_call(long))
    assert before == codec._requests._known.cache_info().misses
    many = deserialize_request(b"".join(b"\x2a\x05\x0a\x03%03x" % (number % 4096) for number in range(100_000)))
    assert (100_000, 1024) == (len(many.tensors), len(set(map(id, many.tensors))) - 1)
    assert "100000 inputs; at most 1024 are allowed" in str(_outcome(call_of, many))


@pytest.mark.parametrize(("num_inputs", "num_more"), [(1, 1), (32, 1), (33, 0)])
def test_layouts_of_few_contents_are_kept(num_inputs: int, num_more: int) -> None:
    """The second of two messages alike leaves its layout unless it has more than 32 contents; the third is the same."""
    inputs = {f"K{index}": WireTensor("UINT8", (3,), b"abc") for index in range(num_inputs)}
    before = set(codec._requests._layouts)
    for content in (b"abc", b"def", b"ghi"):
        call = InferCall("kept", inputs={name: tensor._replace(data=content) for name, tensor in inputs.items()})
        assert call == deserialize_call(serialize_call(call))
    assert num_more == len(codec._requests._layouts.keys() - before)


def test_layouts_are_bounded() -> None:
    """More layouts than are kept, and as many sizes of messages, drop the earlier ones and are read all the same."""
    for number in range(codec.MAX_KNOWN + 50):
        call = InferCall("m", inputs={f"L{number}": WireTensor("UINT8", (number,), b"x" * number)})
        for _ in range(3):
            assert call == deserialize_call(serialize_call(call))
    for kept in (codec._requests._layouts, codec._requests._num_before):
        assert 0 < len(kept) <= codec.MAX_KNOWN


@pytest.mark.parametrize("error", ["", "it failed"])
def test_answers_of_streams_are_those_of_protobuf(error: str) -> None:
    """Random responses, with an error and without; mutated answers are read or refused as by protobuf's parser."""
    rng = random.Random(7)
    for _ in range(500):
        result = _result(rng)
        answer = pb.ModelStreamInferResponse(error_message=error, infer_response=_response(result))
        data = answer.SerializeToString()
        assert data == serialize_stream_answer((error, message_of_result(result)))
        found_error, message = deserialize_stream_answer(data)
        assert (error, result) == (found_error, result_of(message))
        data = _mutated(rng, data)
        expected = _outcome(pb.ModelStreamInferResponse.FromString, data)
        found = _outcome(deserialize_stream_answer, data)
        if isinstance(expected, str):
            assert expected == found
        else:
            assert (expected.error_message, _message_of(expected.infer_response)) == found


@pytest.mark.parametrize(
    "value", [{"O": WireTensor("UINT8", (1 << 70,), b"")}, {"\ud800": WireTensor("UINT8", (1,), b"x")}]
)
def test_what_protobuf_cannot_carry_is_no_message(value: dict[str, WireTensor]) -> None:
    """A shape or a name that no message can have raises where it is written, each time."""
    for _ in range(2):
        with pytest.raises(ValueError, match=r"."):
            serialize_result(InferResult("m", "1", outputs=value))
