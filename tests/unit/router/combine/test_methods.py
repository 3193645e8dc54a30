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

REDUCTIONS = ("AVERAGE", "SUM", "MEDIAN", "MIN", "MAX")
NUMERIC = ["FP16", "BF16", "FP32", "FP64", *(f"{sign}INT{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64))]


def ints(*values: int, shape: tuple[int, ...] | None = None, dtype: type = np.int64) -> WireTensor:
    return encode(np.asarray(values, dtype).reshape(shape or (len(values), 1)))


def numbers(datatype: str, *values: float) -> WireTensor:
    return encode(np.array(values, NUMPY_BY_DATATYPE[datatype]))


def combined(name: str, tensors: Sequence[WireTensor], weights: Sequence[float] = (), axis: int = 0) -> WireTensor:
    return METHODS[name].combine(tensors, weights or [1.0] * len(tensors), CombineSettings(axis))


def values(name: str, tensors: Sequence[WireTensor], weights: Sequence[float] = ()) -> Any:
    """What a method makes, as a list."""
    return decode(combined(name, tensors, weights)).tolist()


def voted(*tensors: WireTensor, weights: Sequence[float] = (), **settings: bool) -> WireTensor:
    vote, given = METHODS["VOTE"], CombineSettings(**settings)
    return vote.combine(tensors, vote.weights(weights or (1.0,) * len(tensors), given), given)


def test_every_method_of_the_language_is_there() -> None:
    """The table has the names of the enum in ``graph.proto``, in its order."""
    assert graph_pb2.Combine.Method.keys() == list(METHODS)


PAIR = [ints(1, 2, shape=(2,)), ints(3, 4, shape=(2,)), ints(3, 4, shape=(2,))]
ROW = [ints(1, 2, shape=(1, 2)), ints(1, 3, shape=(1, 2)), ints(4, 3, shape=(1, 2))]
TEXTS = [make.text(*words, shape=(2, 1)) for words in (("cat", "x"), ("tiger", ""), ("cat", ""))]


@pytest.mark.parametrize(
    ("ballots", "options", "winner"),
    [
        # Each row is voted on its own; one of several elements is one vote; strings keep their framing.
        ([ints(1, 2, 9), ints(1, 9, 3), ints(9, 2, 3)], {}, ints(1, 2, 3)),
        (ROW, {}, ROW[0]),
        (TEXTS, {}, make.text("cat", "", shape=(2, 1))),
        # Without batching the whole tensor is one row; no rows, no votes.
        (PAIR, {"is_batching": False}, PAIR[1]),
        ([WireTensor("INT64", (0, 1), b"")] * 2, {}, WireTensor("INT64", (0, 1), b"")),
        # A tie goes to the higher sum of weights, then to the value declared first; the counts go before.
        ([ints(5), ints(7)], {"weights": (1, 2)}, ints(7)),
        ([ints(5), ints(7), ints(5)], {"weights": (1, 9, 1)}, ints(5)),
        ([ints(5), ints(7)], {}, ints(5)),
        # A weighted vote counts weights, not heads; 0.1 and 0.2 make 0.3, which they do not in binary floating point.
        ([ints(5), ints(7), ints(7)], {"weights": (3, 1, 1), "is_weighted": True}, ints(5)),
        ([ints(5), ints(7), ints(7)], {"weights": (2, 1, 1), "is_weighted": True}, ints(5)),
        ([ints(5), ints(7), ints(7)], {"weights": (0.3, 0.1, 0.2), "is_weighted": True}, ints(5)),
        ([ints(7), ints(7), ints(5)], {"weights": (0.1, 0.2, 0.3), "is_weighted": True}, ints(7)),
    ],
)
def test_a_vote_has_a_winner(ballots: list[WireTensor], options: dict[str, Any], winner: WireTensor) -> None:
    """The value that most voters, or the heaviest, have given."""
    assert winner == voted(*ballots, **options)


def test_a_unanimous_vote_returns_the_first_tensor_itself() -> None:
    """Nothing is decoded or copied."""
    first, second = ints(1, 2), ints(1, 2)
    assert voted(first, second) is first


@given(st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=1, max_size=5))
def test_a_vote_agrees_with_counting(ballots: list[list[int]]) -> None:
    """For any ballots the winner has the most votes, the first declared among equals."""
    rows = zip(*ballots, strict=True)
    expected = [max(row, key=lambda value, row=row: (row.count(value), -row.index(value))) for row in rows]
    assert expected == decode(voted(*(ints(*ballot) for ballot in ballots))).ravel().tolist()


@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=5))
def test_ballot_weights_keep_the_proportions(weights: list[float]) -> None:
    """They are whole numbers as far apart as the weights."""
    ballots = METHODS["VOTE"].weights(weights, CombineSettings())
    assert all(isinstance(ballot, int) for ballot in ballots)
    assert [pytest.approx(weight / weights[0]) for weight in weights] == [ballot / ballots[0] for ballot in ballots]


