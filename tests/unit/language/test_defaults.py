"""Values of outputs whose step gave none."""

import numpy as np
import pytest

from weft.base.tensors import NUMPY_BY_DATATYPE, WireTensor, bytes_tensor, decode, encode
from weft.language import GraphSource
from weft.language.compiler.defaults import default_tensor
from weft.language.syntax.file import GraphReport
from weft.language.syntax.parse import parse_graph
from weft.language.types.signatures import TensorType
from weft.router.operators import KINDS
from weft.router.policies import POLICIES
from weft_protos import graph_pb2 as pb

FILE = parse_graph(GraphSource('name: "g"', "g.pbtxt"), KINDS, POLICIES)


def _type(datatype="FP32", dims=(3,), *, is_batched=False):
    return TensorType(datatype, dims, is_batched, is_optional=False, origin="the model")


def _made(known, **fields):
    """(tensor, codes of what was reported)."""
    report = GraphReport("g.pbtxt")
    tensor = default_tensor(FILE, "default", pb.Default(output="X", **fields), known, report)
    return tensor, [found.code for found in report.diagnostics()]


@pytest.mark.parametrize("datatype", sorted(NUMPY_BY_DATATYPE))
@pytest.mark.parametrize("is_batched", [False, True])
def test_every_datatype_has_a_default(datatype, is_batched):
    """The list for the datatype gives a tensor of it; a batched one has a leading dimension of 1."""
    field = {"BOOL": "boolean", "BYTES": "text"}.get(datatype, "integer" if "INT" in datatype else "number")
    values = {"boolean": [True, False], "text": ["a", ""], "integer": [0, 7], "number": [0.5, -2.0]}[field]
    tensor, codes = _made(_type(datatype, (2,), is_batched=is_batched), **{field: values})
    shape = (1, 2) if is_batched else (2,)
    elements = [value.encode() for value in values] if field == "text" else values  # type: ignore[attr-defined]
    assert [] == codes
    assert (datatype, shape, elements) == (tensor.datatype, tensor.shape, decode(tensor).ravel().tolist())


@pytest.mark.parametrize(
    ("dims", "given", "expected"),
    [((3,), [], (3,)), ((1, 3), [], (1, 3)), ((-1, 3), [1, 3], (1, 3)), ((-1,), [3], (3,))],
)
def test_dims_of_a_default(dims, given, expected):
    """They are those of the output, unless these have a -1: then the default gives them."""
    assert (expected, []) == ((made := _made(_type(dims=dims), number=[1, 2, 3], dims=given))[0].shape, made[1])


@pytest.mark.parametrize("dims", [(1,), (-1,), (-1, 1), (1, 1)])
def test_one_element_needs_no_dims(dims):
    """A single element where every dimension is 1, or may be."""
    assert (1,) * len(dims) == _made(_type(dims=dims), number=[4])[0].shape


def test_an_empty_default():
    """No list, and a dimension of 0: a tensor without elements, where the output's size is free."""
    tensor, codes = _made(_type("BYTES", (-1, 4)), dims=[0, 4])
    assert (WireTensor("BYTES", (0, 4), b""), []) == (tensor, codes)
    assert (None, ["G008"]) == _made(_type(dims=(3,)), dims=[0])
    assert (0, 2**62, 2**62) == _made(_type(dims=(-1, -1, -1)), dims=[0, 2**62, 2**62])[0].shape


@pytest.mark.parametrize(
    ("datatype", "field", "least", "most"),
    [
        ("UINT8", "integer", 0, 255),
        ("INT8", "integer", -128, 127),
        ("UINT16", "integer", 0, 65535),
        ("INT32", "integer", -(2**31), 2**31 - 1),
        ("FP16", "number", -65504, 65504),
        ("FP32", "number", -3.4e38, 3.4e38),
        ("BF16", "number", -3.38e38, 3.38e38),
    ],
)
def test_the_range_of_a_datatype(datatype, field, least, most):
    """The least and the greatest value are held, what is beyond them is an error."""
    assert [] == _made(_type(datatype, (2,)), **{field: [least, most]})[1]
    beyond = 1 if field == "integer" else most
    assert (None, ["G007"]) == _made(_type(datatype, (1,)), **{field: [most + beyond]})
    assert (None, ["G007"]) == _made(_type(datatype, (1,)), **{field: [least - beyond]})


def test_values_that_are_no_numbers():
    """NaN and infinity are values that every floating point datatype holds."""
    for datatype in ("FP16", "BF16", "FP32", "FP64"):
        tensor, codes = _made(_type(datatype, (2,)), number=[float("nan"), float("inf")])
        assert [] == codes
        assert [True, False] == np.isnan(decode(tensor).astype(float)).tolist()


@pytest.mark.parametrize(
    ("known", "fields", "code"),
    [
        (_type(), {}, "G025"),
        (_type(), {"number": [1], "integer": [1]}, "G025"),
        (_type(), {"integer": [1, 2, 3]}, "G007"),
        (_type("INT64"), {"number": [1, 2, 3]}, "G007"),
        (_type("BOOL"), {"text": ["a", "b", "c"]}, "G007"),
        (_type("BYTES"), {"boolean": [True] * 3}, "G007"),
        (_type(), {"number": [1, 2]}, "G008"),
        (_type(), {"number": [1, 2, 3], "dims": [2]}, "G008"),
        (_type(), {"number": [1, 2, 3], "dims": [1, 3]}, "G008"),
        (_type(), {"number": [1, 2, 3], "dims": [-1]}, "G008"),
        (_type(dims=(-1, 3)), {"number": [1, 2, 3]}, "G008"),
        (_type(dims=(-1,)), {"number": [1], "dims": [2**62, 2**62]}, "G008"),
        (_type(dims=(-1,)), {"number": [1], "dims": [2**62]}, "G008"),
    ],
)
def test_what_is_no_default(known, fields, code):
    """Nothing is made of what does not fit the output, and one error says why."""
    assert (None, [code]) == _made(known, **fields)


def test_an_output_of_which_nothing_is_known():
    """The list tells the datatype, and without dims the elements stand in a row."""
    unknown = TensorType.unknown("somewhere")
    assert encode(np.array([1, 2], np.int64)) == _made(unknown, integer=[1, 2])[0]
    assert encode(np.array([[0.5]], np.float32)) == _made(unknown, number=[0.5], dims=[1, 1])[0]
    assert bytes_tensor(["a"], (1,)) == _made(unknown, text=["a"])[0]
