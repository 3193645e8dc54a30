"""Fast CPU attention over a paged KV cache, in torch; see ``reference.paged_attention``."""

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from weft_kernels.blocks.layout import gather_half

# Bytes of keys gathered for one product: they fit in a core's L2 cache, and malloc reuses their buffer.
_GATHER_BYTES = 3 << 19
# Up to this many sequences with one new token are faster one by one.
_FEW_SEQUENCES = 2
# A product over several heads wastes work on pairs of different heads, but needs fewer BLAS calls.
_HEADS_PER_PRODUCT = 4


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
    step_cache: dict[str, Any] | None,
) -> Tensor:
    """``reference.paged_attention`` without determinism; same arguments and result."""
    cache = {} if step_cache is None else step_cache
    cut: _Cut | None = cache.get("gathered_attention")
    if cut is None:
        cut = cache["gathered_attention"] = _cut(kv_layer, block_tables, q_start, ctx_len)
    out = torch.empty_like(q)
    if cut.groups:
        queries = q.index_select(0, cut.rows).float().mul_(scale)
        parts = [_attend(queries[group.place], kv_layer, kv_scales, group, window, soft_cap) for group in cut.groups]
        out.index_copy_(0, cut.rows, (parts[0] if len(parts) == 1 else torch.cat(parts)).to(out.dtype))
    for start, end, blocks, length in cut.others:
        out[start:end] = _one_sequence(q[start:end], kv_layer, kv_scales, blocks, length, scale, window, soft_cap)
    return out


class _Group(NamedTuple):
    """Sequences of similar length with one new token each, whose keys are gathered together.

    Attributes:
        place: Slice of these ``n`` among the step's sequences with one new token, shortest first.
        blocks: Their blocks, sequence by sequence, shape ``[n * m]``, int32.
        contexts: Their context lengths, shape ``[n, 1]``, int64.
        shortest: The smallest of these.
        is_beyond: Positions from ``shortest`` on that are beyond a context, shape ``[n, m * P - shortest]``.
    """

    place: slice
    blocks: Tensor
    contexts: Tensor
    shortest: int
    is_beyond: Tensor


class _Cut(NamedTuple):
    """Partition of a step's sequences, the same in every layer.

    Attributes:
        groups: Sequences with one new token, if there are more than a few.
        rows: Row of ``q`` of each sequence in ``groups``, int64.
        others: For each other sequence the first row of ``q``, the row after its last, its blocks and its context.
    """

    groups: list[_Group]
    rows: Tensor
    others: list[tuple[int, int, Tensor, int]]


