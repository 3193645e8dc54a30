"""Checks ``reshape`` of inputs and outputs by the rules of Triton Inference Server."""

from weft.base.reshape import reshape_fault
from weft.serving.config.report import ConfigReport
from weft_protos.model_config_pb2 import ModelInput, ModelOutput


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
    fault = reshape_fault(tuple(tensor.dims), tuple(tensor.reshape.shape), has_batch=max_batch_size > 0)
    if fault is not None:
        field, text = fault
        report.error(f"{path}.{field}", f"{called} {text}")
