"""Policy of the second tier of the KV cache, in a file or in host memory: ``OffloadTier``."""

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from weft.llm.scheduler.plan import BlockTransfers

_NUM_KEY_BYTES = 16


class OffloadTier:
    """Which blocks a second, slower memory has, by their hashes; the least recently used one is evicted first.

    The pool saves cached blocks here that it reallocates, and a waiting sequence whose prefix the pool has lost loads
    them. Both become entries of the next plan: the runner saves, then loads, then computes. What is saved can be
    matched at once, since a plan's saves come first. A slot that the same plan loads from is not reused. Not
    thread-safe.

    Args:
        num_slots: Blocks that it has room for; 0: it has none, and nothing is ever saved.
        block_bytes: Size of one, for metrics.

    Attributes:
        block_bytes: As given.
        num_slots: The room; 0 also after ``disable``.
        num_loaded: Blocks found here and loaded, failed ones included.
        num_failed: Loads that failed.
        num_saved: Blocks saved.
        num_evicted: Blocks evicted for others.
    """

    def __init__(self, num_slots: int, block_bytes: int = 0) -> None:
        self.num_slots = num_slots
        self.block_bytes = block_bytes
        self.num_loaded = self.num_failed = self.num_saved = self.num_evicted = 0
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._free = list(reversed(range(num_slots)))
        self._pinned: set[bytes] = set()
        self._saves: dict[int, tuple[int, bytes]] = {}  # by slot
        self._loads: dict[int, bytes] = {}  # by block

    @property
    def num_used(self) -> int:
        """Slots that hold a block."""
        return len(self._slots)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._slots

    def save(self, block: int, block_hash: bytes) -> None:
        """Save the contents that ``block`` has before the next plan, if there is a slot for it and it is not here."""
        if block_hash in self._slots:
            self._slots.move_to_end(block_hash)
            return
        slot = self._free.pop() if self._free else self._evict()
        if slot is not None:
            self._slots[block_hash] = slot
            self._saves[slot] = (block, block_hash)

    def pin(self, block_hashes: Iterable[bytes]) -> None:
        """Keep these blocks until the next plan is taken, so that they can be loaded; all of them are here."""
        for block_hash in block_hashes:
            self._slots.move_to_end(block_hash)
            self._pinned.add(block_hash)

    def load(self, block: int, block_hash: bytes) -> None:
        """Load a pinned block into ``block`` of the pool, with the next plan."""
        self._loads[block] = block_hash

    def cancel_load(self, block: int) -> None:
        """Do not load into ``block``, which its owner has freed; no effect once the plan was taken."""
        self._loads.pop(block, None)

    def take(self) -> BlockTransfers | None:
        """The entries of the next plan; None: there are none."""
        self._pinned.clear()
        if not self._saves and not self._loads:
            return None
        loads = [(self._slots[block_hash], block) for block, block_hash in self._loads.items()]
        transfers = BlockTransfers(
            np.array([(block, slot) for slot, (block, _) in self._saves.items()], np.int32).reshape(-1, 2),
            _keys(block_hash for _, block_hash in self._saves.values()),
            np.array(loads, np.int32).reshape(-1, 2),
            _keys(self._loads.values()),
        )
        self.num_saved += len(self._saves)
        self.num_loaded += len(loads)
        self._saves.clear()
        self._loads.clear()
        return transfers

    def fail(self, block_hash: bytes) -> None:
        """A load of this block failed: it is not here. No effect if it is unknown by now."""
        self.num_failed += 1
        slot = self._slots.pop(block_hash, None)
        if slot is not None:
            self._free.append(slot)

    def disable(self) -> None:
        """Forget everything and save nothing any more: the memory is lost."""
        self.num_slots = 0
        self._slots.clear()
        self._free.clear()
        self._pinned.clear()
        self._saves.clear()
        self._loads.clear()

    def check(self) -> None:
        """Raise AssertionError unless every slot is either free or holds one block; for tests and idle times."""
        slots = [*self._free, *self._slots.values()]
        if sorted(slots) != list(range(self.num_slots)) or not self._pinned <= self._slots.keys():
            raise AssertionError(f"{self.num_slots=} {self._free=} {self._slots=} {self._pinned=}")

    def _evict(self) -> int | None:
        """The slot of the least recently used block, which is gone; None: all are pinned, or there are none."""
        block_hash = next(iter(self._slots), None)  # pinned blocks are the most recently used
        if block_hash is None or block_hash in self._pinned:
            return None
        slot = self._slots.pop(block_hash)
        if self._saves.pop(slot, None) is None:
            self.num_evicted += 1
        return slot


def _keys(block_hashes: Iterable[bytes]) -> "np.ndarray[tuple[int, int], np.dtype[np.uint8]]":
    return np.frombuffer(b"".join(block_hashes), np.uint8).reshape(-1, _NUM_KEY_BYTES)
