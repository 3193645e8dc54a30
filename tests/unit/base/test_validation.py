"""A call that does not fit its model is refused with the text that clients of Triton Inference Server look for."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.wire.notation import Case, read_cases

from weft.base.core import InferCall, RequestedOutput
from weft.base.errors import InvalidArgumentError
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import ITEMSIZE_BYTES, WireTensor, num_elements
from weft.base.validation import scheduling_parameters, validate

_TENSOR = re.compile(r"(\w+)(\??):(\w+)(\[[^\]]*\])(?:/(\d+)|=(\w*))?")


def signature_of(case: Case) -> ModelSignature:
    """The model of a case."""
    (line,) = case.starting_with("model")
    (outputs,) = case.starting_with("outputs") or ["y"]
    inputs = tuple(
        TensorSpec(name, datatype, tuple(json.loads(dims)), bool(is_optional))
        for name, is_optional, datatype, dims, *_ in _TENSOR.findall(line)
    )
    return ModelSignature(
        name="m",
        version="1",
        platform="python",
        max_batch_size=int(line.split()[0]),
        inputs=inputs,
        outputs=tuple(TensorSpec(name, "FP32", (-1,)) for name in outputs.split()),
    )


def call_of(case: Case) -> InferCall:
    """The call of a case."""
    (line,) = case.starting_with("call")
    inputs = {}
    for name, _, datatype, shape, num_bytes, data in _TENSOR.findall(line):
        dims = tuple(json.loads(shape))
        zeros = bytes(int(num_bytes or max(0, num_elements(dims)) * ITEMSIZE_BYTES.get(datatype, 4) * (not data)))
        inputs[name] = WireTensor(datatype, dims, bytes.fromhex(data) or zeros)
    asked = [RequestedOutput(name, {}) for names in case.starting_with("asked") for name in names.split()]
    return InferCall("m", request_id="".join(case.starting_with("id")), inputs=inputs, outputs=tuple(asked))


@pytest.mark.parametrize("case", read_cases(Path(__file__).with_name("validation.txt")), ids=lambda case: case.name)
def test_call_of_a_model(case: Case) -> None:
    """A call has its rows or is refused with its text; one that fits without looking at the text stays one."""
    model, call = signature_of(case), call_of(case)
    if rows := case.starting_with("rows"):
        assert int(rows[0]) == validate(call, model)
        return
    (text,) = case.starting_with("refused")
    with pytest.raises(InvalidArgumentError) as caught:
        validate(call, model)
    assert text.removesuffix("$") in caught.value.message
    assert caught.value.message.startswith("[request id: ")
    assert not text.endswith("$") or caught.value.message.endswith(text.removesuffix("$"))


def test_a_requested_output_without_a_name_is_none() -> None:
    """It is told like one that the model does not have."""
    model = ModelSignature("m", "1", "python", 8, (), (TensorSpec("y", "FP32", (-1,)),))
    with pytest.raises(InvalidArgumentError, match="unexpected inference output '' for model 'm'; it has y"):
        validate(InferCall("m", outputs=(RequestedOutput("y", {}), RequestedOutput("", {}))), model)


DIM = st.one_of(st.integers(-2, 20), st.sampled_from([2**31, 2**62, 2**63 - 1]))


@given(st.lists(DIM, max_size=4), st.integers(0, 200), st.integers(0, 9), st.sampled_from(["FP32", "BYTES"]))
def test_only_consistent_tensors_pass(shape, num_bytes, max_batch_size, datatype):
    """Whatever passes has no negative dimension and exactly the bytes of its shape; all else is INVALID_ARGUMENT."""
    model = ModelSignature("m", "1", "python", max_batch_size, (TensorSpec("x", datatype, (-1, -1)),), ())
    try:
        rows = validate(InferCall("m", inputs={"x": WireTensor(datatype, tuple(shape), bytes(num_bytes))}), model)
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
