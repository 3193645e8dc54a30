"""A model combines: it gets the tensors of all steps as one, and a mask of those that are there."""

from collections.abc import Sequence

from weft.base.tensors import NUMPY_BY_DATATYPE, WireTensor, num_elements
from weft.router.combine.layout import STACK
from weft.router.combine.method import CombineMethod, CombineSettings


def stack_with_mask(tensors: Sequence[WireTensor | None], *, is_batching: bool) -> tuple[WireTensor, WireTensor]:
    """All members on a new axis, and which of them are there.

    Args:
        tensors: In declared order, one of them at least present; an absent one leaves zeros, or empty strings.
        is_batching: The leading axis counts rows, and the new axis follows it; else it leads.

    Returns:
        The stack, and a BOOL mask of shape ``[rows, members]`` (or ``[members]``).

    Raises:
        InternalError: Datatypes or shapes differ.
    """
    first = next(tensor for tensor in tensors if tensor is not None)
    dtype = NUMPY_BY_DATATYPE[first.datatype]
    size = num_elements(first.shape)
    gap = WireTensor(first.datatype, first.shape, bytes(size * (4 if first.datatype == "BYTES" else dtype.itemsize)))
    num_rows = first.shape[0] if is_batching and first.shape else 1
    presence = bytes(tensor is not None for tensor in tensors)
    shape = (num_rows, len(tensors)) if is_batching else (len(tensors),)
    members = [gap if tensor is None else tensor for tensor in tensors]
    stacked = STACK.combine(members, (), CombineSettings(axis=1 if is_batching else 0))
    return stacked, WireTensor("BOOL", shape, presence * num_rows)


CUSTOM = CombineMethod("CUSTOM", dims=lambda given: (given.num_steps, *given.common), calls_model=True)
