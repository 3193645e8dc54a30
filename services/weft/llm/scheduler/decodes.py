"""The sequences of a step as arrays: ``Decodes``, kept from step to step, and ``build_plan``."""

from array import array
from collections import Counter
from collections.abc import Sequence as Seq
from itertools import accumulate
from operator import attrgetter

import numpy as np

from weft.llm.grammar import GrammarRows
from weft.llm.scheduler.blocks import NULL_BLOCK
from weft.llm.scheduler.plan import NO_INT32, PARAM_COLUMNS, UNKNOWN_TOKEN, Float32, ForwardPlan, Int32, Int64
from weft.llm.scheduler.sequence import Sequence


class Decodes:
    """One row for each running sequence with a single token left to compute; every step computes all of them.

    A step updates whole columns. Rebuilding them from 256 sequences would take two thirds of the scheduler's time.

    Attributes:
        seqs: The sequence of each row; unordered, since a removed row is replaced by the last one.
    """

    def __init__(self, num_slots: int, block_size: int) -> None:
        self.seqs: list[Sequence] = []
        self._block_size = block_size
        self._columns = np.zeros((5, num_slots), np.int32)
        _, self._positions, self._tokens, self._last_blocks, self._max_lens = self._columns
        self._stop_ids: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self.seqs)

    @property
    def columns(self) -> Int32:
        """``[4, B]`` slot, position and token to compute (-1: in flight) and last block of each sequence; a view."""
        return self._columns[:4, : len(self.seqs)]

    def add(self, seq: Sequence, *, is_known: bool = True) -> None:
        """Add ``seq``, which has a slot and one token to compute; ``is_known`` False: the step in flight samples it."""
        seq.row = len(self.seqs)
        seq.num_scheduled = seq.remaining = 1
        self.seqs.append(seq)
        token, position = (seq.tokens[-1], len(seq.tokens) - 1) if is_known else (UNKNOWN_TOKEN, len(seq.tokens))
        self._columns[:, seq.row] = (seq.slot, position, token, seq.block_table[-1], seq.max_len)
        self._stop_ids.update(seq.stop_ids)

    def remove(self, seq: Sequence) -> None:
        """Remove ``seq``, which has a row; the caller updates ``num_scheduled``."""
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
        """Update the last block of ``seq``."""
        self._last_blocks[seq.row] = seq.block_table[-1]

    def set_token(self, seq: Sequence) -> None:
        """Fill in the token of ``seq``, which was unknown."""
        self._tokens[seq.row] = seq.tokens[-1]

    def at_block_start(self) -> list[tuple[Sequence, int]]:
        """Sequences whose token begins a block, with the number of full blocks before it."""
        positions = self._positions[: len(self.seqs)]
        rows = np.flatnonzero(positions % self._block_size == 0)
        num_blocks = positions[rows] // self._block_size
        return [(self.seqs[row], count) for row, count in zip(rows.tolist(), num_blocks.tolist(), strict=True)]

    def advance(self, num_rows: int, token_ids: Int32 | None = None) -> list[int]:
        """Advance the first ``num_rows`` rows to the token that a step samples; None: not known yet.

        Returns:
            Rows of sequences that may reach their length limit with it; they are removed, and the others have moved.
        """
        self._positions[:num_rows] += 1
        self._tokens[:num_rows] = UNKNOWN_TOKEN if token_ids is None else token_ids
        rows: list[int] = np.flatnonzero(self._positions[:num_rows] + 1 >= self._max_lens[:num_rows]).tolist()
        for seq in [self.seqs[row] for row in rows]:
            self.remove(seq)
            seq.num_scheduled = seq.remaining = 0
        return rows

    def set_tokens(self, seqs: list[Sequence], token_ids: Int32) -> None:
        """Fill in the tokens, ``[len(seqs)]``, of advanced ``seqs``, which were unknown."""
        rows = np.array([seq.row for seq in seqs], np.int64)
        self._tokens[rows[rows >= 0]] = token_ids[rows >= 0]

    def append(self, seqs: list[Sequence], token_ids: Int32) -> list[int]:
        """Append to each of the advanced ``seqs`` its new token, ``[len(seqs)]``.

        Returns:
            Indices of those that may end with it: it is a stop token of some sequence.
        """
        tokens: list[int] = token_ids.tolist()
        for seq, token in zip(seqs, tokens, strict=True):
            seq.tokens.append(token)
        if self._stop_ids.keys().isdisjoint(tokens):
            return []
        return [index for index, token in enumerate(tokens) if token in self._stop_ids]


