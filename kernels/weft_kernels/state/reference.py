"""Inputs of a step's forward pass from per-slot tables, in torch; see ``step_inputs``."""

import torch
from torch import Tensor


def step_inputs(
    token_ids: Tensor,
    q_start: Tensor,
    ctx_len: Tensor,
    slots: Tensor,
    last_tokens: Tensor,
    block_tables: Tensor,
    *,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, positions and cache slots of the ``T`` tokens of ``B`` sequences.

    The last of a sequence's tokens has position ``ctx_len - 1``. A row of padding is a sequence in a slot whose table
    has the null block 0 alone.

    Args:
        token_ids: The tokens as far as the host knows them, shape ``[T]``, int32. -1: the last sampled token of the
            sequence's slot.
        q_start: First token of each sequence, and ``T``, shape ``[B + 1]``, int32.
        ctx_len: Tokens of each sequence, including those of this step, shape ``[B]``, int32.
        slots: Row of each sequence in the tables, shape ``[B]``, int32.
        last_tokens: The last sampled token by slot, shape ``[num_slots]``, int32.
        block_tables: Blocks by slot, shape ``[num_slots, M]``, int32.
        block_size: Tokens of a block.

    Returns:
        Token ids, int32; positions, int32; cache slots, block times block size plus offset, int64; each ``[T]``.

    Source:
        vLLM's model runner V2, whose tables stay on the device between steps.
    """
    num_tokens = token_ids.shape[0]
    device = token_ids.device
    sequences = torch.repeat_interleave(q_start.diff(), output_size=num_tokens)
    slots = slots.index_select(0, sequences)
    last = torch.arange(num_tokens, dtype=torch.int32, device=device) - q_start[1:].index_select(0, sequences)
    positions = ctx_len.index_select(0, sequences) + last
    blocks = block_tables[slots, torch.div(positions, block_size, rounding_mode="floor")].to(torch.int64)
    known = torch.where(token_ids < 0, last_tokens.index_select(0, slots), token_ids)
    return known, positions, blocks * block_size + positions % block_size
