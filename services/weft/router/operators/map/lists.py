"""Lists of rows in a map: splits tensors into chunks for the step and joins the answers.

Values are never decoded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from weft.base.errors import InternalError, InvalidArgumentError
from weft.base.signature import TensorSpec
from weft.base.tensors import INTEGERS, ITEMSIZE_BYTES, LENGTH_BYTES, WireTensor, decode, num_elements
from weft.router.tensors import row_offsets, with_batch, without_batch

#: Slices of fewer bytes are copied: protobuf takes no views, and larger ones do not pass through it.
_VIEW_BYTES = 64 << 10


class ListInput(NamedTuple):
    """An input that is split into rows.

    Attributes:
        row_slot: Of its rows, in the frame of a chunk.
        rank: Number of its dimensions from the list's on.
    """

    name: str
    slot: int
    row_slot: int
    rank: int


class WholeInput(NamedTuple):
    """An input that every row gets whole: slots as of ``ListInput``, and its rank without batch dimension."""

    slot: int
    row_slot: int
    rank: int


class CollectPlan(NamedTuple):
    """One output.

    Attributes:
        row_slot: Of an answer, in the frame of a chunk.
        output: Slot of the result; -1 if nothing reads it.
        is_list: Whether rows are concatenated along their first dimension.
        lengths: Slot of the rows' lengths; -1 if nothing reads them.
        default: Answer for one row whose chunk failed softly, without batch dimension; None if there is none.
    """

    name: str
    row_slot: int
    output: int
    is_list: bool
    lengths: int
    spec: TensorSpec
    default: WireTensor | None


class MapSettings(NamedTuple):
    """Settings of a map.

    Attributes:
        max_rows: Of one list; 0: only the limit for all lists together.
        lengths: (name, slot) of the tensor with the number of valid rows; None: all are valid.
        is_batched: Whether chunks have a batch dimension; else they are of one row.
        index_slot: With streams: slot of the row's number; -1 if nothing reads it.
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


@dataclass(frozen=True, slots=True)
class Lists:
    """The lists of one request: one, or in a graph with a batch dimension one for each row of the batch.

    Attributes:
        size: Rows of each, padding included.
        lengths: Valid rows of each; the others are padding.
        is_batched: Whether a batch dimension counts the lists.
    """

    size: int
    lengths: Sequence[int]
    is_batched: bool

    @property
    def num_rows(self) -> int:
        """Valid rows of all lists."""
        return sum(self.lengths)

    @property
    def shape(self) -> tuple[int, ...]:
        """The leading dims of a tensor of these lists, before the dims of a row."""
        return (len(self.lengths), self.size) if self.is_batched else (self.size,)

    @property
    def is_padded(self) -> bool:
        """Whether some rows are padding."""
        return any(length != self.size for length in self.lengths)

    def owners(self, start: int, stop: int) -> list[tuple[int, int]]:
        """(list, number of rows) of a range of rows, numbered across all lists."""
        found: list[tuple[int, int]] = []
        before = 0
        for number, length in enumerate(self.lengths):
            count = min(stop, before + length) - max(start, before)
            if count > 0:
                found.append((number, count))
            before += length
        return found


