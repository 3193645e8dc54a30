"""What tensors must have in common to be combined."""

from collections.abc import Sequence

from weft_common.errors import InternalError
from weft_common.tensors import WireTensor


def check_alike(tensors: Sequence[WireTensor]) -> None:
    """Return if all tensors have the same datatype and shape.

    Raises:
        InternalError: They differ; the message has every datatype and shape.
    """
    first = tensors[0]
    if any(tensor.datatype != first.datatype or tensor.shape != first.shape for tensor in tensors):
        raise InternalError(f"the steps answered tensors that differ in datatype or shape: {kinds(tensors)}")


def kinds(tensors: Sequence[WireTensor]) -> str:
    """Datatype and shape of each tensor, for messages."""
    return ", ".join(f"{tensor.datatype}{list(tensor.shape)}" for tensor in tensors)
