"""V2 datatypes, and tensors as raw bytes with a datatype and a shape.

Services pass a ``WireTensor`` on without decoding it; ``decode`` returns a numpy view where it is needed. ``reshape``
of inputs and outputs follows the rules of Triton Inference Server.
"""

import math
import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weft.base.errors import InvalidArgumentError, UnsupportedError


def fits(shape: Sequence[int], dims: Sequence[int]) -> bool:
    """Whether a tensor of declared ``dims`` may have this shape; -1 stands for any size."""
    return len(shape) == len(dims) and all(
        got >= 0 and want in (-1, got) for got, want in zip(shape, dims, strict=True)
    )


def reshaped(shape: Sequence[int], source: Sequence[int], target: Sequence[int]) -> tuple[int, ...]:
    """Convert ``shape``, which fits the dims ``source``, to one that fits ``target``.

    Sizes of the -1 in ``source`` are those of the -1 in ``target``, in order. A batch dimension before the dims stays.
    """
    num_before = len(shape) - len(source)
    sizes = iter([size for size, dim in zip(shape[num_before:], source, strict=True) if dim == -1])
    return (*shape[:num_before], *(next(sizes) if dim == -1 else dim for dim in target))


def reshape_fault(dims: Sequence[int], shape: Sequence[int], *, has_batch: bool) -> tuple[str, str] | None:
    """Check that a ``reshape`` has as many elements as ``dims``, for every size of each -1.

    Args:
        dims: Of the tensor, already checked.

    Returns:
        The invalid field and an error message; None if valid.
    """
    if any(dim < -1 or dim == 0 for dim in shape):
        return "reshape.shape", f"reshape dimensions must be integer >= 1, or -1 for any size, got {list(shape)}"
    if not shape and not has_batch:
        return "reshape", (
            "cannot have empty reshape for non-batching model as scalar tensors are not supported; use "
            "reshape { shape: [ 1 ] }, or max_batch_size"
        )
    of_dims, of_shape = list(dims).count(-1), list(shape).count(-1)
    if of_dims != of_shape:
        return "reshape", (
            f"has different number of variable-size dimensions for dims and reshape: {list(dims)} has {of_dims} and "
            f"{list(shape)} has {of_shape}; each -1 of one is a -1 of the other, in order"
        )
    if _chunks(dims) != _chunks(shape):
        return "reshape", (
            f"has different size for dims and reshape: {list(dims)} and {list(shape)}; the number of elements must be "
            "the same, also between each two -1"
        )
    return None


def _chunks(dims: Sequence[int]) -> list[int]:
    """Elements before, between and after the -1 of some dims."""
    places = [i for i, dim in enumerate(dims) if dim == -1]
    bounds = zip([-1, *places], [*places, len(dims)], strict=True)
    return [num_elements(dims[low + 1 : high]) for low, high in bounds]


try:
    import ml_dtypes
except ModuleNotFoundError:
    ml_dtypes = None

Array = npt.NDArray[Any]

#: Longest element of a BYTES tensor in a request, for example an encoded image.
MAX_STRING_BYTES = 256 << 20


class _Dtypes(dict[str, np.dtype[Any]]):
    """Dtypes by V2 datatype; BF16 raises UnsupportedError where ml_dtypes is not installed."""

    def __missing__(self, datatype: str) -> np.dtype[Any]:
        if datatype in DATATYPES:
            raise UnsupportedError(f"{datatype} tensors are numpy arrays of ml_dtypes: pip install 'weft-mesh[bf16]'")
        raise KeyError(datatype)

    def get(self, datatype: str, default: Any = None) -> Any:
        """The dtype; the default for what is no V2 datatype."""
        found = dict.get(self, datatype)
        if found is None:
            return self[datatype] if datatype in DATATYPES else default
        return found


NUMPY_BY_DATATYPE: dict[str, np.dtype[Any]] = _Dtypes(
    {
        "BOOL": np.dtype(np.bool_),
        "UINT8": np.dtype(np.uint8),
        "UINT16": np.dtype(np.uint16),
        "UINT32": np.dtype(np.uint32),
        "UINT64": np.dtype(np.uint64),
        "INT8": np.dtype(np.int8),
        "INT16": np.dtype(np.int16),
        "INT32": np.dtype(np.int32),
        "INT64": np.dtype(np.int64),
        "FP16": np.dtype(np.float16),
        "FP32": np.dtype(np.float32),
        "FP64": np.dtype(np.float64),
        **({} if ml_dtypes is None else {"BF16": np.dtype(ml_dtypes.bfloat16)}),
        "BYTES": np.dtype(np.object_),
    }
)
#: Every V2 datatype.
DATATYPES = (
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "BF16",
    "BYTES",
)  # fmt: skip
INTEGERS = frozenset(name for name in DATATYPES if "INT" in name)
FLOATS = frozenset({"FP16", "FP32", "FP64", "BF16"})
DATATYPE_BY_NUMPY: dict[np.dtype[Any], str] = {dtype: name for name, dtype in NUMPY_BY_DATATYPE.items()}
ITEMSIZE_BYTES: dict[str, int] = {
    name: 2 if name == "BF16" else NUMPY_BY_DATATYPE[name].itemsize for name in DATATYPES if name != "BYTES"
}

