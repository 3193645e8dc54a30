"""One tensor of several: how an ensemble makes its answer of the answers of its steps."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from weft_common.errors import InternalError
from weft_common.tensors import (
    ITEMSIZE_BYTES,
    Array,
    WireTensor,
    decode,
    encode,
    encode_bytes,
    num_elements,
    split_bytes,
)


def vote(
    tensors: Sequence[WireTensor], weights: Sequence[float], *, is_weighted: bool, is_batching: bool
) -> WireTensor:
    """For each row the value that most tensors have.

    Args:
        tensors: One per voter, in declared order; same datatype (integer, BOOL or BYTES) and shape.
        weights: One per voter.
        is_weighted: The highest sum of weights wins instead of the most votes.
        is_batching: The leading axis counts rows; else the whole tensor is one row.

    Returns:
        The voted rows; ties go to the higher sum of weights, then to the value that is declared first.

    Raises:
        InternalError: Datatypes or shapes differ.
    """
    first = tensors[0]
    _check_alike(tensors)
    if all(tensor.data == first.data for tensor in tensors):
        return first
    num_rows = first.shape[0] if is_batching and first.shape else 1
    ballots = [_rows(tensor, num_rows) for tensor in tensors]
    return WireTensor(
        first.datatype,
        first.shape,
        b"".join(_winner(row, weights, is_weighted=is_weighted) for row in zip(*ballots, strict=True)),
    )


def average(tensors: Sequence[WireTensor], weights: Sequence[float], *, is_weighted: bool) -> WireTensor:
    """Mean, or weighted mean, of each element.

    Args:
        tensors: Same numeric datatype and shape.
        weights: One per tensor; used when ``is_weighted``.
        is_weighted: Divide by the sum of weights instead of the number of tensors.

    Returns:
        Datatype and shape of ``tensors``, integers rounded to the nearest. Accumulated in FP32 (FP64 for 32- and 64-bit
        integers and FP64, which FP32 cannot hold).

    Raises:
        InternalError: Datatypes or shapes differ, or the datatype is not numeric.
    """
    _check_alike(tensors)
    datatype = tensors[0].datatype
    if datatype in ("BYTES", "BOOL"):
        raise InternalError(f"AVERAGE needs a numeric datatype, got {datatype}")
    factors = weights if is_weighted else [1.0] * len(tensors)
    arrays = [decode(tensor) for tensor in tensors]
    is_narrow = datatype in ("FP16", "BF16", "FP32", "INT8", "UINT8", "INT16", "UINT16")
    accumulator: np.dtype[Any] = np.dtype(np.float32 if is_narrow else np.float64)
    total: Array = np.zeros(arrays[0].shape, dtype=accumulator)
    for array, factor in zip(arrays, factors, strict=True):
        total += array.astype(accumulator) * factor
    total /= sum(factors)
    if "INT" in datatype:  # FP64 rounds the largest 64-bit integers up, out of their range
        limits = np.iinfo(arrays[0].dtype)
        total = np.rint(total).clip(limits.min, np.nextafter(accumulator.type(limits.max + 1), 0))
    return encode(total.astype(arrays[0].dtype))


def concat(tensors: Sequence[WireTensor], axis: int) -> WireTensor:
    """The tensors one after another along ``axis`` (batch dimension counted), in declared order.

    Raises:
        InternalError: Datatypes differ, or shapes differ elsewhere than in ``axis``, or there is no such axis.
    """
    first = tensors[0]
    rank = len(first.shape)
    if not -rank <= axis < rank:
        raise InternalError(
            f"CONCAT along axis {axis} of a tensor of shape {list(first.shape)}, which has no such axis"
        )
    axis %= rank
    for tensor in tensors[1:]:
        if (
            tensor.datatype != first.datatype
            or tensor.shape[:axis] != first.shape[:axis]
            or tensor.shape[axis + 1 :] != first.shape[axis + 1 :]
        ):
            raise InternalError(f"CONCAT along axis {axis} of tensors that do not fit: {_kinds(tensors)}")
    shape = (*first.shape[:axis], sum(tensor.shape[axis] for tensor in tensors), *first.shape[axis + 1 :])
    if num_elements(first.shape[:axis]) == 1:
        return WireTensor(first.datatype, shape, b"".join(tensor.data for tensor in tensors))
    return encode(np.concatenate([decode(tensor) for tensor in tensors], axis=axis))


def _check_alike(tensors: Sequence[WireTensor]) -> None:
    first = tensors[0]
    if any(tensor.datatype != first.datatype or tensor.shape != first.shape for tensor in tensors):
        raise InternalError(f"the steps answered tensors that differ in datatype or shape: {_kinds(tensors)}")


def _kinds(tensors: Sequence[WireTensor]) -> str:
    return ", ".join(f"{tensor.datatype}{list(tensor.shape)}" for tensor in tensors)


def _rows(tensor: WireTensor, num_rows: int) -> list[bytes]:
    """The wire bytes of each row."""
    if num_rows == 0:
        return []
    per_row = num_elements(tensor.shape) // num_rows
    if tensor.datatype == "BYTES":
        elements = split_bytes(tensor.data)
        return [encode_bytes(elements[row * per_row : (row + 1) * per_row]) for row in range(num_rows)]
    size = per_row * ITEMSIZE_BYTES[tensor.datatype]
    return [tensor.data[row * size : (row + 1) * size] for row in range(num_rows)]


def _winner(row: Sequence[bytes], weights: Sequence[float], *, is_weighted: bool) -> bytes:
    """The winning value of one row; ``max`` keeps the first of equals, which is the one declared first."""
    counts: dict[bytes, int] = {}
    sums: dict[bytes, float] = {}
    for value, weight in zip(row, weights, strict=True):
        counts[value] = counts.get(value, 0) + 1
        sums[value] = sums.get(value, 0.0) + weight
    if is_weighted:
        return max(sums, key=sums.__getitem__)
    return max(counts, key=lambda value: (counts[value], sums[value]))
