"""One step as plain arrays: ``ForwardPlan``. No object of a request reaches the runner."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt8 = npt.NDArray[np.uint8]
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


class BlockTransfers(NamedTuple):
    """Copies of blocks to and from the second tier of the KV cache; the saves come first, then the loads.

    Attributes:
        saves: ``[n, 2]`` block and the slot of the tier to save it in; no slot comes twice.
        save_keys: ``[n, 16]`` hash of each.
        loads: ``[n, 2]`` slot of the tier and the block to load it into; no block comes twice.
        load_keys: ``[n, 16]`` hash that each must have been saved with.
    """

    saves: Int32
    save_keys: UInt8
    loads: Int32
    load_keys: UInt8


class ForwardPlan(NamedTuple):
    """One step over ``B`` sequences, ``T`` tokens and ``S`` sampled rows; the receiver owns the arrays.

    A sequence's *slot* is its row in the runner's tables and does not change while it runs. A token's slot in the KV
    cache is ``block * block_size + offset``. The runner applies ``transfers``, then ``copies``, and
    ``table_delta`` and ``new_*``, before the forward pass.

    Attributes:
        slots: ``[B]`` slot of each sequence; decodes of one token come first.
        q_start: ``[B+1]`` start of each sequence's tokens in the ``T`` tokens.
        ctx_len: ``[B]`` tokens of each sequence with keys and values after the step, drafts included.
        num_drafts: ``[B]`` how many of its tokens in this step, the last ones, are drafts.
        positions: ``[T]`` position of each token in its sequence.
        token_ids: ``[T]`` the tokens; -1: a draft that a proposer on the device fills in, or, in a plan without drafts,
            the token that was sampled last for the slot.
        slot_mapping: ``[T]`` slot in the KV cache for each token's keys and values.
        sample_rows: ``[S]`` rows of ``T`` after which a new token is sampled: the last known token of a sequence and
            each of its drafts, in order.
        sample_slots: ``[S]`` slot of the sequence of each of these.
        sample_positions: ``[S]`` position of the new token.
        num_logprobs: ``[S]`` most likely tokens to report with it; -1: no log probabilities at all.
        table_delta: ``[n, 3]`` changes of block tables: slot, index in the table, block.
        copies: ``[C, 2]`` blocks to copy, source and destination; no block is in both columns, no destination twice.
        new_slots: ``[n]`` slots that a new sequence takes from this step on.
        new_params: ``[n, 6]`` its sampling parameters, ``PARAM_COLUMNS``.
        new_top_k: ``[n]`` its ``top_k``, 0 for off.
        new_seeds: ``[n]`` its seed.
        penalty_start: ``[S+1]`` start of each sampled row's entries among the ``L`` penalty entries.
        penalty_tokens: ``[L]`` token ids, unique within a row; empty if no row has penalties.
        penalty_counts: ``[L]`` occurrences of the token in the output; 0: in the prompt only; -1: in neither.
        penalty_bias: ``[L]`` added to the token's logit; minus infinity forbids it.
        max_q_len: Most tokens of a sequence in this step.
        max_ctx_len: Largest of ``ctx_len``.
        transfers: Copies to and from the second tier; None: there are none.
    """

    slots: Int32
    q_start: Int32
    ctx_len: Int32
    num_drafts: Int32
    positions: Int32
    token_ids: Int32
    slot_mapping: Int64
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
    transfers: BlockTransfers | None = None
