"""Steps whose tokens are divided among ranks along the context axis: ``divide``, ``ContextShare``.

Each rank computes its own rows. Keys and values are exchanged layer by layer, in the form in which caches store them,
so that every rank's cache has all of them, and a rank attends from its rows alone.
"""

from collections.abc import Callable, Sequence
from heapq import heapreplace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.llm.parallel.groups import Group
from weft_kernels.blocks.layout import MAX_CODE, KVLayer

Int32 = npt.NDArray[np.int32]

#: Least tokens of a step for each rank, by the type of device; a step with fewer is computed whole by every rank. On a
#: GPU fewer take as long as one, which is what weights take to be read.
MIN_TOKENS = {"cpu": 16, "cuda": 128}
#: Keys from which attention takes as long as all that a token costs besides.
KEYS_PER_TOKEN = 8192


class Part(NamedTuple):
    """The tokens of a step that one rank computes, as pieces of sequences.

    Attributes:
        rows: Rows of the step's T tokens, ascending, ``[t]``.
        sequences: The sequence of each piece, ``[n]``.
        q_start: Start of each piece's tokens in ``rows``, ``[n + 1]``.
        ctx_len: Tokens of its sequence up to the piece's last, ``[n]``.
    """

    rows: Int32
    sequences: Int32
    q_start: Int32
    ctx_len: Int32


class _Piece(NamedTuple):
    """Consecutive tokens of a sequence, and about what they cost, in keys."""

    cost: int
    num_rows: int
    ctx_len: int
    row: int
    sequence: int


def divide(q_start: Int32, ctx_len: Int32, num_ranks: int) -> list[Part]:
    """Parts of about equal cost, one for each rank; none is empty if there are as many tokens.

    No piece has more than ``1 / (2 * num_ranks)`` of the tokens. A prompt's are dealt from both ends, since late tokens
    have more keys: of four pieces one rank gets the first and the last.

    Args:
        q_start: First row of each sequence, and T, ``[B + 1]``.
        ctx_len: Tokens of each sequence after the step, ``[B]``.
        num_ranks: At least 1.
    """
    most = -(-int(q_start[-1]) // (2 * num_ranks))
    pieces = []
    for sequence, ((first, end), num_keys) in enumerate(zip(pairwise(q_start.tolist()), ctx_len.tolist(), strict=True)):
        number = -(-(end - first) // most)
        bounds = [first + (end - first) * each // number for each in range(number)]
        for low, high in pairwise([*bounds, end]):
            last = num_keys - (end - high)
            pieces.append(_Piece((high - low) * (last + KEYS_PER_TOKEN), high - low, last, low, sequence))
    loads = [(0, rank) for rank in range(num_ranks)]
    dealt: list[list[_Piece]] = [[] for _ in range(num_ranks)]
    for piece in sorted(pieces, reverse=True):  # the dearest to whoever has least
        cost, rank = loads[0]
        dealt[rank].append(piece)
        heapreplace(loads, (cost + piece.cost, rank))
    return [_part(sorted(own, key=lambda piece: piece.row)) for own in dealt]


def _part(pieces: Sequence[_Piece]) -> Part:
    num_rows, ctx_len, row, sequences = np.array([piece[1:] for piece in pieces], np.int32).reshape(-1, 4).T
    ends = np.cumsum(num_rows, dtype=np.int32)
    rows = np.repeat(row - (ends - num_rows), num_rows) + np.arange(num_rows.sum(), dtype=np.int32)
    return Part(rows, sequences, np.append(np.int32(0), ends), np.ascontiguousarray(ctx_len))


class ContextShare:
    """What one rank computes of a divided step, and its exchange with the others.

    Args:
        group: The ranks among which the step is divided.
        slot_mapping: Slot in the KV cache for each of the step's tokens, int64 ``[T]``.
        wanted: Rows whose hidden states every rank needs.
        upload: Moves an array to the device.

    Attributes:
        part: The rank's own.
    """

    def __init__(
        self,
        group: Group,
        q_start: Int32,
        ctx_len: Int32,
        slot_mapping: npt.NDArray[np.int64],
        wanted: Int32,
        block_size: int,
        upload: Callable[[npt.NDArray[Any]], Tensor],
    ) -> None:
        parts = divide(q_start, ctx_len, group.size)
        self.part = parts[group.rank]
        self._group = group
        self._num_tokens = len(slot_mapping)
        slots = slot_mapping[_of_equal_length(parts, [part.rows for part in parts])]
        self._own_slots, self._slots = (
            tuple(map(upload, np.divmod(each, block_size))) for each in (slots[group.rank], slots.reshape(-1))
        )
        found = [part.rows[np.isin(part.rows, wanted)] for part in parts]
        rows = _of_equal_length(parts, found).astype(np.int64)
        self._own_wanted = upload(np.searchsorted(self.part.rows, rows[group.rank]))
        self._wanted = upload(rows.reshape(-1))

    def exchange(self, kv_layer: KVLayer) -> None:
        """Store the other ranks' keys and values of the step, and give them those that this rank has stored."""
        for view in kv_layer:
            if view is not None:
                cells = (view.view(torch.uint8) if view.dtype in MAX_CODE else view).transpose(1, 2)
                cells.index_put_(self._slots, self._group.all_gather(cells[self._own_slots]))

    def whole(self, hidden: Tensor) -> Tensor:
        """Hidden states ``[T, width]`` of the step from the rank's ``[t, width]``; undefined in rows not wanted."""
        rows = hidden.new_empty(self._num_tokens, hidden.shape[1])
        if len(self._wanted):
            rows.index_copy_(0, self._wanted, self._group.all_gather(hidden.index_select(0, self._own_wanted)))
        return rows


def _of_equal_length(parts: Sequence[Part], rows: Sequence[Int32]) -> Int32:
    """Some rows of each part, ``[num_ranks, most]``, with the part's first one behind where they are fewer."""
    most = max(map(len, rows))
    return np.stack(
        [np.append(own, np.repeat(part.rows[:1], most - len(own))) for part, own in zip(parts, rows, strict=True)]
    )
