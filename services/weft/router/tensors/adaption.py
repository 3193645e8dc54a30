"""Between tensors with a batch dimension and users of them that have none, and the reverse.

The rule of Triton Inference Server's ensembles: a leading dimension of 1 is added where the user batches and the tensor
has no batch dimension; it is taken away where the user does not batch and the batch size is 1. A tensor whose rank
already fits is left as it is, so a model without batching may take the batch dimension as one of its own.
"""

from collections.abc import Mapping

from weft.base.errors import InvalidArgumentError
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import WireTensor


def full_rank(spec: TensorSpec, *, is_batching: bool) -> int:
    """Number of dimensions of a tensor, the batch dimension included."""
    return len(spec.dims) + is_batching


def fitted_input(tensor: WireTensor, rank: int, signature: ModelSignature, name: str) -> WireTensor:
    """The tensor as ``signature`` takes it; its bytes are never touched.

    Args:
        tensor: Of another rank than ``rank``.
        rank: What the model takes, batch dimension included.
        signature: Of the model.
        name: Of the input.

    Raises:
        InvalidArgumentError: The model does not batch and the batch size is not 1.
    """
    excess = len(tensor.shape) - rank
    if signature.max_batch_size > 0 and excess == -1:
        return with_batch(tensor)
    if signature.max_batch_size == 0 and excess == 1:
        if tensor.shape[0] != 1:
            raise InvalidArgumentError(
                f"input '{name}' has batch size {tensor.shape[0]}, but model '{signature.name}' has no batch dimension "
                "(max_batch_size 0) and takes batch size 1 only; send one row in each request"
            )
        return without_batch(tensor)
    return tensor


def restored_outputs(outputs: Mapping[str, WireTensor], signature: ModelSignature) -> dict[str, WireTensor]:
    """Outputs of a call whose inputs were fitted, as a graph sees them that differs from the model in batching."""
    ranks = {spec.name: len(spec.dims) for spec in signature.outputs}
    if signature.max_batch_size > 0:
        return {
            name: without_batch(tensor)
            if tensor.shape[:1] == (1,) and len(tensor.shape) == ranks.get(name, -1) + 1
            else tensor
            for name, tensor in outputs.items()
        }
    return {
        name: with_batch(tensor) if len(tensor.shape) == ranks.get(name, -1) else tensor
        for name, tensor in outputs.items()
    }


def fitted_output(tensor: WireTensor, rank: int) -> WireTensor:
    """An output of a graph with the rank that the graph declares, where a dimension of 1 makes the difference."""
    if len(tensor.shape) == rank - 1:
        return with_batch(tensor)
    if len(tensor.shape) == rank + 1 and tensor.shape[0] == 1:
        return without_batch(tensor)
    return tensor


def with_batch(tensor: WireTensor) -> WireTensor:
    """The same bytes with a leading dimension of 1."""
    return WireTensor(tensor.datatype, (1, *tensor.shape), tensor.data)


def without_batch(tensor: WireTensor) -> WireTensor:
    """The same bytes without the leading dimension, which is 1."""
    return WireTensor(tensor.datatype, tensor.shape[1:], tensor.data)
