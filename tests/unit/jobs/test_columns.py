"""Columns of a data set as tensors, and answers as columns."""

from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa
import pytest

from weft.base.signature import TensorSpec
from weft.base.tensors import decode
from weft.jobs.layout import read_column, write_column

NUMBERS = TensorSpec("X", "INT32", (2,))
TEXT = TensorSpec("T", "BYTES", (1,))


@pytest.mark.parametrize(
    "column",
    [
        [[1, 2], [3, 4]],
        pa.array([[1, 2], [3, 4]], pa.list_(pa.int32())),
        pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2)),
        pa.array([[1, 2], [3, 4]], pa.large_list(pa.int64())),
        pa.chunked_array([pa.array([[1, 2]], pa.list_(pa.int32())), pa.array([[3, 4]], pa.list_(pa.int32()))]),
        pa.array([[0, 0], [1, 2], [3, 4]], pa.list_(pa.int32())).slice(1),
        pa.array([[0, 0], [1, 2], [3, 4]], pa.list_(pa.int32(), 2)).slice(1),
    ],
)
def test_lists_of_every_kind_are_rows(column: Any) -> None:
    """Python lists, Arrow's three kinds of lists, chunks and slices give the same tensor."""
    rows = read_column(NUMBERS, column, is_text=False)
    assert not rows.faults
    assert decode(rows.tensor([0, 1])).tolist() == [[1, 2], [3, 4]]
    assert decode(rows.tensor([1])).tolist() == [[3, 4]]


@pytest.mark.parametrize(
    ("spec", "value", "message"),
    [
        (NUMBERS, None, "'X' has no value"),
        (NUMBERS, [1, 2, 3], "'X' has shape [3], which does not fit [2]: [1, 2, 3]"),
        (NUMBERS, [1, 2.5], "'X' does not fit INT32: [1, 2.5]"),
        (NUMBERS, [1, [2]], "'X' does not fit INT32: [1, [2]]"),
        (NUMBERS, ["1", "2"], "'X' does not fit INT32: ['1', '2']"),
        (NUMBERS, [True, False], "'X' does not fit INT32: [True, False]"),
        (NUMBERS, [0, 2**31], "'X' does not fit INT32, which holds -2147483648 to 2147483647: [0, 2147483648]"),
        (NUMBERS, [0, 2**70], "'X' does not fit INT32"),
        (TEXT, 5, "'T' takes text, got 5"),
        (TEXT, "\ud800", "'T' is not UTF-8 text"),
        (TensorSpec("B", "BOOL", (1,)), 1, "'B' does not fit BOOL: 1"),
    ],
)
def test_a_value_that_does_not_fit_fails_its_row_alone(spec: TensorSpec, value: Any, message: str) -> None:
    """The message names the input, what it takes and the value; the other rows keep theirs."""
    good: Any = "x" if spec.datatype == "BYTES" else True if spec.datatype == "BOOL" else [1, 2]
    rows = read_column(spec, [good, value, good], is_text=False)
    assert list(rows.faults) == [1]
    assert message in rows.faults[1]
    assert decode(rows.tensor([0, 2])).shape == (2, *spec.dims)


def test_rows_of_arrow_with_a_missing_value_are_read_one_by_one() -> None:
    """A null in a column of numbers fails its row and no other."""
    rows = read_column(TensorSpec("X", "FP32", (1,)), pa.array([1.5, None, 2.5], pa.float32()), is_text=False)
    assert list(rows.faults) == [1]
    assert decode(rows.tensor([0, 2])).tolist() == [[1.5], [2.5]]


def test_cells_of_text_are_json_for_numbers_and_text_for_text() -> None:
    """A cell of CSV is a number or list in JSON, or the text itself; other text fails its row."""
    rows = read_column(NUMBERS, ["[1, 2]", "one"], is_text=True)
    assert rows.faults == {1: "'X': 'one' is no JSON"}
    assert decode(read_column(TEXT, ["[1, 2]"], is_text=True).tensor([0])).tolist() == [[b"[1, 2]"]]


def test_rows_of_several_shapes_keep_their_own() -> None:
    """Where the input allows any size, each row has its own shape."""
    rows = read_column(TensorSpec("X", "INT32", (-1,)), [[1], [1, 2]], is_text=False)
    assert [rows.shape(row) for row in (0, 1)] == [(1,), (2,)]


@pytest.mark.parametrize(
    ("spec", "values", "expected"),
    [
        (TensorSpec("Y", "FP32", (1,)), [[1.5], [2.5]], [1.5, 2.5]),
        (TensorSpec("Y", "INT64", (2, 2)), [[[1, 2], [3, 4]], [[5, 6], [7, 8]]], None),
        (TensorSpec("Y", "INT32", (-1,)), [[1], [2, 3], []], None),
        (TensorSpec("Y", "INT32", (-1, 2)), [[[1, 2]], [[3, 4], [5, 6]]], None),
        (TensorSpec("Y", "BOOL", (2,)), [[True, False]], None),
        (TensorSpec("Y", "FP16", (2,)), [[1.0, 2.0]], None),
    ],
)
def test_answers_are_lists_nested_as_their_shape(spec: TensorSpec, values: Any, expected: Any) -> None:
    """One element a row is a plain value; other outputs are lists, also where the rows differ in shape."""
    from weft.base.tensors import NUMPY_BY_DATATYPE

    arrays = [np.array(value, NUMPY_BY_DATATYPE[spec.datatype]) for value in values]
    assert write_column(spec, arrays, is_binary=False).to_pylist() == (values if expected is None else expected)


def test_answers_without_a_value_are_null() -> None:
    """A row whose optional output is left out has a null."""
    spec = TensorSpec("Y", "FP32", (2,), is_optional=True)
    assert write_column(spec, [np.ones(2, np.float32), None], is_binary=False).to_pylist() == [[1.0, 1.0], None]


def test_bfloat16_becomes_float32() -> None:
    """Arrow has no bfloat16; its values are those of float32."""
    column = write_column(TensorSpec("Y", "BF16", (1,)), [np.array([1.5], ml_dtypes.bfloat16)], is_binary=False)
    assert (column.type, column.to_pylist()) == (pa.float32(), [1.5])
