"""Votes, averages, concatenations of wire tensors."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft_common.errors import InternalError
from weft_common.tensors import NUMPY_BY_DATATYPE, WireTensor, bytes_tensor, decode, encode
from weft_router.combine import average, concat, vote


def ints(*values: int, shape: tuple[int, ...] | None = None, dtype: type = np.int64) -> WireTensor:
    return encode(np.asarray(values, dtype).reshape(shape or (len(values), 1)))


def voted(*tensors: WireTensor, weights: tuple[float, ...] = (), is_weighted: bool = False) -> WireTensor:
    return vote(tensors, weights or (1.0,) * len(tensors), is_weighted=is_weighted, is_batching=True)


def test_each_row_is_voted_on_its_own() -> None:
    """The majority of each row wins, whichever voters make it."""
    assert ints(1, 2, 3) == voted(ints(1, 2, 9), ints(1, 9, 3), ints(9, 2, 3))


def test_strings_are_voted_like_numbers(make: SimpleNamespace) -> None:
    """BYTES of different lengths keep their framing."""
    tensors = [
        make.text("cat", "x", shape=(2, 1)),
        make.text("tiger", "", shape=(2, 1)),
        make.text("cat", "", shape=(2, 1)),
    ]
    assert make.text("cat", "", shape=(2, 1)) == voted(*tensors)


def test_a_tie_goes_to_the_higher_sum_of_weights() -> None:
    """One vote each, unweighted: the weights decide after the counts."""
    assert ints(7) == voted(ints(5), ints(7), weights=(1.0, 2.0))
    assert ints(5) == voted(ints(5), ints(7), ints(5), weights=(1.0, 9.0, 1.0))


def test_a_tie_of_weights_goes_to_the_value_declared_first() -> None:
    """Weighted or not, the order of the steps is the last word."""
    assert ints(5) == voted(ints(5), ints(7))
    assert ints(5) == voted(ints(5), ints(7), ints(7), weights=(2.0, 1.0, 1.0), is_weighted=True)


def test_a_weighted_vote_counts_weights_not_heads() -> None:
    """One heavy voter outvotes two light ones."""
    assert ints(5) == voted(ints(5), ints(7), ints(7), weights=(3.0, 1.0, 1.0), is_weighted=True)


def test_a_row_of_several_elements_is_one_vote() -> None:
    """The answer is always a row that some voter gave."""
    rows = [ints(1, 2, shape=(1, 2)), ints(1, 3, shape=(1, 2)), ints(4, 3, shape=(1, 2))]
    assert rows[0] == voted(*rows)


def test_without_batching_the_whole_tensor_is_one_row() -> None:
    """A graph without batch dimension has one row."""
    tensors = [ints(1, 2, shape=(2,)), ints(3, 4, shape=(2,)), ints(3, 4, shape=(2,))]
    assert tensors[1] == vote(tensors, [1, 1, 1], is_weighted=False, is_batching=False)


def test_a_unanimous_vote_returns_the_first_tensor_itself() -> None:
    """Nothing is decoded or copied."""
    first, second = ints(1, 2), ints(1, 2)
    assert voted(first, second) is first


def test_an_empty_batch_has_an_empty_answer() -> None:
    """No rows, no votes."""
    empty = WireTensor("INT64", (0, 1), b"")
    assert empty == voted(empty, empty)


@given(st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=1, max_size=5))
def test_a_vote_agrees_with_counting(ballots: list[list[int]]) -> None:
    """For any ballots the winner has the most votes, the first declared among equals."""
    tensors = [ints(*ballot) for ballot in ballots]
    rows = zip(*ballots, strict=True)
    expected = [max(row, key=lambda value, row=row: (row.count(value), -row.index(value))) for row in rows]
    assert expected == decode(voted(*tensors)).ravel().tolist()


@pytest.mark.parametrize("datatype", ["FP16", "BF16", "FP32", "FP64", "INT8", "UINT8", "INT32", "UINT64"])
def test_an_average_keeps_the_datatype(datatype: str) -> None:
    """Floating point is averaged, integers are rounded to the nearest."""
    dtype = NUMPY_BY_DATATYPE[datatype]
    tensors = [
        encode(np.array([[1, 10]], dtype)),
        encode(np.array([[2, 20]], dtype)),
        encode(np.array([[2, 60]], dtype)),
    ]
    result = average(tensors, [1, 1, 1], is_weighted=False)
    exact = np.array([[5 / 3, 30.0]])
    expected = np.rint(exact) if "INT" in datatype else exact
    assert datatype == result.datatype
    np.testing.assert_allclose(expected, decode(result).astype(np.float64), rtol=1e-2 if "16" in datatype else 1e-6)


@pytest.mark.parametrize("datatype", ["INT8", "UINT8", "INT32", "UINT32", "INT64", "UINT64"])
def test_an_average_of_limits_stays_within_them(datatype: str) -> None:
    """What FP64 rounds up past the largest integer does not wrap round to the smallest."""
    limits = np.iinfo(NUMPY_BY_DATATYPE[datatype])
    tensor = encode(np.array([limits.min, limits.max], NUMPY_BY_DATATYPE[datatype]))
    smallest, largest = decode(average([tensor] * 3, [1, 1, 1], is_weighted=False)).tolist()
    assert limits.min == smallest
    assert 0 <= int(limits.max) - largest <= 2048


def test_a_weighted_average_divides_by_the_sum_of_weights() -> None:
    """2 x 1 + 1 x 4, over 3."""
    tensors = [encode(np.array([1.0], np.float32)), encode(np.array([4.0], np.float32))]
    assert [2.0] == decode(average(tensors, [2.0, 1.0], is_weighted=True)).tolist()
    assert [2.5] == decode(average(tensors, [2.0, 1.0], is_weighted=False)).tolist()


def test_half_precision_is_accumulated_in_single() -> None:
    """65504 is the largest FP16; the sum of two of them would not fit, their mean does."""
    largest = encode(np.array([65504.0], np.float16))
    assert [65504.0] == decode(average([largest, largest], [1, 1], is_weighted=False)).tolist()


@pytest.mark.parametrize("datatype", ["BYTES", "BOOL"])
def test_what_is_no_number_has_no_average(datatype: str) -> None:
    """The loader refuses it; the executor does too."""
    value = bytes_tensor(["a"], (1,)) if datatype == "BYTES" else WireTensor("BOOL", (1,), b"\x01")
    with pytest.raises(InternalError, match=f"AVERAGE needs a numeric datatype, got {datatype}"):
        average([value, value], [1, 1], is_weighted=False)


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_concat_agrees_with_numpy(axis: int) -> None:
    """For every axis, and sizes that differ along it."""
    shape = [2, 3, 4]
    arrays = []
    for size in (1, 2, 5):
        shape[axis] = size
        arrays.append(np.arange(math.prod(shape), dtype=np.float32).reshape(shape))
    result = concat([encode(array) for array in arrays], axis)
    np.testing.assert_array_equal(np.concatenate(arrays, axis), decode(result))


@pytest.mark.parametrize(("axis", "expected"), [(0, ["a", "b", "cc", "d"]), (1, ["a", "cc", "b", "d"])])
def test_strings_are_concatenated_along_any_axis(axis: int, expected: list[str], make: SimpleNamespace) -> None:
    """The elements come in row-major order of the whole."""
    result = concat([make.text("a", "b", shape=(2, 1)), make.text("cc", "d", shape=(2, 1))], axis)
    assert make.text(*expected, shape=(4, 1) if axis == 0 else (2, 2)) == result


@pytest.mark.parametrize(
    ("other", "axis", "message"),
    [
        (ints(1, 2, shape=(1, 2)), 0, "do not fit"),
        (ints(1, 2, dtype=np.int32), 0, "do not fit"),
        (ints(1, 2), 2, "no such axis"),
        (ints(1, 2), -3, "no such axis"),
    ],
)
def test_tensors_that_do_not_fit_are_not_concatenated(other: WireTensor, axis: int, message: str) -> None:
    """Other datatypes, other sizes elsewhere, or an axis that is not there."""
    with pytest.raises(InternalError, match=message):
        concat([ints(1, 2), other], axis)
