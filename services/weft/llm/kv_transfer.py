"""Blocks that one engine computes and another goes on with: leases, and copies by hash. ``KvTransfers``.

The engine that computes a prompt holds its blocks and copies them out (``read``). The engine that goes on holds those
that it has and takes in the others (``write``), so that its request finds them in the prefix cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from weft.llm.block_store import read_blocks
from weft.llm.request import EngineRequest
from weft.llm.runner import ModelRunner
from weft.llm.scheduler.blocks import BlockPool

#: Leases hold at most this share of all blocks, besides those of the latest lease; the oldest ends first.
_MAX_SHARE = 0.5
#: This share of all blocks stays free when blocks are taken in.
_SPARE_SHARE = 0.03


@dataclass(slots=True)
class _Lease:
    deadline_ns: int
    blocks: list[int] = field(default_factory=list)


class KvTransfers:
    """Leases of one engine and copies of its blocks. Used only on the engine's thread, between two steps.

    A lease gives its blocks one more owner until it ends: with ``end``, at its deadline, or because others need the
    blocks, in which case what is missing is computed again.

    Args:
        runner: Has the blocks; None: they cannot be copied.
        on_end: Called with the request of a lease that has ended.

    Attributes:
        block_bytes: Size of a block; 0: blocks cannot be copied.
        num_expired: Leases that ended at their deadline.
        num_bytes: Copied out and taken in.
    """

    def __init__(self, pool: BlockPool, runner: ModelRunner | None, on_end: Callable[[EngineRequest], None]) -> None:
        self._pool = pool
        self._runner = runner
        self.block_bytes = 0 if runner is None else runner.block_bytes
        self._on_end = on_end
        self._leases: dict[EngineRequest, _Lease] = {}  # the oldest first
        self.num_expired = self.num_bytes = self._num_held = 0

    @property
    def num_open(self) -> int:
        """Leases that have not ended. Any thread."""
        return len(self._leases)

    def hold(self, request: EngineRequest, hashes: Sequence[bytes], deadline_ns: int) -> list[bytes]:
        """Hold the cached blocks that tokens behind those of ``hashes`` read; returns the hashes of missing ones."""
        if request.is_cancelled:
            return []
        pool = self._pool
        lease = self._leases.setdefault(request, _Lease(deadline_ns))
        needed = hashes[pool.window.num_behind(len(hashes) * pool.block_size) :]
        blocks = {block_hash: pool.find(block_hash) for block_hash in needed}
        found = [block for block in blocks.values() if block is not None]
        pool.acquire(found)
        self._keep(lease, found)
        return [each for each, block in blocks.items() if block is None and each not in pool.tier]

    def write(self, request: EngineRequest, hashes: Sequence[bytes], data: bytes) -> bool:
        """Take in the blocks of ``hashes``, and hold them for the request.

        Returns:
            False: nothing was changed: the lease has ended, blocks are short, or ``data`` has another size.
        """
        pool, runner, lease = self._pool, self._runner, self._leases.get(request)
        new = [index for index, each in enumerate(hashes) if pool.find(each) is None]
        has_room = pool.num_free >= len(new) + int(_SPARE_SHARE * pool.capacity)
        if runner is None or lease is None or not has_room or len(data) != len(hashes) * self.block_bytes:
            return False
        blocks = pool.allocate(len(new))
        rows = np.frombuffer(data, np.uint8).reshape(len(hashes), self.block_bytes)
        runner.write_blocks(blocks, rows if len(new) == len(rows) else rows[new], pool.tier.take())
        for block, index in zip(blocks, new, strict=True):
            pool.commit(block, hashes[index])
        self.num_bytes += len(blocks) * self.block_bytes
        self._keep(lease, blocks)
        return True

    def read(self, hashes: Sequence[bytes], most_bytes: int) -> bytes:
        """Contents of the blocks of the leading ``hashes`` that are cached, one behind the other; at least of one."""
        found = map(self._pool.find, hashes[: max(most_bytes // max(self.block_bytes, 1), 1)])
        blocks = [block for block in takewhile(lambda block: block is not None, found) if block]
        self.num_bytes += len(blocks) * self.block_bytes
        return b"" if self._runner is None else read_blocks(self._runner.kv, blocks)

    def end(self, request: EngineRequest) -> None:
        """End the lease of a request; no effect if it has none."""
        lease = self._leases.pop(request, None)
        if lease is not None:
            self._num_held -= len(lease.blocks)
            self._pool.held.subtract(lease.blocks)
            self._pool.free(lease.blocks)
            self._on_end(request)

    def release(self, lease: str) -> None:
        """End a lease by its name; no effect if it has ended."""
        for request in [request for request in self._leases if lease and request.lease == lease]:
            self.end(request)

    def end_oldest(self) -> bool:
        """End the oldest lease; False if there is none."""
        oldest = next(iter(self._leases), None)
        if oldest is not None:
            self.end(oldest)
        return oldest is not None

    def expire(self, now_ns: int) -> None:
        """End leases whose deadline has passed."""
        for request in [request for request, lease in self._leases.items() if lease.deadline_ns <= now_ns]:
            self.num_expired += 1
            self.end(request)

    def _keep(self, lease: _Lease, blocks: Sequence[int]) -> None:
        lease.blocks += blocks
        self._num_held += len(blocks)
        self._pool.held.update(blocks)
        while len(self._leases) > 1 and self._num_held > _MAX_SHARE * self._pool.capacity + len(lease.blocks):
            oldest = next(request for request, one in self._leases.items() if one is not lease)
            self.end(oldest)
