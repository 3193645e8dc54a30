"""Tensor operations of the router: batch dimensions, checks of answers, splitting and joining by rows.

As in Triton Inference Server's ensembles, a leading dimension of 1 is added if the user batches and the tensor has no
batch dimension, and removed if the user does not batch and the batch size is 1. A tensor whose rank already fits is
unchanged, so a model without batching may take the batch dimension as one of its own.
"""

import struct
from collections.abc import Mapping, Sequence

import numpy as np

from weft.base.errors import InternalError, InvalidArgumentError
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import ITEMSIZE_BYTES, WireTensor, check_bytes, fits, num_elements

#: Numbers of rows, ascending.
Rows = Sequence[int]

_LENGTH = struct.Struct("<I")


def full_rank(spec: TensorSpec, *, is_batching: bool) -> int:
    """Number of dimensions of a tensor, the batch dimension included."""
    return len(spec.dims) + is_batching


def fitted_input(tensor: WireTensor, rank: int, signature: ModelSignature, name: str) -> WireTensor:
    """Adapt the batch dimension of an input to ``signature``; the bytes are unchanged.

    Args:
        rank: Rank that the model takes, batch dimension included.

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
    """Adapt the outputs of a call with fitted inputs to the graph, which differs from the model in batching."""
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
    """Adapt an output of a graph to its declared rank by adding or removing a dimension of 1."""
    if len(tensor.shape) == rank - 1:
        return with_batch(tensor)
    if len(tensor.shape) == rank + 1 and tensor.shape[0] == 1:
        return without_batch(tensor)
    return tensor


def with_batch(tensor: WireTensor) -> WireTensor:
    """The same bytes with a leading dimension of 1."""
    return WireTensor(tensor.datatype, (1, *tensor.shape), tensor.data)


def without_batch(tensor: WireTensor) -> WireTensor:
    """The same bytes without the leading dimension of 1."""
    return WireTensor(tensor.datatype, tensor.shape[1:], tensor.data)


def rows_of(inputs: Mapping[str, WireTensor], *, is_batching: bool) -> int:
    """Number of rows of a call, and so of its answer; -1 without a batch dimension."""
    if is_batching:
        for _, shape, _ in inputs.values():
            return shape[0] if shape else -1
    return -1


def check_outputs(outputs: Mapping[str, WireTensor], signature: ModelSignature) -> None:
    """Raise InternalError if an output contradicts the model's declaration.

    About 1 us for each output; for BYTES another 0.1 us for each string.
    """
    has_batch = signature.max_batch_size > 0
    for spec in signature.outputs:
        tensor = outputs.get(spec.name)
        if tensor is not None and (fault := misfit(tensor, spec, has_batch=has_batch)):
            raise broken_promise(signature.name, spec, fault)


def broken_promise(model: str, spec: TensorSpec, fault: str) -> InternalError:
    """The error of an output that contradicts its declaration; ``fault`` is from ``misfit``."""
    return InternalError(f"output '{spec.name}' of model '{model}' is not as it declares: {fault}")


def misfit(tensor: WireTensor, spec: TensorSpec, *, has_batch: bool, num_rows: int = -1) -> str:
    """How an output differs from its declaration; "" if it does not.

    Args:
        has_batch: A batch dimension precedes ``spec.dims``.
        num_rows: Its size; -1 is any.
    """
    datatype, shape, data = tensor
    if spec.fits(datatype, shape, len(data), has_batch=has_batch) and (not has_batch or num_rows in (-1, shape[0])):
        return ""
    if datatype != spec.datatype:
        return f"it is {datatype}, declared as {spec.datatype}"
    row_shape = shape[1:] if has_batch else shape
    if (has_batch and (not shape or shape[0] < 0)) or (
        (row_shape != spec.dims or -1 in row_shape) and not fits(row_shape, spec.dims)
    ):
        dims = (-1, *spec.dims) if has_batch else spec.dims
        return f"its shape is [{_text(shape)}], declared as [{_text(dims)}]"
    if has_batch and num_rows not in (-1, shape[0]):
        return f"its batch size is {shape[0]}, that of the request is {num_rows}"
    if datatype == "BYTES":
        try:
            check_bytes(data, num_elements(shape), name=spec.name, model="")
        except InvalidArgumentError:
            return f"its {len(data)} bytes are not the {num_elements(shape)} strings of shape [{_text(shape)}]"
    elif len(data) != (expected := num_elements(shape) * ITEMSIZE_BYTES[datatype]):
        return f"it has {len(data)} bytes, its shape [{_text(shape)}] takes {expected}"
    return ""


def _text(dims: tuple[int, ...]) -> str:
    return ",".join(map(str, dims))


def split(tensor: WireTensor, groups: Sequence[Rows]) -> list[WireTensor]:
    """Cut a tensor into one for each group of rows; a group of all rows gets the tensor itself.

    Args:
        tensor: Its leading dimension counts rows.
        groups: Non-empty; row numbers below the number of rows.
    """
    datatype, shape, data = tensor
    num_rows = shape[0]
    if len(groups) == 1 and len(groups[0]) == num_rows:
        return [tensor]
    dims = shape[1:]
    if datatype == "BYTES":
        offsets = row_offsets(tensor)
        return [
            WireTensor(datatype, (len(rows), *dims), b"".join([data[offsets[row] : offsets[row + 1]] for row in rows]))
            for rows in groups
        ]
    row_bytes = _row_bytes(tensor)
    parts = []
    for rows in groups:
        first, last = rows[0], rows[-1]
        if last - first + 1 == len(rows):
            part = data[first * row_bytes : (last + 1) * row_bytes]
        else:
            part = np.frombuffer(data, np.uint8).reshape(num_rows, row_bytes).take(rows, 0).tobytes()
        parts.append(WireTensor(datatype, (len(rows), *dims), part))
    return parts


def join(parts: Sequence[tuple[Rows, WireTensor]], num_rows: int) -> WireTensor:
    """Merge parts into one tensor, in the order of rows; a part that has all rows is returned as it is.

    Args:
        parts: The rows, and their values in that order. Each row is in one part.

    Raises:
        InternalError: The parts differ in datatype or dims, or one has another number of rows than went into it.
    """
    for rows, tensor in parts:
        if tensor.shape[:1] != (len(rows),):
            raise InternalError(
                f"{len(rows)} rows went into a step, and its answer has shape {list(tensor.shape)}; the leading "
                "dimension must count the same rows"
            )
    first = parts[0][1]
    if len(parts) == 1:
        return first
    datatype, dims = first.datatype, first.shape[1:]
    for rows, tensor in parts:
        if tensor.datatype != datatype or tensor.shape[1:] != dims:
            raise InternalError(
                f"rows that went different ways do not make one tensor: row {parts[0][0][0]} is "
                f"{datatype}{list(dims)}, row {rows[0]} is {tensor.datatype}{list(tensor.shape[1:])}; a variable "
                "dimension must come out the same for all rows of a request, else send rows one by one"
            )
    shape = (num_rows, *dims)
    if datatype == "BYTES":
        pieces = [b""] * num_rows
        for rows, tensor in parts:
            offsets, data = row_offsets(tensor), tensor.data
            for place, row in enumerate(rows):
                pieces[row] = data[offsets[place] : offsets[place + 1]]
        return WireTensor(datatype, shape, b"".join(pieces))
    row_bytes = _row_bytes(first)
    whole = np.empty((num_rows, row_bytes), np.uint8)
    for rows, tensor in parts:
        whole[rows] = np.frombuffer(tensor.data, np.uint8).reshape(len(rows), row_bytes)
    return WireTensor(datatype, shape, whole.tobytes())


def without_rows(datatype: str, dims: Sequence[int]) -> WireTensor:
    """A tensor of no rows; a variable dimension (-1) is 0."""
    return WireTensor(datatype, (0, *(max(dim, 0) for dim in dims)), b"")


def _row_bytes(tensor: WireTensor) -> int:
    size, rest = divmod(len(tensor.data), tensor.shape[0])
    if rest:
        raise InternalError(f"{len(tensor.data)} bytes are not {tensor.shape[0]} rows of the same size")
    return size


def row_offsets(tensor: WireTensor) -> list[int]:
    """Offset of each row of a BYTES tensor, and of the end."""
    data, per_row = tensor.data, num_elements(tensor.shape[1:])
    end, offset, offsets, unpack = len(data), 0, [0], _LENGTH.unpack_from
    try:
        for _ in range(tensor.shape[0]):
            for _ in range(per_row):
                offset += 4 + unpack(data, offset)[0]
            offsets.append(offset)
    except struct.error:
        offset = -1
    if offset != end:
        raise InternalError(f"{end} bytes are not the strings of shape {list(tensor.shape)}")
    return offsets
