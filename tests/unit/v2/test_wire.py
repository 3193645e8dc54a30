"""Requests and responses mean the same as messages and as calls; what is malformed is refused with its name."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.messages import call_from_request, request_from_call, response_from_result, result_from_response

from weft.base.core import InferCall, InferResult, RequestedOutput
from weft.base.errors import InvalidArgumentError, RemoteError, UnsupportedError
from weft.base.tensors import NUMPY_BY_DATATYPE, WireTensor, decode, encode_bytes
from weft.v2.protocol.encoding import fill_parameters
from weft.v2.protocol.wire import parameters_from
from weft_protos import grpc_service_pb2 as pb

INT64_MIN, INT64_MAX, UINT64_MAX = -(2**63), 2**63 - 1, 2**64 - 1
TYPED = {
    "BOOL": ("bool_contents", [True, False]),
    "INT8": ("int_contents", [-128, 127]),
    "INT16": ("int_contents", [-(2**15), 2**15 - 1]),
    "INT32": ("int_contents", [-(2**31), 2**31 - 1]),
    "INT64": ("int64_contents", [INT64_MIN, INT64_MAX]),
    "UINT8": ("uint_contents", [0, 255]),
    "UINT16": ("uint_contents", [0, 2**16 - 1]),
    "UINT32": ("uint_contents", [0, 2**32 - 1]),
    "UINT64": ("uint64_contents", [0, UINT64_MAX]),
    "FP32": ("fp32_contents", [-0.0, 1.5]),
    "FP64": ("fp64_contents", [-0.0, 0.1]),
    "BYTES": ("bytes_contents", [b"", b"a\x00"]),
}


def request(*inputs, raw=(), **fields):
    """A request for model 'm' with these input messages."""
    return pb.ModelInferRequest(model_name="m", inputs=inputs, raw_input_contents=raw, **fields)


def tensor(name="x", datatype="INT32", shape=(2,), **contents):
    """An input message; ``contents`` are typed contents."""
    typed = pb.InferTensorContents(**contents) if contents else None
    return pb.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=shape, contents=typed)


@pytest.mark.parametrize("datatype", TYPED)
def test_typed_contents_become_raw_bytes(datatype):
    """Typed contents of every datatype, at the ends of its range, give the bytes that the raw form has."""
    field, values = TYPED[datatype]
    typed = call_from_request(request(tensor(datatype=datatype, **{field: values}))).inputs["x"]
    raw = encode_bytes(values) if datatype == "BYTES" else np.array(values, NUMPY_BY_DATATYPE[datatype]).tobytes()  # type: ignore[arg-type]
    assert WireTensor(datatype, (2,), raw) == typed
    assert typed == call_from_request(request(tensor(datatype=datatype), raw=[raw])).inputs["x"]
    assert values == decode(typed).tolist()


def test_every_datatype_is_typed_or_raw_only():
    """FP16 and BF16 are the only datatypes without typed contents."""
    assert {"FP16", "BF16"} == set(NUMPY_BY_DATATYPE) - set(TYPED)


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_raw_only_datatype_says_so(datatype):
    """Half precision in typed contents is refused with the cure."""
    text = f"datatype '{datatype}' of input 'x' has no typed contents; send it in raw_input_contents"
    with pytest.raises(InvalidArgumentError, match=text):
        call_from_request(request(tensor(datatype=datatype, fp32_contents=[1, 2])))


def test_unknown_datatype_says_so():
    """A datatype that does not exist is refused when its contents would have to be read."""
    with pytest.raises(InvalidArgumentError, match="datatype 'FP8' of input 'x' has no typed contents; it is no V2"):
        call_from_request(request(tensor(datatype="FP8", fp32_contents=[1, 2])))


@pytest.mark.parametrize(
    ("datatype", "field", "value"),
    [
        ("INT8", "int_contents", 300),
        ("INT8", "int_contents", -129),
        ("INT16", "int_contents", 2**15),
        ("UINT8", "uint_contents", 256),
        ("UINT16", "uint_contents", 2**16),
    ],
)
def test_value_outside_its_datatype_is_refused(datatype, field, value):
    """A value that the wide field can carry but the datatype cannot is an error, never a wrapped number."""
    with pytest.raises(InvalidArgumentError, match=f"input 'x' holds a value that {datatype} cannot"):
        call_from_request(request(tensor(datatype=datatype, **{field: [0, value]})))


@pytest.mark.parametrize("datatype", [name for name in TYPED if name != "FP64"])
def test_contents_in_another_field_are_refused(datatype):
    """Contents in a field of another datatype are an error that names both fields."""
    field = TYPED[datatype][0]
    with pytest.raises(InvalidArgumentError, match=f"must fill {field}, but fp64_contents is set"):
        call_from_request(request(tensor(datatype=datatype, fp64_contents=[1, 2])))


def test_contents_in_two_fields_are_refused():
    """One right and one wrong field are an error too."""
    with pytest.raises(InvalidArgumentError, match="must fill fp32_contents, but int_contents, fp32_contents is set"):
        call_from_request(request(tensor(datatype="FP32", fp32_contents=[1, 2], int_contents=[1])))


def test_raw_and_typed_do_not_mix():
    """One input typed and another raw is refused with the text that clients know."""
    with pytest.raises(InvalidArgumentError, match="contents field must not be specified when using raw_input_cont"):
        call_from_request(request(tensor("a"), tensor("b", int_contents=[1, 2]), raw=[bytes(8), bytes(8)]))


@pytest.mark.parametrize(("inputs", "raw"), [(["x"], []), (["a", "x"], [bytes(8)])], ids=["none", "too few"])
def test_missing_data_is_refused(inputs, raw):
    """An input without contents and without a raw entry is refused with its name."""
    with pytest.raises(InvalidArgumentError, match="unable to find data for input tensor 'x' for model 'm'"):
        call_from_request(request(*(tensor(name) for name in inputs), raw=raw))


def test_too_many_raw_entries_are_refused():
    """More raw entries than inputs are an error with both numbers, because it is unclear what belongs to what."""
    with pytest.raises(InvalidArgumentError, match="raw_input_contents has 2 entries for 1 inputs of model 'm'"):
        call_from_request(request(tensor(), raw=[bytes(8), bytes(8)]))


def test_raw_entries_without_inputs_are_refused():
    """Data that belongs to no input is an error."""
    with pytest.raises(InvalidArgumentError, match="raw_input_contents has 1 entries for 0 inputs"):
        call_from_request(request(raw=[b"a"]))


@pytest.mark.parametrize("raw", [[], [b""]], ids=["no entry", "empty entry"])
def test_empty_tensor_needs_no_data(raw):
    """A tensor without elements is complete without contents."""
    assert (
        WireTensor("FP32", (0, 4), b"") == call_from_request(request(tensor("x", "FP32", (0, 4)), raw=raw)).inputs["x"]
    )


def test_duplicate_input_is_refused():
    """The same input twice is an error instead of the last one winning."""
    with pytest.raises(InvalidArgumentError, match="input 'x' is given twice in a request for model 'm'"):
        call_from_request(request(tensor(), tensor(), raw=[bytes(8), bytes(8)]))


def test_order_of_inputs_and_outputs_is_kept():
    """Inputs keep the order sent and requested outputs theirs."""
    outputs = [pb.ModelInferRequest.InferRequestedOutputTensor(name=name) for name in ("z", "a")]
    call = call_from_request(request(tensor("z"), tensor("a"), raw=[b"1", b"2"], outputs=outputs))
    assert [("z", b"1"), ("a", b"2")] == [(name, value.data) for name, value in call.inputs.items()]
    assert ["z", "a"] == [output.name for output in call.outputs]


@pytest.mark.parametrize("key", ["triton_final_response", "triton_", "triton_enable"])
def test_reserved_parameter_is_refused(key):
    """Keys that only servers set are refused."""
    with pytest.raises(InvalidArgumentError, match=f"parameter '{key}' is reserved"):
        call_from_request(request(parameters={key: pb.InferParameter(bool_param=True)}))


def test_reserved_parameter_that_clients_send_is_accepted():
    """The one reserved key that C++ clients send with every request is let through."""
    key = "triton_enable_empty_final_response"
    assert {key: False} == call_from_request(request(parameters={key: pb.InferParameter(bool_param=False)})).parameters


@pytest.mark.parametrize("side", ["inputs", "outputs"])
def test_shared_memory_is_refused(side):
    """A tensor in shared memory is UNIMPLEMENTED with the text that clients know, before its data is missed."""
    message = request(tensor(), raw=[bytes(8)], outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name="y")])
    getattr(message, side)[0].parameters["shared_memory_region"].string_param = "r"
    if side == "inputs":
        del message.raw_input_contents[:]
    with pytest.raises(UnsupportedError, match="Client shared memory is disabled"):
        call_from_request(message)


def test_classification_is_left_to_the_core():
    """An output asked for as its best classes keeps its parameter."""
    output = pb.ModelInferRequest.InferRequestedOutputTensor(name="y")
    output.parameters["classification"].int64_param = 3
    assert (("y", {"classification": 3}),) == call_from_request(request(outputs=[output])).outputs


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
    ],
)
def test_parameter_keeps_value_and_type(key, value, field):
    """A parameter travels in the field of its type and comes back as the same value of the same type."""
    message = pb.ModelInferRequest()
    fill_parameters(message.parameters, {key: value})
    assert field == message.parameters[key].WhichOneof("parameter_choice")
    got = parameters_from(message.parameters)[key]
    assert (type(value), value) == (type(got), got)


@pytest.mark.parametrize(
    ("key", "value"),
    [("priority", -1), ("x", UINT64_MAX + 1), ("x", INT64_MIN - 1), ("x", None), ("x", [1]), ("x", "\udc80")],
)
def test_parameter_that_cannot_travel_is_refused(key, value):
    """A value outside the protocol's types is an error with key and value."""
    with pytest.raises(InvalidArgumentError, match=f"parameter '{key}' has value "):
        fill_parameters(pb.ModelInferRequest().parameters, {key: value})


