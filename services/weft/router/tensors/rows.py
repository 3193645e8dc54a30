"""Some rows of a tensor, and a tensor of rows that went different ways; values are never decoded."""

import struct
from collections.abc import Sequence

import numpy as np

from weft.base.errors import InternalError
from weft.base.tensors import WireTensor, num_elements

#: Numbers of rows, ascending.
Rows = Sequence[int]

_LENGTH = struct.Struct("<I")


def split(tensor: WireTensor, groups: Sequence[Rows]) -> list[WireTensor]:
    """The rows of each group as a tensor; a group of all rows gets the tensor itself.

    Args:
        tensor: Its leading dimension counts rows.
        groups: Not empty each; row numbers below the number of rows.

    Raises:
        InternalError: The bytes do not fit the shape.
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
    """One tensor of rows that went different ways; a part that has all rows is the tensor itself.

    Args:
        parts: The rows, and their values in that order. Each row is in one part.
        num_rows: Of the whole.

    Raises:
        InternalError: The parts differ in datatype or dims, or one has not as many rows as went into it.
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
    """Where each row of BYTES begins, and where the last one ends."""
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
