"""Attention over a paged KV cache, in torch: the CPU implementation, and the kernel's test oracle."""

from typing import Any

from torch import Tensor

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
        max_q_len: The largest number of new tokens of a sequence.
        max_ctx_len: The largest ``ctx_len``.
        deterministic: A row's result is bitwise the same alone and in any batch, in any chunking and with any blocks:
            queries go in tiles of 16 rows padded with zeros, keys in tiles counted from position 0, first to last.
        step_cache: A dict shared by the layers of one step, empty before the first: how the
            sequences are partitioned and their masks are computed once. None: for this call only.

    Returns:
        Shape ``[T, H, D]``, dtype and device of ``q``. Accumulated in float32.
    """
    if deterministic:
        return tiled_attention(
            q, kv_layer, kv_scales, block_tables, q_start, ctx_len, scale, window, soft_cap, step_cache
        )
    return gathered_attention(
        q, kv_layer, kv_scales, block_tables, q_start, ctx_len, scale, window, soft_cap, step_cache
    )
