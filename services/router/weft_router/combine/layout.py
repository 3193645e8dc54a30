"""Tensors side by side: one after another, on a new axis, and with gaps where one is absent."""

from collections.abc import Sequence

import numpy as np

from weft_common.errors import InternalError
from weft_common.tensors import NUMPY_BY_DATATYPE, WireTensor, decode, encode, num_elements
from weft_router.combine.alike import check_alike, kinds


def concat(tensors: Sequence[WireTensor], axis: int) -> WireTensor:
    """The tensors one after another along ``axis`` (batch dimension counted), in declared order.

    Raises:
        InternalError: Datatypes differ, or shapes differ elsewhere than in ``axis``, or there is no such axis.
    """
    first = tensors[0]
    axis = _axis("CONCAT", axis, len(first.shape), first)
    for tensor in tensors[1:]:
        if (
            tensor.datatype != first.datatype
            or tensor.shape[:axis] != first.shape[:axis]
            or tensor.shape[axis + 1 :] != first.shape[axis + 1 :]
        ):
            raise InternalError(f"CONCAT along axis {axis} of tensors that do not fit: {kinds(tensors)}")
    shape = (*first.shape[:axis], sum(tensor.shape[axis] for tensor in tensors), *first.shape[axis + 1 :])
    if num_elements(first.shape[:axis]) == 1:
        return WireTensor(first.datatype, shape, b"".join([tensor.data for tensor in tensors]))
    return encode(np.concatenate([decode(tensor) for tensor in tensors], axis=axis))


def stack(tensors: Sequence[WireTensor], axis: int) -> WireTensor:
    """The tensors along a new ``axis`` of the result (batch dimension counted), in declared order.

    Raises:
        InternalError: Datatypes or shapes differ, or the result has no such axis.
    """
    first = tensors[0]
    check_alike(tensors)
    axis = _axis("STACK", axis, len(first.shape) + 1, first)
    if num_elements(first.shape[:axis]) == 1:
        shape = (*first.shape[:axis], len(tensors), *first.shape[axis:])
        return WireTensor(first.datatype, shape, b"".join([tensor.data for tensor in tensors]))
    return encode(np.stack([decode(tensor) for tensor in tensors], axis=axis))


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
    stacked = stack([gap if tensor is None else tensor for tensor in tensors], 1 if is_batching else 0)
    return stacked, WireTensor("BOOL", shape, presence * num_rows)


def _axis(method: str, axis: int, rank: int, tensor: WireTensor) -> int:
    if not -rank <= axis < rank:
        raise InternalError(
            f"{method} along axis {axis} of tensors of shape {list(tensor.shape)}; the result has no such axis"
        )
    return axis % rank
