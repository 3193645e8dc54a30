"""Votes, numbers, concatenations and stacks of wire tensors."""

import math
import re
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.router import make

from weft.base.errors import InternalError
from weft.base.tensors import NUMPY_BY_DATATYPE, WireTensor, bytes_tensor, decode, encode
from weft.router.combine import METHODS, CombineSettings, stack_with_mask
from weft_protos import graph_pb2


def ints(*values: int, shape: tuple[int, ...] | None = None, dtype: type = np.int64) -> WireTensor:
    return encode(np.asarray(values, dtype).reshape(shape or (len(values), 1)))


def combined(name: str, tensors: Sequence[WireTensor], weights: Sequence[float] = (), axis: int = 0) -> WireTensor:
    return METHODS[name].combine(tensors, weights, CombineSettings(axis))


def average(tensors: Sequence[WireTensor], weights: Sequence[float]) -> WireTensor:
    return combined("AVERAGE", tensors, weights)


def total(tensors: Sequence[WireTensor], weights: Sequence[float]) -> WireTensor:
    return combined("SUM", tensors, weights)


def median(tensors: Sequence[WireTensor]) -> WireTensor:
    return combined("MEDIAN", tensors)


def minimum(tensors: Sequence[WireTensor]) -> WireTensor:
    return combined("MIN", tensors)


def maximum(tensors: Sequence[WireTensor]) -> WireTensor:
    return combined("MAX", tensors)


def concat(tensors: Sequence[WireTensor], axis: int) -> WireTensor:
    return combined("CONCAT", tensors, axis=axis)


def stack(tensors: Sequence[WireTensor], axis: int) -> WireTensor:
    return combined("STACK", tensors, axis=axis)


def voted(*tensors: WireTensor, weights: tuple[float, ...] = (), is_weighted: bool = False) -> WireTensor:
    vote, settings = METHODS["VOTE"], CombineSettings(is_weighted=is_weighted)
    return vote.combine(tensors, vote.weights(weights or (1.0,) * len(tensors), settings), settings)


def test_every_method_of_the_language_is_there() -> None:
    """The table has the names of the enum in ``graph.proto``, in its order."""
    assert graph_pb2.Combine.Method.keys() == list(METHODS)


def test_each_row_is_voted_on_its_own() -> None:
    """The majority of each row wins, whichever voters make it."""
    assert ints(1, 2, 3) == voted(ints(1, 2, 9), ints(1, 9, 3), ints(9, 2, 3))


def test_strings_are_voted_like_numbers() -> None:
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
    assert tensors[1] == METHODS["VOTE"].combine(tensors, [1, 1, 1], CombineSettings(is_batching=False))


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
    result = average(tensors, [1, 1, 1])
    exact = np.array([[5 / 3, 30.0]])
    expected = np.rint(exact) if "INT" in datatype else exact
    assert datatype == result.datatype
    np.testing.assert_allclose(expected, decode(result).astype(np.float64), rtol=1e-2 if "16" in datatype else 1e-6)


@pytest.mark.parametrize("datatype", ["INT8", "UINT8", "INT32", "UINT32", "INT64", "UINT64"])
def test_an_average_of_limits_stays_within_them(datatype: str) -> None:
    """What FP64 rounds up past the largest integer does not wrap round to the smallest."""
    limits = np.iinfo(NUMPY_BY_DATATYPE[datatype])
    tensor = encode(np.array([limits.min, limits.max], NUMPY_BY_DATATYPE[datatype]))
    smallest, largest = decode(average([tensor] * 3, [1, 1, 1])).tolist()
    assert limits.min <= smallest <= limits.min + 2
    assert 0 <= int(limits.max) - largest <= 2


def test_a_weighted_average_divides_by_the_sum_of_weights() -> None:
    """2 x 1 + 1 x 4, over 3."""
    tensors = [encode(np.array([1.0], np.float32)), encode(np.array([4.0], np.float32))]
    assert [2.0] == decode(average(tensors, [2.0, 1.0])).tolist()
    assert [2.5] == decode(average(tensors, [1.0, 1.0])).tolist()


