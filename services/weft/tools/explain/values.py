"""Tensors of which only datatype and shape are known, in the frames of a router that really runs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from weft.base.errors import InvalidArgumentError
from weft.base.signature import TensorSpec
from weft.base.tensors import ITEMSIZE_BYTES, WireTensor, encode_bytes, num_elements

#: In the message of a condition that failed only because it needs such a value.
UNKNOWN_VALUE = "(the value is not known yet)"
#: What depends on values of rows that went their own paths.
SOME_ROWS = ("the rows that come here",)
_MAX_ORIGINS = 3
#: A row of more elements is represented by a row of one, which costs no memory.
_MAX_ELEMENTS = 4096
_STRING = b"\xabweft: not known\xab"
_BYTE = b"\xab"


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What is known of a tensor that is not known.

    Attributes:
        shape: As far as it is known, -1 where it is not.
        origins: What it depends on, for people: ``LANG of lid -> lang_id``.
        may_be_absent: Whether it may be absent.
    """

    shape: tuple[int, ...]
    origins: tuple[str, ...]
    may_be_absent: bool = False


class Known(WireTensor):
    """A tensor that the request, or the plan, gives."""


class Unknown(WireTensor):
    """A placeholder: its shape is a possible one, its elements mean nothing."""

    known: Knowledge

    @classmethod
    def of(cls, datatype: str, known: Knowledge, shape: Sequence[int]) -> "Unknown":
        """A placeholder of a possible shape, -1 standing for 1."""
        shape = tuple(1 if size < 0 else size for size in shape)
        count = num_elements(shape)
        is_text = datatype == "BYTES"
        data = encode_bytes([_STRING] * count) if is_text else _BYTE * (ITEMSIZE_BYTES.get(datatype, 1) * count)
        tensor = cls(datatype, shape, data)
        tensor.known = known
        return tensor

    def _replace(self, **changes: Any) -> "Unknown":
        """As of any named tuple; of another shape, sizes are as unknown as they were."""
        shape = tuple(changes.get("shape", self.shape))
        is_open = -1 in self.known.shape[1:]
        rest = (-1,) * len(shape[1:]) if is_open else shape[1:]
        rows = self.known.shape[:1] if shape[:1] == self.shape[:1] else shape[:1]
        known = replace(self.known, shape=(*rows, *rest))
        return Unknown.of(changes.get("datatype", self.datatype), known, (*shape[:1], *small(shape[1:])))


def small(dims: Sequence[int]) -> tuple[int, ...]:
    """The dims of a placeholder's row: the same, unless they are of too many elements."""
    dims = tuple(dims)
    return dims if num_elements(max(size, 1) for size in dims) <= _MAX_ELEMENTS else (1,) * len(dims)


def is_marked(tensor: WireTensor) -> bool:
    """Whether these are rows of a placeholder; a tensor of no bytes counts as one."""
    if tensor.datatype == "BYTES":
        return not tensor.data or _STRING in tensor.data
    return not tensor.data.strip(_BYTE)


def placeholder(spec: TensorSpec, num_rows: int | None, origin: str, *, is_open: bool = False) -> Unknown:
    """A tensor as declared.

    Args:
        spec: The declaration.
        num_rows: Size of its batch dimension; None where it has none.
        origin: What gives it.
        is_open: The number of rows is only a possible one.
    """
    rows = () if num_rows is None else (num_rows,)
    known = Knowledge((*((-1,) if is_open and rows else rows), *spec.dims), (origin,))
    return Unknown.of(spec.datatype, known, (*rows, *small(spec.dims)))


def resolved(tensor: WireTensor | None) -> WireTensor | None:
    """The tensor, where it is some rows of another, with what is known of them."""
    if tensor is None or isinstance(tensor, (Known, Unknown)) or not is_marked(tensor):
        return tensor
    shape = (*tensor.shape[:1], *(-1 for _ in tensor.shape[1:]))
    return Unknown.of(tensor.datatype, Knowledge(shape, SOME_ROWS), tensor.shape)


def vague(tensor: WireTensor) -> Unknown:
    """Unknown rows of a tensor; in the frame it has as many as ``tensor``."""
    known = tensor.known if isinstance(tensor, Unknown) else Knowledge(tensor.shape, SOME_ROWS)
    known = Knowledge((-1, *known.shape[1:]), known.origins, known.may_be_absent)
    return Unknown.of(tensor.datatype, known, tensor.shape)


def key_of(tensor: WireTensor | None) -> object:
    """Equal for tensors that nothing tells apart."""
    return (tensor.datatype, tensor.shape, tensor.known) if isinstance(tensor, Unknown) else tensor


def joined(tensors: Iterable[WireTensor | None], origin: str = "the branch taken") -> WireTensor | None:
    """What is known of a slot that holds one of ``tensors``; ``origin`` is what decides where they do not tell."""
    choices = list({key_of(tensor): tensor for tensor in tensors}.values())
    if len(choices) <= 1:
        return choices[0] if choices else None
    present = [tensor for tensor in choices if tensor is not None]
    unknown = [tensor.known for tensor in present if isinstance(tensor, Unknown)]
    shapes = [tensor.known.shape if isinstance(tensor, Unknown) else tensor.shape for tensor in present]
    shape = tuple(sizes[0] if len(set(sizes)) == 1 else -1 for sizes in zip(*shapes, strict=False))
    origins = tuple(dict.fromkeys(origin for known in unknown for origin in known.origins))[:_MAX_ORIGINS]
    may_be_absent = len(present) < len(choices) or any(known.may_be_absent for known in unknown)
    known = Knowledge(shape, origins or (origin,), may_be_absent)
    return Unknown.of(present[0].datatype, known, present[0].shape)


class Unread:
    """In place of a placeholder where a condition is tried: it has a shape, and elements that cannot be read.

    Attributes:
        was_read: Whether someone has tried to.
    """

    def __init__(self, tensor: Unknown) -> None:
        self.datatype = tensor.datatype
        self._shape = tensor.known.shape
        self.was_read = False

    @property
    def shape(self) -> tuple[int, ...]:
        """A possible one; where a row's dims are not known, it counts as elements do."""
        self.was_read = self.was_read or min(self._shape[1:], default=0) < 0
        return tuple(1 if size < 0 else size for size in self._shape)

    @property
    def data(self) -> bytes:
        """Raises InvalidArgumentError."""
        self.was_read = True
        raise InvalidArgumentError(UNKNOWN_VALUE)

    def __iter__(self) -> object:
        self.was_read = True
        raise InvalidArgumentError(UNKNOWN_VALUE)


def sized(tensor: Unknown) -> WireTensor:
    """The tensor where only its shape is looked at: in place of bytes it has something as long as they are."""
    shape = tensor.known.shape
    length = num_elements(shape) * ITEMSIZE_BYTES.get(tensor.datatype, 0)
    return WireTensor(tensor.datatype, shape, cast(bytes, range(length)))
