"""Which entries of a draft model's KV cache are computed: ``DraftCache``. Plain numpy."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.llm.scheduler.blocks import NULL_BLOCK
from weft.llm.scheduler.plan import ForwardPlan, Int32, Int64


class TokenRange(NamedTuple):
    """Consecutive tokens of some sequences, ``[N]`` each: slots, first positions and numbers of tokens."""

    slots: Int32
    first: Int64
    num_tokens: Int64


class DraftCache:
    """Follows the target's plans; a cache entry is named by its place, ``block * block_size + offset``.

    An entry that the target writes belongs to another token from then on, so the draft model's is void until it is
    computed again.

    Args:
        num_slots: Slots of the engine.
        num_columns: Most blocks of a sequence.
        num_blocks: Blocks of the cache, including the null block.
        block_size: Tokens of a block.
    """

    def __init__(self, num_slots: int, num_columns: int, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._tables = np.zeros((num_slots, num_columns), np.int32)
        self._is_computed = np.zeros((num_blocks, block_size), np.bool_)
        self._num_checked = np.zeros(num_slots, np.int64)  # leading tokens of a slot that are known to be computed

    def follow(self, plan: ForwardPlan) -> None:
        """Apply copies, block tables and new slots of a plan, and void the entries of all its tokens."""
        self._num_checked[plan.new_slots] = 0
        slots, columns, blocks = plan.table_delta.T
        self._tables[slots, columns] = blocks
        self._is_computed[plan.copies[:, 1]] = self._is_computed[plan.copies[:, 0]]
        self._flat[plan.slot_mapping] = False
        self._is_computed[NULL_BLOCK] = True  # stands for blocks behind a window, which nobody needs

    def places(self, slots: Int32, positions: Int64) -> Int64:
        """Places of tokens, int64 ``[N]``, by their slots and positions."""
        blocks = self._tables[slots, positions // self._block_size].astype(np.int64)
        return blocks * self._block_size + positions % self._block_size

    def missing(self, slots: Int32, ends: Int32, max_num_tokens: int) -> TokenRange:
        """From the first token that is not computed, of each sequence, as many tokens as a step may compute.

        The last token is always among those to compute, because its hidden state is wanted.

        Args:
            slots: Slots of the sequences, ``[N]``; the first are served first.
            ends: Number of known tokens of each.
            max_num_tokens: Of all sequences together.
        """
        checked = np.minimum(self._num_checked[slots], ends - 1)
        first = np.minimum(checked + self._num_computed(slots, checked, ends), ends - 1)
        self._num_checked[slots] = first
        up_to = np.minimum(np.cumsum(ends - first), max_num_tokens)
        return TokenRange(slots, first, np.diff(up_to, prepend=0))

    def set_computed(self, places: Int64) -> None:
        """Declare that the entries hold the keys and values of their tokens."""
        self._flat[places] = True

    @property
    def _flat(self) -> npt.NDArray[np.bool_]:
        return self._is_computed.reshape(-1)

    def _num_computed(self, slots: Int32, first: Int64, ends: Int32) -> Int64:
        """Computed tokens of each sequence between two positions, up to the first that is not."""
        positions = first[:, None] + np.arange((ends - first).max())
        is_within = positions < ends[:, None]
        columns = np.where(is_within, positions, 0)
        is_missing = ~self._flat[self.places(slots[:, None], columns)] & is_within
        return np.where(is_missing.any(axis=1), is_missing.argmax(axis=1), ends - first)