class Rows:
    """The valid rows of a tensor of lists, one after another.

    Args:
        tensor: With the shape of ``lists`` before the dims of a row.
    """

    __slots__ = ("_data", "_datatype", "_dims", "_offsets", "_row_bytes")

    def __init__(self, tensor: WireTensor, lists: Lists) -> None:
        datatype, shape, data = tensor
        lead = len(lists.shape)
        num_lists, size = len(lists.lengths), lists.size
        self._datatype = datatype
        self._dims = shape[lead:] or (1,)
        self._offsets: list[int] | None = None
        self._row_bytes = 0
        if datatype == "BYTES":
            flat = WireTensor(datatype, (num_lists * size, *shape[lead:]), data)
            self._offsets = row_offsets(flat)
        else:
            self._row_bytes = num_elements(shape[lead:]) * ITEMSIZE_BYTES[datatype]
            if len(data) != num_lists * size * self._row_bytes:
                raise InternalError(f"{len(data)} bytes are not {datatype} of shape {list(shape)}")
        self._data = memoryview(data)
        if lists.is_padded:
            self._leave_out_padding(lists)

    def part(self, start: int, stop: int, *, is_batched: bool) -> WireTensor:
        """Rows ``start`` to ``stop`` as a tensor; without a batch dimension, one row."""
        first, last = self._at(start), self._at(stop)
        data = self._data[first:last]
        shape = (stop - start, *self._dims) if is_batched else self._dims
        return WireTensor(self._datatype, shape, bytes(data) if len(data) < _VIEW_BYTES else data)  # type: ignore[arg-type]

    def _at(self, row: int) -> int:
        return row * self._row_bytes if self._offsets is None else self._offsets[row]

    def _leave_out_padding(self, lists: Lists) -> None:
        pieces, lengths = [], [0]
        for number, length in enumerate(lists.lengths):
            first = number * lists.size
            pieces.append(self._data[self._at(first) : self._at(first + length)])
            if self._offsets is not None:
                offsets = self._offsets[first : first + length + 1]
                lengths += [stop - start for start, stop in pairwise(offsets)]
        self._data = memoryview(b"".join(pieces))
        if self._offsets is not None:
            self._offsets = list(accumulate(lengths))


class Whole:
    """A tensor that every row gets whole; in a graph with a batch dimension, the rows of a list get that list's part.

    Args:
        rank: Of the tensor without batch dimension.
    """

    __slots__ = ("_parts", "_repeated", "_tensor")

    def __init__(self, tensor: WireTensor, lists: Lists, rank: int) -> None:
        self._repeated: dict[int, WireTensor] = {}
        self._parts: Rows | None = None
        if len(tensor.shape) == rank + 1:
            if tensor.shape[0] == 1:
                tensor = without_batch(tensor)
            elif lists.is_batched:
                own = Lists(1, (1,) * tensor.shape[0], is_batched=True)
                self._parts = Rows(
                    WireTensor(tensor.datatype, (tensor.shape[0], 1, *tensor.shape[1:]), tensor.data), own
                )
        self._tensor = tensor

    def part(self, lists: Lists, start: int, stop: int, *, is_batched: bool) -> WireTensor:
        """The tensor for rows ``start`` to ``stop``; without a batch dimension, for one row."""
        if self._parts is None:
            return self._copies(stop - start) if is_batched else self._tensor
        owners = lists.owners(start, stop)
        if not is_batched:
            return self._parts.part(owners[0][0], owners[0][0] + 1, is_batched=False)
        datatype, dims = self._tensor.datatype, self._tensor.shape[1:]
        data = b"".join(
            bytes(self._parts.part(number, number + 1, is_batched=False).data) * count for number, count in owners
        )
        return WireTensor(datatype, (stop - start, *dims), data)

    def _copies(self, count: int) -> WireTensor:
        if count not in self._repeated:
            tensor = with_batch(self._tensor)
            data = tensor.data if count == 1 else bytes(tensor.data) * count
            self._repeated[count] = WireTensor(tensor.datatype, (count, *tensor.shape[1:]), data)
        return self._repeated[count]


def as_lists(tensor: WireTensor, rank: int, name: str, *, is_batched: bool) -> WireTensor:
    """Add or remove the batch dimension in front of the list dimension.

    Args:
        rank: Number of dimensions from the list's on.

    Raises:
        InvalidArgumentError: It has several lists, and the graph no batch dimension; or it has another rank.
    """
    excess = len(tensor.shape) - rank
    if excess == is_batched:
        return tensor
    if excess == 0:
        return with_batch(tensor)
    if excess == 1 and tensor.shape[0] == 1:
        return without_batch(tensor)
    wanted = f"{rank + is_batched} dimensions, {'the second' if is_batched else 'the first'} of which counts rows"
    raise InvalidArgumentError(f"the list '{name}' has shape {list(tensor.shape)}; it must have {wanted}")