@pytest.mark.parametrize("datatype", NUMERIC)
def test_reductions_agree_with_python(datatype: str) -> None:
    """Of each element, in the datatype of the members; an average of integers is rounded to the nearest."""
    tensors = [numbers(datatype, *row) for row in zip((1, 7, 3), (20, 10, 30), (5, 5, 5), (1, 2, 2), strict=True)]
    mean = 2 if "INT" in datatype else pytest.approx(5 / 3, rel=1e-2)
    for name, expected in (
        ("SUM", [11, 60, 15, 5]),
        ("MEDIAN", [3, 20, 5, 2]),
        ("MIN", [1, 10, 5, 1]),
        ("MAX", [7, 30, 5, 2]),
        ("AVERAGE", [pytest.approx(11 / 3, rel=1e-2) if mean != 2 else 4, 20, 5, mean]),
    ):
        result = combined(name, tensors)
        assert (datatype, expected) == (result.datatype, decode(result).astype(np.float64).tolist())


@pytest.mark.parametrize("datatype", [name for name in NUMERIC if "INT" in name])
def test_integers_stay_within_their_limits(datatype: str) -> None:
    """A sum too large is the largest integer, one too small the smallest; nothing wraps round."""
    limits = np.iinfo(NUMPY_BY_DATATYPE[datatype])
    pair = [numbers(datatype, limits.min, limits.max)] * 2
    assert [limits.min, limits.max] == values("SUM", pair) == values("MEDIAN", pair)
    smallest, largest = values("AVERAGE", [*pair, pair[0]])
    assert limits.min <= smallest <= limits.min + 2
    assert 0 <= int(limits.max) - largest <= 2


INF, HALF_MAX, FLOAT_MAX = math.inf, 65504.0, float(np.finfo(np.float32).max)


@pytest.mark.parametrize(
    ("name", "tensors", "weights", "expected"),
    [
        # Averages and sums may be weighted: 2 x 1 + 1 x 4 over 3, 3 x 1 + 0.5 x 4.
        ("AVERAGE", [numbers("FP32", 1.0), numbers("FP32", 4.0)], (2.0, 1.0), [2.0]),
        ("SUM", [numbers("FP32", 1.0), numbers("FP32", 4.0)], (3.0, 0.5), [5.0]),
        # Half precision is accumulated in single: the sum of two of its largest would not fit, their mean does.
        ("AVERAGE", [numbers("FP16", HALF_MAX)] * 2, (), [HALF_MAX]),
        ("SUM", [numbers("FP16", HALF_MAX)] * 2, (), [INF]),
        # Sums of large integers are exact, where FP64 would lose the ones.
        *(
            ("SUM", [numbers(datatype, 2**60 + 1), numbers(datatype, 2**60 + 2)], (), [2**61 + 3])
            for datatype in ("INT64", "UINT64")
        ),
        # Halves are rounded to even, as numpy and IEEE 754 round.
        *(
            (name, [ints(2, 3, -2, -3, shape=(4,)), ints(3, 4, -3, -4, shape=(4,))], (), [2, 4, -2, -4])
            for name in ("AVERAGE", "MEDIAN")
        ),
        # An infinity stays.
        ("AVERAGE", [numbers("FP32", INF), numbers("FP32", 1.0)], (), [INF]),
        # The median of an even number is the mean of the middle two; of equal values it is that value.
        ("MEDIAN", [numbers("FP32", value) for value in (9.0, 2.0, -7.0, 3.0)], (), [2.5]),
        ("MEDIAN", [numbers("FP32", FLOAT_MAX)], (), [FLOAT_MAX]),
        ("MEDIAN", [numbers("FP32", FLOAT_MAX)] * 2, (), [FLOAT_MAX]),
        # BOOL has a smallest and a largest: all, or any.
        *(
            (name, [WireTensor("BOOL", (3,), b"\0\0\1"), WireTensor("BOOL", (3,), b"\0\1\1")], (), expected)
            for name, expected in (("MIN", [False, False, True]), ("MAX", [False, True, True]))
        ),
    ],
)
def test_a_reduction_is_exact(name: str, tensors: list[WireTensor], weights: tuple[float, ...], expected: Any) -> None:
    """As far as the datatype can hold it."""
    assert expected == values(name, tensors, weights)


