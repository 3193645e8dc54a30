"""What a format of quantised weights is: which tensors a weight is stored as, and how it is read from them."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TypeAlias

import torch

from weft.base.errors import InvalidArgumentError
from weft.llm.weights.checkpoint import Checkpoint, StoredTensor
from weft_kernels.linear.quantized import QuantizedWeight

#: A weight ``[out, in]`` as numbers or as codes.
ReadWeight: TypeAlias = torch.Tensor | QuantizedWeight


class WeightFormat(ABC):
    """Reads the linear layers of a folder. Layers that are not quantised are recognised by the tensors that they have.

    A layer is named by its module, such as ``model.layers.0.mlp.up_proj``, and has a weight of ``shape`` ``[out, in]``.
    """

    name: str

    @abstractmethod
    def is_quantized(self, module: str, checkpoint: Checkpoint) -> bool:
        """Whether the weight of the module is stored in this format; else it is stored as plain numbers."""

    @abstractmethod
    def tensors(self, module: str, shape: tuple[int, int], checkpoint: Checkpoint) -> dict[str, StoredTensor]:
        """The tensors that the weight is stored as, with the shapes and types that they must have.

        Raises:
            InvalidArgumentError: A tensor that decides about those of others is missing or wrong.
        """

    @abstractmethod
    def read(self, module: str, shape: tuple[int, int], checkpoint: Checkpoint) -> ReadWeight:
        """The weight, from tensors that were checked.

        Raises:
            InvalidArgumentError: The values of a tensor are impossible.
        """

    def ignored(self, module: str) -> Iterable[str]:
        """Names of tensors that a quantised module may have and that are not read."""
        return ()


def wrong(tensor: str, allowed: str, got: object) -> InvalidArgumentError:
    """Error for a tensor that is not what its format says."""
    return InvalidArgumentError(
        f"weights: '{tensor}' must be {allowed}, got {got}; fetch the folder again, or quantise the model again"
    )


def num_groups(module: str, scales: str, axis: int, num_inputs: int, checkpoint: Checkpoint) -> int:
    """Groups of inputs by the shape of the scales, which have them along ``axis``.

    Raises:
        InvalidArgumentError: The scales are missing, or their number does not divide the inputs.
    """
    stored = checkpoint.find(scales)
    if stored is None:
        raise InvalidArgumentError(
            f"weights: '{scales}' is missing, the scales of '{module}'; fetch the folder again, or quantise it again"
        )
    groups = stored.shape[axis] if len(stored.shape) == 2 else 0
    if groups < 1 or num_inputs % groups or (groups > 1 and num_inputs // groups % 2):
        allowed = f"of two dimensions, with a number along axis {axis} that divides {num_inputs} into even groups"
        raise wrong(scales, allowed, list(stored.shape))
    return groups


def scales_of(tensor: torch.Tensor) -> torch.Tensor:
    """Scales as ``QuantizedWeight`` has them: float16 as they are, others as float32."""
    return tensor.contiguous() if tensor.dtype == torch.float16 else tensor.float().contiguous()


def bytes_of(words: torch.Tensor) -> torch.Tensor:
    """uint8 ``[rows, columns, 4]`` of int32 ``[rows, columns]``, the least significant byte first."""
    rows, columns = words.shape
    return words.contiguous().view(torch.uint8).view(rows, columns, 4)


def halves_of(packed: torch.Tensor) -> torch.Tensor:
    """Codes of 4 bits, low half first, along a new last axis of twice the length: ``[..., n]`` to ``[..., 2 n]``."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def permutation_of(name: str, g_idx: torch.Tensor, group_size: int) -> torch.Tensor | None:
    """The order of inputs in which those of a group are neighbours; None where they are in order already.

    Args:
        name: Of the tensor, for the error.
        g_idx: Group of each input.
        group_size: Inputs of each group.

    Raises:
        InvalidArgumentError: A group has more or fewer inputs, or does not exist.
    """
    groups = g_idx.numel() // group_size
    in_order = torch.arange(groups).repeat_interleave(group_size)
    if torch.equal(g_idx.long(), in_order):
        return None
    order = torch.argsort(g_idx.long(), stable=True)
    if not torch.equal(g_idx.long()[order], in_order):
        raise wrong(
            name,
            f"the group of each input, {group_size} of each of {groups}",
            f"from {int(g_idx.min())} to {int(g_idx.max())} in other numbers",
        )
    return order
