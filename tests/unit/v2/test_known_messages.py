"""Messages that are read and written from what was seen, beside protobuf."""

import random
from dataclasses import replace

import pytest
from google.protobuf.message import DecodeError

from weft.base.core import InferCall, InferResult, RequestedOutput
from weft.base.errors import WeftError
from weft.base.tensors import WireTensor
from weft.v2.protocol import known_messages
from weft.v2.protocol.known_messages import (
    CallDeserializer,
    CallSerializer,
    KnownMessages,
    ResultDeserializer,
    ResultSerializer,
    result_of,
)
from weft.v2.protocol.wire import (
    call_from_request,
    request_from_call,
    response_from_result,
    result_from_response,
)
from weft_protos import grpc_service_pb2 as pb

_IDS = ("", "a", "b", "7" * 127, "8" * 128, "Größe")


def _tensors(rng, names):
    sizes = [rng.choice((0, 1, 3, 120, 128, 300)) for _ in names]
    return {name: WireTensor("UINT8", (1, size), rng.randbytes(size)) for name, size in zip(names, sizes, strict=True)}


def _call(rng):
    names = rng.sample(("IN", "B", "a long name " * 12), rng.randrange(4))
    outputs = tuple(RequestedOutput(name, {}) for name in rng.sample(("OUT", "P", "Q"), rng.randrange(3)))
    return InferCall(rng.choice("mn"), rng.choice(("", "1", "12")), rng.choice(_IDS), {}, _tensors(rng, names), outputs)


def _result(rng):
    names = rng.sample(("OUT", "B", "C"), rng.randrange(4))
    return InferResult(rng.choice("mn"), "1", rng.choice(_IDS), {}, _tensors(rng, names))


def _mutated(rng, data):
    """Bytes that a client could send in place of a message: flipped, cut out, doubled, put in."""
    changed = bytearray(data)
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
                changed[place:place] = rng.choice((b"\x1a\x01z", b"\x0a\x01n", b"\x22\x00", b"\x80\x01", b"\x3a\x00"))
    return bytes(changed)


def _outcome(read, data):
    try:
        return read(data)
    except DecodeError:
        return DecodeError
    except WeftError as error:
        return error.code, error.message


def _call_of(request):
    return request if isinstance(request, InferCall) else call_from_request(request)


def test_requests_are_read_and_written_as_by_protobuf():
    """Random requests, most of them like an earlier one, give the same bytes and the same calls."""
    rng, read, write = random.Random(1), CallDeserializer(), CallSerializer()
    for _ in range(3000):
        call = _call(rng)
        data = request_from_call(call).SerializeToString()
        assert write(call) == write.to_parts(call) == data
        assert _call_of(read(data)) == call


def test_responses_are_read_and_written_as_by_protobuf():
    """Random responses, most of them like an earlier one, give the same bytes and the same results."""
    rng, read, write = random.Random(2), ResultDeserializer(), ResultSerializer()
    for _ in range(3000):
        result = _result(rng)
        data = response_from_result(result).SerializeToString()
        assert write(result) == write.to_parts(result) == data
        assert result_of(read(data)) == result


def test_mutated_messages_mean_what_protobuf_says():
    """Whatever is changed in a message that is known, the call, the result or the error is that of protobuf."""
    rng, read_call, read_result = random.Random(3), CallDeserializer(), ResultDeserializer()
    num_errors = 0
    for _ in range(4000):
        request = request_from_call(_call(rng)).SerializeToString()
        read_call(request)
        data = _mutated(rng, request)
        expected = _outcome(lambda data: call_from_request(pb.ModelInferRequest.FromString(data)), data)
        assert _outcome(lambda data: _call_of(read_call(data)), data) == expected
        num_errors += not isinstance(expected, InferCall)
        response = response_from_result(_result(rng)).SerializeToString()
        read_result(response)
        data = _mutated(rng, response)
        expected = _outcome(lambda data: result_from_response(pb.ModelInferResponse.FromString(data)), data)
        assert _outcome(lambda data: result_of(read_result(data)), data) == expected
    assert 400 < num_errors < 3600


def test_a_message_like_one_that_was_seen_is_not_parsed(monkeypatch):
    """The third request of a shape needs no protobuf, with another id and other data."""
    read = CallDeserializer()
    call = InferCall("m", "1", "first", {}, {"IN": WireTensor("FP32", (1, 2), b"12345678")})
    for _ in range(2):
        read(request_from_call(call).SerializeToString())
    monkeypatch.setattr(known_messages, "deserialize_request", lambda data: pytest.fail("it was parsed"))
    other = replace(call, request_id="the second", inputs={"IN": WireTensor("FP32", (1, 2), b"abcdefgh")})
    assert read(request_from_call(other).SerializeToString()) == other


