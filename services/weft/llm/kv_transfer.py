"""Blocks that one engine computes and another goes on with: leases, and copies by hash. ``KvTransfers``.

The engine that computes a prompt holds its blocks (``hold``) and copies them out (``read``). The engine that goes on
holds those that it has (``begin``) and takes in the others (``write``): its request finds them in the prefix cache.
Both ``end`` their leases. How bytes travel between the two is not known here.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from weft.llm.request import EngineRequest
from weft.llm.scheduler.blocks import BlockPool
from weft.llm.scheduler.plan import BlockTransfers

#: Finish reasons of deltas of a request with ``hold_s``: after its first token, and when its lease has ended.
HELD, RELEASED = "held", "released"
#: Leases hold at most this share of all blocks, besides those of the latest lease; the oldest ends first.
_MAX_SHARE = 0.5
#: This share of all blocks stays free when blocks are taken in.
_SPARE_SHARE = 0.03


@runtime_checkable
class BlockCopier(Protocol):
    """The part of ``ModelRunner`` that copies blocks between two steps; ``block_bytes`` is the size of one."""

    block_bytes: int

    def read_blocks(self, blocks: Sequence[int]) -> bytes:
        """Contents of blocks, one behind the other."""

    def write_blocks(
        self, blocks: Sequence[int], rows: npt.NDArray[np.uint8], saves: BlockTransfers | None = None
    ) -> None:
        """Save to the second tier, then set the contents of blocks, ``[len(blocks), block_bytes]``."""


@dataclass(slots=True)
class _Lease:
    deadline_ns: int
    blocks: list[int] = field(default_factory=list)


class KvTransfers:
    """Leases of one engine and copies of its blocks. Used only on the engine's thread, between two steps.

    A lease gives its blocks one more owner until it ends: with ``end``, at its deadline, or because others need the
    blocks, in which case what is missing is computed again.

    Args:
        copier: None: blocks cannot be copied.
        on_end: Called with the request of a lease that has ended.

    Attributes:
        block_bytes: Size of a block; 0: blocks cannot be copied.
        num_expired: Leases that ended at their deadline.
        num_read: Blocks copied out; ``num_written``: blocks taken in.
    """

    def __init__(self, pool: BlockPool, copier: BlockCopier | None, on_end: Callable[[EngineRequest], None]) -> None:
        self._pool = pool
        self._copier = copier
        self.block_bytes = 0 if copier is None else copier.block_bytes
        self._on_end = on_end
        self._leases: dict[EngineRequest, _Lease] = {}  # the oldest first
        self.num_expired = self.num_read = self.num_written = 0

    @property
    def num_open(self) -> int:
        """Leases that have not ended. Any thread."""
        return len(self._leases)

    @property
    def num_bytes(self) -> int:
        """Bytes copied out and taken in. Any thread."""
        return (self.num_read + self.num_written) * self.block_bytes

    def hold(self, request: EngineRequest, hashes: Sequence[bytes], deadline_ns: int) -> list[bytes]:
        """Hold the cached blocks that tokens behind those of ``hashes`` read; returns the hashes of missing ones."""
        pool = self._pool
        lease = self._leases.setdefault(request, _Lease(deadline_ns))
        needed = hashes[pool.window.num_behind(len(hashes) * pool.block_size) :]
        blocks = {block_hash: pool.find(block_hash) for block_hash in needed}
        found = [block for block in blocks.values() if block is not None]
        pool.acquire(found)
        self._keep(lease, found)
        return [each for each, block in blocks.items() if block is None and each not in pool.tier]

    def begin(self, request: EngineRequest, deadline_ns: int) -> list[bytes]:
        """``hold`` for a request that waits for blocks; nothing is missing once it does not wait any more."""
        return self.hold(request, request.block_hashes, deadline_ns) if request.fetch_until_ns else []

    def write(self, request: EngineRequest, hashes: Sequence[bytes], data: bytes) -> bool:
        """Take in the blocks of ``hashes``, and hold them for the request.

        Returns:
            False: nothing was changed, because the request waits no more, blocks are short or ``data`` has another
            size.
        """
        pool, copier, lease = self._pool, self._copier, self._leases.get(request)
        is_waiting = lease is not None and request.fetch_until_ns > 0
        new = [index for index, each in enumerate(hashes) if pool.find(each) is None]
        has_room = pool.num_free >= len(new) + int(_SPARE_SHARE * pool.capacity)
        if copier is None or lease is None or not is_waiting or not has_room:
            return False
        if len(data) != len(hashes) * self.block_bytes:
            return False
        blocks = pool.allocate(len(new))
        rows = np.frombuffer(data, np.uint8).reshape(len(hashes), self.block_bytes)
        copier.write_blocks(blocks, rows if len(new) == len(rows) else rows[new], pool.tier.take())
        for block, index in zip(blocks, new, strict=True):
            pool.commit(block, hashes[index])
        self.num_written += len(blocks)
        self._keep(lease, blocks)
        return True

    def read(self, hashes: Iterable[bytes]) -> bytes:
        """Contents of the blocks of the leading ``hashes`` that are cached, one behind the other."""
        blocks = [block for block in takewhile(lambda block: block is not None, map(self._pool.find, hashes)) if block]
        self.num_read += len(blocks)
        return b"" if self._copier is None else self._copier.read_blocks(blocks)

    def end(self, request: EngineRequest) -> None:
        """End the lease of a request; no effect if it has none."""
        lease = self._leases.pop(request, None)
        if lease is not None:
            self._pool.held.subtract(lease.blocks)
            self._pool.free(lease.blocks)
            self._on_end(request)

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
        self._pool.held.update(blocks)
        while len(self._leases) > 1 and self._pool.held.total() > _MAX_SHARE * self._pool.capacity + len(lease.blocks):
            oldest = next(request for request, one in self._leases.items() if one is not lease)
            self.end(oldest)
