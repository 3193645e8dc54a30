"""Batches put together and taken apart, without a model."""

import numpy as np
import pytest

from weft.base.core import CallContext, InferCall
from weft.base.errors import InternalError
from weft.base.signature import ModelSignature, TensorSpec
from weft.serving.backends.layout import BatchInput, BatchLayout, file_signature, make_gatherer
from weft.serving.queues.settings import LengthBuckets
from weft.serving.request.request import InferenceRequest

IDS = TensorSpec("IDS", "INT64", (-1,))
MASK = TensorSpec("MASK", "INT32", (-1,), is_optional=True)
FIXED = TensorSpec("FIXED", "FP32", (2,))
HIDDEN = TensorSpec("HIDDEN", "FP32", (-1, 3))
POOLED = TensorSpec("POOLED", "FP32", (3,))
PAIRS = TensorSpec("PAIRS", "FP32", (-1, -1))


def _signature(inputs, outputs, max_batch_size=8):
    return ModelSignature("m", "1", "", max_batch_size, inputs, outputs)


def _members(*inputs):
    """Members by their inputs; the rows are those of the first one."""
    return [
        (InferenceRequest(InferCall("m"), CallContext(), len(next(iter(arrays.values())))), arrays) for arrays in inputs
    ]


def _ids(rows, length, start=1):
    return np.arange(start, start + rows * length, dtype=np.int64).reshape(rows, length)


def _lists(arrays):
    return {name: array.tolist() for name, array in arrays.items()}


BUCKETS = LengthBuckets((8,), {"IDS": -5, "MASK": 0}, "MASK")


def test_rows():
    """Rows follow one another, a lone member is not copied, and outputs are cut by rows."""
    gatherer = make_gatherer(_signature((FIXED,), (POOLED,)), BatchLayout())
    one, two = np.ones((1, 2), np.float32), np.full((2, 2), 2, np.float32)
    assert gatherer.gather(_members({"FIXED": one}))["FIXED"] is one
    members = _members({"FIXED": one}, {"FIXED": two})
    assert [[1, 1], [2, 2], [2, 2]] == gatherer.gather(members)["FIXED"].tolist()
    parts = gatherer.scatter(members, {"POOLED": np.arange(9).reshape(3, 3)})
    assert [[[0, 1, 2]], [[3, 4, 5], [6, 7, 8]]] == [part["POOLED"].tolist() for part in parts]


RAGGED = TensorSpec("RAGGED", "FP32", (-1,), allow_ragged_batch=True)
COUNTS = BatchInput("BATCH_ELEMENT_COUNT", ("COUNTS",), "FP32", "RAGGED")


@pytest.mark.parametrize(
    ("inputs", "layout", "members"),
    [
        ((FIXED,), BatchLayout(), [{"FIXED": np.ones((1, 2), np.float32)}, {"FIXED": np.ones((2, 2), np.float32)}]),
        (
            (IDS, MASK, FIXED),
            BatchLayout(BUCKETS),
            [{"IDS": _ids(n, n), "FIXED": np.ones((n, 2), np.float32)} for n in (1, 3)],
        ),
        (
            (RAGGED,),
            BatchLayout(batch_inputs=(COUNTS,)),
            [{"RAGGED": np.ones((1, n), np.float32)} for n in (2, 5)],
        ),
    ],
    ids=["rows", "padding", "ragged"],
)
@pytest.mark.parametrize("num_members", [1, 2])
def test_arrays_of_a_caller(inputs, layout, members, num_members):
    """With an allocator every input lies in an array that it made, a lone member's too, and has the same contents."""
    made = []

    def allocate(shape, dtype):
        made.append(np.full(shape, 99, dtype))
        return made[-1]

    signature, asked = _signature(inputs, (POOLED,)), _members(*members[:num_members])
    gathered = make_gatherer(signature, layout, allocate).gather(asked)
    assert all(any(array is known for known in made) for array in gathered.values())
    expected = make_gatherer(signature, layout).gather(asked)
    assert _lists(expected) == _lists(gathered)
    assert {name: array.dtype for name, array in expected.items()} == {
        name: array.dtype for name, array in gathered.items()
    }


@pytest.mark.parametrize("array", [np.zeros((4, 3)), np.zeros(())])
def test_wrong_rows(array):
    """An output needs a row for each row of the batch, if the model has a batch dimension."""
    members = _members({"FIXED": np.ones((1, 2))}, {"FIXED": np.ones((2, 2))})
    with pytest.raises(InternalError, match="its first dimension must be 3"):
        make_gatherer(_signature((FIXED,), (POOLED,)), BatchLayout()).scatter(members, {"POOLED": array})
    gatherer = make_gatherer(_signature((FIXED,), (POOLED,), max_batch_size=0), BatchLayout())
    assert array is gatherer.scatter(members[:1], {"POOLED": array})[0]["POOLED"]


