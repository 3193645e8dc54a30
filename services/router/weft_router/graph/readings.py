"""Values that conditions read from tensors: no more of a tensor is decoded than a reading needs."""

from collections.abc import Callable
from typing import Any

from weft_common.errors import InvalidArgumentError
from weft_common.tensors import Array, WireTensor, decode, num_elements
from weft_router.graph.expression import Use

#: A tensor of more elements is not turned into a list; reductions such as ``max`` have no limit.
MAX_LIST_ELEMENTS = 1024
#: CEL takes such a string for what stands before the character.
NUL_FAULT = "a string that conditions read has no NUL character, this one has"


def text(tensor: WireTensor) -> str:
    """The first string of a BYTES tensor.

    Raises:
        InvalidArgumentError: Not a BYTES tensor, it has no element, or the element is not UTF-8.
    """
    data = tensor.data
    if tensor.datatype != "BYTES":
        raise InvalidArgumentError(f"text() takes a BYTES tensor, got {tensor.datatype}")
    length = int.from_bytes(data[:4], "little")
    if not num_elements(tensor.shape) or len(data) < 4 + length or len(data) < 4:
        raise InvalidArgumentError(f"the tensor of shape {list(tensor.shape)} has no first string")
    return _utf8(data[4 : 4 + length])


def _utf8(data: bytes) -> str:
    try:
        value = data.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(
            f"the string is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}"
        ) from None
    if "\0" in value:
        raise InvalidArgumentError(NUL_FAULT)
    return value


def _numbers(tensor: WireTensor, row: Array | None = None) -> Array:
    """The tensor, or one row of it, if it has numbers."""
    array = decode(tensor) if row is None else row
    if array.size == 0 or array.dtype.kind not in "iufV":
        raise InvalidArgumentError(f"a reduction takes numbers, got {tensor.datatype} of shape {list(tensor.shape)}")
    return array


def _scalar(value: Any) -> int | float:
    return int(value) if value.dtype.kind in "iu" else float(value)


def reading(use: Use, num_dims: int) -> Callable[[WireTensor], object]:
    """The function that reads ``use`` from a tensor.

    Args:
        use: ``VALUE`` gives a list, nested as the dims are.
        num_dims: Number of dims without the batch dimension. A tensor that has one more is read by ``VALUE``,
            ``TEXT`` and ``ARGMAX`` if it has one row.
    """

    def one_row(tensor: WireTensor) -> Array:
        if len(tensor.shape) == num_dims:
            return decode(tensor)
        if len(tensor.shape) != num_dims + 1 or tensor.shape[0] != 1:
            raise InvalidArgumentError(
                f"elements are read of one row, got shape {list(tensor.shape)}; send rows one by one, or use max(), "
                "min() or mean(), which take them all"
            )
        array: Array = decode(tensor)[0]
        return array

    def text_of_one_row(tensor: WireTensor) -> str:
        if len(tensor.shape) == num_dims + 1 and tensor.shape[0] > 1:
            raise InvalidArgumentError(
                f"text() reads one row, got shape {list(tensor.shape)}: the whole request takes one branch; send rows "
                "one by one"
            )
        return text(tensor)

    def value(tensor: WireTensor) -> object:
        if num_elements(tensor.shape) > MAX_LIST_ELEMENTS:
            raise InvalidArgumentError(
                f"a tensor of {num_elements(tensor.shape)} elements is too large to be read one by one, the limit is "
                f"{MAX_LIST_ELEMENTS}; use max(), min(), mean() or argmax()"
            )
        row = one_row(tensor).tolist()
        return _decoded(row) if tensor.datatype == "BYTES" else row

    readings: dict[Use, Callable[[WireTensor], object]] = {
        Use.VALUE: value,
        Use.TEXT: text_of_one_row,
        Use.MAX: lambda tensor: _scalar(_numbers(tensor).max()),
        Use.MIN: lambda tensor: _scalar(_numbers(tensor).min()),
        Use.MEAN: lambda tensor: float(_numbers(tensor).mean(dtype=float)),
        Use.ARGMAX: lambda tensor: int(_numbers(tensor, one_row(tensor)).argmax()),
    }
    return readings[use]


def _decoded(value: Any) -> Any:
    return [_decoded(item) for item in value] if isinstance(value, list) else _utf8(value)
