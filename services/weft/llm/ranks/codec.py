"""Bytes of plans and results: named tuples of arrays, numbers and one another. Nothing is pickled."""

import json
import math
import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.llm.request import StepLogprobs
from weft.llm.runner import StepTokens
from weft.llm.scheduler.plan import BlockTransfers, ForwardPlan, GrammarMasks

_TUPLES: dict[str, Any] = {
    each.__name__: each for each in (ForwardPlan, BlockTransfers, GrammarMasks, StepTokens, StepLogprobs)
}
_COLLECTIONS: dict[str, Any] = {"frozenset": frozenset, "list": list, "tuple": tuple}
_DTYPES = ("<i4", "<i8", "|u1", "<f4")
#: Arrays begin at multiples of so many bytes.
_ALIGNMENT = 8
_LENGTH = struct.Struct("<I")


def pack(value: Any) -> bytes:
    """The bytes of a ``ForwardPlan`` or ``StepTokens``: a description as JSON behind its length, then the arrays.

    Raises TypeError for what is neither a known tuple nor an array, a number, a set or list of numbers, or None.
    """
    arrays: list[npt.NDArray[Any]] = []
    head = json.dumps(_described(value, arrays), separators=(",", ":")).encode()
    parts = [_LENGTH.pack(len(head)), head, bytes(-(_LENGTH.size + len(head)) % _ALIGNMENT)]
    for array in arrays:
        parts += (array.tobytes(), bytes(-array.nbytes % _ALIGNMENT))
    return b"".join(parts)


def unpack(data: bytes | memoryview) -> Any:
    """The value that ``pack`` was given; its arrays are new, and may be written. Raises ValueError for other bytes."""
    try:
        end = _LENGTH.size + _LENGTH.unpack_from(data)[0]
        start = end + -end % _ALIGNMENT
        arrays = bytearray(data[start:])
        value, position = _made(json.loads(bytes(data[_LENGTH.size : end])), arrays, 0)
    except (struct.error, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"not a plan or result of this version: {error}") from None
    if start + position != len(data):
        raise ValueError(f"{len(data)} bytes, of which {start + position} are described")
    return value


def _described(value: Any, arrays: list[npt.NDArray[Any]]) -> Any:
    """JSON: a number or None is itself; else a list whose first entry is the kind."""
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(value)
        if array.dtype.str not in _DTYPES:
            raise TypeError(f"arrays are of {', '.join(_DTYPES)}, got {array.dtype}")
        arrays.append(array)
        return ["array", array.dtype.str, *value.shape]
    if isinstance(value, frozenset | list) or value == ():
        return [type(value).__name__, *map(int, value)]
    if type(value).__name__ not in _TUPLES:
        raise TypeError(f"cannot be sent: {type(value).__name__}")
    return [type(value).__name__, *(_described(each, arrays) for each in value)]


def _made(described: Any, arrays: bytearray, position: int) -> tuple[Any, int]:
    """The value of a description, whose arrays begin at a position, and where they end."""
    if not isinstance(described, list):
        return described, position
    kind, *rest = described
    if kind in _COLLECTIONS:
        return _COLLECTIONS[kind](map(int, rest)), position
    if kind != "array":
        values = []
        for each in rest:
            value, position = _made(each, arrays, position)
            values.append(value)
        return _TUPLES[kind](*values), position
    dtype, *shape = rest
    if dtype not in _DTYPES or not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError(f"no array is {dtype!r:.20} of shape {shape!r:.80}")
    count = math.prod(shape)
    end = position + count * np.dtype(dtype).itemsize
    if end > len(arrays):
        raise ValueError(f"an array ends at byte {end} of {len(arrays)}")
    return np.frombuffer(arrays, dtype, count, position).reshape(shape), end + -end % _ALIGNMENT
