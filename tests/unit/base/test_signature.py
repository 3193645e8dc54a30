"""Signatures of models, and which tensors fit them."""

import numpy as np
import pytest

from weft.base.signature import ModelSignature, TensorSpec, datatype_name
from weft.base.tensors import ITEMSIZE_BYTES, NUMPY_BY_DATATYPE, encode
from weft_protos import model_config_pb2 as pb


def test_every_type_has_its_wire_name():
    """TYPE_STRING is BYTES, every other type has its own name, and both lists are complete."""
    names = {datatype_name(number) for name, number in pb.DataType.items() if name != "TYPE_INVALID"}
    assert set(NUMPY_BY_DATATYPE) == names
    assert ("BYTES", "BF16", "INVALID") == tuple(
        datatype_name(t) for t in (pb.TYPE_STRING, pb.TYPE_BF16, pb.TYPE_INVALID)
    )


@pytest.mark.parametrize(("max_batch_size", "shape"), [(0, (3, -1)), (1, (-1, 3, -1)), (8, (-1, 3, -1))])
def test_signature_of_a_configuration(max_batch_size, shape):
    """Names, datatypes, dims, optional and ragged inputs are taken over; a batching model shows a leading -1."""
    config = pb.ModelConfig(
        name="m",
        backend="b",
        max_batch_size=max_batch_size,
        input=[
            pb.ModelInput(name="x", data_type=pb.TYPE_FP32, dims=[3, -1], allow_ragged_batch=True),
            pb.ModelInput(name="s", data_type=pb.TYPE_STRING, dims=[1], optional=True),
        ],
        output=[pb.ModelOutput(name="y", data_type=pb.TYPE_INT64, dims=[2])],
    )
    signature = ModelSignature.from_config(config, "4")
    x = TensorSpec("x", "FP32", (3, -1), allow_ragged_batch=True)
    s = TensorSpec("s", "BYTES", (1,), is_optional=True)
    assert ModelSignature("m", "4", "b", max_batch_size, (x, s), (TensorSpec("y", "INT64", (2,)),)) == signature
    assert shape == signature.full_shape(x)


def test_platform_wins_over_backend():
    """``platform`` is shown where it is set; a decoupled model is marked."""
    config = pb.ModelConfig(name="m", platform="ensemble", backend="b")
    config.model_transaction_policy.decoupled = True
    signature = ModelSignature.from_config(config, "1")
    assert ("ensemble", True) == (signature.platform, signature.is_decoupled)


def test_a_model_with_sequence_batching_is_stateful() -> None:
    """Even without any setting of it."""
    config = pb.ModelConfig(name="m")
    assert not ModelSignature.from_config(config, "1").is_stateful
    config.sequence_batching.SetInParent()
    assert ModelSignature.from_config(config, "1").is_stateful


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
