"""A call that does not fit its model is refused with the text that clients of Triton Inference Server look for."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.base.core import InferCall, RequestedOutput
from weft.base.errors import InvalidArgumentError
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import ITEMSIZE_BYTES, WireTensor, encode_bytes, num_elements
from weft.base.validation import scheduling_parameters, validate


def signature(*inputs, max_batch_size=8, outputs=("y",)):
    """Signature of model 'm'; an input is ``(name, datatype, dims[, is_optional])``."""
    return ModelSignature(
        name="m",
        version="1",
        platform="python",
        max_batch_size=max_batch_size,
        inputs=tuple(TensorSpec(*spec) for spec in inputs),
        outputs=tuple(TensorSpec(name, "FP32", (-1,)) for name in outputs),
    )


def tensor(*shape, datatype="FP32", num_bytes=None):
    """A tensor of zeros with this shape."""
    if num_bytes is None:
        num_bytes = max(0, num_elements(shape)) * ITEMSIZE_BYTES.get(datatype, 4)
    return WireTensor(datatype, shape, bytes(num_bytes))


def call(outputs=(), request_id="", **inputs):
    return InferCall("m", request_id=request_id, inputs=inputs, outputs=tuple(RequestedOutput(o, {}) for o in outputs))


def refused(request, model):
    """Text of the refusal."""
    with pytest.raises(InvalidArgumentError) as caught:
        validate(request, model)
    return caught.value.message


X16 = signature(("x", "FP32", (16,)))
ABC = signature(("a", "FP32", (1,)), ("b", "FP32", (1,)), ("c", "FP32", (1,)))
OPTIONAL = signature(("a", "FP32", (1,)), ("b", "FP32", (1,)), ("c", "FP32", (1,)), ("d", "FP32", (1,), True))
ONE = tensor(1, 1)


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_fitting_call_gives_its_rows(rows):
    """The batch size of a call that fits is its leading dimension, up to the limit."""
    assert rows == validate(call(x=tensor(rows, 16)), X16)


@pytest.mark.parametrize("shape", [(16,), (1, 16), (5, 16)])
def test_model_without_batch_dimension_has_one_row(shape):
    """Without a batch dimension a call is one row, whatever its first dimension is."""
    model = signature(("x", "FP32", shape), max_batch_size=0)
    assert 1 == validate(call(x=tensor(*shape)), model)


def test_model_without_inputs_has_one_row():
    """A model that takes nothing accepts a call that gives nothing."""
    assert 1 == validate(call(), signature())


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (
            call(a=ONE),
            "expected 3 inputs but got 1 inputs for model 'm'. Got input(s) ['a'], but missing required input(s) "
            "['b','c']. Please provide all required input(s).",
        ),
        (
            call(),
            "expected 3 inputs but got 0 inputs for model 'm'. Got input(s) [], but missing required input(s) "
            "['a','b','c']. Please provide all required input(s).",
        ),
        (call(a=ONE, b=ONE, z=ONE), "unexpected inference input 'z' for model 'm'; it takes a, b, c"),
        (
            call(a=ONE, b=ONE, c=ONE, z=ONE),
            "expected 3 inputs but got 4 inputs for model 'm'. Got input(s) ['a','b','c','z'], but unexpected "
            "inference input 'z' for model 'm'; it takes a, b, c",
        ),
    ],
    ids=["missing", "none", "unknown", "too many"],
)
def test_wrong_set_of_inputs(request_, text):
    """Missing, unknown and surplus inputs are told apart, with the counts."""
    assert f"[request id: <id_unknown>] {text}" == refused(request_, ABC)


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (
            call(a=ONE, d=ONE),
            "expected number of inputs between 3 and 4 but got 2 inputs for model 'm'. Got input(s) ['a','d'], but "
            "missing required input(s) ['b','c']. Please provide all required input(s).",
        ),
        (call(a=ONE, b=ONE, d=ONE, z=ONE), "unexpected inference input 'z' for model 'm'"),
        (
            call(a=ONE, b=ONE, c=ONE, d=ONE, z=ONE),
            "expected number of inputs between 3 and 4 but got 5 inputs for model 'm'",
        ),
    ],
    ids=["missing", "unknown", "too many"],
)
def test_wrong_set_of_inputs_with_optional_ones(request_, text):
    """With optional inputs the text gives the range."""
    assert text in refused(request_, OPTIONAL)


def test_optional_input_may_be_left_out():
    """A call fits with and without the optional input."""
    required = {"a": ONE, "b": ONE, "c": ONE}
    assert 1 == validate(call(**required), OPTIONAL)
    assert 1 == validate(call(**required, d=ONE), OPTIONAL)


def test_optional_input_is_checked_when_given():
    """An optional input that is given must fit like any other."""
    assert "unexpected shape for input 'd'" in refused(call(a=ONE, b=ONE, c=ONE, d=tensor(1, 2)), OPTIONAL)


def test_order_of_inputs_is_free():
    """Inputs are found by name."""
    assert 2 == validate(call(c=tensor(2, 1), a=tensor(2, 1), b=tensor(2, 1)), ABC)


def test_wrong_datatype():
    """The text names both datatypes."""
    text = "inference input 'x' data-type is 'INT32', but model 'm' expects 'FP32'"
    assert text in refused(call(x=tensor(1, 16, datatype="INT32")), X16)


NOTE = " NOTE: max_batch_size is 8, so the first dimension is the batch size, 1 to 8."


@pytest.mark.parametrize(
    "shape", [(), (16,), (1,), (1, 15), (1, 16, 1), (0, 16), (-1, 16), (1, -16), (-1, -16), (1, 2**62), (2**63 - 1, 15)]
)
def test_wrong_shape(shape):
    """Missing and surplus dimensions, wrong, negative and huge sizes and an empty batch are shape errors."""
    got = ",".join(str(dim) for dim in shape)
    text = f"unexpected shape for input 'x' for model 'm'. Expected [-1,16], got [{got}].{NOTE}"
    assert text in refused(call(x=tensor(*shape, num_bytes=64)), X16)


@pytest.mark.parametrize("shape", [(), (1, 16), (15,), (-16,)])
def test_wrong_shape_without_batch_dimension(shape):
    """A model without batch dimension expects exactly its dims, and the text does not speak of batches."""
    message = refused(call(x=tensor(*shape, num_bytes=64)), signature(("x", "FP32", (16,)), max_batch_size=0))
    assert re.search(r"Expected \[16\], got \[[-,0-9]*\]\.$", message)


@pytest.mark.parametrize(
    ("shape", "fits"), [((1, 3, 5), True), ((1, 3, 0), True), ((1, 3, -1), False), ((1, 4, 5), False)]
)
def test_wildcard_takes_any_size(shape, fits):
    """-1 in the configuration takes any size from 0 up, and only there."""
    model = signature(("x", "FP32", (3, -1)))
    if fits:
        assert 1 == validate(call(x=tensor(*shape)), model)
    else:
        assert "Expected [-1,3,-1], got " in refused(call(x=tensor(*shape, num_bytes=60)), model)


@pytest.mark.parametrize("num_bytes", [0, 63, 65, 128])
def test_wrong_byte_size(num_bytes):
    """The text gives both sizes."""
    text = f"input byte size mismatch for input 'x' for model 'm'. Expected 64, got {num_bytes}"
    assert text in refused(call(x=tensor(1, 16, num_bytes=num_bytes)), X16)


def test_two_negative_dimensions_do_not_make_a_positive_size():
    """A shape whose negative dimensions multiply to the right size is refused, for wildcards too."""
    model = signature(("x", "FP32", (-1, -1)))
    assert "got [1,-1,-4]" in refused(call(x=tensor(1, -1, -4, num_bytes=16)), model)
    assert "got [1,-1,-1]" in refused(call(x=tensor(1, -1, -1, num_bytes=4)), model)


def test_huge_dimensions_do_not_wrap_around():
    """Dimensions whose product is 0 in 64 bits do not pass with no data."""
    model = signature(("x", "FP32", (-1, -1)))
    assert f"Expected {4 * 2**64}, got 0" in refused(call(x=tensor(1, 2**32, 2**32, num_bytes=0)), model)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (encode_bytes([b"a"]), "expected 2 string elements for inference input 'x' for model 'm', got 1"),
        (encode_bytes([b"a"] * 3), "expected 2 string elements for inference input 'x' for model 'm', got 3"),
        (encode_bytes([b"a", b"bc"])[:-1], "incomplete string data for inference input 'x' for model 'm'"),
        (b"\x01", "incomplete string length indicator for inference input 'x' for model 'm'"),
        (b"\xff\xff\xff\xff", "incomplete string data for inference input 'x' for model 'm'"),
    ],
)
def test_wrong_strings(data, text):
    """Too few, too many and damaged BYTES elements are refused at the door."""
    assert text in refused(call(x=WireTensor("BYTES", (2, 1), data)), signature(("x", "BYTES", (1,))))


def test_right_strings_fit():
    """BYTES with as many elements as the shape says fit."""
    assert 2 == validate(
        call(x=WireTensor("BYTES", (2, 1), encode_bytes([b"", b"bc"]))), signature(("x", "BYTES", (1,)))
    )


def test_batch_over_the_limit():
    """The text gives the limit and the size got."""
    text = "inference request batch-size must be <= 8 for 'm', got 9"
    assert text in refused(call(x=tensor(9, 16)), X16)


def test_inputs_disagree_on_the_batch():
    """The text names the input that differs and both sizes."""
    text = "input 'b' batch size does not match other inputs for 'm': got 3, others have 2"
    assert text in refused(call(a=tensor(2, 1), b=tensor(3, 1), c=tensor(2, 1)), ABC)


@pytest.mark.parametrize(("outputs", "fits"), [((), True), (("z", "y"), True), (("nope",), False), (("y", ""), False)])
def test_requested_outputs_exist(outputs, fits):
    """Only outputs that the model has may be asked for."""
    model = signature(("x", "FP32", (16,)), outputs=("y", "z"))
    request = call(outputs, x=tensor(1, 16))
    if fits:
        assert 1 == validate(request, model)
    else:
        assert f"unexpected inference output '{outputs[-1]}' for model 'm'; it has y, z" in refused(request, model)


@pytest.mark.parametrize(("request_id", "prefix"), [("7", "[request id: 7] "), ("", "[request id: <id_unknown>] ")])
def test_text_starts_with_the_request_id(request_id, prefix):
    """The client finds its own id in front of the text."""
    assert refused(call(request_id=request_id, x=tensor(9, 16)), X16).startswith(prefix + "inference request")


DIM = st.one_of(st.integers(-2, 20), st.sampled_from([2**31, 2**62, 2**63 - 1]))


@given(st.lists(DIM, max_size=4), st.integers(0, 200), st.integers(0, 9), st.sampled_from(["FP32", "BYTES"]))
def test_only_consistent_tensors_pass(shape, num_bytes, max_batch_size, datatype):
    """Whatever passes has no negative dimension and exactly the bytes of its shape; all else is INVALID_ARGUMENT."""
    model = signature(("x", datatype, (-1, -1)), max_batch_size=max_batch_size)
    request = call(x=tensor(*shape, datatype=datatype, num_bytes=num_bytes))
    try:
        rows = validate(request, model)
    except InvalidArgumentError:
        return
    assert min(shape) >= 0
    assert 4 * num_elements(shape) == num_bytes
    assert (shape[0] if max_batch_size else 1) == rows <= max(max_batch_size, 1)


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, (0, 0)),
        ({"priority": 2}, (2, 0)),
        ({"timeout": 500}, (0, 500)),
        ({"priority": 2**64 - 1, "timeout": 0, "other": "x"}, (2**64 - 1, 0)),
    ],
)
def test_scheduling_parameters(parameters, expected):
    """Priority and timeout in microseconds are read, with 0 for none."""
    assert expected == scheduling_parameters(parameters)


@pytest.mark.parametrize("key", ["priority", "timeout"])
@pytest.mark.parametrize("value", [-1, 1.0, "1", True])
def test_bad_scheduling_parameter(key, value):
    """A negative number and anything but a whole number are refused with key and value."""
    text = f"parameter '{key}' must be a whole number of at least 0, got {value!r}"
    with pytest.raises(InvalidArgumentError, match=re.escape(text)):
        scheduling_parameters({key: value})
