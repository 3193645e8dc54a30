"""One number of several, element by element.

Floating point is computed in FP32 (FP64 in FP64) and rounded once at the end. A NaN of any member makes the element
NaN, and what overflows becomes infinite. Integers are computed in FP32 (8 and 16 bits), FP64 (32 bits) or the long
double of the platform (64 bits), rounded half to even, and stop at the limits of their datatype.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from weft.base.errors import InternalError
from weft.base.tensors import INTEGERS, Array, WireTensor, decode, encode
from weft.router.combine.method import NUMBERS, CombineMethod, CombineSettings, check_alike

_ACCUMULATORS: dict[str, type[np.floating[Any]]] = {
    **dict.fromkeys(("FP16", "BF16", "FP32", "INT8", "UINT8", "INT16", "UINT16"), np.float32),
    **dict.fromkeys(("FP64", "INT32", "UINT32"), np.float64),
    **dict.fromkeys(("INT64", "UINT64"), np.longdouble),
}
#: What labels are; 8 bits may be pixels.
_LABELS = INTEGERS - {"INT8", "UINT8"}


def _average(tensors: Sequence[WireTensor], weights: Sequence[float], settings: CombineSettings) -> WireTensor:
    """Weighted mean of each element: the weighted sum over the sum of weights."""
    arrays, accumulator = _numbers(tensors, "AVERAGE")
    with np.errstate(all="ignore"):
        mean = _weighted_sum(arrays, weights, accumulator) / accumulator(sum(weights))
        return _encoded(mean, arrays[0].dtype)


def _sum(tensors: Sequence[WireTensor], weights: Sequence[float], settings: CombineSettings) -> WireTensor:
    arrays, accumulator = _numbers(tensors, "SUM")
    with np.errstate(all="ignore"):
        return _encoded(_weighted_sum(arrays, weights, accumulator), arrays[0].dtype)


def _median(tensors: Sequence[WireTensor], weights: Sequence[float], settings: CombineSettings) -> WireTensor:
    """Middle value of each element, exact where it is one member's own or the same in both middle ones."""
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


def _min(tensors: Sequence[WireTensor], weights: Sequence[float], settings: CombineSettings) -> WireTensor:
    """Smallest value of each element; of BOOL: true where all are."""
    return _extreme(tensors, "MIN", np.minimum)


def _max(tensors: Sequence[WireTensor], weights: Sequence[float], settings: CombineSettings) -> WireTensor:
    """Largest value of each element; of BOOL: true where any is."""
    return _extreme(tensors, "MAX", np.maximum)


def _extreme(tensors: Sequence[WireTensor], method: str, function: np.ufunc) -> WireTensor:
    check_alike(tensors)
    if tensors[0].datatype == "BYTES":
        raise InternalError(f"{method} needs a numeric datatype or BOOL, got BYTES")
    arrays = [decode(tensor) for tensor in tensors]
    with np.errstate(all="ignore"):
        result = arrays[0]
        for array in arrays[1:]:
            result = function(result, array)
    return encode(np.asarray(result))


def _numbers(tensors: Sequence[WireTensor], method: str) -> tuple[list[Array], type[np.floating[Any]]]:
    check_alike(tensors)
    datatype = tensors[0].datatype
    accumulator = _ACCUMULATORS.get(datatype)
    if accumulator is None:
        raise InternalError(f"{method} needs a numeric datatype, got {datatype}")
    return [decode(tensor) for tensor in tensors], accumulator


def _weighted_sum(arrays: Sequence[Array], weights: Sequence[float], accumulator: type[np.floating[Any]]) -> Array:
    result: Array = np.zeros(arrays[0].shape, dtype=accumulator)
    for array, weight in zip(arrays, weights, strict=True):
        values = array.astype(accumulator, copy=False)
        result += values if weight == 1.0 else values * accumulator(weight)
    return result


def _encoded(values: Array, dtype: np.dtype[Any]) -> WireTensor:
    return encode(np.asarray(_rounded(values, dtype)))


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


AVERAGE = CombineMethod("AVERAGE", _average, NUMBERS, remark=_label_remark, takes_weights=True)
MEDIAN = CombineMethod("MEDIAN", _median, NUMBERS)
SUM = CombineMethod("SUM", _sum, NUMBERS, takes_weights=True)
MIN = CombineMethod("MIN", _min, NUMBERS)
MAX = CombineMethod("MAX", _max, NUMBERS)