def test_parameter_without_value_is_left_out():
    """A key whose value is not set does not become a parameter."""
    assert {} == call_from_request(request(parameters={"x": pb.InferParameter()})).parameters


def test_load_parameters_may_be_bytes():
    """Files in a repository request come through as bytes."""
    message = pb.RepositoryModelLoadRequest(parameters={"file:1/m": pb.ModelRepositoryParameter(bytes_param=b"\x00")})
    assert {"file:1/m": b"\x00"} == parameters_from(message.parameters)


TENSORS = st.dictionaries(
    st.text(min_size=1, max_size=5).filter(str.isprintable),
    st.binary(max_size=16).map(lambda data: WireTensor("UINT8", (len(data),), data)),
    max_size=4,
)
PARAMETERS = st.dictionaries(
    st.text(min_size=1, max_size=5).filter(str.isprintable),
    st.one_of(st.booleans(), st.integers(INT64_MIN, UINT64_MAX), st.floats(allow_nan=False), st.text(max_size=5)),
    max_size=3,
)


@given(TENSORS, PARAMETERS, st.text(max_size=5))
def test_call_round_trip(inputs, parameters, request_id):
    """Any call is the same after it travelled as a message."""
    call = InferCall("m", "3", request_id, parameters, inputs, (RequestedOutput("y", parameters),))
    received = call_from_request(pb.ModelInferRequest.FromString(request_from_call(call).SerializeToString()))
    assert call == received
    assert list(call.inputs) == list(received.inputs)


