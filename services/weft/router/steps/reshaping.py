"""``reshape`` of a graph's inputs and outputs: other dims inside than those that callers see, of the same bytes."""

from collections.abc import Iterable

from weft.base.reshape import reshaped
from weft.base.tensors import WireTensor
from weft.language.plan import Frame, Reshaping


def reshape_slots(frame: Frame, reshapings: Iterable[Reshaping]) -> None:
    """Give tensors of a frame the dims of the other side."""
    for reshaping in reshapings:
        tensor = frame[reshaping.slot]
        if tensor is not None:
            frame[reshaping.slot] = across(tensor, reshaping)


def across(tensor: WireTensor, reshaping: Reshaping) -> WireTensor:
    """The tensor with the dims of the other side."""
    if len(tensor.shape) < len(reshaping.source):
        return tensor
    return tensor._replace(shape=reshaped(tensor.shape, reshaping.source, reshaping.target))
