"""Paged KV cache: ownership of blocks, the free list, the prefix cache, and the policy of its second tier."""

import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Protocol

import numpy as np

from weft.llm.config import KvWindow
from weft.llm.request import EngineRequest
from weft.llm.scheduler.plan import BlockTransfers

_DIGEST_BYTES = 16
#: Blocks hashed before other threads may have the interpreter: 80 us.
_NUM_SLICE_BLOCKS = 64
#: In a matched table: the block is in the second tier.
OFFLOADED = -1
#: Never allocated: padding writes there. Its links are the two ends of the free list.
NULL_BLOCK = 0


class OffloadTier:
    """Index of the blocks in a second, slower memory, by hash; evicts the least recently used.

    The pool saves here the cached blocks that it reallocates, and a waiting sequence whose prefix the pool has lost
    loads them. Both become entries of the next plan: the runner saves, then loads, then computes. A saved block can be
    matched at once, since a plan's saves come first. A slot that the same plan loads from is not reused. Not
    thread-safe.

    Attributes:
        num_slots: Capacity in blocks; 0: none, also after ``disable``, and nothing is ever saved.
        block_bytes: Size of one, for metrics.
        num_loaded: Blocks found here and loaded, failed ones included.
        loading: Hashes of blocks that the current step loads; invalid until it is completed.
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
        self.loading: set[bytes] = set()

    @property
    def num_used(self) -> int:
        """Slots that hold a block."""
        return len(self._slots)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._slots

    def save(self, block: int, block_hash: bytes) -> None:
        """Save the current contents of ``block`` with the next plan, if there is a slot and it is not saved yet."""
        if block_hash in self._slots:
            self._slots.move_to_end(block_hash)
            return
        slot = self._free.pop() if self._free else self._evict()
        if slot is not None:
            self._slots[block_hash] = slot
            self._saves[slot] = (block, block_hash)

    def pin(self, block_hashes: Iterable[bytes]) -> None:
        """Keep these blocks, all of which are here, until the next plan is taken, so that they can be loaded."""
        for block_hash in block_hashes:
            self._slots.move_to_end(block_hash)
            self._pinned.add(block_hash)

    def load(self, block: int, block_hash: bytes) -> None:
        """Load a pinned block into ``block`` of the pool, with the next plan."""
        self._loads[block] = block_hash
        self.loading.add(block_hash)

    def cancel_load(self, block: int, block_hash: bytes) -> None:
        """Do not load into ``block``, which its owner has freed; a plan already taken still loads it."""
        self._loads.pop(block, None)
        self.loading.discard(block_hash)

    def take(self) -> BlockTransfers | None:
        """Take the entries for the next plan; None: there are none."""
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
        """Remove a block whose load failed, if it is still known."""
        self.num_failed += 1
        slot = self._slots.pop(block_hash, None)
        if slot is not None:
            self._free.append(slot)

    def disable(self) -> None:
        """Forget everything and save nothing any more, because the memory is lost."""
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
    return np.frombuffer(b"".join(block_hashes), np.uint8).reshape(-1, _DIGEST_BYTES)


class BlockHasher:
    """Chain hashes of blocks, thread-safe: keyed BLAKE2b, 128 bits, over the parent's hash and the block's tokens.

    Equal hashes mean equal KV, so the hash covers everything that KV depends on: all preceding tokens, the adapter
    and the tenant's salt (``EngineRequest.cache_key``), and the fields that identify the model. The secret key prevents
    clients, who choose the tokens, from constructing collisions.

    Args:
        key: Secret, up to 64 bytes; processes with the same one have the same hashes.
        fields: Other things that KV depends on, such as the model and the dtype of the cache. Each name and
            value is hashed with its length, so that no value can imitate another field.
    """

    def __init__(self, key: bytes, block_size: int, fields: Mapping[str, str]) -> None:
        self._block_size = block_size
        self._block = blake2b(digest_size=_DIGEST_BYTES, key=key, person=b"block")
        self._root = blake2b(digest_size=_DIGEST_BYTES, key=key, person=b"root")
        for name, value in sorted(fields.items()):
            for text in (name.encode(), value.encode()):
                self._root.update(len(text).to_bytes(8, "little") + text)

    def root(self, salt: bytes) -> bytes:
        """Parent of the first block of every sequence with this salt."""
        root = self._root.copy()
        root.update(salt)  # needs no length, because nothing follows it
        return root.digest()

    def extend(self, hashes: list[bytes], root: bytes, tokens: "array[int]", num_blocks: int) -> None:
        """Append to ``hashes`` until it has those of the first ``num_blocks`` blocks of ``tokens``."""
        block_size, keyed = self._block_size, self._block
        parent = hashes[-1] if hashes else root
        for index in range(len(hashes), num_blocks):
            block = keyed.copy()
            block.update(parent + tokens[index * block_size : (index + 1) * block_size].tobytes())
            parent = block.digest()
            hashes.append(parent)

    def prompt(self, salt: bytes, tokens: "array[int]", is_stopped: Callable[[], bool]) -> list[bytes]:
        """Hash the full blocks of a prompt in slices, so that no other thread waits long.

        Args:
            is_stopped: Asked between slices; once true, the hashes so far are returned.
        """
        hashes: list[bytes] = []
        root = self.root(salt)
        num_blocks = len(tokens) // self._block_size
        for end in range(_NUM_SLICE_BLOCKS, num_blocks, _NUM_SLICE_BLOCKS):
            if is_stopped():
                return hashes
            self.extend(hashes, root, tokens, end)
            time.sleep(0)
        if not is_stopped():
            self.extend(hashes, root, tokens, num_blocks)
        return hashes


class BlockObserver(Protocol):
    """Is told, on the engine's thread, which blocks can be found in the prefix cache; must not block."""

    def stored(self, request: EngineRequest, hashes: Sequence[bytes], tokens: "array[int]", index: int) -> None:
        """Block ``index`` of a sequence of ``request`` can be found now, by ``hashes[index]``."""

    def removed(self, block_hash: bytes) -> None:
        """The block cannot be found any more."""