def test_padding():
    """Shorter rows are filled up to the longest with their input's value; the mask is made where absent."""
    gatherer = make_gatherer(_signature((IDS, MASK, FIXED), (HIDDEN,)), BatchLayout(BUCKETS))
    fixed = np.ones((1, 2), np.float32)
    inputs = gatherer.gather(
        _members(
            {"IDS": _ids(1, 2), "FIXED": fixed},
            {"IDS": _ids(2, 3, 10), "FIXED": np.repeat(fixed, 2, axis=0), "MASK": np.full((2, 3), 7, np.int32)},
        )
    )
    assert {
        "IDS": [[1, 2, -5], [10, 11, 12], [13, 14, 15]],
        "MASK": [[1, 1, 0], [7, 7, 7], [7, 7, 7]],
        "FIXED": [[1, 1]] * 3,
    } == _lists(inputs)
    assert (np.int64, np.int32) == (inputs["IDS"].dtype, inputs["MASK"].dtype)  # type: ignore[comparison-overlap]


def test_padding_is_cut_off():
    """Outputs have the length of their own row again, in every dimension that varies, and in no other."""
    gatherer = make_gatherer(_signature((IDS, MASK), (HIDDEN, POOLED, PAIRS)), BatchLayout(BUCKETS))
    members = _members({"IDS": _ids(1, 1)}, {"IDS": _ids(2, 2)})
    outputs = {
        "HIDDEN": np.arange(18).reshape(3, 2, 3),
        "POOLED": np.arange(9).reshape(3, 3),
        "PAIRS": np.arange(12).reshape(3, 2, 2),
    }
    first, second = gatherer.scatter(members, outputs)
    assert {"HIDDEN": [[[0, 1, 2]]], "POOLED": [[0, 1, 2]], "PAIRS": [[[0]]]} == _lists(first)
    assert {name: array[1:].tolist() for name, array in outputs.items()} == _lists(second)


def test_same_length_is_not_padded():
    """Members of one length, or a lone one, are not padded, and an output may have any size then."""
    gatherer = make_gatherer(_signature((IDS, MASK), (HIDDEN,)), BatchLayout(BUCKETS))
    members = _members({"IDS": _ids(1, 2)}, {"IDS": _ids(1, 2)})
    assert {"IDS": [[1, 2], [1, 2]], "MASK": [[1, 1], [1, 1]]} == _lists(gatherer.gather(members))
    parts = gatherer.scatter(members, {"HIDDEN": np.zeros((2, 9, 3))})
    assert [(1, 9, 3)] * 2 == [part["HIDDEN"].shape for part in parts]


@pytest.mark.parametrize("shape", [(2, 4, 3), (2, 3), (2, 3, 3, 1)])
def test_padded_output_of_another_length(shape):
    """An output whose varying dimension is not the padded length cannot be cut; the error says so."""
    gatherer = make_gatherer(_signature((IDS, MASK), (HIDDEN,)), BatchLayout(BUCKETS))
    members = _members({"IDS": _ids(1, 1)}, {"IDS": _ids(1, 3)})
    with pytest.raises(InternalError, match="for inputs padded to length 3"):
        gatherer.scatter(members, {"HIDDEN": np.zeros(shape)})


def test_lengths_that_disagree_are_left_alone():
    """A batch of requests whose own inputs disagree reaches the model as it is."""
    gatherer = make_gatherer(_signature((IDS, MASK), (HIDDEN,)), BatchLayout(BUCKETS))
    member = {"IDS": _ids(1, 2), "MASK": np.ones((1, 3), np.int32)}
    assert {"IDS": [[1, 2]] * 2, "MASK": [[1, 1, 1]] * 2} == _lists(gatherer.gather(_members(member, member)))
    parts = gatherer.scatter(_members(member, member), {"HIDDEN": np.zeros((2, 5, 3))})
    assert (1, 5, 3) == parts[0]["HIDDEN"].shape


def test_no_mask_for_lengths_that_disagree():
    """A mask is not made up for a request whose own inputs disagree; the model says what it thinks of that."""
    types = TensorSpec("TYPES", "INT64", (-1,))
    buckets = LengthBuckets((8,), {"IDS": 0, "TYPES": 0, "MASK": 0}, "MASK")
    gatherer = make_gatherer(_signature((IDS, types, MASK), (HIDDEN,)), BatchLayout(buckets))
    member = {"IDS": _ids(1, 2), "TYPES": _ids(1, 3)}
    assert {"IDS": [[1, 2]], "TYPES": [[1, 2, 3]]} == _lists(gatherer.gather(_members(member)))


