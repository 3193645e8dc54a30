"""Outputs that are answered as their best classes."""

import ml_dtypes
import numpy as np
import pytest

from weft.base.classification import MAX_ELEMENTS, best_classes, check_classification, classify
from weft.base.core import InferResult, RequestedOutput
from weft.base.errors import InvalidArgumentError
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import decode, encode

ROWS = np.array([[0.1, 0.7, 0.2], [3.0, -1.0, 3.0]], np.float32)


def texts(tensor):
    """Elements as lists of str."""
    return np.vectorize(bytes.decode, otypes=[object])(decode(tensor)).tolist()


def test_best_first_with_labels():
    """Each row gives its greatest elements, greatest first, as value with six decimals, index and label."""
    expected = [["0.700000:1:dog", "0.200000:2:owl"], ["3.000000:0:cat", "3.000000:2:owl"]]
    assert expected == texts(best_classes("P", encode(ROWS), 2, ("cat", "dog", "owl"), is_batching=True))


def test_classes_without_a_label():
    """Where there is no label, or too few, value and index remain."""
    assert [["0.700000:1", "0.200000:2"]] == texts(best_classes("P", encode(ROWS[:1]), 2, (), is_batching=True))
    assert [["0.700000:1"]] == texts(best_classes("P", encode(ROWS[:1]), 1, ("cat",), is_batching=True))


@pytest.mark.parametrize(
    ("array", "is_batching", "count", "expected"),
    [
        (ROWS, True, 9, (2, 3)),
        (ROWS, False, 9, (6,)),
        (ROWS, False, 4, (4,)),
        (ROWS.reshape(1, 2, 3), True, 4, (1, 4)),
        (np.zeros((0, 3), np.float32), True, 2, (0, 2)),
        (np.float32(1), False, 2, (1,)),
    ],
)
def test_shape(array, is_batching, count, expected):
    """A row is all that is not the batch; a row with fewer elements than asked for gives them all."""
    tensor = best_classes("P", encode(np.asarray(array)), count, (), is_batching=is_batching)
    assert expected == tensor.shape == decode(tensor).shape


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [(np.int8, -128, 127), (np.uint8, 0, 255), (np.int64, -(2**63), 2**63 - 1), (np.uint64, 0, 2**64 - 1)],
)
def test_integers_are_exact(dtype, low, high):
    """The least and the greatest integer are in order, and written in full."""
    array = np.array([[low, high, 1]], dtype)
    assert [[f"{high}:1", "1:2", f"{low}:0"]] == texts(best_classes("P", encode(array), 3, (), is_batching=True))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_every_float_is_ordered(dtype):
    """Infinities are the ends, and NaN is last."""
    array = np.array([[np.nan, -np.inf, 0.5, np.inf]], dtype)
    assert [["inf:3", "0.500000:2", "-inf:1", "nan:0"]] == texts(
        best_classes("P", encode(array), 4, (), is_batching=True)
    )


@pytest.mark.parametrize("array", [np.array([b"a"], object), np.array([True])])
def test_what_has_no_order(array):
    """BYTES and BOOL are refused by name."""
    with pytest.raises(
        InvalidArgumentError, match=r"class result not available for output due to unsupported type .*'P'"
    ):
        best_classes("P", encode(array), 1, (), is_batching=False)


def test_too_many_elements():
    """A row of more than a million elements is refused."""
    with pytest.raises(InvalidArgumentError, match=f"has {MAX_ELEMENTS + 1} elements in a row"):
        best_classes("P", encode(np.zeros(MAX_ELEMENTS + 1, np.uint8)), 1, (), is_batching=False)


@pytest.mark.parametrize("count", [0, -1, True, "3", 1.5])
def test_bad_number_of_classes(count):
    """A number of classes that is no integer above 0 is refused with the value."""
    with pytest.raises(InvalidArgumentError, match="must be an integer above 0"):
        check_classification([RequestedOutput("P", {"classification": count})])


def test_only_what_was_asked_for():
    """Outputs that were not asked for as classes stay tensors; labels are those of the signature."""
    spec = TensorSpec("P", "FP32", (3,), labels=("cat", "dog", "owl"))
    signature = ModelSignature("m", "1", "p", 4, (), (spec, TensorSpec("Q", "FP32", (3,))))
    result = InferResult("m", "1", outputs={"P": encode(ROWS), "Q": encode(ROWS)})
    classify(result, [RequestedOutput("P", {"classification": 1}), RequestedOutput("Q", {})], signature)
    assert ([["0.700000:1:dog"], ["3.000000:0:cat"]], encode(ROWS)) == (
        texts(result.outputs["P"]),
        result.outputs["Q"],
    )