_NO_PARAMS = np.empty((0, len(PARAM_COLUMNS)), np.float32)
_params_of = attrgetter(*PARAM_COLUMNS)


def build_plan(
    decodes: Decodes,
    prefills: Seq[Sequence],
    *,
    changed: Seq[Sequence],
    has_sampling_extras: bool,
    block_size: int,
) -> ForwardPlan:
    """Build the plan of a step, and mark the block tables and slots of its sequences as uploaded.

    Args:
        decodes: Each computes its one token and samples the next.
        prefills: Other sequences, with ``num_scheduled`` tokens to compute, drafts included, and blocks for them; those
            that compute all their tokens sample after the last known token and after each draft.
        changed: Those of both whose block table or slot is not uploaded.
        has_sampling_extras: Some sequences need log probabilities, penalties or masks.
    """
    num_decodes = len(decodes)
    counts = [seq.num_scheduled for seq in prefills]
    q_start = np.arange(num_decodes + len(prefills) + 1, dtype=np.int32)
    q_start[num_decodes + 1 :] = [num_decodes + end for end in accumulate(counts)]
    slots, ctx_len = (np.empty(len(q_start) - 1, np.int32) for _ in range(2))
    positions, token_ids, slot_mapping = (np.empty(q_start[-1], dtype) for dtype in (np.int32, np.int32, np.int64))
    num_drafts, num_samples = np.zeros(len(slots), np.int32), np.ones(len(slots), np.int32)
    slots[:num_decodes], at, token_ids[:num_decodes], last_blocks = decodes.columns
    positions[:num_decodes], ctx_len[:num_decodes] = at, at + 1
    slot_mapping[:num_decodes] = last_blocks.astype(np.int64) * block_size + at % block_size
    for row, seq in enumerate(prefills, num_decodes):
        slots[row], ctx_len[row] = seq.slot, seq.num_computed_tokens + seq.num_scheduled
        num_drafts[row], num_samples[row] = len(seq.drafts), 1 + len(seq.drafts) if seq.is_sampled else 0
        tokens = slice(q_start[row], q_start[row + 1])
        positions[tokens], token_ids[tokens], slot_mapping[tokens] = _chunk(seq, block_size)
    sample_rows, sample_slots, sample_positions = q_start[1:] - 1, slots, ctx_len
    if prefills and (num_samples != 1).any():
        ends = np.cumsum(num_samples, dtype=np.int32)
        first_rows = q_start[1:] - ends  # minus the rows of sequences before it
        sample_rows = np.repeat(first_rows, num_samples) + np.arange(ends[-1], dtype=np.int32)
        sample_slots, sample_positions = np.repeat(slots, num_samples), positions[sample_rows] + 1
    asking = [*decodes.seqs, *(seq for seq in prefills if seq.is_sampled)] if has_sampling_extras else []
    num_logprobs = np.full(len(sample_rows), -1, np.int32)
    if asking:
        num_logprobs[:] = np.repeat([seq.num_logprobs for seq in asking], [1 + len(seq.drafts) for seq in asking])
    table_delta = _table_changes(changed)
    new = [seq for seq in changed if seq.num_uploaded_blocks < 0]
    new_slots, new_params, new_top_k, new_seeds = _new_rows(new)
    adapters = [seq.request.adapter for seq in new]
    for seq in changed:
        seq.num_uploaded_blocks = len(seq.block_table)
        seq.num_uploaded_behind = seq.num_behind
    return ForwardPlan(
        slots,
        q_start,
        ctx_len,
        num_drafts,
        positions,
        token_ids,
        slot_mapping,
        sample_rows,
        sample_slots,
        sample_positions,
        num_logprobs,
        table_delta,
        new_slots,
        new_params,
        new_top_k,
        new_seeds,
        *_penalties(asking, len(sample_rows)),
        max(counts, default=1),
        int(ctx_len.max()),
        None,
        GrammarRows.of((seq.matcher, seq.drafts) for seq in asking),
        np.array([-1 if each is None else each.slot for each in adapters], np.int32) if any(adapters) else NO_INT32,
        *_scores(prefills, q_start[num_decodes:]),
    )