@given(TENSORS, PARAMETERS, st.text(max_size=5))
def test_result_round_trip(outputs, parameters, request_id):
    """Any result is the same after it travelled as a message."""
    result = InferResult("m", "3", request_id, parameters, outputs)
    message = pb.ModelInferResponse.FromString(response_from_result(result).SerializeToString())
    received = result_from_response(message)
    assert result == received
    assert list(result.outputs) == list(received.outputs)
    assert len(message.outputs) == len(message.raw_output_contents)


def response(datatype="INT32", **contents):
    """A response of model 'm' with one output 'y' that has no raw data."""
    message = pb.ModelInferResponse(model_name="m")
    message.outputs.add(name="y", datatype=datatype, shape=[2])
    if contents:
        message.outputs[0].contents.CopyFrom(pb.InferTensorContents(**contents))
    return message


def test_typed_answer_of_another_server_is_read():
    """Outputs in typed contents, as some servers answer, become raw bytes."""
    assert [1, 2] == decode(result_from_response(response(int_contents=[1, 2])).outputs["y"]).tolist()


@pytest.mark.parametrize("contents", [{}, {"fp32_contents": [1, 2]}], ids=["no data", "wrong field"])
def test_bad_answer_is_not_the_clients_fault(contents):
    """A response without usable data is INTERNAL and names model and output."""
    with pytest.raises(RemoteError, match=r"bad answer of model 'm': .*output.* 'y'") as caught:
        result_from_response(response(**contents))
    assert "INTERNAL" == caught.value.code


def test_a_view_of_a_tensor_is_sent_as_its_bytes():
    """Also in a small message, which protobuf alone makes."""
    data = memoryview(b"abcdef")[1:5]
    request = request_from_call(InferCall("m", inputs={"X": WireTensor("UINT8", (4,), data)}))  # type: ignore[arg-type]
    assert [b"bcde"] == list(request.raw_input_contents)
