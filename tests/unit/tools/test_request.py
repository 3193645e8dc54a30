"""Values of the command line as tensors."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from weft.base.errors import InvalidArgumentError
from weft.base.signature import TensorSpec
from weft.base.tensors import decode, split_bytes
from weft.tools.request import build_inputs, content_of, parameter_value, tensor_from_json

TEXT = TensorSpec("TEXT", "BYTES", (-1, 1))
NAME = TensorSpec("NAME", "BYTES", (1,))
FLOATS = TensorSpec("X", "FP32", (-1, 3))


@pytest.mark.parametrize(
    ("spec", "text", "shape", "values"),
    [
        (FLOATS, "[1, 2.5, 3]", (1, 3), [[1, 2.5, 3]]),
        (FLOATS, "[[1, 2, 3], [4, 5, 6]]", (2, 3), [[1, 2, 3], [4, 5, 6]]),
        (TensorSpec("N", "INT64", (-1, 1)), "7", (1, 1), [[7]]),
        (TensorSpec("N", "INT64", (1,)), "7", (1,), [7]),
        (TensorSpec("B", "BOOL", (2,)), "[true, false]", (2,), [True, False]),
        (TEXT, '"hello"', (1, 1), [[b"hello"]]),
        (TEXT, '[["a"], ["b"]]', (2, 1), [[b"a"], [b"b"]]),
    ],
)
def test_json_becomes_a_tensor_that_fits(
    spec: TensorSpec, text: str, shape: tuple[int, ...], values: list[object]
) -> None:
    """Leading dimensions of 1 are added; datatype and values are those of the input."""
    tensor = tensor_from_json(spec, text)
    assert (tensor.datatype, tensor.shape) == (spec.datatype, shape)
    assert decode(tensor).tolist() == values


@pytest.mark.parametrize(
    ("spec", "text", "message"),
    [
        (FLOATS, "[1, 2]", r"shape \[2\], which does not fit \[-1, 3\]"),
        (FLOATS, "[[[1, 2, 3]]]", r"shape \[1, 1, 3\]"),
        (FLOATS, '["a", "b", "c"]', "does not fit FP32"),
        (FLOATS, "[[1, 2, 3], [4]]", "does not fit FP32"),
        (FLOATS, "{", "is no JSON"),
        (FLOATS, "null", "does not fit FP32"),
        (TensorSpec("N", "INT32", (1,)), "1.5", "does not fit INT32"),
        (TensorSpec("N", "UINT8", (1,)), "256", "does not fit UINT8"),
        (TensorSpec("B", "BOOL", (1,)), "1", "does not fit BOOL"),
        (TEXT, "hello", "quote text twice"),
        (TEXT, "5", "takes text, got 5"),
    ],
)
def test_a_value_that_does_not_fit_is_refused(spec: TensorSpec, text: str, message: str) -> None:
    """A wrong value is an error before anything is sent; nothing is rounded or cut."""
    with pytest.raises(InvalidArgumentError, match=message):
        tensor_from_json(spec, text)


def test_text_fills_the_one_open_bytes_input() -> None:
    """The element goes to the BYTES input that has no value of its own; the model's order is kept."""
    inputs = build_inputs([TEXT, NAME], {"NAME": '"x"'}, {"": [b"hello"]})
    assert list(inputs) == ["TEXT", "NAME"]
    assert inputs["TEXT"].shape == (1, 1)
    assert split_bytes(inputs["TEXT"].data) == [b"hello"]


def test_elements_with_a_name_leave_the_other_inputs_open() -> None:
    """What is named goes to its input, what is not to the one that is left; an input may also stay empty."""
    inputs = build_inputs([TEXT, NAME], {}, {"NAME": [b"x"], "": [b"one", b"two"]})
    assert {"TEXT": [b"one", b"two"], "NAME": [b"x"]} == {n: split_bytes(t.data) for n, t in inputs.items()}
    assert ["NAME"] == list(build_inputs([TEXT, NAME], {}, {"NAME": [b"x"]}))


