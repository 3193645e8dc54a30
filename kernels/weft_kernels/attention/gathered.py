"""CPU attention over a paged KV cache in torch, where numba is missing; see ``reference.paged_attention``.

Each sequence's keys and values are gathered, from the first that it sees. At 1,024 tokens (12 heads of 64 on 4) this
takes 4 times as long as ``cpu_kernel``.
"""

import itertools

import torch
from torch import Tensor
from torch.nn import functional

from weft_kernels.blocks.layout import gather_half


def gathered_attention(
    q: Tensor,
    kv_layer: Tensor,
    kv_scales: Tensor | None,
    block_tables: Tensor,
    q_start: Tensor,
    ctx_len: Tensor,
    scale: float,
    window: int,
    soft_cap: float,
    sinks: Tensor | None,
) -> Tensor:
    """``reference.paged_attention`` without determinism; same arguments and result."""
    out = torch.empty_like(q)
    block_size = kv_layer.shape[2]
    for table, (start, end), length in zip(
        block_tables, itertools.pairwise(q_start.tolist()), ctx_len.tolist(), strict=True
    ):
        if start == end:
            continue
        skipped = max(0, length - (end - start) + 1 - window) // block_size if window else 0
        blocks = table[skipped : -(-length // block_size)]
        own = length - skipped * block_size
        out[start:end] = _one_sequence(q[start:end], kv_layer, kv_scales, blocks, own, scale, window, soft_cap, sinks)
    return out


def _one_sequence(
    q: Tensor,
    kv_layer: Tensor,
    kv_scales: Tensor | None,
    blocks: Tensor,
    length: int,
    scale: float,
    window: int,
    soft_cap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of one sequence's tokens ``q``, shape ``[n, H, D]``, the last of which is its newest.

    ``blocks`` have its last ``length`` tokens.
    """
    num_kv_heads, head_dim = kv_layer.shape[3:]
    keys, values = (
        gather_half(kv_layer, kv_scales, half, blocks).view(-1, num_kv_heads, head_dim)[:length].transpose(0, 1)[None]
        for half in (0, 1)
    )
    queries = q.to(keys.dtype).transpose(0, 1).unsqueeze(0)
    is_visible = _visible(q.shape[0], length, window)
    if window:  # a weight of 0 does not stop a NaN, which may stand where no token sees anything
        is_seen = is_visible.any(0).unsqueeze(1)
        values = values.masked_fill(~is_seen, 0.0)
    if soft_cap or sinks is not None:
        return _softmax_of_scores(queries, keys, values, is_visible, scale, soft_cap, sinks)[0].transpose(0, 1)
    is_whole = q.shape[0] == length and not window
    sees_all = q.shape[0] == 1 and not window
    out = functional.scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=None if is_whole or sees_all else is_visible,
        is_causal=is_whole,
        scale=scale,
        enable_gqa=queries.shape[1] != num_kv_heads,
    )
    return out[0].transpose(0, 1).to(q.dtype)


def _visible(num_tokens: int, length: int, window: int) -> Tensor:
    """Causal mask of the last ``num_tokens`` over ``length`` positions, shape ``[num_tokens, length]``."""
    seen = torch.arange(length)
    own = seen[length - num_tokens :].unsqueeze(1)
    return (seen <= own) & (seen > own - window) if window else seen <= own


def _softmax_of_scores(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    is_visible: Tensor,
    scale: float,
    soft_cap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Attention with a soft cap or sinks, which ``scaled_dot_product_attention`` lacks: ``[1, H, n, D]``."""
    num_kv_heads = keys.shape[1]
    grouped = queries.unflatten(1, (num_kv_heads, -1)).float()
    scores = torch.matmul(grouped, keys.unsqueeze(2).float().transpose(-1, -2)).mul_(scale)
    if soft_cap:
        scores.div_(soft_cap).tanh_().mul_(soft_cap)
    scores.masked_fill_(~is_visible, float("-inf"))
    if sinks is not None:
        of_sinks = sinks.view(num_kv_heads, -1, 1, 1).expand(*scores.shape[1:4], 1)
        scores = torch.cat((scores, of_sinks[None]), -1)
    weights = scores.softmax(-1)[..., : keys.shape[2]]
    return torch.matmul(weights, values.unsqueeze(2).float()).flatten(1, 2).to(queries.dtype)