def _cut(kv_layer: Tensor, block_tables: Tensor, q_start: Tensor, ctx_len: Tensor) -> _Cut:
    block_size, num_kv_heads, head_dim = kv_layer.shape[2:]
    starts: list[int] = q_start.tolist()
    lengths: list[int] = ctx_len.tolist()
    q_lens = [end - start for start, end in itertools.pairwise(starts)]
    single = [sequence for sequence, q_len in enumerate(q_lens) if q_len == 1]
    if len(single) <= _FEW_SEQUENCES:
        single = []
    grouped = set(single)
    others = [
        (starts[sequence], starts[sequence + 1], block_tables[sequence, : -(-length // block_size)], length)
        for sequence, length in enumerate(lengths)
        if q_lens[sequence] and sequence not in grouped
    ]
    single.sort(key=lengths.__getitem__)
    contexts = torch.tensor([lengths[sequence] for sequence in single]).unsqueeze(1)
    tables = block_tables.index_select(0, torch.tensor(single, dtype=torch.int64))
    blocks_per_group = _GATHER_BYTES // (block_size * num_kv_heads * head_dim * torch.float32.itemsize)
    groups: list[_Group] = []
    end = len(single)
    while end:
        num_blocks = -(-lengths[single[end - 1]] // block_size)
        place = slice(max(0, end - max(1, blocks_per_group // num_blocks)), end)
        shortest = lengths[single[place.start]]
        is_beyond = torch.arange(shortest, num_blocks * block_size) >= contexts[place]
        groups.append(_Group(place, tables[place, :num_blocks].reshape(-1), contexts[place], shortest, is_beyond))
        end = place.start
    return _Cut(groups[::-1], torch.tensor([starts[sequence] for sequence in single], dtype=torch.int64), others)


def _one_sequence(
    q: Tensor,
    kv_layer: Tensor,
    kv_scales: Tensor | None,
    blocks: Tensor,
    length: int,
    scale: float,
    window: int,
    soft_cap: float,
) -> Tensor:
    """Attention of one sequence's tokens ``q``, shape ``[n, H, D]``, the last of which is its newest."""
    num_kv_heads, head_dim = kv_layer.shape[3:]
    keys, values = (
        gather_half(kv_layer, kv_scales, half, blocks).view(-1, num_kv_heads, head_dim)[:length].transpose(0, 1)[None]
        for half in (0, 1)
    )
    queries = q.to(keys.dtype).transpose(0, 1).unsqueeze(0)
    is_whole = q.shape[0] == length and not window
    sees_all = q.shape[0] == 1 and not window
    if soft_cap:
        return _capped(queries, keys, values, _visible(q.shape[0], length, window), scale, soft_cap)[0].transpose(0, 1)
    out = functional.scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=None if is_whole or sees_all else _visible(q.shape[0], length, window),
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


def _capped(queries: Tensor, keys: Tensor, values: Tensor, is_visible: Tensor, scale: float, soft_cap: float) -> Tensor:
    """Attention with a soft cap, which ``scaled_dot_product_attention`` lacks: ``[1, H, n, D]``."""
    num_kv_heads = keys.shape[1]
    grouped = queries.unflatten(1, (num_kv_heads, -1)).float()
    scores = torch.matmul(grouped, keys.unsqueeze(2).float().transpose(-1, -2)).mul_(scale / soft_cap)
    weights = scores.tanh_().mul_(soft_cap).masked_fill_(~is_visible, float("-inf")).softmax(-1)
    return torch.matmul(weights, values.unsqueeze(2).float()).flatten(1, 2).to(queries.dtype)


def _attend(
    q: Tensor, kv_layer: Tensor, kv_scales: Tensor | None, group: _Group, window: int, soft_cap: float
) -> Tensor:
    """Attention of the scaled queries ``q[n, H, D]`` of a group. Everything is float32 but the cache."""
    shape = (q.shape[0], -1, kv_layer.shape[3] * q.shape[2])
    keys = gather_half(kv_layer, kv_scales, 0, group.blocks).float().view(shape)
    scores = _scores(q, keys)
    if soft_cap:
        scores.div_(soft_cap).tanh_().mul_(soft_cap)
    scores[..., group.shortest :].masked_fill_(group.is_beyond.unsqueeze(1), float("-inf"))
    if window:
        is_before = torch.arange(keys.shape[1]) < group.contexts - window
        scores.masked_fill_(is_before.unsqueeze(1), float("-inf"))
    values = gather_half(kv_layer, kv_scales, 1, group.blocks).float().view(shape)
    values[:, group.shortest :].masked_fill_(group.is_beyond.unsqueeze(2), 0.0)  # 0 * NaN would be NaN
    return _weighted(scores.softmax(-1), values, q.shape[2])


def _scores(q: Tensor, keys: Tensor) -> Tensor:
    """``q[n, H, D]`` times ``keys[n, S, K*D]``, each query with the keys of its own head: ``[n, H, S]``.

    The keys of all heads of a token are adjacent in memory, and BLAS takes one stride per matrix, so a product takes
    several heads at once, with queries that are 0 in the columns of other heads.
    """
    num_sequences, _, head_dim = q.shape
    num_kv_heads = keys.shape[2] // head_dim
    grouped = q.view(num_sequences, num_kv_heads, -1, head_dim)
    parts = []
    for first in range(0, num_kv_heads, _HEADS_PER_PRODUCT):
        heads = grouped[:, first : first + _HEADS_PER_PRODUCT]
        num_together = heads.shape[1]
        spread = heads.new_zeros(*heads.shape[:3], num_together, head_dim)
        spread.diagonal(dim1=1, dim2=3).copy_(heads.permute(0, 2, 3, 1))
        columns = slice(first * head_dim, (first + num_together) * head_dim)
        spread = spread.view(num_sequences, -1, num_together * head_dim)
        parts.append(torch.bmm(spread, keys[:, :, columns].transpose(1, 2)))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _weighted(weights: Tensor, values: Tensor, head_dim: int) -> Tensor:
    """``weights[n, H, S]`` times ``values[n, S, K*D]``, each with the values of its own head: ``[n, H, D]``."""
    num_sequences, num_heads, _ = weights.shape
    num_kv_heads = values.shape[2] // head_dim
    group_size = num_heads // num_kv_heads
    out = weights.new_empty(num_sequences, num_heads, head_dim)
    by_kv_head = out.view(num_sequences, num_kv_heads, group_size, head_dim)
    for first in range(0, num_kv_heads, _HEADS_PER_PRODUCT):
        last = min(first + _HEADS_PER_PRODUCT, num_kv_heads)
        rows = weights[:, first * group_size : last * group_size]
        product = torch.bmm(rows, values[:, :, first * head_dim : last * head_dim])
        product = product.view(num_sequences, last - first, group_size, last - first, head_dim)
        by_kv_head[:, first:last] = product.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
    return out
