"""``TensorType``: what is known of a tensor at compile time; and when two types fit."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from weft.base.signature import TensorSpec


@dataclass(frozen=True, slots=True)
class TensorType:
    """Datatype and shape of a tensor, and their origin.

    Attributes:
        datatype: V2 name; "" if unknown (a model that no target lists, in an offline check).
        dims: Without the batch dimension; -1 is any size.
        is_batched: Whether a batch dimension precedes ``dims``.
        origin: For messages, for example ``output 'OUT' of step 'pre' (graph.pbtxt:6:3)``.
        absence: For messages: why it may be absent, and the cure; "" if clients may leave it out.
        labels: Names of the classes, if its model has them.
    """

    datatype: str
    dims: tuple[int, ...]
    is_batched: bool
    is_optional: bool
    origin: str
    absence: str = ""
    labels: tuple[str, ...] = field(default=(), compare=False, repr=False)

    @classmethod
    def of(cls, spec: TensorSpec, *, is_batched: bool, origin: str) -> "TensorType":
        """Type of a declared tensor."""
        return cls(spec.datatype, spec.dims, is_batched, spec.is_optional, origin, labels=spec.labels)

    @classmethod
    def unknown(cls, origin: str) -> "TensorType":
        """An unknown type, which fits everything."""
        return cls("", (), is_batched=False, is_optional=False, origin=origin)

    @property
    def is_known(self) -> bool:
        """Whether datatype and dims are known."""
        return self.datatype != ""

    @property
    def full_dims(self) -> tuple[int, ...]:
        """Dims with the batch dimension as a leading -1."""
        return (-1, *self.dims) if self.is_batched else self.dims

    def forgotten(self) -> "TensorType":
        """A copy with everything unknown but the origin."""
        return self.unknown(self.origin)

    def present(self) -> "TensorType":
        """A copy that is known to be present."""
        return replace(self, is_optional=False, absence="")

    def absent_like(self, other: "TensorType") -> "TensorType":
        """A copy that may be absent if ``other`` may, for the same reason."""
        return replace(self, is_optional=other.is_optional, absence=other.absence)

    def __str__(self) -> str:
        return f"{self.datatype} {shape_text(self.full_dims)}"


def shape_text(dims: Iterable[int]) -> str:
    """Dims as files write them: ``[-1,3]``."""
    return f"[{','.join(map(str, dims))}]"


def dims_fit(left: tuple[int, ...], right: tuple[int, ...]) -> bool:
    """Same rank, and each pair equal or one of it -1."""
    return len(left) == len(right) and all(a == b or -1 in (a, b) for a, b in zip(left, right, strict=True))


def fits(produced: TensorType, used: TensorType) -> bool:
    """Whether shapes agree as in Triton Inference Server, with or without the batch dimension; -1 fits any."""
    if not (produced.is_known and used.is_known):
        return True
    return dims_fit(produced.dims, used.dims) or dims_fit(produced.full_dims, used.full_dims)


def loses_batch(produced: TensorType, used: TensorType) -> bool:
    """Whether the tensor fits only in one-row requests, because one side has no batch dimension."""
    if not (produced.is_known and used.is_known) or produced.is_batched == used.is_batched:
        return False
    return not dims_fit(produced.full_dims, used.full_dims)


def merged(types: list[TensorType], origin: str) -> TensorType:
    """Type of a tensor that any of several alternatives gives: sizes that differ become -1.

    All of ``types`` have the same datatype and fit one another; unknown ones are ignored.
    """
    known = [one for one in types if one.is_known]
    if not known:
        return TensorType.unknown(origin)
    first = known[0]
    alike = [one.dims for one in known if len(one.dims) == len(first.dims)]
    dims = tuple(sizes[0] if len(set(sizes)) == 1 else -1 for sizes in zip(*alike, strict=True))
    result = TensorType(first.datatype, dims, first.is_batched, is_optional=False, origin=origin)
    return result.absent_like(next((one for one in known if one.is_optional), result))
