"""Tensors side by side: one after another, or on a new axis."""

from collections.abc import Sequence

import numpy as np

from weft.base.errors import InternalError
from weft.base.tensors import WireTensor, decode, encode, num_elements
from weft.router.combine.method import CombinedDims, CombineMethod, CombineSettings, Dims, check_alike, types_text


def _concat(tensors: Sequence[WireTensor], weights: Sequence[float], settings: CombineSettings) -> WireTensor:
    first = tensors[0]
    axis = _axis("CONCAT", settings.axis, len(first.shape), first)
    for tensor in tensors[1:]:
        if (
            tensor.datatype != first.datatype
            or tensor.shape[:axis] != first.shape[:axis]
            or tensor.shape[axis + 1 :] != first.shape[axis + 1 :]
        ):
            raise InternalError(f"CONCAT along axis {axis} of tensors that do not fit: {types_text(tensors)}")
    shape = (*first.shape[:axis], sum(tensor.shape[axis] for tensor in tensors), *first.shape[axis + 1 :])
    if num_elements(first.shape[:axis]) == 1:
        return WireTensor(first.datatype, shape, b"".join([tensor.data for tensor in tensors]))
    return encode(np.concatenate([decode(tensor) for tensor in tensors], axis=axis))


def _concat_dims(given: CombinedDims) -> Dims:
    sizes = [dims[given.axis] for dims in given.members]
    dims = list(given.common)
    dims[given.axis] = sum(sizes) if given.is_complete and -1 not in sizes else -1
    return tuple(dims)


def _stack(tensors: Sequence[WireTensor], weights: Sequence[float], settings: CombineSettings) -> WireTensor:
    first = tensors[0]
    check_alike(tensors)
    axis = _axis("STACK", settings.axis, len(first.shape) + 1, first)
    if num_elements(first.shape[:axis]) == 1:
        shape = (*first.shape[:axis], len(tensors), *first.shape[axis:])
        return WireTensor(first.datatype, shape, b"".join([tensor.data for tensor in tensors]))
    return encode(np.stack([decode(tensor) for tensor in tensors], axis=axis))


def _stack_dims(given: CombinedDims) -> Dims:
    axis = given.axis % (len(given.common) + 1)
    return (*given.common[:axis], given.num_steps if given.is_complete else -1, *given.common[axis:])


def _axis(method: str, axis: int, rank: int, tensor: WireTensor) -> int:
    if not -rank <= axis < rank:
        raise InternalError(
            f"{method} along axis {axis} of tensors of shape {list(tensor.shape)}; the result has no such axis"
        )
    return axis % rank


CONCAT = CombineMethod("CONCAT", _concat, dims=_concat_dims, takes_axis=True, is_free_along_axis=True)
STACK = CombineMethod("STACK", _stack, dims=_stack_dims, takes_axis=True, adds_axis=True)
