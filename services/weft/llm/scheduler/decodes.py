"""Running sequences with one token to compute, as arrays that are kept from step to step: ``Decodes``."""

from collections import Counter

import numpy as np

from weft.llm.scheduler.acceptance import UNKNOWN_TOKEN
from weft.llm.scheduler.plan import Int32
from weft.llm.scheduler.sequence import Sequence


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
        """``[B]`` the token to compute; -1 while the step in flight samples it."""
        return self._tokens[: len(self.seqs)]

    @property
    def last_blocks(self) -> Int32:
        """``[B]`` last block of each block table."""
        return self._last_blocks[: len(self.seqs)]

    def add(self, seq: Sequence, *, is_known: bool = True) -> None:
        """Add ``seq``, which has a slot and one token to compute.

        Args:
            seq: The sequence.
            is_known: False: the token follows those of ``seq`` and is being sampled by the step in flight.
        """
        seq.row = len(self.seqs)
        seq.num_scheduled = seq.remaining = 1
        self.seqs.append(seq)
        token, position = (seq.tokens[-1], len(seq.tokens) - 1) if is_known else (UNKNOWN_TOKEN, len(seq.tokens))
        self._columns[:, seq.row] = (seq.slot, position, token, seq.block_table[-1], seq.max_len)
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

    def set_token(self, seq: Sequence) -> None:
        """The token of ``seq`` was not known, and now is."""
        self._tokens[seq.row] = seq.tokens[-1]

    def examine(self, seq: Sequence) -> None:
        """Have ``advance`` always remove ``seq``."""
        self._max_lens[seq.row] = 0

    def at_block_start(self) -> list[tuple[Sequence, int]]:
        """Sequences whose token begins a block, and how many full blocks are before it."""
        rows = np.flatnonzero(self.positions % self._block_size == 0)
        num_blocks = self.positions[rows] // self._block_size
        return [(self.seqs[row], count) for row, count in zip(rows.tolist(), num_blocks.tolist(), strict=True)]

    def advance(self, num_rows: int, token_ids: Int32 | None = None) -> list[int]:
        """Go on to the next token in the first ``num_rows`` rows, whose token a step computes.

        Args:
            num_rows: Rows of the step.
            token_ids: Their next tokens; None: not known yet.

        Returns:
            Rows of sequences that the next token may end by their length, or that have forks; they are removed, and the
            others have moved.
        """
        self._positions[:num_rows] += 1
        self._tokens[:num_rows] = UNKNOWN_TOKEN if token_ids is None else token_ids
        rows: list[int] = np.flatnonzero(self._positions[:num_rows] + 1 >= self._max_lens[:num_rows]).tolist()
        for seq in [self.seqs[row] for row in rows]:
            self.remove(seq)
            seq.num_scheduled = seq.remaining = 0
        return rows

    def set_tokens(self, seqs: list[Sequence], token_ids: Int32) -> None:
        """The tokens of ``seqs``, which ``advance`` went through, were not known, and now are: ``[len(seqs)]``."""
        rows = np.array([seq.row for seq in seqs], np.int64)
        self._tokens[rows[rows >= 0]] = token_ids[rows >= 0]

    def append(self, seqs: list[Sequence], token_ids: Int32) -> list[int]:
        """Append to each of ``seqs``, which ``advance`` went through, its new token, ``[len(seqs)]``.

        Returns:
            Indices of those that the token may end: it is a stop token of some sequence.
        """
        tokens: list[int] = token_ids.tolist()
        for seq, token in zip(seqs, tokens, strict=True):
            seq.tokens.append(token)
        if self._stop_ids.keys().isdisjoint(tokens):
            return []
        return [index for index, token in enumerate(tokens) if token in self._stop_ids]