def test_text_fills_the_input_that_must_be_given() -> None:
    """Optional inputs stay open; where all are optional it is `text_input`."""
    prompt, options = TensorSpec("text_input", "BYTES", (1,)), TensorSpec("OPTIONS", "BYTES", (1,), is_optional=True)
    for spec in (prompt, replace(prompt, is_optional=True)):
        assert ["text_input"] == list(build_inputs([options, spec], {}, {"": [b"hello"]}))
    assert ["OPTIONS"] == list(build_inputs([options], {}, {"": [b"hello"]}))


@pytest.mark.parametrize(("dims", "shape"), [((-1, 1), (3, 1)), ((-1,), (3,)), ((1, -1), (1, 3))])
def test_several_elements_are_rows_where_the_shape_allows(dims: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Three texts are a batch of three rows, or the last dimension if that one is free."""
    inputs = build_inputs([TensorSpec("T", "BYTES", dims)], {}, {"": [b"a", b"b", b"c"]})
    assert inputs["T"].shape == shape


@pytest.mark.parametrize(
    ("specs", "named", "elements", "message"),
    [
        ([FLOATS], {"Y": "1"}, {}, r"no input 'Y'; the inputs are X FP32\[-1, 3\]"),
        ([FLOATS], {}, {"Y": [b"a"]}, r"no input 'Y'; the inputs are X FP32\[-1, 3\]"),
        ([FLOATS], {}, {"X": [b"a"]}, "input 'X' is FP32; give it with --input X=JSON"),
        ([FLOATS], {}, {"": [b"a"]}, "no BYTES input is open"),
        ([TEXT, NAME], {}, {"": [b"a"]}, "2 BYTES inputs are open; use --file NAME=PATH"),
        ([TEXT], {"TEXT": '"a"'}, {"": [b"a"]}, "no BYTES input is open"),
        ([TEXT], {}, {"TEXT": [b"a"], "": [b"a"]}, "no BYTES input is open"),
        ([TEXT], {"TEXT": '"a"'}, {"TEXT": [b"a"]}, "input 'TEXT' is given twice"),
        ([TensorSpec("T", "BYTES", (1,))], {}, {"": [b"a", b"b"]}, "does not fit"),
    ],
)
def test_an_open_question_is_an_error(
    specs: list[TensorSpec], named: dict[str, str], elements: dict[str, list[bytes]], message: str
) -> None:
    """Unknown names and text without exactly one place for it are refused, with the inputs named."""
    with pytest.raises(InvalidArgumentError, match=message):
        build_inputs(specs, named, elements)


def test_a_value_may_stand_in_a_file(tmp_path: Path) -> None:
    """@FILE is the text of the file; what is no text cannot be JSON."""
    (tmp_path / "x.json").write_text("[1, 2, 3]")
    (tmp_path / "x.png").write_bytes(b"\x89PNG")
    assert "[1, 2, 3]" == content_of(f"@{tmp_path}/x.json")
    assert "5" == content_of("5")
    with pytest.raises(InvalidArgumentError, match="is no UTF-8 text; write the value as JSON"):
        content_of(f"@{tmp_path}/x.png")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5),
        ("0.5", 0.5),
        ("true", True),
        ("care", "care"),
        ('"5"', '"5"'),
        ("[1]", "[1]"),
        ("", ""),
        ("null", "null"),
    ],
)
def test_parameter_values_are_what_json_says_or_text(text: str, value: object) -> None:
    """Numbers and booleans are read as such; everything else stays the text it is."""
    parsed = parameter_value(text)
    assert (parsed, type(parsed)) == (value, type(value))


def test_a_missing_value_leaves_the_input_out() -> None:
    """What may be optional is left to the server to judge."""
    assert build_inputs([FLOATS], {}, {}) == {}
    np.testing.assert_array_equal(decode(build_inputs([FLOATS, TEXT], {"X": "[1,2,3]"}, {})["X"]), [[1, 2, 3]])


def test_nesting_without_end_is_told() -> None:
    """A value that is nested deeper than JSON can be read is refused as an input, and plain text as a parameter."""
    deep = "[" * 200_000
    with pytest.raises(InvalidArgumentError, match="is no JSON"):
        tensor_from_json(FLOATS, deep)
    assert parameter_value(deep) == deep
