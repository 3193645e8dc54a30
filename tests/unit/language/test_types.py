"""When two tensors fit."""

import pytest

from weft.language.types.signatures import TensorType, fits, loses_batch, merged


def _type(dims, *, is_batched=True, datatype="FP32", is_optional=False):
    return TensorType(datatype, dims, is_batched, is_optional, "the test")


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (_type((3,)), _type((3,)), True),
        (_type((3,)), _type((4,)), False),
        (_type((-1,)), _type((4,)), True),
        (_type((3, 4)), _type((3,)), False),
        (_type((3,)), _type((3,), is_batched=False), True),
        (_type((3,)), _type((-1, 3), is_batched=False), True),
        (_type((3,)), _type((5, 3), is_batched=False), True),
        (_type((3,)), _type((5, 4), is_batched=False), False),
        (_type((3, 3)), _type((3,), is_batched=False), False),
        (TensorType.unknown("x"), _type((3,)), True),
    ],
)
def test_shapes_fit_without_or_with_the_batch_dimension(left, right, expected):
    """-1 fits any size; dims may agree as they are, or with the batch dimension written out."""
    assert [expected, expected] == [fits(left, right), fits(right, left)]


def test_a_batch_is_lost_where_only_one_row_fits():
    """A tensor with a batch dimension and an equal one without fit in requests of one row only."""
    batched = _type((3,))
    assert loses_batch(batched, _type((3,), is_batched=False))
    assert not loses_batch(batched, _type((-1, 3), is_batched=False))
    assert not loses_batch(batched, batched)
    assert not loses_batch(batched, TensorType.unknown("x"))


def test_merged_alternatives():
    """Sizes that differ become -1; the result may be absent if one of them may."""
    result = merged([_type((3, 4)), TensorType.unknown("x"), _type((3, 5), is_optional=True)], "both")
    assert ("FP32", (3, -1), True, "both") == (result.datatype, result.dims, result.is_optional, result.origin)
    assert not merged([TensorType.unknown("x")], "both").is_known


def test_types_are_shown_with_the_batch_dimension():
    """Messages show what a client would send."""
    assert "FP32 [-1,3]" == str(_type((3,)))
    assert "FP32 [3]" == str(_type((3,), is_batched=False))