#: Product of a shape; 1 for a scalar.
num_elements = math.prod

_MAX_SHOWN = 80
_LENGTH = struct.Struct("<I")
#: Of the length before each BYTES element.
LENGTH_BYTES = _LENGTH.size


class WireTensor(NamedTuple):
    """A tensor in wire format.

    Attributes:
        datatype: V2 name: BOOL, (U)INT8..64, FP16, FP32, FP64, BF16 or BYTES.
        shape: Dimensions, including the batch dimension.
        data: Row-major little-endian elements; each BYTES element is a 4-byte little-endian length followed by its
            bytes.
    """

    datatype: str
    shape: tuple[int, ...]
    data: bytes


def datatype_of(array: Array) -> str:
    """V2 datatype of a numpy array; unicode and byte-string arrays are BYTES.

    Raises:
        InvalidArgumentError: The dtype has no V2 datatype.
    """
    datatype = DATATYPE_BY_NUMPY.get(array.dtype)
    if datatype is not None:
        return datatype
    if array.dtype.kind in "SU":
        return "BYTES"
    raise InvalidArgumentError(f"dtype {array.dtype} has no V2 datatype; use one of {', '.join(DATATYPES)}")


def encode_bytes(elements: Iterable[bytes | str]) -> bytes:
    """BYTES elements in wire format; str is encoded as UTF-8."""
    parts: list[bytes] = []
    for element in elements:
        value = bytes(element) if isinstance(element, (bytes, bytearray, memoryview)) else str(element).encode()
        parts.append(_LENGTH.pack(len(value)))
        parts.append(value)
    return b"".join(parts)


def split_bytes(data: bytes | memoryview, *, name: str = "") -> list[bytes]:
    """Elements of a BYTES tensor in wire format.

    Raises:
        InvalidArgumentError: ``data`` ends inside a length or inside an element.
    """
    elements: list[bytes] = []
    view = memoryview(data)
    offset, end = 0, len(view)
    while offset < end:
        if offset + 4 > end:
            raise InvalidArgumentError(
                f"incomplete string length indicator for inference input '{name}': {end - offset} bytes left at offset "
                f"{offset}, 4 needed; each BYTES element is a 4-byte little-endian length and that many bytes"
            )
        (length,) = _LENGTH.unpack_from(view, offset)
        offset += 4
        if offset + length > end:
            raise InvalidArgumentError(
                f"incomplete string data for inference input '{name}': an element of {length} bytes starts at offset "
                f"{offset}, but the tensor has {end} bytes"
            )
        elements.append(bytes(view[offset : offset + length]))
        offset += length
    return elements


def check_bytes(data: bytes, expected: int, *, name: str, model: str) -> None:
    """Check that ``data`` is exactly ``expected`` BYTES elements, without copying or scanning further elements.

    Raises:
        InvalidArgumentError: Truncated, too few or too many elements, or one is longer than ``MAX_STRING_BYTES``.
    """
    offset, end, count = 0, len(data), 0
    while offset + 4 <= end and count <= expected:
        length = _LENGTH.unpack_from(data, offset)[0]
        offset += 4 + length
        count += 1
        if MAX_STRING_BYTES < length <= end:
            raise InvalidArgumentError(
                f"input '{name}' for model '{model}' has a string of {length} bytes; at most {MAX_STRING_BYTES} are "
                "allowed"
            )
    if offset != end and count <= expected:
        what, count = ("data", count) if offset > end else ("length indicator", count + 1)
        raise InvalidArgumentError(
            f"incomplete string {what} for inference input '{name}' for model '{model}': {end} bytes end inside "
            f"element {count}; each element is a 4-byte little-endian length and that many bytes"
        )
    if count != expected:
        raise InvalidArgumentError(
            f"expected {expected} string elements for inference input '{name}' for model '{model}', got {count}"
            + " or more" * (offset < end)
        )


