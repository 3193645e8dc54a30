"""Inputs of a step's forward pass in one kernel; semantics: ``reference.step_inputs``."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TOKENS_PER_PROGRAM = 128


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
    """As ``reference.step_inputs``; all tensors contiguous. The launch depends on shapes alone.

    Raises:
        ValueError: A shape, dtype or layout is not as documented; the message gives the one got.
    """
    num_tokens, num_sequences = token_ids.shape[0], ctx_len.shape[0]
    shapes = {
        "token_ids": (token_ids, (num_tokens,)),
        "q_start": (q_start, (num_sequences + 1,)),
        "ctx_len": (ctx_len, (num_sequences,)),
        "slots": (slots, (num_sequences,)),
        "last_tokens": (last_tokens, block_tables.shape[:1]),
        "block_tables": (block_tables, block_tables.shape[:2]),
    }
    for name, (tensor, shape) in shapes.items():
        is_right = tensor.shape == shape and tensor.dtype == torch.int32 and tensor.device == token_ids.device
        if not is_right or not tensor.is_contiguous():
            raise ValueError(
                f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; it must be int32 {list(shape)} on "
                f"{token_ids.device}, contiguous"
            )
    known, positions = torch.empty_like(token_ids), torch.empty_like(token_ids)
    slot_mapping = torch.empty(num_tokens, dtype=torch.int64, device=token_ids.device)
    if not num_tokens:
        return known, positions, slot_mapping
    _step_inputs[(triton.cdiv(num_tokens, _TOKENS_PER_PROGRAM),)](
        token_ids,
        q_start,
        ctx_len,
        slots,
        last_tokens,
        block_tables,
        known,
        positions,
        slot_mapping,
        num_tokens,
        num_sequences,
        num_sequences.bit_length(),
        TABLE_STRIDE=block_tables.shape[1],
        BLOCK_SIZE=block_size,
        TOKENS=_TOKENS_PER_PROGRAM,
        num_warps=4,
    )
    return known, positions, slot_mapping


@triton.jit(do_not_specialize=["num_tokens", "num_sequences", "num_halvings"])
def _step_inputs(
    token_ptr,
    q_start_ptr,
    ctx_len_ptr,
    slot_ptr,
    last_token_ptr,
    table_ptr,
    known_ptr,
    position_ptr,
    slot_mapping_ptr,
    num_tokens,
    num_sequences,
    num_halvings,
    TABLE_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_token = token < num_tokens
    # The sequence of each token: q_start[low] <= token < q_start[high].
    low = tl.zeros([TOKENS], dtype=tl.int32)
    high = low + num_sequences
    for _ in range(num_halvings):
        middle = (low + high) // 2
        is_at_or_after = tl.load(q_start_ptr + middle, mask=is_token, other=0) <= token
        low = tl.where(is_at_or_after, middle, low)
        high = tl.where(is_at_or_after, high, middle)
    end = tl.load(q_start_ptr + low + 1, mask=is_token, other=0)
    slot = tl.load(slot_ptr + low, mask=is_token, other=0).to(tl.int64)
    position = tl.load(ctx_len_ptr + low, mask=is_token, other=0) - end + token
    block = tl.load(table_ptr + slot * TABLE_STRIDE + position // BLOCK_SIZE, mask=is_token, other=0).to(tl.int64)
    given = tl.load(token_ptr + token, mask=is_token, other=0)
    last = tl.load(last_token_ptr + slot, mask=is_token, other=0)
    tl.store(known_ptr + token, tl.where(given < 0, last, given), mask=is_token)
    tl.store(position_ptr + token, position, mask=is_token)
    tl.store(slot_mapping_ptr + token, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=is_token)
