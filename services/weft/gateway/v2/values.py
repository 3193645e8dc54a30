"""Tensor data in JSON and in wire format."""

import json
from typing import Any

import numpy as np

from weft.base.errors import InvalidArgumentError
from weft.base.tensors import (
    DATATYPES,
    FLOATS,
    INTEGERS,
    NUMPY_BY_DATATYPE,
    Array,
    WireTensor,
    decode,
    encode_bytes,
    split_bytes,
)
from weft.gateway.errors import RequestError


def bytes_of(data: Any, datatype: str, name: str) -> bytes:
    """Wire format of the elements of an input.

    Args:
        data: A value of JSON: an array, nested or flat in row-major order, or one element.
        datatype: V2 name.
        name: Name of the input, for messages.

    Raises:
        RequestError: The data is ragged, or not of the datatype.
    """
    if datatype == "BYTES":
        return _strings(data, name)
    dtype = NUMPY_BY_DATATYPE.get(datatype)
    if dtype is None:
        raise RequestError(
            f"input '{name}' has datatype '{datatype[:40]}', which is no V2 datatype; use one of {', '.join(DATATYPES)}"
        )
    try:
        values: Array = np.asarray(data)
    except (ValueError, OverflowError):
        raise RequestError(f"the data of input '{name}' is ragged; every row must have the same length") from None
    if datatype == "UINT64" and values.dtype.kind == "f":  # numpy's type for small and large integers together
        values = np.asarray(data, np.object_)
        if all(type(value) is int and 0 <= value < 1 << 64 for value in values.ravel()):
            values = values.astype(dtype)
    if values.size == 0:
        return b""
    if datatype in INTEGERS:
        _check_integers(values, datatype, dtype, name)
    elif values.dtype.kind not in ("iuf" if datatype in FLOATS else "b"):
        raise _wrong_kind(name, datatype, values)
    with np.errstate(over="ignore"):
        return values.astype(dtype).tobytes()


def json_of(tensor: WireTensor, name: str) -> bytes:
    """JSON of the elements of an output, a flat array in row-major order.

    Numbers that are not finite are NaN, Infinity and -Infinity, as Python's and Triton's readers take them.

    Raises:
        InvalidArgumentError: A string is not UTF-8.
    """
    return json.dumps(elements(tensor, name), ensure_ascii=False, separators=(",", ":")).encode()


def elements(tensor: WireTensor, name: str) -> list[Any]:
    """The elements of an output for JSON. Raises like ``json_of``."""
    if tensor.datatype != "BYTES":
        array = decode(tensor, name=name)
        if array.dtype.kind == "V":  # bfloat16
            array = array.astype(np.float32)
        values: list[Any] = array.ravel().tolist()
        return values
    try:
        return [element.decode() for element in split_bytes(tensor.data, name=name)]
    except UnicodeDecodeError:
        raise InvalidArgumentError(
            f"output '{name}' has a string that is not UTF-8, which JSON cannot carry; ask for it with the parameter "
            '"binary_data": true'
        ) from None


def _check_integers(values: Array, datatype: str, dtype: "np.dtype[Any]", name: str) -> None:
    if values.dtype.kind not in "iu":
        raise _wrong_kind(name, datatype, values)
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    if int(values.min()) < low or int(values.max()) > high:
        got = int(values.min()) if int(values.min()) < low else int(values.max())
        raise RequestError(f"input '{name}' has the value {got}; {datatype} takes {low} to {high}")


def _wrong_kind(name: str, datatype: str, values: Array) -> RequestError:
    wanted = "integers" if datatype in INTEGERS else "numbers" if datatype in FLOATS else "true and false"
    kinds = {"b": "true or false", "f": "numbers with a fraction", "U": "strings", "O": "values of several types"}
    got = kinds.get(values.dtype.kind, "integers")
    return RequestError(f"the data of input '{name}' of datatype {datatype} must be {wanted}, got {got}")


def _strings(data: Any, name: str) -> bytes:
    found: list[str] = []
    waiting = [data]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, list):
            waiting.extend(reversed(value))
        else:
            raise RequestError(f"the data of input '{name}' of datatype BYTES must be strings, got {value!r:.40}")
    try:
        return encode_bytes(found)
    except UnicodeEncodeError:
        raise RequestError(f"input '{name}' has half of a surrogate pair; send whole characters") from None
