"""Running sequences with one token to compute, as arrays that are kept from step to step: ``Decodes``."""

from collections import Counter

import numpy as np

from weft_model.llm.scheduler.plan import Int32
from weft_model.llm.scheduler.sequence import Sequence


class Decodes:
    """One row for each running sequence that has one token left to compute; every step computes all of them.

    A step changes whole columns. Building them anew from 256 sequences would take two thirds of the scheduler's time.

    Args:
        num_slots: Most rows.
        block_size: Tokens of a block.

    Attributes:
        seqs: The sequence of each row; in no particular order, since a removed row is replaced by the last one.
    """

    def __init__(self, num_slots: int, block_size: int) -> None:
        self.seqs: list[Sequence] = []
        self._block_size = block_size
        self._columns = np.zeros((5, num_slots), np.int32)
        self._slots, self._positions, self._tokens, self._last_blocks, self._max_lens = self._columns
        self._stop_ids: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self.seqs)

    @property
    def slots(self) -> Int32:
        """``[B]`` slot of each sequence. A view, as the other columns: copy what outlives the step."""
        return self._slots[: len(self.seqs)]

    @property
    def positions(self) -> Int32:
        """``[B]`` position of the token to compute."""
        return self._positions[: len(self.seqs)]

    @property
    def tokens(self) -> Int32:
        """``[B]`` the token to compute."""
        return self._tokens[: len(self.seqs)]

    @property
    def last_blocks(self) -> Int32:
        """``[B]`` last block of each block table."""
        return self._last_blocks[: len(self.seqs)]

    def add(self, seq: Sequence) -> None:
        """Add ``seq``, which has a slot and one token to compute."""
        seq.row = len(self.seqs)
        seq.num_scheduled = 1
        self.seqs.append(seq)
        self._columns[:, seq.row] = (seq.slot, len(seq.tokens) - 1, seq.tokens[-1], seq.block_table[-1], seq.max_len)
        self._stop_ids.update(seq.stop_ids)
        if seq.forks:
            self.examine(seq)

    def remove(self, seq: Sequence) -> None:
        """Remove ``seq``, which has a row; ``num_scheduled`` is left to the caller."""
        row, seq.row = seq.row, -1
        last = self.seqs.pop()
        if last is not seq:
            self.seqs[row] = last
            last.row = row
            self._columns[:, row] = self._columns[:, len(self.seqs)]
        for token in seq.stop_ids:
            self._stop_ids[token] -= 1
            if not self._stop_ids[token]:
                del self._stop_ids[token]

    def set_last_block(self, seq: Sequence) -> None:
        """``seq`` has got another last block."""
        self._last_blocks[seq.row] = seq.block_table[-1]

    def examine(self, seq: Sequence) -> None:
        """Have ``append`` always return the row of ``seq``."""
        self._max_lens[seq.row] = 0

    def at_block_start(self) -> list[Sequence]:
        """Sequences whose next token begins a block: all blocks before it are full."""
        return [self.seqs[row] for row in np.flatnonzero(self.positions % self._block_size == 0).tolist()]

    def append(self, token_ids: Int32) -> list[int]:
        """Append a new token to each sequence, ``[B]``, in the order of the rows, once the token before is computed.

        Returns:
            The rows to examine: the token is a stop token of some sequence, or the sequence has its longest length.
        """
        tokens = token_ids.tolist()
        for seq, token in zip(self.seqs, tokens, strict=True):
            seq.tokens.append(token)
        self.positions[:] += 1
        self.tokens[:] = token_ids
        may_end = self.positions + 1 >= self._max_lens[: len(tokens)]
        if not self._stop_ids.keys().isdisjoint(tokens):
            may_end |= np.array([token in self._stop_ids for token in tokens], np.bool_)
        ended: list[int] = np.flatnonzero(may_end).tolist()
        return ended
