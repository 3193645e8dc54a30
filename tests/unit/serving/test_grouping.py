"""What requests must have in common to share a batch."""

import pytest

from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import WireTensor
from weft.serving.queues.settings import LengthBuckets
from weft.serving.scheduler.admission import make_batch_key

FIXED = TensorSpec("A", "FP32", (2,))
VARYING = TensorSpec("B", "FP32", (-1, 3))
OPTIONAL = TensorSpec("C", "FP32", (1,), is_optional=True)
RAGGED = TensorSpec("R", "FP32", (-1,), allow_ragged_batch=True)
IDS, MASK = TensorSpec("IDS", "INT64", (-1,)), TensorSpec("MASK", "INT64", (-1, -1), is_optional=True)
BUCKETS = LengthBuckets((4, 8), {"IDS": 0, "MASK": 0}, mask="MASK")


def _tensor(*shape):
    return WireTensor("FP32", shape, b"")


def _key(*specs, buckets=None, max_batch_size=8):
    key = make_batch_key(ModelSignature("m", "1", "", max_batch_size, specs, ()), buckets)
    return key and (lambda **inputs: key({name: _tensor(*shape) for name, shape in inputs.items()}))


def test_no_key_where_nothing_can_differ():
    """Requests for inputs of fixed or ragged shape are all alike, and without batches nothing is asked."""
    assert _key(FIXED, RAGGED) is None
    assert _key(VARYING, max_batch_size=0) is None


def test_shapes_and_presence():
    """Keys are equal for any batch size and order of inputs, and differ by row shape and by the set of inputs."""
    key = _key(FIXED, VARYING, OPTIONAL)
    assert key(B=(4, 7, 3), C=(4, 1)) == key(C=(2, 1), A=(2, 2), B=(2, 7, 3))
    assert key(B=(4, 7, 3), C=(4, 1)) != key(B=(4, 8, 3), C=(4, 1))
    assert key(B=(4, 7, 3), C=(4, 1)) != key(B=(4, 7, 3))


def test_ragged_inputs_differ_by_presence_alone():
    """An optional ragged input may have any shape, but must be there in all requests or in none."""
    key = _key(TensorSpec("R", "FP32", (-1,), is_optional=True, allow_ragged_batch=True), VARYING)
    assert key(R=(1, 5), B=(1, 1, 3)) == key(R=(1, 9), B=(1, 1, 3))
    assert key(R=(1, 5), B=(1, 1, 3)) != key(B=(1, 1, 3))
    assert key(R=(1, 5), B=(1, 1, 3)) != key(R=(1, 5), B=(1, 2, 3))


@pytest.mark.parametrize(("length", "expected"), [(0, 4), (1, 4), (4, 4), (5, 8), (8, 8), (9, 9), (900, 900)])
def test_bound_of_a_length(length, expected):
    """A length belongs to the first bucket that it fits into; beyond the last one each has its own."""
    assert expected == BUCKETS.bound_of(length)


def test_buckets():
    """Requests in one bucket are alike, with or without the mask, which is made for those that leave it out."""
    key = _key(IDS, MASK, buckets=BUCKETS)
    assert key(IDS=(1, 1)) == key(IDS=(3, 4)) == key(IDS=(1, 2), MASK=(1, 2, 2))
    assert key(IDS=(1, 4)) != key(IDS=(1, 5))
    assert key(IDS=(1, 9)) != key(IDS=(1, 10))


def test_lengths_that_disagree():
    """A request whose padded inputs have different lengths is only like one of the very same shapes."""
    key = _key(IDS, MASK, buckets=BUCKETS)
    assert key(IDS=(1, 3), MASK=(1, 3, 4)) == key(IDS=(2, 3), MASK=(2, 3, 4))
    assert key(IDS=(1, 3), MASK=(1, 3, 4)) != key(IDS=(1, 3))
    assert key(IDS=(1, 3), MASK=(1, 3, 4)) != key(IDS=(1, 2), MASK=(1, 3, 4))


def test_other_inputs_beside_buckets():
    """Within a bucket, inputs that are not padded must agree as ever."""
    key = _key(IDS, MASK, VARYING, OPTIONAL, buckets=BUCKETS)
    assert key(IDS=(1, 1), B=(1, 7, 3)) == key(IDS=(1, 2), B=(1, 7, 3))
    assert key(IDS=(1, 1), B=(1, 7, 3)) != key(IDS=(1, 1), B=(1, 8, 3))
    assert key(IDS=(1, 1), B=(1, 7, 3)) != key(IDS=(1, 1), B=(1, 7, 3), C=(1, 1))
    extra = TensorSpec("TYPES", "INT64", (-1,), is_optional=True)
    key = _key(IDS, extra, buckets=LengthBuckets((4,), {"IDS": 0, "TYPES": 0}))
    assert key(IDS=(1, 1), TYPES=(1, 1)) != key(IDS=(1, 1))
