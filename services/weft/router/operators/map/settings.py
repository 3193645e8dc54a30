"""What a map does with rows: which tensors are lists, and what is made of the answers."""

from typing import NamedTuple

from weft.base.signature import TensorSpec
from weft.base.tensors import WireTensor


class ListInput(NamedTuple):
    """An input whose rows the step gets.

    Attributes:
        row_slot: Of its rows, in the frame of a chunk.
        rank: Number of its dimensions from the list's on.
    """

    name: str
    slot: int
    row_slot: int
    rank: int


class WholeInput(NamedTuple):
    """An input that goes to every row: slots as of ``ListInput``, and its rank without batch dimension."""

    slot: int
    row_slot: int
    rank: int


class CollectPlan(NamedTuple):
    """One output.

    Attributes:
        row_slot: Of an answer, in the frame of a chunk.
        output: Slot of the result; -1 where nothing reads it.
        is_list: Whether rows follow one another along their first dimension.
        lengths: Slot of the rows' lengths; -1 where nothing reads them.
        spec: What is known of the answer for one row.
        default: Answer of one row whose chunk failed softly, without batch dimension; None where there is none.
    """

    name: str
    row_slot: int
    output: int
    is_list: bool
    lengths: int
    spec: TensorSpec
    default: WireTensor | None


class MapSettings(NamedTuple):
    """What a map does with rows.

    Attributes:
        over: Lists; at least one.
        chunk_rows: Rows in a chunk at most.
        max_rows: Of one list; 0: no limit but that of all lists together.
        max_inflight: Chunks at once.
        lengths: (name, slot) of the tensor that says how many rows count; None where all do.
        is_batched: Whether chunks have a batch dimension; else they are of one row.
        index_slot: Where the step streams: slot of the row's number; -1 where nothing reads it.
    """

    over: tuple[ListInput, ...]
    whole: tuple[WholeInput, ...]
    collects: tuple[CollectPlan, ...]
    chunk_rows: int
    max_rows: int
    max_inflight: int
    lengths: tuple[str, int] | None
    is_batched: bool
    index_slot: int = -1


#: Of a map of which nothing is known.
NO_ROWS = MapSettings((), (), (), 1, 0, 1, None, is_batched=False)