def test_half_precision_is_accumulated_in_single() -> None:
    """65504 is the largest FP16; the sum of two of them would not fit, their mean does."""
    largest = encode(np.array([65504.0], np.float16))
    assert [65504.0] == decode(average([largest, largest], [1, 1])).tolist()


@pytest.mark.parametrize("datatype", ["BYTES", "BOOL"])
def test_what_is_no_number_has_no_average(datatype: str) -> None:
    """The loader refuses it; the executor does too."""
    value = bytes_tensor(["a"], (1,)) if datatype == "BYTES" else WireTensor("BOOL", (1,), b"\x01")
    with pytest.raises(InternalError, match=f"AVERAGE needs a numeric datatype, got {datatype}"):
        average([value, value], [1, 1])


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
def test_strings_are_concatenated_along_any_axis(axis: int, expected: list[str]) -> None:
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


def test_weights_that_are_written_as_equal_sums_tie() -> None:
    """0.1 and 0.2 make 0.3, which they do not in binary floating point; the value declared first wins the tie."""
    assert ints(5) == voted(ints(5), ints(7), ints(7), weights=(0.3, 0.1, 0.2), is_weighted=True)
    assert ints(7) == voted(ints(7), ints(7), ints(5), weights=(0.1, 0.2, 0.3), is_weighted=True)


@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=5))
def test_ballot_weights_keep_the_proportions(weights: list[float]) -> None:
    """They are whole numbers as far apart as the weights."""
    ballots = METHODS["VOTE"].weights(weights, CombineSettings())
    assert all(isinstance(ballot, int) for ballot in ballots)
    assert [pytest.approx(weight / weights[0]) for weight in weights] == [ballot / ballots[0] for ballot in ballots]


