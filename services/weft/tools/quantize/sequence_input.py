"""Inputs of a step that computes one whole row of tokens."""

from typing import NamedTuple

import torch

BLOCK_SIZE = 16


class SequenceInput(NamedTuple):
    """As the arguments of ``TransformerModel.forward``; the row has the blocks from 1 on.

    Attributes:
        positions: int32 ``[T]``.
        block_tables: int32 ``[1, M]``.
        q_start: int32 ``[2]``.
        ctx_len: int32 ``[1]``.
        slot_mapping: int64 ``[T]``.
        num_blocks: Blocks of the cache that it needs, the null block counted.
    """

    positions: torch.Tensor
    block_tables: torch.Tensor
    q_start: torch.Tensor
    ctx_len: torch.Tensor
    slot_mapping: torch.Tensor
    num_blocks: int


def sequence_input(num_tokens: int) -> SequenceInput:
    """Inputs for a row of so many tokens."""
    num_blocks = 1 + -(-num_tokens // BLOCK_SIZE)
    return SequenceInput(
        torch.arange(num_tokens, dtype=torch.int32),
        torch.arange(1, num_blocks, dtype=torch.int32).unsqueeze(0),
        torch.tensor([0, num_tokens], dtype=torch.int32),
        torch.tensor([num_tokens], dtype=torch.int32),
        BLOCK_SIZE + torch.arange(num_tokens),
        num_blocks,
    )
