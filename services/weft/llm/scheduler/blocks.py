"""Paged KV cache: ownership of blocks, the free list and the prefix cache. ``BlockPool``."""

import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b

from weft.llm.kv_window import KvWindow
from weft.llm.scheduler.offload import OffloadTier

_DIGEST_BYTES = 16
#: Blocks hashed before other threads may have the interpreter: 80 us.
_NUM_SLICE_BLOCKS = 64


class BlockHasher:
    """Chain hashes, on any thread: BLAKE2b, 128 bits, keyed, over the parent's hash and the block's tokens.

    Equal hashes mean equal KV, so the hash covers everything that KV depends on: all preceding tokens, the tenant's
    salt, and the fields that identify the model. The secret key prevents clients, who choose the tokens, from
    constructing collisions.

    Args:
        key: Secret, up to 64 bytes; one per process is enough.
        block_size: Tokens of a block.
        fields: What else KV depends on, such as the model, an adapter, the dtype of the cache. Each name and value is
            hashed with its length, so that no value can imitate another field.
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
        """Hashes of the full blocks of a prompt, computed beside other threads: none waits for more than a slice.

        Args:
            salt: See ``root``.
            tokens: The prompt.
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


#: In a matched table: the block is in the second tier.
OFFLOADED = -1
#: Never allocated: padding writes there. Its links are the two ends of the free list.
NULL_BLOCK = 0


class BlockPool:
    """Reference counts, the free list and the prefix cache index. Not thread-safe.

    A block without an owner is free, and stays in the index until it is allocated again. Free blocks outside the index
    are allocated first, then the least recently freed. The free list is doubly linked: removing any block costs O(1).

    Args:
        num_blocks: All blocks, including the null block.
        block_size: Tokens of a block.
        enable_prefix_caching: False: ``match`` never finds a block.
        key: Secret key of the hashes, up to 64 bytes.
        fields: See ``BlockHasher``.
        window: What a sequence still reads; by default everything.
        tier: Where cached blocks are saved that are reallocated; by default nowhere.

    Attributes:
        hasher: Computes the hashes that ``match`` and ``commit`` take.
        num_free: Blocks that can be allocated.

    Raises:
        ValueError: ``num_blocks`` is less than 2.
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

        Changes nothing. A block that only the second tier has is ``OFFLOADED``.
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

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add an owner to each of ``blocks``, which are cached or owned; null and ``OFFLOADED`` ones have none."""
        for block in blocks:
            if block <= NULL_BLOCK:
                continue
            if not self._ref[block]:
                self._unlink(block)
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
                self._link(block, NULL_BLOCK if hashes[block] is None else self._prev[NULL_BLOCK])

    def fork(self, table: Sequence[int]) -> list[int]:
        """A copy of ``table`` whose blocks have one more owner each."""
        self.acquire(table)
        return list(table)

    def is_shared(self, block: int) -> bool:
        """Whether the block has another owner or is in the index, so that its owner must not write to it."""
        return self._ref[block] + (self._hash[block] is not None) > 1

    def num_owners(self, block: int) -> int:
        """Owners of ``block``."""
        return self._ref[block]

    def commit(self, block: int, block_hash: bytes) -> None:
        """Add ``block``, owned and computed, to the index, unless another block has the same hash."""
        if self.enable_prefix_caching and self._hash[block] is None and block_hash not in self._index:
            self._hash[block] = block_hash
            self._index[block_hash] = block

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
        """As ``match``: a prefix is usable if the blocks of the window before its end are cached.

        Source:
            The search from the end of https://github.com/vllm-project/vllm, its manager of sliding windows.
        """
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

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before
        self.num_free -= 1

    def _link(self, block: int, before: int) -> None:
        after = self._next[before]
        self._next[before] = self._prev[after] = block
        self._prev[block] = before
        self._next[block] = after
        self.num_free += 1
