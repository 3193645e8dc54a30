"""Copies of whole KV-cache blocks, in torch: gather and scatter."""

import torch
from torch import Tensor


def gather_blocks(kv: Tensor, ids: Tensor) -> Tensor:
    """Copy the blocks ``ids`` into a new tensor.

    Args:
        kv: The cache, shape ``[num_blocks, ...]``, contiguous. Not modified.
        ids: Block ids, shape ``[C]``, int32; repeats are allowed.

    Returns:
        Shape ``[C, ...]``, dtype and device of ``kv``.
    """
    return kv.index_select(0, ids)


def scatter_blocks(kv: Tensor, ids: Tensor, data: Tensor) -> None:
    """Write ``data[c]`` into block ``ids[c]``, for every ``c``.

    Args:
        kv: The cache, shape ``[num_blocks, ...]``, contiguous. Written.
        ids: Block ids, shape ``[C]``, int32, all different.
        data: Shape ``[C, ...]``, contiguous, dtype and device of ``kv``. Not modified.
    """
    if ids.shape[0]:
        kv.index_copy_(0, ids.to(torch.int64), data)
