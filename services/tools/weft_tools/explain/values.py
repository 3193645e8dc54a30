"""What is known of a tensor before any model has answered."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

from weft_common.errors import InvalidArgumentError
from weft_common.signature import TensorSpec
from weft_common.tensors import ITEMSIZE_BYTES, WireTensor, num_elements
from weft_router.tensors.rows import split

#: In the message of a condition that failed only because it needs such a value.
UNKNOWN_VALUE = "(the value is not known yet)"
_MAX_ORIGINS = 3


class StandIn:
    """In a frame, a tensor with a shape whose elements nobody knows: a condition that needs them fails.

    Attributes:
        was_read: Whether someone has tried to.
    """

    def __init__(self, datatype: str, shape: tuple[int, ...]) -> None:
        self.datatype = datatype
        self.shape = shape
        self.was_read = False

    @property
    def data(self) -> bytes:
        """Raises InvalidArgumentError."""
        self.was_read = True
        raise InvalidArgumentError(UNKNOWN_VALUE)

    def __iter__(self) -> Iterator[object]:
        self.was_read = True
        raise InvalidArgumentError(UNKNOWN_VALUE)


@dataclass(frozen=True, slots=True)
class Value:
    """A slot of a frame.

    Attributes:
        tensor: The tensor; where its elements are not known, a stand-in; None where it is absent.
        is_known: Whether presence and elements are certain.
        may_be_absent: Whether it may be absent.
        is_shape_known: Whether every dimension is.
        origins: What it depends on, for people: ``LANG of lid -> lang_id``.
    """

    tensor: WireTensor | None = None
    is_known: bool = True
    may_be_absent: bool = True
    is_shape_known: bool = True
    origins: tuple[str, ...] = ()

    @classmethod
    def known(cls, tensor: WireTensor) -> "Value":
        """A tensor with its elements."""
        return cls(tensor, may_be_absent=False)

    @classmethod
    def shaped(cls, datatype: str, shape: Sequence[int], origin: str, *, is_shape_known: bool = True) -> "Value":
        """A tensor of which only the shape is known; -1 is any size."""
        stand_in = cast(WireTensor, StandIn(datatype, tuple(1 if size < 0 else size for size in shape)))
        is_shape_known = is_shape_known and min(shape, default=0) >= 0
        return cls(stand_in, is_known=False, may_be_absent=False, is_shape_known=is_shape_known, origins=(origin,))

    @classmethod
    def unknown(cls, spec: TensorSpec | None, num_rows: int | None, origin: str, *, is_batched: bool) -> "Value":
        """What a model gives.

        Args:
            spec: What is declared of it; None where nothing is.
            num_rows: Rows of the request; None where not known.
            origin: The model.
            is_batched: Whether rows are counted by a leading dimension.
        """
        if spec is None or not spec.datatype:
            return cls.shaped("", (1,), origin, is_shape_known=False)
        rows = (-1 if num_rows is None else num_rows,) if is_batched else ()
        return cls.shaped(spec.datatype, (*rows, *spec.dims), origin)

    def maybe(self) -> "Value":
        """The same, or absent."""
        return self if self.may_be_absent else replace(self, is_known=False, may_be_absent=True)

    def present(self) -> "Value":
        """The same, if it is there at all."""
        return self if self.tensor is None else replace(self, may_be_absent=False)

    def vague(self) -> "Value":
        """Some rows of it, nobody knows which."""
        if self.tensor is None:
            return self
        shape = (-1, *self.tensor.shape[1:])
        value = Value.shaped(self.tensor.datatype, shape, "the rows that come here", is_shape_known=False)
        return value.maybe() if self.may_be_absent else value

    def sized(self) -> WireTensor | None:
        """The tensor where only its shape is looked at: in place of bytes it has something as long as they are."""
        if self.tensor is None:
            return None
        datatype, shape = self.tensor.datatype, self.tensor.shape
        return WireTensor(datatype, shape, cast(bytes, range(num_elements(shape) * ITEMSIZE_BYTES.get(datatype, 0))))

    def rows(self, rows: Sequence[int]) -> "Value":
        """Those rows of it."""
        if self.tensor is None:
            return self
        if self.is_known:
            return replace(self, tensor=split(self.tensor, [rows])[0])
        stand_in = StandIn(self.tensor.datatype, (len(rows), *self.tensor.shape[1:]))
        return replace(self, tensor=cast(WireTensor, stand_in))


ABSENT = Value()


def joined(values: Iterable[Value], origin: str = "the branch taken") -> Value:
    """What is known of a slot that holds one of ``values``; ``origin`` is what decides where they do not tell."""
    choices = list(dict.fromkeys(values))
    if len(choices) == 1:
        return choices[0]
    present = [choice for choice in choices if choice.tensor is not None]
    if not present:
        return ABSENT
    origins = tuple(dict.fromkeys(origin for choice in choices for origin in choice.origins))[:_MAX_ORIGINS]
    tensor = cast(WireTensor, present[0].tensor)
    shapes = {cast(WireTensor, choice.tensor).shape for choice in present}
    stand_in = cast(WireTensor, StandIn(tensor.datatype, tensor.shape))
    return Value(
        stand_in,
        is_known=False,
        may_be_absent=any(choice.may_be_absent for choice in choices),
        is_shape_known=len(shapes) == 1 and all(choice.is_shape_known for choice in present),
        origins=origins or (origin,),
    )