def _chunk(seq: Sequence, block_size: int) -> tuple[Int64, "array[int]", Int64]:
    """Positions, token ids and cache slots of the tokens and drafts that ``seq`` computes."""
    first, end = seq.num_computed_tokens, seq.num_computed_tokens + seq.num_scheduled
    positions = np.arange(first, end, dtype=np.int64)
    first_index = first // block_size
    blocks = np.array(seq.block_table[first_index : (end - 1) // block_size + 1], np.int64)
    slot_mapping = blocks[positions // block_size - first_index] * block_size + positions % block_size
    tokens = seq.tokens[first:end]
    tokens.extend(seq.drafts)
    return positions, tokens, slot_mapping


def _scores(prefills: Seq[Sequence], q_start: Int32) -> tuple[Int32, Int32, int]:
    """The fields of a plan for tokens of prompts whose log probabilities are asked for."""
    rows, token_ids, num_top = array("i"), array("i"), 0
    for seq, start in zip(prefills, q_start.tolist(), strict=False):
        if span := seq.to_score:
            rows.extend(start + position - seq.num_computed_tokens for position in span)
            token_ids += seq.tokens[span.start + 1 : span.stop + 1]
            num_top = max(num_top, seq.params.prompt_logprobs or 0)
    return (np.array(rows, np.int32), np.array(token_ids, np.int32), num_top) if rows else (NO_INT32, NO_INT32, 0)


def _table_changes(changed: Seq[Sequence]) -> Int32:
    # Columns: a tuple for each of the 6,250 blocks of a prompt of 100,000 tokens would cost a millisecond.
    slots: list[int] = []
    indices: list[int] = []
    blocks: list[int] = []
    for seq in changed:
        table = seq.block_table
        first = max(seq.num_uploaded_blocks, 0)
        if seq.num_uploaded_behind < seq.num_behind:
            newly_behind = range(seq.num_uploaded_behind, min(seq.num_behind, first))
            indices += newly_behind
            blocks += [NULL_BLOCK] * len(newly_behind)
        indices += range(first, len(table))
        blocks += table[first:]
        slots += [seq.slot] * (len(indices) - len(slots))
    table_delta = np.empty((len(slots), 3), np.int32)
    table_delta[:, 0], table_delta[:, 1], table_delta[:, 2] = slots, indices, blocks
    return table_delta


def _new_rows(seqs: Seq[Sequence]) -> tuple[Int32, Float32, Int32, Int64]:
    if not seqs:
        return NO_INT32, _NO_PARAMS, NO_INT32, np.empty(0, np.int64)
    return (
        np.array([seq.slot for seq in seqs], np.int32),
        np.array([_params_of(seq.params) for seq in seqs], np.float32),
        np.array([seq.params.top_k for seq in seqs], np.int32),
        np.array([seq.seed for seq in seqs], np.int64),
    )


def _penalties(asking: Seq[Sequence], num_rows: int) -> tuple[Int32, Int32, Int32, Float32]:
    if all(seq.penalties is None for seq in asking):
        return np.zeros(num_rows + 1, np.int32), NO_INT32, NO_INT32, np.empty(0, np.float32)
    # array.array concatenates by memcpy; 256 NumPy views would cost a millisecond.
    tokens, counts, biases = array("i"), array("i"), array("f")
    starts = [0]
    for seq in asking:
        if seq.penalties is None:
            starts += [starts[-1]] * (1 + len(seq.drafts))
            continue
        for row in seq.penalties.rows(seq.drafts):
            tokens += row[0]
            counts += row[1]
            biases += row[2]
            starts.append(len(tokens))
    return (
        np.array(starts, np.int32),
        np.array(tokens, np.int32),
        np.array(counts, np.int32),
        np.array(biases, np.float32),
    )