@pytest.mark.parametrize("change", ["parameters", "input parameters", "output parameters", "typed contents"])
def test_whatever_is_more_than_tensors_is_left_to_protobuf(change):
    """Parameters anywhere, and typed contents, give the message itself, however often they come."""
    call = InferCall("m", inputs={"IN": WireTensor("UINT8", (1,), b"x")}, outputs=(RequestedOutput("OUT", {}),))
    request = request_from_call(call)
    read = CallDeserializer()
    assert read(request.SerializeToString()) == call
    if change == "parameters":
        request.parameters["priority"].uint64_param = 1
    elif change == "input parameters":
        request.inputs[0].parameters["shared_memory_region"].string_param = "r"
    elif change == "output parameters":
        request.outputs[0].parameters["classification"].int64_param = 1
    else:
        request.inputs[0].contents.uint_contents.append(1)
        del request.raw_input_contents[:]
    for _ in range(2):
        assert read(request.SerializeToString()) == request


def test_a_call_with_parameters_is_written_by_protobuf():
    """Parameters of a call, of a requested output and of a result are in the message."""
    tensors = {"IN": WireTensor("UINT8", (1,), b"x")}
    for call in (
        InferCall("m", parameters={"priority": 2}, inputs=tensors),
        InferCall("m", inputs=tensors, outputs=(RequestedOutput("OUT", {"classification": 3}),)),
    ):
        assert CallSerializer()(call) == request_from_call(call).SerializeToString()
    result = InferResult("m", "1", parameters={"p": 1.5}, outputs=tensors)
    assert ResultSerializer()(result) == response_from_result(result).SerializeToString()


def test_what_is_kept_is_bounded(monkeypatch):
    """Clients that vary names, shapes and lengths cost no memory, and long names are not kept at all."""
    monkeypatch.setattr(known_messages, "_MAX_KNOWN", 16)
    known = KnownMessages(pb.ModelInferRequest, "inputs", "raw_input_contents")
    for number in range(100):
        call = InferCall("m", inputs={f"I{number}": WireTensor("UINT8", (number,), b"x" * number)})
        message = request_from_call(call)
        data = message.SerializeToString()
        assert known.write("m", "", "", call.inputs) is None
        assert known.write("m", "", "", call.inputs) == data
        for _ in range(2):
            known.learn(data, pb.ModelInferRequest.FromString(data), call.inputs)
        assert known._read
        assert len(known._met) <= 16
        assert len(known._read) <= 16
        assert len(known._written) <= 16
    known._read.clear()
    long = InferCall("m", inputs={"n" * 5000: WireTensor("UINT8", (1,), b"x")})
    message = request_from_call(long)
    for _ in range(2):
        known.learn(message.SerializeToString(), message, long.inputs)
    assert not known._read


def test_what_comes_once_is_left_to_protobuf():
    """Texts have other lengths each time: nothing is made of a message for a second one that does not come."""
    read, write = CallDeserializer(), CallSerializer()
    for number in range(1000):
        call = InferCall("m", inputs={"TEXT": WireTensor("BYTES", (1,), b"x" * number)})
        assert read(write(call)) == call
    assert not read._known._read
    assert not write._known._written


def test_messages_of_many_tensors_are_not_kept():
    """Names of a few bytes each would cost a hundred times as much in objects: 400 MB in all."""
    tensors = {f"{number:x}": WireTensor("", (), b"") for number in range(500)}
    outputs = tuple(RequestedOutput(name, {}) for name in tensors)
    for call in (InferCall("m", inputs=tensors), InferCall("m", outputs=outputs)):
        read, write = CallDeserializer(), CallSerializer()
        data = request_from_call(call).SerializeToString()
        for _ in range(2):
            assert write(call) == data
            assert read(data) == call
        assert not read._known._read
        assert not write._known._written


def test_fields_that_are_unknown_are_no_tensors():
    """A message whose last field is unknown and ends as its tensors do gives the tensors, whatever that field has."""
    call = InferCall("m", inputs={"IN": WireTensor("UINT8", (1,), b"x")})
    data = request_from_call(call).SerializeToString()
    unknown = b"\x7a\x03" + data[-3:]
    read = CallDeserializer()
    for _ in range(2):
        assert read(data + unknown) == call
    assert read(data + unknown[:-1] + b"y") == call


def test_what_protobuf_cannot_carry_is_no_message():
    """A shape or a name that no message can have raises where it is written, each time."""
    write = ResultSerializer()
    for tensors in ({"O": WireTensor("UINT8", (1 << 70,), b"")}, {"\ud800": WireTensor("UINT8", (1,), b"x")}):
        for _ in range(2):
            with pytest.raises(ValueError, match=r"."):
                write(InferResult("m", "1", outputs=tensors))