RAGGED = TensorSpec("R", "FP32", (-1, -1), allow_ragged_batch=True)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("BATCH_ELEMENT_COUNT", [6, 4]),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT", [6, 10]),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", [0, 6, 10]),
        ("BATCH_MAX_ELEMENT_COUNT_AS_SHAPE", [0] * 6),
        ("BATCH_ITEM_SHAPE", [[3, 1], [3, 1], [2, 2]]),
        ("BATCH_ITEM_SHAPE_FLATTEN", [3, 1, 3, 1, 2, 2]),
    ],
)
@pytest.mark.parametrize(("datatype", "dtype"), [("INT32", np.int32), ("FP32", np.float32)])
def test_ragged(kind, expected, datatype, dtype):
    """Two rows of [3, 1] and one of [2, 2] are ten numbers in one dimension; the batch input tells them apart."""
    layout = BatchLayout(batch_inputs=(BatchInput(kind, ("A", "B"), datatype, "R"),))
    gatherer = make_gatherer(_signature((RAGGED, FIXED), (POOLED,)), layout)
    members = _members(
        {"R": np.arange(6.0).reshape(2, 3, 1), "FIXED": np.zeros((2, 2))},
        {"R": np.arange(6.0, 10.0).reshape(1, 2, 2), "FIXED": np.ones((1, 2))},
    )
    inputs = gatherer.gather(members)
    assert {"R": [*range(10)], "FIXED": [[0, 0], [0, 0], [1, 1]], "A": expected, "B": expected} == _lists(inputs)
    assert dtype == inputs["A"].dtype
    parts = gatherer.scatter(members, {"POOLED": np.arange(9).reshape(3, 3)})
    assert [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8]]] == [part["POOLED"].tolist() for part in parts]


def test_a_lone_ragged_request():
    """One request is laid out as several are, so that the model always sees one dimension."""
    layout = BatchLayout(batch_inputs=(BatchInput("BATCH_ELEMENT_COUNT", ("A",), "INT32", "R"),))
    inputs = make_gatherer(_signature((RAGGED,), ()), layout).gather(_members({"R": np.ones((1, 2, 2))}))
    assert {"R": [1, 1, 1, 1], "A": [4]} == _lists(inputs)


def test_absent_ragged_input():
    """A batch input counts nothing where no request has its source."""
    layout = BatchLayout(
        batch_inputs=tuple(
            BatchInput(kind, (kind,), "INT32", "R")
            for kind in ("BATCH_ELEMENT_COUNT", "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE", "BATCH_ITEM_SHAPE_FLATTEN")
        )
    )
    gatherer = make_gatherer(_signature((RAGGED, FIXED), ()), layout)
    inputs = gatherer.gather(_members({"FIXED": np.ones((1, 2))}))
    assert [[[1, 1]], [], [], []] == [array.tolist() for array in inputs.values()]


def test_scattered_output():
    """A batch output is one row of numbers that is cut by the shapes of the source, the declared sizes kept."""
    hidden = TensorSpec("HIDDEN", "FP32", (-1, 2))
    gatherer = make_gatherer(_signature((RAGGED,), (hidden,)), BatchLayout(scattered={"HIDDEN": "R"}))
    members = _members({"R": np.ones((2, 1, 7))}, {"R": np.ones((1, 3, 7))})
    first, second = gatherer.scatter(members, {"HIDDEN": np.arange(10)})
    assert {"HIDDEN": [[[0, 1]], [[2, 3]]]} == _lists(first)
    assert {"HIDDEN": [[[4, 5], [6, 7], [8, 9]]]} == _lists(second)
    with pytest.raises(InternalError, match=r"with 9 elements for a batch whose members need 4 \+ 6"):
        gatherer.scatter(members, {"HIDDEN": np.arange(9)})


def test_file_signature():
    """The file has ragged tensors in one dimension, batch inputs beside the others, and a mask that is always there."""
    layout = BatchLayout(
        BUCKETS,
        (BatchInput("BATCH_ITEM_SHAPE", ("S",), "FP32", "R"), BatchInput("BATCH_ELEMENT_COUNT", ("N",), "INT32", "R")),
        {"HIDDEN": "R"},
    )
    seen = file_signature(_signature((RAGGED, MASK, IDS), (HIDDEN, POOLED)), layout)
    assert {"R": (-1,), "MASK": (-1, -1), "IDS": (-1, -1), "S": (-1, 2), "N": (-1,)} == {
        spec.name: seen.full_shape(spec) for spec in seen.inputs
    }
    assert {"HIDDEN": (-1,), "POOLED": (-1, 3)} == {spec.name: seen.full_shape(spec) for spec in seen.outputs}
    assert not any(spec.is_optional for spec in seen.inputs)
