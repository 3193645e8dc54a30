"""Requests and responses mean the same as messages and as calls; what is malformed or too large is refused by name."""

import json
from pathlib import Path

import grpc
import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st
from tests.messages import call_from_request, request_from_call, response_from_result, result_from_response
from tests.unit.v2.builders import make_request
from tests.wire.notation import Case, read_cases

from weft.base import errors, limits
from weft.base.core import InferCall, InferResult, RequestedOutput
from weft.base.errors import InvalidArgumentError, RemoteError
from weft.base.tensors import MAX_STRING_BYTES, WireTensor, check_bytes, decode
from weft.v2.protocol.encoding import fill_parameters
from weft.v2.protocol.wire import parameters_from
from weft.v2.server.make_server import make_server
from weft.v2.server.server import add_services
from weft.wire.server.methods import ServerOptions
from weft_protos import grpc_service_pb2 as pb
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub

INT64_MIN, INT64_MAX, UINT64_MAX = -(2**63), 2**63 - 1, 2**64 - 1


@pytest.mark.parametrize("case", read_cases(Path(__file__).with_name("messages.txt")), ids=lambda case: case.name)
def test_message(case: Case):
    """A request is the call that the case says, or is refused with its text, which can be shown."""
    (text,) = case.starting_with("request")
    request = text_format.Parse(text, pb.ModelInferRequest())
    request.model_name = request.model_name or "m"
    for refusal in case.starting_with("refused"):
        name, _, rest = refusal.partition(" ")
        error = getattr(errors, name, InvalidArgumentError)
        with pytest.raises(error) as caught:
            call_from_request(request)
        assert (rest if hasattr(errors, name) else refusal) in caught.value.message
        assert caught.value.message.isascii()
        assert caught.value.message.isprintable()
        return
    call = call_from_request(request)
    expected = [line.split() for line in case.starting_with("tensor")]
    assert [
        (name, WireTensor(datatype, tuple(json.loads(shape)), bytes.fromhex(data.strip('"'))))
        for name, datatype, shape, data in expected
    ] == list(call.inputs.items())
    outputs = [line.partition(" {") for line in case.starting_with("output")]
    assert [(name, json.loads(f"{{{told}")) for name, _, told in outputs] == list(call.outputs)
    assert [call.parameters] == [json.loads(line) for line in case.starting_with("parameters") or ["{}"]]


@pytest.mark.parametrize(
    ("key", "value", "field"),
    [
        ("priority", 3, "uint64_param"),
        ("priority", UINT64_MAX, "uint64_param"),
        ("timeout", 5, "int64_param"),
        ("offset", INT64_MIN, "int64_param"),
        ("offset", INT64_MAX, "int64_param"),
        ("offset", INT64_MAX + 1, "uint64_param"),
        ("flag", True, "bool_param"),
        ("flag", False, "bool_param"),
        ("share", 0.5, "double_param"),
        ("share", 1.0, "double_param"),
        ("text", "", "string_param"),
        ("text", "ü", "string_param"),
        ("priority", -1, None),
        ("x", UINT64_MAX + 1, None),
        ("x", INT64_MIN - 1, None),
        ("x", None, None),
        ("x", [1], None),
        ("x", "\udc80", None),
    ],
)
def test_parameter(key, value, field):
    """A parameter travels in the field of its type and comes back as it was; one outside the types is refused."""
    message = pb.ModelInferRequest()
    if field is None:
        with pytest.raises(InvalidArgumentError, match=f"parameter '{key}' has value "):
            fill_parameters(message.parameters, {key: value})
        return
    fill_parameters(message.parameters, {key: value})
    assert field == message.parameters[key].WhichOneof("parameter_choice")
    got = parameters_from(message.parameters)[key]
    assert (type(value), value) == (type(got), got)


def test_load_parameters_may_be_bytes():
    """Files in a repository request come through as bytes."""
    message = pb.RepositoryModelLoadRequest(parameters={"file:1/m": pb.ModelRepositoryParameter(bytes_param=b"\x00")})
    assert {"file:1/m": b"\x00"} == parameters_from(message.parameters)


NAMES = st.text(min_size=1, max_size=5).filter(str.isprintable)
TENSORS = st.dictionaries(
    NAMES, st.binary(max_size=16).map(lambda data: WireTensor("UINT8", (len(data),), data)), max_size=4
)
PARAMETERS = st.dictionaries(
    NAMES,
    st.one_of(st.booleans(), st.integers(INT64_MIN, UINT64_MAX), st.floats(allow_nan=False), st.text(max_size=5)),
    max_size=3,
)


@given(TENSORS, PARAMETERS, st.text(max_size=5))
def test_round_trip(tensors, parameters, request_id):
    """Any call and any result are the same after they travelled as messages."""
    call = InferCall("m", "3", request_id, parameters, tensors, (RequestedOutput("y", parameters),))
    received = call_from_request(pb.ModelInferRequest.FromString(request_from_call(call).SerializeToString()))
    assert (call, list(call.inputs)) == (received, list(received.inputs))
    result = InferResult("m", "3", request_id, parameters, tensors)
    message = pb.ModelInferResponse.FromString(response_from_result(result).SerializeToString())
    answer = result_from_response(message)
    assert (result, list(result.outputs)) == (answer, list(answer.outputs))
    assert len(message.outputs) == len(message.raw_output_contents)


