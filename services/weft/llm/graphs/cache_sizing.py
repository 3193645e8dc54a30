"""The size of a KV cache beside CUDA graphs: plain Python, no torch.

Graphs keep the addresses of the cache, so it is made first; but what graphs take is known only once they are captured.
So the largest is captured on a small cache, which is dropped, and the cache gets what is left. Where that was too much
all the same, ``build_shrinking`` makes it smaller.
"""

import logging
from collections.abc import Callable
from typing import TypeVar

from weft.base.errors import InvalidArgumentError

_log = logging.getLogger("weft.model.llm")
_T = TypeVar("_T")

_SHRINK = 0.95
_MAX_ATTEMPTS = 8


def build_shrinking(
    num_blocks: int, build: Callable[[int], _T], *, out_of_memory: type[Exception], release: Callable[[], None]
) -> _T:
    """What ``build`` makes with ``num_blocks`` blocks, or with as few percent less as fit, at most 30.

    Args:
        num_blocks: Blocks of the first attempt.
        build: Makes cache and graphs with so many blocks.
        out_of_memory: What it raises where they do not fit.
        release: Called after a failed attempt, with nothing of it alive: gives memory back to the device.

    Raises:
        InvalidArgumentError: Even the smallest did not fit.
    """
    wanted = num_blocks
    for _ in range(_MAX_ATTEMPTS):
        try:
            return build(num_blocks)
        except out_of_memory:
            pass  # the exception keeps what was built alive until here
        release()
        num_blocks = max(2, int(num_blocks * _SHRINK))
        _log.warning("KV cache and CUDA graphs did not fit into memory; the cache has %d blocks now", num_blocks)
    raise InvalidArgumentError(
        f"engine: a KV cache of {wanted} blocks, and of {_MAX_ATTEMPTS - 1} times 5 % less, does not fit into memory "
        "beside CUDA graphs; lower num_blocks or kv_cache_bytes, or set enable_cuda_graphs to false"
    )
