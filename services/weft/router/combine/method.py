"""``CombineMethod``: which tensors a combine method takes, what it returns, and how it computes it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft.base.errors import InternalError
from weft.base.tensors import FLOATS, INTEGERS, WireTensor

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