def decode(tensor: WireTensor, *, name: str = "") -> Array:
    """Decode a wire tensor: a read-only numpy view of its bytes, or an object array of ``bytes`` for BYTES.

    Raises:
        InvalidArgumentError: The byte size, or the number of BYTES elements, does not match the shape.
    """
    datatype, shape, data = tensor
    if shape and min(shape) < 0:
        raise InvalidArgumentError(f"shape [{','.join(map(str, shape))}] of '{name}' has a negative dimension")
    expected = num_elements(shape)
    if datatype == "BYTES":
        elements = split_bytes(data, name=name)
        if len(elements) != expected:
            raise InvalidArgumentError(
                f"expected {expected} string elements for inference input '{name}', got {len(elements)}"
            )
        array: Array = np.empty(expected, dtype=np.object_)
        array[:] = elements
    else:
        dtype = NUMPY_BY_DATATYPE.get(datatype)
        if dtype is None:
            raise InvalidArgumentError(f"unknown datatype '{datatype}' for '{name}'; use one of {', '.join(DATATYPES)}")
        if len(data) != expected * dtype.itemsize:
            raise InvalidArgumentError(
                f"input byte size mismatch for input '{name}'. Expected {expected * dtype.itemsize}, got {len(data)}"
            )
        array = np.frombuffer(data, dtype=dtype)
    try:
        return array.reshape(shape)
    except ValueError as error:  # with a dimension of 0, the others may exceed numpy's limits
        raise InvalidArgumentError(f"shape [{','.join(map(str, shape))}] of '{name}' is too large: {error}") from None


def encode(array: Array) -> WireTensor:
    """Wire tensor of a numpy array; copies the data. Raises InvalidArgumentError: the dtype has no V2 datatype."""
    datatype = datatype_of(array)
    data = encode_bytes(array.ravel().tolist()) if datatype == "BYTES" else array.tobytes()
    return WireTensor(datatype, array.shape, data)


def array_of(value: Any, datatype: str, *, what: str) -> Array:
    """Array of ``datatype`` from a number, a text, or a list of them; an integer may stand for a float.

    Elements of BYTES are ``bytes``, those of text in UTF-8.

    Raises InvalidArgumentError: The value does not fit; the message begins with ``what``.
    """
    if datatype == "BYTES":
        return _array_of_bytes(value, what)
    try:
        plain = np.array(value)
    except (ValueError, TypeError, OverflowError, RuntimeError):  # a list of unequal lists, a tensor of a GPU
        plain = np.array(None)
    allowed = "b" if datatype == "BOOL" else "iu" if datatype in INTEGERS else "iuf"
    if plain.size and plain.dtype.kind not in allowed:
        raise InvalidArgumentError(f"{what} does not fit {datatype}: {shown(value)}")
    dtype = NUMPY_BY_DATATYPE[datatype]
    if plain.size and datatype in INTEGERS:
        bounds = np.iinfo(dtype)
        if int(plain.min()) < bounds.min or int(plain.max()) > bounds.max:
            holds = f"which holds {bounds.min} to {bounds.max}"
            raise InvalidArgumentError(f"{what} does not fit {datatype}, {holds}: {shown(value)}")
    with np.errstate(over="ignore"):
        array: Array = plain.astype(dtype)
    if datatype in FLOATS and np.isinf(array[np.isfinite(plain)]).any():
        raise InvalidArgumentError(f"{what} does not fit {datatype}, it is too large: {shown(value)}")
    return array


def _array_of_bytes(value: Any, what: str) -> Array:
    is_nested = isinstance(value, list | tuple | np.ndarray)
    array = np.array(value, np.object_) if is_nested else np.empty((), np.object_)
    if not is_nested:
        array[()] = value
    flat = array.reshape(-1)
    for place, element in enumerate(flat):
        if isinstance(element, str):
            try:
                flat[place] = element.encode()
            except UnicodeEncodeError:
                raise InvalidArgumentError(f"{what} is not UTF-8 text: {shown(element)}") from None
        elif not isinstance(element, bytes):
            raise InvalidArgumentError(f"{what} takes text, got {shown(element)}")
    return array


def shown(value: Any) -> str:
    """A value in a message, at most 80 characters of it."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def tensor_of(value: Any, datatype: str, dims: Sequence[int], *, name: str, has_batch: bool) -> WireTensor:
    """Tensor of a numpy array as it is, or of what ``array_of`` takes, in the shape of a model's tensor.

    A list may lack the batch dimension; if a row has one element, a flat list has a row in each.

    Args:
        dims: Shape of a row, or of the tensor without batch dimension; -1 is any size.

    Raises:
        InvalidArgumentError: As ``array_of``, or the dtype has no V2 datatype. The shape is not checked.
    """
    if isinstance(value, np.ndarray | np.generic):
        return encode(np.asarray(value))
    array = array_of(value, datatype, what=f"value of input '{name}'")
    if has_batch and fits(array.shape, dims):
        array = array[np.newaxis]
    elif array.ndim <= 1 and all(dim == 1 for dim in dims) and (has_batch or array.size == 1):
        array = array.reshape((-1, *dims) if has_batch else tuple(dims))
    return encode(array)


def bytes_tensor(elements: Sequence[bytes | str], shape: tuple[int, ...]) -> WireTensor:
    """BYTES wire tensor of ``shape`` from its elements in row-major order."""
    return WireTensor("BYTES", shape, encode_bytes(elements))


def joined(tensors: Iterable[WireTensor]) -> WireTensor:
    """One string of all that BYTES tensors have, those of a stream for example."""
    return bytes_tensor([b"".join(text for one in tensors for text in split_bytes(one.data))], (1,))
