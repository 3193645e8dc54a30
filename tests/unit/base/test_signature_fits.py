"""The quick check of a tensor against its declaration."""

import numpy as np
import pytest

from weft.base.signature import TensorSpec
from weft.base.tensors import ITEMSIZE_BYTES, encode

FIXED = TensorSpec("X", "FP32", (2, 3))


@pytest.mark.parametrize("datatype", ITEMSIZE_BYTES)
def test_the_bytes_of_a_row_follow_from_the_type_and_the_dims(datatype: str) -> None:
    """For every numeric type as for numpy."""
    assert 6 * ITEMSIZE_BYTES[datatype] == TensorSpec("X", datatype, (2, 3)).row_bytes
    assert ITEMSIZE_BYTES[datatype] == TensorSpec("X", datatype, ()).row_bytes


@pytest.mark.parametrize("spec", [TensorSpec("X", "BYTES", (2,)), TensorSpec("X", "FP32", (2, -1))])
def test_what_varies_has_no_such_size_and_never_fits(spec: TensorSpec) -> None:
    """Strings, and a dimension of any size: the slower check decides."""
    assert -1 == spec.row_bytes
    assert not spec.fits(spec.datatype, (1, 2, 3), 24, has_batch=True)


@pytest.mark.parametrize(
    ("shape", "has_batch", "fits"),
    [
        ((4, 2, 3), True, True),
        ((2, 3), False, True),
        ((2, 3), True, False),
        ((0, 2, 3), True, False),
        ((4, 2, 3), False, False),
        ((4, 3, 2), True, False),
        ((), True, False),
    ],
)
def test_a_tensor_fits_with_its_type_and_shape(shape: tuple[int, ...], has_batch: bool, fits: bool) -> None:
    """Of any number of rows, at least one, where there is a batch dimension."""
    datatype, _, data = encode(np.zeros(shape, np.float32))
    assert fits == FIXED.fits(datatype, shape, len(data), has_batch=has_batch)


def test_a_tensor_of_another_type_or_size_does_not_fit() -> None:
    """Also where its shape is right."""
    assert not FIXED.fits("INT32", (1, 2, 3), 24, has_batch=True)
    assert not FIXED.fits("FP32", (1, 2, 3), 20, has_batch=True)
