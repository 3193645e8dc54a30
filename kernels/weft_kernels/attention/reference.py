"""Attention over a paged KV cache on a CPU: compiled, or in torch where numba is missing; the kernels' test oracle."""

from typing import Any

import torch
from torch import Tensor

from weft_kernels import jit
from weft_kernels.attention.gathered import gathered_attention
from weft_kernels.attention.tiled import tiled_attention


def paged_attention(
    q: Tensor,
    kv_layer: Tensor,
    block_tables: Tensor,
    q_start: Tensor,
    ctx_len: Tensor,
    *,
    kv_scales: Tensor | None = None,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    max_q_len: int,
    max_ctx_len: int,
    deterministic: bool = False,
    step_cache: dict[str, Any] | None = None,
) -> Tensor:
    """Causal attention of each sequence's new tokens over all its tokens; keys and values are in the cache.

    Token ``j`` of sequence ``b`` has position ``ctx_len[b] - q_len[b] + j`` and attends to positions up to its own.
    Cache contents beyond ``ctx_len`` never affect a result, not even NaN.

    Args:
        q: Queries of all sequences, one after the other, shape ``[T, H, D]``. Not modified.
        kv_layer: Keys (0) and values (1) of one layer, shape ``[num_blocks, 2, P, K, D]``, a strided view whose blocks
            are contiguous; dtype of ``q``, or of 8-bit codes (``blocks.layout``); ``H`` a multiple of ``K``.
        block_tables: Block ids of each sequence in order, shape ``[B, M]``, int32; entries past a context are any
            block's.
        q_start: Row of ``q`` at which each sequence starts, shape ``[B + 1]``, int32; the last is ``T``.
        ctx_len: Tokens of each sequence, those of this step counted, shape ``[B]``, int32; at least its ``q_len``.
        kv_scales: Scales of the codes, shape ``[num_blocks, 2, P, K]``, float32, a strided view; None without codes.
        scale: Factor on the scores. Dimensionless.
        window: A token sees this many positions, its own counted; 0 for all.
        soft_cap: Scores become ``soft_cap * tanh(score / soft_cap)``; 0 for none.
        sinks: A score of each head whose weight is in the sum and has no value, shape ``[H]``, float32; None: none.
        max_q_len: The largest number of new tokens of a sequence.
        max_ctx_len: The largest ``ctx_len``.
        deterministic: A row's result is bitwise the same alone and in any batch, in any chunking and with any blocks:
            queries go in tiles of 16 rows padded with zeros, keys in tiles counted from position 0, first to last.
        step_cache: A dict shared by the layers of one step, empty before the first: how the
            sequences are partitioned and their masks are computed once. None: for this call only.

    Returns:
        Shape ``[T, H, D]``, dtype and device of ``q``. Accumulated in float32.
    """
    if jit.is_available():
        from weft_kernels.attention import cpu_kernel  # noqa: PLC0415  # needs numba

        if cpu_kernel.is_supported(q, kv_layer, block_tables):
            return cpu_kernel.paged_attention(
                q, kv_layer, kv_scales, block_tables, q_start, ctx_len, scale, window, soft_cap, sinks, step_cache
            )
    arguments = (q, kv_layer, kv_scales, block_tables, q_start, ctx_len, scale, window, soft_cap, sinks)
    return tiled_attention(*arguments, step_cache) if deterministic else gathered_attention(*arguments)


def prepare(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    *,
    has_cap: bool = False,
    has_sinks: bool = False,
) -> None:
    """Compile what ``paged_attention`` needs for a model of this shape, so that it need not while it serves."""
    if jit.is_available():
        from weft_kernels.attention import cpu_kernel  # noqa: PLC0415  # needs numba

        cpu_kernel.prepare(num_heads, num_kv_heads, head_dim, dtype, kv_dtype, has_cap=has_cap, has_sinks=has_sinks)
