"""Checks ``reshape`` of inputs and outputs by the rules of Triton Inference Server."""

from collections.abc import Sequence

from weft_common.tensors import num_elements
from weft_protos.model_config_pb2 import ModelInput, ModelOutput
from weft_serving.config.report import ConfigReport


def model_dims(tensor: ModelInput | ModelOutput) -> tuple[int, ...]:
    """Dims of the model itself: ``reshape`` where that is set, else ``dims``."""
    return tuple(tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims)


def check_reshape(
    path: str, called: str, tensor: ModelInput | ModelOutput, max_batch_size: int, report: ConfigReport
) -> None:
    """Check that ``reshape``, if set, has as many elements as ``dims`` for every size of each -1.

    Args:
        path: Of the tensor.
        called: Its name in messages.
        tensor: Its dims were checked.
        max_batch_size: Of the model.
        report: Receives the faults.
    """
    if not tensor.HasField("reshape"):
        return
    dims, shape = tuple(tensor.dims), tuple(tensor.reshape.shape)
    if any(dim < -1 or dim == 0 for dim in shape):
        report.error(
            f"{path}.reshape.shape",
            f"{called} reshape dimensions must be integer >= 1, or -1 for any size, got {list(shape)}",
        )
    elif not shape and not max_batch_size:
        report.error(
            f"{path}.reshape",
            f"{called} cannot have empty reshape for non-batching model as scalar tensors are not supported; use "
            "reshape { shape: [ 1 ] }, or max_batch_size",
        )
    elif dims.count(-1) != shape.count(-1):
        report.error(
            f"{path}.reshape",
            f"{called} has different number of variable-size dimensions for dims and reshape: {list(dims)} has "
            f"{dims.count(-1)} and {list(shape)} has {shape.count(-1)}; each -1 of one is a -1 of the other, in order",
        )
    elif _chunks(dims) != _chunks(shape):
        report.error(
            f"{path}.reshape",
            f"{called} has different size for dims and reshape: {list(dims)} and {list(shape)}; the number of elements "
            "must be the same, also between each two -1",
        )


def _chunks(dims: Sequence[int]) -> list[int]:
    """Elements before, between and after the -1 of some dims."""
    places = [i for i, dim in enumerate(dims) if dim == -1]
    bounds = zip([-1, *places], [*places, len(dims)], strict=True)
    return [num_elements(dims[low + 1 : high]) for low, high in bounds]