def lengths_of(tensor: WireTensor, name: str, num_lists: int, size: int) -> list[int]:
    """Read the number of valid rows of each list from a tensor.

    Args:
        tensor: One integer for each list.

    Raises:
        InvalidArgumentError: The number of integers is wrong, or one is not from 0 to ``size``.
    """
    if tensor.datatype not in INTEGERS or num_elements(tensor.shape) != num_lists:
        shown = f"{tensor.datatype} {list(tensor.shape)}"
        lists = "list, of which there is one" if num_lists == 1 else f"of the {num_lists} lists"
        raise InvalidArgumentError(f"the lengths '{name}' are {shown}; give one integer for each {lists}")
    lengths = [int(value) for value in decode(tensor, name=name).ravel()]
    for length in lengths:
        if not 0 <= length <= size:
            raise InvalidArgumentError(
                f"'{name}' says that {length} rows of a list count, which has {size}; give 0 to {size}"
            )
    return lengths


def stacked(answers: Sequence[WireTensor], lists: Lists) -> WireTensor:
    """Stack answers, padded like the lists.

    Args:
        answers: ``[rows, dims...]`` each, with ``lists.num_rows`` in all, and the same ``dims``.
    """
    datatype, dims = answers[0].datatype, answers[0].shape[1:]
    data = answers[0].data if len(answers) == 1 else b"".join([one.data for one in answers])
    if lists.is_padded:
        data = _padded(WireTensor(datatype, (lists.num_rows, *dims), data), lists.lengths, lists.size)
    return WireTensor(datatype, (*lists.shape, *dims), data)


def concatenated(answers: Sequence[WireTensor], lists: Lists) -> tuple[WireTensor, WireTensor]:
    """Concatenate the rows of answers along their first dimension; return also the length of each.

    Args:
        answers: ``[rows, length, dims...]`` each, with ``lists.num_rows`` in all, and the same ``dims``.

    Returns:
        ``[sum, dims...]`` and INT64 ``[N]``; with a batch dimension, separately for each list, padded to the longest.
    """
    datatype, dims = answers[0].datatype, answers[0].shape[2:]
    lengths = [one.shape[1] for one in answers for _ in range(one.shape[0])]
    sums, table, at = [], np.zeros((len(lists.lengths), lists.size), np.int64), 0
    for number, count in enumerate(lists.lengths):
        table[number, :count] = own = lengths[at : at + count]
        sums.append(sum(own))
        at += count
    data = answers[0].data if len(answers) == 1 else b"".join([one.data for one in answers])
    size = max(sums, default=0)
    if any(one != size for one in sums):
        data = _padded(WireTensor(datatype, (sum(sums), *dims), data), sums, size)
    shape = (len(sums), size, *dims) if lists.is_batched else (size, *dims)
    return WireTensor(datatype, shape, data), WireTensor("INT64", lists.shape, table.tobytes())


def _padded(tensor: WireTensor, counts: Sequence[int], size: int) -> bytes:
    """Bytes of rows in lists of ``counts``, each list padded to ``size`` with zeros or empty strings."""
    per_row = num_elements(tensor.shape[1:])
    item_bytes = LENGTH_BYTES if tensor.datatype == "BYTES" else ITEMSIZE_BYTES[tensor.datatype]
    filling = bytes(per_row * item_bytes)
    offsets = row_offsets(tensor) if tensor.datatype == "BYTES" else None
    view, row = memoryview(tensor.data), 0
    pieces: list[bytes | memoryview] = []
    for count in counts:
        first, last = (row, row + count) if offsets is None else (offsets[row], offsets[row + count])
        scale = per_row * item_bytes if offsets is None else 1
        pieces += [view[first * scale : last * scale], filling * (size - count)]
        row += count
    return b"".join(pieces)
