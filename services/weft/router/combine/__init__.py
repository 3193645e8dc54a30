"""Combine methods: how an ensemble merges the tensors of its steps into one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial, reduce
from math import lcm
from typing import Any, NamedTuple

import numpy as np

from weft.base.errors import InternalError
from weft.base.tensors import (
    FLOATS,
    INTEGERS,
    ITEMSIZE_BYTES,
    NUMPY_BY_DATATYPE,
    Array,
    WireTensor,
    decode,
    encode,
    encode_bytes,
    num_elements,
    split_bytes,
)

#: A shape without its batch dimension; -1 is any size.
Dims = tuple[int, ...]


class Datatypes(NamedTuple):
    """Datatypes that a method accepts.

    Attributes:
        others: Which method to use for other datatypes, for messages.
    """

    names: frozenset[str]
    words: str
    others: str


NUMBERS = Datatypes(
    INTEGERS | FLOATS,
    "numbers",
    "of strings and BOOL, take the one that most steps give: method: VOTE",
)
CLASSES = Datatypes(
    INTEGERS | {"BYTES", "BOOL"},
    "integers, strings or BOOL",
    "of other numbers, take method: AVERAGE or MEDIAN",
)


class CombineSettings(NamedTuple):
    """Settings of one combine in a graph.

    Attributes:
        axis: Of the whole result, batch dimension counted; negative counts from the end.
        is_batching: Whether the leading axis counts rows.
    """

    axis: int = 0
    is_weighted: bool = False
    is_batching: bool = True


class CombinedDims(NamedTuple):
    """Shapes of the tensors to combine, without batch dimensions.

    Attributes:
        common: Dims of all members; -1 where they differ.
        axis: From the graph, counted from the end.
        is_complete: Whether every member is always present.
    """

    common: Dims
    members: Sequence[Dims]
    axis: int
    num_steps: int
    is_complete: bool


def _first(tensors: Sequence[WireTensor], weights: Sequence[float], settings: CombineSettings) -> WireTensor:
    return tensors[0]


def _given_weights(weights: Sequence[float], settings: CombineSettings) -> Sequence[float]:
    return weights if settings.is_weighted else [1.0] * len(weights)


@dataclass(frozen=True, slots=True, eq=False)
class CombineMethod:
    """Merges the tensors of an ensemble's steps into one.

    Attributes:
        combine: (tensors of the steps that gave one, in declared order, at least one; their weights; settings) -> the
            result. Raises InternalError if they cannot be combined.
        weights: (weight of each step, settings) -> the weights that ``combine`` gets; called once at load.
        remark: Datatype -> a warning for the author of the graph; "": none.
        adds_axis: The result has one axis more than the tensors, at ``axis``.
        is_free_along_axis: The tensors may differ in size along ``axis``.
        is_first: ``combine`` gets the tensors in the order of the answers; if every combine of an ensemble does, the
            first answer suffices.
        is_merged: Each response of each step is a response of the ensemble; ``combine`` is called for each.
        is_keyed: Nothing is combined: every step's tensor is an output, named ``step.tensor``.
        calls_model: A model combines all tensors, stacked on a new leading axis; ``combine`` is not called.
    """

    name: str
    combine: Callable[[Sequence[WireTensor], Sequence[float], CombineSettings], WireTensor] = _first
    datatypes: Datatypes | None = None
    weights: Callable[[Sequence[float], CombineSettings], Sequence[float]] = _given_weights
    dims: Callable[[CombinedDims], Dims] = lambda given: given.common
    remark: Callable[[str], str] = lambda datatype: ""
    takes_axis: bool = False
    adds_axis: bool = False
    is_free_along_axis: bool = False
    takes_weights: bool = False
    is_first: bool = False
    is_merged: bool = False
    is_keyed: bool = False
    calls_model: bool = False

    def __repr__(self) -> str:
        return self.name


def check_alike(tensors: Sequence[WireTensor]) -> None:
    """Raise InternalError unless all tensors have the same datatype and shape."""
    first = tensors[0]
    if any(tensor.datatype != first.datatype or tensor.shape != first.shape for tensor in tensors):
        raise InternalError(f"the steps answered tensors that differ in datatype or shape: {types_text(tensors)}")


def types_text(tensors: Sequence[WireTensor]) -> str:
    """Datatype and shape of each tensor, for messages."""
    return ", ".join(f"{tensor.datatype}{list(tensor.shape)}" for tensor in tensors)


_ACCUMULATORS: dict[str, type[np.floating[Any]]] = {
    **dict.fromkeys(("FP16", "BF16", "FP32", "INT8", "UINT8", "INT16", "UINT16"), np.float32),
    **dict.fromkeys(("FP64", "INT32", "UINT32"), np.float64),
    **dict.fromkeys(("INT64", "UINT64"), np.longdouble),
}
#: What labels are; 8 bits may be pixels.
_LABELS = INTEGERS - {"INT8", "UINT8"}


def _weighted(
    method: str, tensors: Sequence[WireTensor], weights: Sequence[float], settings: CombineSettings
) -> WireTensor:
    """SUM, or AVERAGE: the weighted sum of each element over the sum of weights."""
    arrays, accumulator = _numbers(tensors, method)
    with np.errstate(all="ignore"):
        total: Array = np.zeros(arrays[0].shape, dtype=accumulator)
        for array, weight in zip(arrays, weights, strict=True):
            values = array.astype(accumulator, copy=False)
            total += values if weight == 1.0 else values * accumulator(weight)
        result = total / accumulator(sum(weights)) if method == "AVERAGE" else total
        return encode(np.asarray(_rounded(result, arrays[0].dtype)))


def _median(tensors: Sequence[WireTensor], weights: Sequence[float], settings: CombineSettings) -> WireTensor:
    """Median of each element; exact if it is a member's own value or the two middle ones are equal."""
    arrays, accumulator = _numbers(tensors, "MEDIAN")
    dtype = arrays[0].dtype
    with np.errstate(all="ignore"):
        if dtype.kind in "iu":
            ordered = np.sort(np.stack(arrays), axis=0)
        else:
            ordered = np.sort(np.stack([array.astype(accumulator) for array in arrays]), axis=0)
            ordered = np.where(np.isnan(ordered[-1]), ordered[-1], ordered)  # a NaN is sorted to the end
        low, high = ordered[(len(arrays) - 1) // 2], ordered[len(arrays) // 2]
        middle = _rounded((low.astype(accumulator) + high.astype(accumulator)) / accumulator(2), dtype)
        return encode(np.where(low == high, low.astype(dtype), middle))


def _extreme(
    method: str, tensors: Sequence[WireTensor], weights: Sequence[float], settings: CombineSettings
) -> WireTensor:
    """Minimum or maximum of each element; of BOOL: all or any."""
    check_alike(tensors)
    if tensors[0].datatype == "BYTES":
        raise InternalError(f"{method} needs a numeric datatype or BOOL, got BYTES")
    function = np.minimum if method == "MIN" else np.maximum
    with np.errstate(all="ignore"):
        return encode(np.asarray(reduce(function, [decode(tensor) for tensor in tensors])))


def _numbers(tensors: Sequence[WireTensor], method: str) -> tuple[list[Array], type[np.floating[Any]]]:
    check_alike(tensors)
    datatype = tensors[0].datatype
    accumulator = _ACCUMULATORS.get(datatype)
    if accumulator is None:
        raise InternalError(f"{method} needs a numeric datatype, got {datatype}")
    return [decode(tensor) for tensor in tensors], accumulator


def _rounded(values: Array, dtype: np.dtype[Any]) -> Array:
    """The values in ``dtype``; integers are rounded, and held within its limits."""
    if dtype.kind not in "iu":
        return values.astype(dtype)
    limits = np.iinfo(dtype)
    largest = values.dtype.type(limits.max)
    if int(largest) > limits.max:  # rounded up, where the type has fewer bits than the integer
        largest = np.nextafter(largest, values.dtype.type(0))
    return np.rint(values).clip(limits.min, largest).astype(dtype)


def _label_remark(datatype: str) -> str:
    if datatype not in _LABELS:
        return ""
    return f"AVERAGE of {datatype} gives whole numbers; of labels, take the one that most steps give: method: VOTE"


def _vote(tensors: Sequence[WireTensor], weights: Sequence[float], settings: CombineSettings) -> WireTensor:
    """For each row the value that most tensors have; weighted: that with the highest sum of weights.

    Ties go to the higher sum of weights, then to the value that is declared first. Without a batch dimension the whole
    tensor is one row.
    """
    first = tensors[0]
    check_alike(tensors)
    if all(tensor.data == first.data for tensor in tensors):
        return first
    num_rows = first.shape[0] if settings.is_batching and first.shape else 1
    ballots = [_rows(tensor, num_rows) for tensor in tensors]
    return WireTensor(
        first.datatype,
        first.shape,
        b"".join(_winner(row, weights, is_weighted=settings.is_weighted) for row in zip(*ballots, strict=True)),
    )


def _ballots(weights: Sequence[float], settings: CombineSettings) -> Sequence[float]:
    """Integer weights in exact decimal proportion: 0.1 and 0.2 together tie with 0.3."""
    exact = [Fraction(repr(float(weight))) for weight in weights]
    scale = lcm(*(weight.denominator for weight in exact))
    return [int(weight * scale) for weight in exact]


def _rows(tensor: WireTensor, num_rows: int) -> list[bytes]:
    if num_rows == 0:
        return []
    per_row = num_elements(tensor.shape) // num_rows
    if tensor.datatype == "BYTES":
        elements = split_bytes(tensor.data)
        return [encode_bytes(elements[row * per_row : (row + 1) * per_row]) for row in range(num_rows)]
    size = per_row * ITEMSIZE_BYTES[tensor.datatype]
    return [tensor.data[row * size : (row + 1) * size] for row in range(num_rows)]


def _winner(row: Sequence[bytes], weights: Sequence[float], *, is_weighted: bool) -> bytes:
    counts: dict[bytes, int] = {}
    sums: dict[bytes, float] = {}
    for value, weight in zip(row, weights, strict=True):
        counts[value] = counts.get(value, 0) + 1
        sums[value] = sums.get(value, 0) + weight
    if is_weighted:
        return max(sums, key=sums.__getitem__)
    return max(counts, key=lambda value: (counts[value], sums[value]))


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


def stack_with_mask(tensors: Sequence[WireTensor | None], *, is_batching: bool) -> tuple[WireTensor, WireTensor]:
    """Stack all members along a new axis, with a mask of those that are present.

    Args:
        tensors: In declared order, at least one present; absent ones become zeros or empty strings.
        is_batching: The leading axis counts rows, and the new axis follows it; else it leads.

    Returns:
        The stack, and a BOOL mask of shape ``[rows, members]`` (or ``[members]``).
    """
    first = next(tensor for tensor in tensors if tensor is not None)
    dtype = NUMPY_BY_DATATYPE[first.datatype]
    size = num_elements(first.shape)
    gap = WireTensor(first.datatype, first.shape, bytes(size * (4 if first.datatype == "BYTES" else dtype.itemsize)))
    num_rows = first.shape[0] if is_batching and first.shape else 1
    presence = bytes(tensor is not None for tensor in tensors)
    shape = (num_rows, len(tensors)) if is_batching else (len(tensors),)
    members = [gap if tensor is None else tensor for tensor in tensors]
    stacked = _stack(members, (), CombineSettings(axis=1 if is_batching else 0))
    return stacked, WireTensor("BOOL", shape, presence * num_rows)


#: By the names of the values of ``Combine.Method`` in ``graph.proto``.
METHODS: dict[str, CombineMethod] = {
    method.name: method
    for method in (
        CombineMethod("KEYED", is_keyed=True),
        CombineMethod("VOTE", _vote, CLASSES, _ballots, takes_weights=True),
        CombineMethod("AVERAGE", partial(_weighted, "AVERAGE"), NUMBERS, remark=_label_remark, takes_weights=True),
        CombineMethod("MEDIAN", _median, NUMBERS),
        CombineMethod("SUM", partial(_weighted, "SUM"), NUMBERS, takes_weights=True),
        CombineMethod("MIN", partial(_extreme, "MIN"), NUMBERS),
        CombineMethod("MAX", partial(_extreme, "MAX"), NUMBERS),
        CombineMethod("CONCAT", _concat, dims=_concat_dims, takes_axis=True, is_free_along_axis=True),
        CombineMethod("STACK", _stack, dims=_stack_dims, takes_axis=True, adds_axis=True),
        CombineMethod("FIRST", is_first=True),
        CombineMethod("CUSTOM", dims=lambda given: (given.num_steps, *given.common), calls_model=True),
        CombineMethod("MERGE", is_merged=True),
    )
}