@pytest.mark.parametrize("contents", [{"int_contents": [1, 2]}, {}, {"fp32_contents": [1, 2]}], ids=str)
def test_answers_of_other_servers(contents):
    """Typed outputs become raw bytes; without usable data a response is INTERNAL and names model and output."""
    message = pb.ModelInferResponse(model_name="m")
    message.outputs.add(name="y", datatype="INT32", shape=[2])
    if contents:
        message.outputs[0].contents.CopyFrom(pb.InferTensorContents(**contents))
    if "int_contents" in contents:
        assert [1, 2] == decode(result_from_response(message).outputs["y"]).tolist()
        return
    with pytest.raises(RemoteError, match=r"bad answer of model 'm': .*output.* 'y'") as caught:
        result_from_response(message)
    assert "INTERNAL" == caught.value.code


def test_a_view_of_a_tensor_is_sent_as_its_bytes():
    """Also in a small message, which protobuf alone makes."""
    data = memoryview(b"abcdef")[1:5]
    request = request_from_call(InferCall("m", inputs={"X": WireTensor("UINT8", (4,), data)}))  # type: ignore[arg-type]
    assert [b"bcde"] == list(request.raw_input_contents)


# ---- limits of a request


def request(**fields):
    return pb.ModelInferRequest(**{"model_name": "m"} | fields)


def inputs(count, **fields):
    made = request(raw_input_contents=[b""] * count)
    for i in range(count):
        made.inputs.add(**({"name": str(i), "datatype": "INT32", "shape": [0]} | fields))
    return made


def outputs(count):
    return request(outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name=str(i)) for i in range(count)])


def output(name):
    return request(outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name=name)])


def parameters(count, key="k{}", text=""):
    return request(parameters={key.format(i): pb.InferParameter(string_param=text) for i in range(count)})


def parameters_of_tensors(count):
    made = inputs(1)
    made.outputs.add(name="y")
    for i in range(count):
        made.inputs[0].parameters[f"k{i}"].bool_param = True
        made.outputs[0].parameters[f"k{i}"].bool_param = True
    return made


def typed_strings(count):
    made = request()
    made.inputs.add(name="x", datatype="BYTES", shape=[1]).contents.bytes_contents.extend([b""] * count)
    return made


def strings(count):
    """So many strings, or more than the limit in two dimensions."""
    beyond = [2, limits.MAX_STRINGS // 2 + 1]
    return inputs(1, datatype="BYTES", shape=[count] if count <= limits.MAX_STRINGS else beyond)


LIMITS = {
    "inputs": (inputs, limits.MAX_TENSORS),
    "outputs": (outputs, limits.MAX_TENSORS),
    "dimensions": (lambda count: inputs(1, shape=[0] * count), limits.MAX_DIMS),
    "strings": (strings, limits.MAX_STRINGS),
    "parameters": (parameters, limits.MAX_PARAMETERS),
    "parameter bytes": (lambda count: parameters(1, "k", "v" * (count - 1)), limits.MAX_PARAMETER_CHARS),
    "parameters of tensors": (parameters_of_tensors, limits.MAX_PARAMETERS),
    "typed strings": (typed_strings, limits.MAX_TYPED_STRINGS),
    "parameter name": (lambda count: parameters(1, "n" * count), limits.MAX_NAME_CHARS),
    "model name": (lambda count: request(model_name="n" * count), limits.MAX_NAME_CHARS),
    "version": (lambda count: request(model_version="n" * count), limits.MAX_NAME_CHARS),
    "request id": (lambda count: request(id="n" * count), limits.MAX_NAME_CHARS),
    "input name": (lambda count: inputs(1, name="n" * count), limits.MAX_NAME_CHARS),
    "output name": (lambda count: output("n" * count), limits.MAX_NAME_CHARS),
}


@pytest.mark.parametrize(("make", "limit"), LIMITS.values(), ids=LIMITS)
def test_limit_is_exact(make, limit):
    """What reaches the limit is taken; one more is INVALID_ARGUMENT, because no second try helps, with both numbers."""
    call_from_request(make(limit))
    with pytest.raises(InvalidArgumentError, match=r"has \d+ .*; at most \d+ are allowed") as caught:
        call_from_request(make(limit + 1))
    assert len(caught.value.message) < 2 * limits.MAX_NAME_CHARS


def test_longest_string_is_bounded():
    """A string of the limit passes; one byte more does not."""
    data = MAX_STRING_BYTES.to_bytes(4, "little") + bytes(MAX_STRING_BYTES)
    check_bytes(data, 1, name="x", model="m")
    longer = (MAX_STRING_BYTES + 1).to_bytes(4, "little") + memoryview(data)[4:] + b"\0"
    with pytest.raises(InvalidArgumentError, match=f"a string of {MAX_STRING_BYTES + 1} bytes"):
        check_bytes(longer, 1, name="x", model="m")


async def test_compression_does_not_pass_the_message_limit(core):
    """The limit of a message holds for what it becomes: 50 MB of zeros in 49 kB of gzip are refused."""
    server = make_server(ServerOptions(max_message_bytes=1_000_000))
    add_services(server, core, "weft.test")
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(
        f"127.0.0.1:{port}", options=options, compression=grpc.Compression.Gzip
    ) as channel:
        bomb = request(model_name="echo", raw_input_contents=[bytes(50_000_000)])
        bomb.inputs.add(name="x", datatype="INT32", shape=[1, 12_500_000])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await GRPCInferenceServiceStub(channel).ModelInfer(bomb, timeout=20)
    assert grpc.StatusCode.RESOURCE_EXHAUSTED is caught.value.code()
    assert [] == core.calls
    await server.stop(None)


async def test_metadata_has_a_limit(stub, core):
    """A call with more metadata than the server takes is refused before any handler sees it."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.ModelInfer(make_request(), metadata=(("x-a", "v" * 70_000),), timeout=5)
    assert grpc.StatusCode.RESOURCE_EXHAUSTED is caught.value.code()
    assert [] == core.calls