class BlockPool:
    """Reference counts, the free list and the prefix cache index. Not thread-safe.

    A block without an owner is free, and stays in the index until it is allocated again. Free blocks outside the index
    are allocated first, then the least recently freed. The free list is doubly linked: removing any block costs O(1).

    Args:
        num_blocks: All blocks, including the null block; at least 2.
        enable_prefix_caching: False: ``match`` never finds a block.
        window: The part of a sequence that is still read; by default all.
        tier: Where reallocated cached blocks are saved; by default nowhere.

    Attributes:
        hasher: Computes the hashes that ``match`` and ``commit`` take.
        num_free: Blocks that can be allocated.
        held: Owners of each block that are no sequences; kept by ``KvTransfers``.
        observer: Is told of blocks that enter and leave the index; None: nobody is.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool,
        key: bytes,
        fields: Mapping[str, str] | None = None,
        window: KvWindow | None = None,
        tier: OffloadTier | None = None,
    ) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2, one of them the null block; got {num_blocks}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.window = window or KvWindow(block_size=block_size)
        self.tier = tier or OffloadTier(0)
        self.hasher = BlockHasher(key, block_size, fields or {})
        self.num_free = num_blocks - 1
        self.held: Counter[int] = Counter()
        self.observer: BlockObserver | None = None
        self._ref = array("i", bytes(4 * num_blocks))  # owners
        self._hash: list[bytes | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}
        self._next = array("i", [*range(1, num_blocks), NULL_BLOCK])
        self._prev = array("i", [num_blocks - 1, *range(num_blocks - 1)])

    @property
    def capacity(self) -> int:
        """Blocks that sequences can own."""
        return self.num_blocks - 1

    @property
    def num_used(self) -> int:
        """Blocks with an owner."""
        return self.capacity - self.num_free

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """The cached blocks of the longest cached prefix of ``hashes``, null blocks behind its window.

        Changes nothing. A block that only the second tier has is ``OFFLOADED``. With a window, a prefix is usable if
        the blocks of the window before its end are cached; it is searched from the end, as vLLM does.
        """
        if self.window.num_tokens:
            return self._match_window(list(hashes))
        blocks = []
        for block_hash in hashes:
            block = self._index.get(block_hash)
            if block is None:
                if block_hash not in self.tier:
                    break
                block = OFFLOADED
            blocks.append(block)
        return blocks

    def find(self, block_hash: bytes) -> int | None:
        """The cached block with a hash; None: there is none."""
        return self._index.get(block_hash)

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add an owner to each of ``blocks``, which are cached or owned; null and ``OFFLOADED`` ones have none."""
        for block in blocks:
            if block <= NULL_BLOCK:
                continue
            if not self._ref[block]:  # take it out of the free list
                before, after = self._prev[block], self._next[block]
                self._next[before], self._prev[after] = after, before
                self.num_free -= 1
            self._ref[block] += 1

    def allocate(self, num_blocks: int) -> list[int]:
        """Take ``num_blocks`` free blocks, remove them from the index, and give each one owner.

        Cached ones among them are saved to the second tier.

        Raises:
            ValueError: Fewer are free; nothing was changed.
        """
        if num_blocks > self.num_free:
            raise ValueError(f"{num_blocks} blocks asked for, {self.num_free} are free")
        blocks = []
        block = NULL_BLOCK
        for _ in range(num_blocks):
            block = self._next[block]
            block_hash = self._hash[block]
            if block_hash is not None:
                self.tier.save(block, block_hash)
                self._forget(block)
            self._ref[block] = 1
            blocks.append(block)
        self._next[NULL_BLOCK] = after = self._next[block]
        self._prev[after] = NULL_BLOCK
        self.num_free -= num_blocks
        return blocks

    def free(self, table: Sequence[int]) -> None:
        """Remove an owner from each block of ``table``; its last block is reallocated first. See ``acquire``."""
        ref, hashes = self._ref, self._hash
        for block in reversed(table):
            if block <= NULL_BLOCK:
                continue
            count = ref[block] = ref[block] - 1
            if not count:
                # A block outside the index cannot be reused by a later prompt, so it is allocated first.
                before = NULL_BLOCK if hashes[block] is None else self._prev[NULL_BLOCK]
                after = self._next[before]
                self._next[before] = self._prev[after] = block
                self._prev[block], self._next[block] = before, after
                self.num_free += 1

    def num_owners(self, block: int) -> int:
        """Owners of ``block``."""
        return self._ref[block]

    def commit(self, block: int, block_hash: bytes) -> bool:
        """Add ``block``, owned and computed, to the index, unless another block has the same hash; whether it did."""
        if not self.enable_prefix_caching or self._hash[block] is not None or block_hash in self._index:
            return False
        self._hash[block] = block_hash
        self._index[block_hash] = block
        return True

    def forget(self, block: int) -> None:
        """Remove the owned ``block`` from the index unless it has other owners."""
        if self._ref[block] == 1:
            self._forget(block)

    def check(self) -> None:
        """Raise AssertionError unless counts, free list and index agree; O(blocks), for tests and idle times."""
        free: list[int] = []
        block = self._next[NULL_BLOCK]
        while block != NULL_BLOCK and len(free) <= self.num_blocks:
            if self._prev[self._next[block]] != block:
                raise AssertionError(f"the free list is broken at block {block}")
            free.append(block)
            block = self._next[block]
        hashed = {block: found for block, found in enumerate(self._hash) if found is not None}
        if not (
            len(free) == self.num_free
            and set(free) == {block for block in range(1, self.num_blocks) if not self._ref[block]}
            and all(count >= 0 for count in self._ref)
            and self._ref[NULL_BLOCK] == 0
            and NULL_BLOCK not in hashed
            and {found: block for block, found in hashed.items()} == self._index
        ):
            raise AssertionError(f"{self.num_free=} {free=} {self._ref=} {hashed=} {self._index=}")

    def _match_window(self, hashes: list[bytes]) -> list[int]:
        end = len(hashes)
        blocks: list[int] = []  # of the run that ends at ``end``, last first
        for index in reversed(range(end)):
            block = self._index.get(hashes[index])
            if block is None and hashes[index] not in self.tier:
                end, blocks = index, []
                continue
            blocks.append(OFFLOADED if block is None else block)
            if index == self.window.num_behind(end * self.block_size):
                return [NULL_BLOCK] * index + blocks[::-1]
        return []

    def _forget(self, block: int) -> None:
        block_hash = self._hash[block]
        if block_hash is not None:
            del self._index[block_hash]
            self._hash[block] = None
            if self.observer is not None:
                self.observer.removed(block_hash)