NUMERIC = ["FP16", "BF16", "FP32", "FP64", *(f"{sign}INT{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64))]


def numbers(datatype: str, *values: float) -> WireTensor:
    return encode(np.array(values, NUMPY_BY_DATATYPE[datatype]))


@pytest.mark.parametrize("datatype", NUMERIC)
def test_reductions_agree_with_python(datatype: str) -> None:
    """Sum, median, smallest and largest of each element, for every numeric datatype."""
    columns = [(1, 7, 3), (20, 10, 30), (5, 5, 5)]
    tensors = [numbers(datatype, *row) for row in zip(*columns, strict=True)]
    for result, expected in [
        (total(tensors, [1, 1, 1]), [11, 60, 15]),
        (median(tensors), [3, 20, 5]),
        (minimum(tensors), [1, 10, 5]),
        (maximum(tensors), [7, 30, 5]),
    ]:
        assert datatype == result.datatype
        assert expected == decode(result).astype(np.float64).tolist()


@pytest.mark.parametrize("datatype", [name for name in NUMERIC if "INT" in name])
def test_integers_stop_at_their_limits(datatype: str) -> None:
    """A sum too large is the largest integer, one too small the smallest; nothing wraps round."""
    limits = np.iinfo(NUMPY_BY_DATATYPE[datatype])
    pair = [numbers(datatype, limits.min, limits.max)] * 2
    assert [2 * limits.min if limits.min == 0 else limits.min, limits.max] == decode(total(pair, [1, 1])).tolist()
    assert [limits.min, limits.max] == decode(median(pair)).tolist()


@pytest.mark.parametrize("datatype", ["INT64", "UINT64"])
def test_sums_of_large_integers_are_exact(datatype: str) -> None:
    """FP64 would lose the ones."""
    tensors = [numbers(datatype, 2**60 + 1), numbers(datatype, 2**60 + 2)]
    assert [2**61 + 3] == decode(total(tensors, [1, 1])).tolist()


def test_halves_are_rounded_to_even() -> None:
    """As numpy and IEEE 754 round: 2.5 is 2, 3.5 is 4, also below zero."""
    tensors = [ints(2, 3, -2, -3, shape=(4,)), ints(3, 4, -3, -4, shape=(4,))]
    expected = [2, 4, -2, -4]
    assert expected == decode(average(tensors, [1, 1])).tolist()
    assert expected == decode(median(tensors)).tolist()


@pytest.mark.parametrize("datatype", ["FP16", "BF16", "FP32", "FP64"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_nan_of_any_member_is_the_result(datatype: str, place: int) -> None:
    """In its element alone, whichever member has it, and without a warning."""
    values = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    values[place][0] = math.nan
    tensors = [numbers(datatype, *row) for row in values]
    ones = [1.0, 1.0, 1.0]
    results = [average(tensors, ones), total(tensors, ones), median(tensors), minimum(tensors), maximum(tensors)]
    arrays = [decode(result).astype(np.float64) for result in results]
    assert [True] * 5 == [math.isnan(array[0]) for array in arrays]
    assert [4.0, 12.0, 4.0, 2.0, 6.0] == [array[1] for array in arrays]


def test_infinities_follow_ieee_754() -> None:
    """One stays; two of opposite signs have no mean; what overflows is infinite."""
    high, low = numbers("FP32", math.inf), numbers("FP32", -math.inf)
    assert [math.inf] == decode(average([high, numbers("FP32", 1.0)], [1, 1])).tolist()
    assert math.isnan(decode(average([high, low], [1, 1]))[0])
    assert [math.inf] == decode(total([numbers("FP16", 65504.0)] * 2, [1, 1])).tolist()


def test_a_sum_may_be_weighted() -> None:
    """3 x 1 + 0.5 x 4."""
    assert [5.0] == decode(total([numbers("FP32", 1.0), numbers("FP32", 4.0)], [3.0, 0.5])).tolist()


def test_the_median_of_an_even_number_is_the_mean_of_the_middle_two() -> None:
    """The outer ones do not matter, in whatever order they come."""
    assert [2.5] == decode(median([numbers("FP32", value) for value in (9.0, 2.0, -7.0, 3.0)])).tolist()


@pytest.mark.parametrize("function", [minimum, maximum])
def test_bool_has_a_smallest_and_a_largest(function: Any) -> None:
    """All, or any."""
    left, right = (WireTensor("BOOL", (3,), data) for data in (b"\x00\x00\x01", b"\x00\x01\x01"))
    assert (b"\x00\x00\x01" if function is minimum else b"\x00\x01\x01") == function([left, right]).data


@pytest.mark.parametrize("shape", [(), (0, 3), (1, 2)])
def test_every_shape_can_be_reduced(shape: tuple[int, ...]) -> None:
    """A scalar, an empty batch, a single row."""
    tensor = encode(np.ones(shape, np.float32))
    pair = [tensor, tensor]
    for result in (average(pair, [1, 1]), median(pair), minimum(pair), maximum(pair)):
        assert tensor == result


@pytest.mark.parametrize("function", [lambda t: total(t, [1, 1]), median, minimum, maximum])
def test_strings_are_no_numbers(function: Any) -> None:
    """The loader refuses it; the executor does too."""
    with pytest.raises(InternalError, match="needs a numeric datatype"):
        function([bytes_tensor(["a"], (1,))] * 2)


@pytest.mark.parametrize(
    ("other", "text"), [(ints(1, dtype=np.int32), "INT32[1, 1]"), (ints(1, 2), "INT64[2, 1]")], ids=["datatype", "rows"]
)
@pytest.mark.parametrize(
    "function",
    [
        lambda t: average(t, [1, 1]),
        lambda t: total(t, [1, 1]),
        median,
        minimum,
        maximum,
        voted,
        lambda t: stack(t, 0),
        lambda t: stack_with_mask(t, is_batching=True),
    ],
)
def test_tensors_that_differ_are_not_combined(function: Any, other: WireTensor, text: str) -> None:
    """Neither in datatype nor in the number of rows; the message has both."""
    pair = [ints(1), other]
    with pytest.raises(InternalError, match=re.escape(f"differ in datatype or shape: INT64[1, 1], {text}")):
        function(*pair) if function is voted else function(pair)


@given(st.sampled_from(NUMERIC), st.integers(0, 2**32 - 1), st.integers(1, 5))
def test_random_numbers_reduce_as_numpy_does(datatype: str, seed: int, num_members: int) -> None:
    """Limits, infinities and NaN among them; floating point within its precision, integers after saturation."""
    dtype, draw = NUMPY_BY_DATATYPE[datatype], np.random.default_rng(seed)
    if "FP" in datatype or "BF" in datatype:
        arrays = draw.choice([0.0, 1.5, -3.25, 100.0, np.inf, np.nan], (num_members, 2, 3)).astype(dtype)
        low, high = -np.inf, np.inf
    else:
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        arrays = draw.choice(np.array([low, high, 0, 1, 7, 100], dtype), (num_members, 2, 3))
    exact = arrays.astype(np.longdouble)
    ones = [1.0] * num_members
    with np.errstate(invalid="ignore"), warnings.catch_warnings(action="ignore"):
        expected = [exact.sum(0), exact.mean(0), np.median(exact, 0), exact.min(0), exact.max(0)]
    members = [encode(array) for array in arrays]
    if "INT" in datatype:
        expected = [np.rint(values).clip(low, high) for values in expected]
    results = [total(members, ones), average(members, ones), median(members), minimum(members), maximum(members)]
    rtol = {"BF16": 1e-2, "FP16": 1e-3}.get(datatype, 1e-6)
    for result, wanted in zip(results, expected, strict=True):
        np.testing.assert_allclose(decode(result).astype(np.longdouble), wanted, rtol=rtol)


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
@pytest.mark.parametrize("num_rows", [0, 1, 2])
def test_stack_agrees_with_numpy(axis: int, num_rows: int) -> None:
    """For every axis of the result, counted from either end."""
    arrays = [np.arange(num_rows * 3, dtype=np.float32).reshape(num_rows, 3) + member for member in range(4)]
    expected = np.stack(arrays, axis)
    result = stack([encode(array) for array in arrays], axis)
    assert expected.shape == result.shape
    np.testing.assert_array_equal(expected, decode(result))


def test_strings_are_stacked() -> None:
    """Elements of any length keep their framing."""
    left, right = make.text("a", "bb", shape=(2, 1)), make.text("", "dddd", shape=(2, 1))
    assert make.text("a", "", "bb", "dddd", shape=(2, 2, 1)) == stack([left, right], 1)


def test_a_stack_has_one_axis_more_than_its_tensors() -> None:
    """Beyond that there is none."""
    with pytest.raises(InternalError, match=r"STACK along axis 3 of tensors of shape \[1, 1\]; the result has no such"):
        stack([ints(1)], 3)


@pytest.mark.parametrize("is_batching", [True, False])
def test_absent_members_leave_gaps_and_the_mask_shows_them(is_batching: bool) -> None:
    """The members' axis follows that of the rows, or leads; a gap is zeros."""
    stacked, mask = stack_with_mask([None, ints(1, 2), None], is_batching=is_batching)
    shape = (2, 3, 1) if is_batching else (3, 2, 1)
    expected = np.array([[0, 1, 0], [0, 2, 0]]) if is_batching else np.array([[0, 0], [1, 2], [0, 0]])
    assert shape == stacked.shape
    assert expected.tolist() == decode(stacked)[:, :, 0].tolist()
    assert ([[False, True, False]] * 2 if is_batching else [False, True, False]) == decode(mask).tolist()


def test_absent_strings_are_empty() -> None:
    """Also where a row has several."""
    stacked, _ = stack_with_mask([make.text("a", "b", shape=(1, 2)), None], is_batching=True)
    assert [[[b"a", b"b"], [b"", b""]]] == decode(stacked).tolist()


def test_the_median_of_equal_values_is_that_value() -> None:
    """Though the sum of the two in the middle would overflow."""
    largest = numbers("FP32", float(np.finfo(np.float32).max))
    assert largest == median([largest])
    assert largest == median([largest, largest])
