"""What one step computes, as plain arrays: ``ForwardPlan``. No Python object of a request crosses to the runner."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]

#: Columns of ``ForwardPlan.new_params``.
PARAM_COLUMNS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


class ForwardPlan(NamedTuple):
    """One step over ``B`` sequences, ``T`` tokens and ``S`` sampled rows; the arrays belong to whoever gets the plan.

    A *slot* is a sequence's row in the runner's tables and stays the same while the sequence is seated. A token's slot
    in the cache is ``block * block_size + offset``. ``copies``, ``table_delta`` and ``new_*`` come before the forward
    pass.

    Attributes:
        slots: ``[B]`` slot of each sequence; those that go on by one token come first.
        q_start: ``[B+1]`` where each sequence's tokens begin in the ``T`` tokens.
        ctx_len: ``[B]`` tokens of each sequence whose keys and values are valid after the step.
        positions: ``[T]`` position of each token in its sequence.
        token_ids: ``[T]`` the tokens.
        slot_map: ``[T]`` where each token's keys and values go in the cache.
        sample_rows: ``[S]`` rows in ``T`` after which a new token is sampled.
        sample_slots: ``[S]`` slot of the sequence of each of these.
        sample_positions: ``[S]`` position that the new token will have.
        num_logprobs: ``[S]`` likeliest tokens to report with it; -1: no log probabilities at all.
        table_delta: ``[n, 3]`` changes of block tables: slot, index in the table, block.
        copies: ``[C, 2]`` blocks to copy, source and destination; no block is in both columns, no destination twice.
        new_slots: ``[n]`` slots that a sequence takes from this step on.
        new_params: ``[n, 6]`` its sampling parameters, ``PARAM_COLUMNS``.
        new_top_k: ``[n]`` its ``top_k``, 0 for off.
        new_seeds: ``[n]`` its seed.
        penalty_start: ``[S+1]`` where each sampled row's entries begin among the ``L`` penalty entries.
        penalty_tokens: ``[L]`` token ids, unique within a row; empty where nobody asks.
        penalty_counts: ``[L]`` times that the token is in the output; 0: in the prompt only; -1: in neither.
        penalty_bias: ``[L]`` to be added to the token's logit; minus infinity forbids it.
        max_q_len: Most tokens of a sequence in this step.
        max_ctx_len: Largest of ``ctx_len``.
    """

    slots: Int32
    q_start: Int32
    ctx_len: Int32
    positions: Int32
    token_ids: Int32
    slot_map: Int64
    sample_rows: Int32
    sample_slots: Int32
    sample_positions: Int32
    num_logprobs: Int32
    table_delta: Int32
    copies: Int32
    new_slots: Int32
    new_params: Float32
    new_top_k: Int32
    new_seeds: Int64
    penalty_start: Int32
    penalty_tokens: Int32
    penalty_counts: Int32
    penalty_bias: Float32
    max_q_len: int
    max_ctx_len: int