@pytest.mark.parametrize("datatype", ["FP16", "BF16", "FP32", "FP64"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_nan_of_any_member_is_the_result(datatype: str, place: int) -> None:
    """In its element alone, whichever member has it, and without a warning; so is the mean of opposite infinities."""
    rows = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    rows[place][0] = math.nan
    tensors = [numbers(datatype, *row) for row in rows]
    arrays = [decode(combined(name, tensors)).astype(np.float64) for name in REDUCTIONS]
    assert [True] * 5 == [math.isnan(array[0]) for array in arrays]
    assert [4.0, 12.0, 4.0, 2.0, 6.0] == [array[1] for array in arrays]
    assert math.isnan(values("AVERAGE", [numbers("FP32", INF), numbers("FP32", -INF)])[0])


@pytest.mark.parametrize("shape", [(), (0, 3), (1, 2)])
def test_every_shape_can_be_reduced(shape: tuple[int, ...]) -> None:
    """A scalar, an empty batch, a single row."""
    tensor = encode(np.ones(shape, np.float32))
    assert all(tensor == combined(name, [tensor, tensor]) for name in REDUCTIONS if name != "SUM")


@pytest.mark.parametrize("name", REDUCTIONS)
def test_what_is_no_number_is_not_reduced(name: str) -> None:
    """The loader refuses it; the executor does too."""
    with pytest.raises(InternalError, match=f"{name} needs a numeric datatype.*, got BYTES"):
        combined(name, [bytes_tensor(["a"], (1,))] * 2)
    if name in ("AVERAGE", "SUM", "MEDIAN"):
        with pytest.raises(InternalError, match=f"{name} needs a numeric datatype, got BOOL"):
            combined(name, [WireTensor("BOOL", (1,), b"\x01")] * 2)


@pytest.mark.parametrize(
    ("other", "text"), [(ints(1, dtype=np.int32), "INT32[1, 1]"), (ints(1, 2), "INT64[2, 1]")], ids=["datatype", "rows"]
)
@pytest.mark.parametrize("name", [*REDUCTIONS, "VOTE", "STACK", "CUSTOM"])
def test_tensors_that_differ_are_not_combined(name: str, other: WireTensor, text: str) -> None:
    """Neither in datatype nor in the number of rows; the message has both."""
    pair = [ints(1), other]
    with pytest.raises(InternalError, match=re.escape(f"differ in datatype or shape: INT64[1, 1], {text}")):
        stack_with_mask(pair, is_batching=True) if name == "CUSTOM" else combined(name, pair)


@given(st.sampled_from(NUMERIC), st.integers(0, 2**32 - 1), st.integers(1, 5))
def test_random_numbers_reduce_as_numpy_does(datatype: str, seed: int, num_members: int) -> None:
    """Limits, infinities and NaN among them; floating point within its precision, integers after saturation."""
    dtype, draw = NUMPY_BY_DATATYPE[datatype], np.random.default_rng(seed)
    if "INT" not in datatype:
        arrays = draw.choice([0.0, 1.5, -3.25, 100.0, np.inf, np.nan], (num_members, 2, 3)).astype(dtype)
        low, high = -np.inf, np.inf
    else:
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        arrays = draw.choice(np.array([low, high, 0, 1, 7, 100], dtype), (num_members, 2, 3))
    exact = arrays.astype(np.longdouble)
    with np.errstate(invalid="ignore"), warnings.catch_warnings(action="ignore"):
        expected = [exact.mean(0), exact.sum(0), np.median(exact, 0), exact.min(0), exact.max(0)]
    members = [encode(array) for array in arrays]
    if "INT" in datatype:
        expected = [np.rint(one).clip(low, high) for one in expected]
    rtol = {"BF16": 1e-2, "FP16": 1e-3}.get(datatype, 1e-6)
    for name, wanted in zip(REDUCTIONS, expected, strict=True):
        np.testing.assert_allclose(decode(combined(name, members)).astype(np.longdouble), wanted, rtol=rtol)


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_concat_agrees_with_numpy(axis: int) -> None:
    """For every axis, and sizes that differ along it."""
    shape = [2, 3, 4]
    arrays = []
    for size in (1, 2, 5):
        shape[axis] = size
        arrays.append(np.arange(math.prod(shape), dtype=np.float32).reshape(shape))
    result = combined("CONCAT", [encode(array) for array in arrays], axis=axis)
    np.testing.assert_array_equal(np.concatenate(arrays, axis), decode(result))


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
@pytest.mark.parametrize("num_rows", [0, 1, 2])
def test_stack_agrees_with_numpy(axis: int, num_rows: int) -> None:
    """For every axis of the result, counted from either end."""
    arrays = [np.arange(num_rows * 3, dtype=np.float32).reshape(num_rows, 3) + member for member in range(4)]
    result = combined("STACK", [encode(array) for array in arrays], axis=axis)
    assert result == encode(np.stack(arrays, axis))


AB, CD = make.text("a", "bb", shape=(2, 1)), make.text("", "dddd", shape=(2, 1))


@pytest.mark.parametrize(
    ("name", "axis", "expected", "shape"),
    [
        ("CONCAT", 0, ("a", "bb", "", "dddd"), (4, 1)),
        ("CONCAT", 1, ("a", "", "bb", "dddd"), (2, 2)),
        ("STACK", 1, ("a", "", "bb", "dddd"), (2, 2, 1)),
    ],
)
def test_strings_are_laid_side_by_side(name: str, axis: int, expected: tuple[str, ...], shape: Any) -> None:
    """Elements of any length keep their framing, in row-major order of the whole."""
    assert make.text(*expected, shape=shape) == combined(name, [AB, CD], axis=axis)


@pytest.mark.parametrize(
    ("name", "other", "axis", "message"),
    [
        ("CONCAT", ints(1, 2, shape=(1, 2)), 0, "do not fit"),
        ("CONCAT", ints(1, 2, dtype=np.int32), 0, "do not fit"),
        ("CONCAT", ints(1, 2), 2, "no such axis"),
        ("CONCAT", ints(1, 2), -3, "no such axis"),
        ("STACK", ints(1, 2), 3, r"STACK along axis 3 of tensors of shape \[2, 1\]; the result has no such axis"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(name: str, other: WireTensor, axis: int, message: str) -> None:
    """Other datatypes, other sizes elsewhere, or an axis that is not there."""
    with pytest.raises(InternalError, match=message):
        combined(name, [ints(1, 2), other], axis=axis)


@pytest.mark.parametrize("is_batching", [True, False])
def test_absent_members_leave_gaps_and_the_mask_shows_them(is_batching: bool) -> None:
    """The members' axis follows that of the rows, or leads; a gap is zeros, or empty strings."""
    stacked, mask = stack_with_mask([None, ints(1, 2), None], is_batching=is_batching)
    expected = [[0, 1, 0], [0, 2, 0]] if is_batching else [[0, 0], [1, 2], [0, 0]]
    assert ((2, 3, 1) if is_batching else (3, 2, 1)) == stacked.shape
    assert expected == decode(stacked)[:, :, 0].tolist()
    assert ([[False, True, False]] * 2 if is_batching else [False, True, False]) == decode(mask).tolist()
    stacked, _ = stack_with_mask([make.text("a", "b", shape=(1, 2)), None], is_batching=True)
    assert [[[b"a", b"b"], [b"", b""]]] == decode(stacked).tolist()
