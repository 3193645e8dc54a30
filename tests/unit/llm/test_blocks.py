"""Blocks of the KV cache: owners, free list and index, by facts and under any order of operations."""

from array import array

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.unit.llm.fake_runner import is_shared

from weft.llm.config import KvWindow
from weft.llm.scheduler.blocks import NULL_BLOCK, OFFLOADED, BlockHasher, BlockPool, OffloadTier

P = 4


def _pool(num_blocks=9, **fields):
    return BlockPool(num_blocks, P, **{"enable_prefix_caching": True, "key": b"key"} | fields)  # type: ignore[arg-type]


def _hashes(pool, tokens, salt=b""):
    hashes = []
    pool.hasher.extend(hashes, pool.hasher.root(salt), array("i", tokens), len(tokens) // P)
    return hashes


def _cached(pool, tokens, salt=b""):
    """Blocks that hold ``tokens``, computed and freed again."""
    hashes = _hashes(pool, tokens, salt)
    table = pool.allocate(len(hashes))
    for block, block_hash in zip(table, hashes, strict=True):
        pool.commit(block, block_hash)
    pool.free(table)
    return table


def test_a_pool_needs_a_block_beside_the_null_block():
    """A pool of one block is refused."""
    with pytest.raises(ValueError, match="at least 2"):
        _pool(1)


def test_the_end_of_a_chain_is_forgotten_first():
    """Cached blocks are reused least recently freed first, the last of a sequence first, uncached ones before."""
    pool = _pool()
    old, new = _cached(pool, range(12)), _cached(pool, range(50, 62))
    assert {1, 2, 3, 4, 5, 6, 7, 8} - {*old, *new} == set(pool.allocate(2))
    assert [old[2]] == pool.allocate(1)
    assert old[:2] == pool.match(_hashes(pool, range(12)))
    assert new == pool.match(_hashes(pool, range(50, 62)))


def test_behind_a_window_nothing_is_needed():
    """A hit of a model with a window of 5 tokens needs the two blocks before its end, and gives null blocks before."""
    pool = _pool(window=KvWindow(5, P, 8))
    table = _cached(pool, range(24))
    hashes = _hashes(pool, range(24))
    assert [0, 0, 0, 0, *table[4:]] == pool.match(hashes)
    assert [0, *table[1:3]] == pool.match(_hashes(pool, [*range(12), 99, 99, 99, 99]))
    pool.acquire(pool.match(hashes))
    assert [0, 2] == [pool.num_owners(NULL_BLOCK), pool.num_used]
    pool.allocate(4)  # takes the two blocks that never held anything, and the fourth and third of the chain
    assert table[:2] == pool.match(hashes[:4])
    assert [0, 0, 0, 0, *table[4:]] == pool.match(hashes)
    pool.check()


def test_a_hole_in_the_window_ends_a_hit():
    """If a block of the window before it is gone, a prefix is cached only as far as one whose window is whole."""
    pool = _pool(window=KvWindow(5, P, 8))
    table = _cached(pool, range(24))
    hashes = _hashes(pool, range(24))
    pool.acquire(table)
    pool.forget(table[4])
    assert [0, 0, *table[2:4]] == pool.match(hashes)
    pool.forget(table[0])
    pool.forget(table[2])
    assert [] == pool.match(hashes)


def test_a_block_with_other_owners_is_not_forgotten():
    """Only the last owner of a block takes it out of the index."""
    pool = _pool()
    table = _cached(pool, range(4))
    pool.acquire(table * 2)
    pool.forget(table[0])
    assert table == pool.match(_hashes(pool, range(4)))


@pytest.mark.parametrize("window", range(1, 12))
@pytest.mark.parametrize("step", [1, 3, 8])
def test_a_window_never_needs_more_blocks_than_it_says(window, step):
    """Wherever a step begins and ends, its blocks and those of its window are no more than ``num_blocks``."""
    of_blocks = KvWindow(window, P, step)
    most = max(-(-(first + step) // P) - of_blocks.num_behind(first) for first in range(100))
    assert most <= of_blocks.num_blocks(1000)
    assert of_blocks.num_behind(first := 50) * P <= first - window


@pytest.mark.parametrize(
    ("key", "fields", "salt"),
    [
        (b"other", {"model": "m", "dtype": "f"}, b""),
        (b"key", {"model": "m", "dtype": "g"}, b""),
        (b"key", {"model": "md", "type": "f"}, b""),
        (b"key", {"model": "m"}, b""),
        (b"key", {"model": "m", "dtype": "f"}, b"\0"),
    ],
)
def test_all_that_kv_depends_on_is_in_the_hash(key, fields, salt):
    """Another key, another field, a field whose text moved into its neighbour, or another salt: another hash."""
    one, other = BlockHasher(b"key", P, {"model": "m", "dtype": "f"}), BlockHasher(key, P, fields)
    assert one.root(b"") == BlockHasher(b"key", P, {"dtype": "f", "model": "m"}).root(b"")
    assert one.root(b"") != other.root(salt)


def test_hashes_are_chained_and_keyed():
    """A block's hash depends on its tokens, all tokens before and the key, and not on when it was made."""
    tokens = array("i", range(12))
    at_once, by_bits, keyed, moved = [], [], [], []
    hasher = BlockHasher(b"key", P, {})
    hasher.extend(at_once, hasher.root(b""), tokens, 3)
    for num_blocks in (1, 1, 3):
        hasher.extend(by_bits, hasher.root(b""), tokens, num_blocks)
    BlockHasher(b"other", P, {}).extend(keyed, hasher.root(b""), tokens, 3)
    hasher.extend(moved, hasher.root(b""), array("i", [99, *tokens[1:]]), 3)
    assert by_bits == at_once
    assert {16} == {len(block_hash) for block_hash in at_once}
    assert 9 == len({*at_once, *keyed, *moved})


def _hash(number):
    return bytes([number]) * 16


class PoolMachine(RuleBasedStateMachine):
    """Whatever is done in whatever order: counts, list and index agree, and a block is found only by what it holds.

    So is a block in the second tier: what a plan saves and loads is what was committed under its hash.
    """

    @initialize(num_blocks=st.integers(2, 9), is_caching=st.booleans(), num_slots=st.integers(0, 3))
    def start(self, num_blocks, is_caching, num_slots):
        self.tier = OffloadTier(num_slots)
        self.pool = _pool(num_blocks, enable_prefix_caching=is_caching, tier=self.tier)
        self.tables = []
        self.hash_of = {}
        self.contents = {}  # of blocks, by the hash that they were last committed with
        self.store = {}  # by slot
        self.loading = {}  # what each block is to hold after the next plan

    @rule(count=st.integers(0, 4))
    def allocate(self, count):
        if count > self.pool.num_free:
            with pytest.raises(ValueError, match="asked for"):
                self.pool.allocate(count)
            return
        table = self.pool.allocate(count)
        owned = {block for other in self.tables for block in other}
        assert len(set(table)) == count
        assert NULL_BLOCK not in table
        assert not owned.intersection(table)
        for block in table:
            self.hash_of.pop(block, None)
            assert not is_shared(self.pool, block)
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data):
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        for block in table:
            if block_hash := self.loading.pop(block, None):
                self.tier.cancel_load(block, block_hash)
        self.pool.free(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data):
        table = data.draw(st.sampled_from(self.tables))
        self.run_plan()  # nobody shares a block that is being loaded
        self.pool.acquire(table)
        self.tables.append(list(table))

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), number=st.integers(0, 5))
    def commit(self, data, number):
        block = data.draw(st.sampled_from([block for table in self.tables for block in table]))
        block_hash = _hash(number)
        self.run_plan()  # what was evicted is saved before its block is written
        self.contents.setdefault(block, block_hash)
        if self.contents[block] != block_hash and block not in self.hash_of:
            self.contents[block] = block_hash
        self.pool.commit(block, block_hash)
        is_free_hash = block_hash not in self.hash_of.values()
        if self.pool.enable_prefix_caching and block not in self.hash_of and is_free_hash:
            self.hash_of[block] = block_hash

    @rule(numbers=st.lists(st.integers(0, 5), max_size=3, unique=True))
    def match_and_acquire(self, numbers):
        by_hash = {block_hash: block for block, block_hash in self.hash_of.items()}
        expected = []
        for block_hash in map(_hash, numbers):
            if block_hash not in by_hash and block_hash not in self.tier:
                break
            expected.append(by_hash.get(block_hash, OFFLOADED))
        found = self.pool.match(map(_hash, numbers))
        assert expected == found
        self.pool.acquire(found)
        lost = [(index, _hash(numbers[index])) for index, block in enumerate(found) if block == OFFLOADED]
        if len(lost) > self.pool.num_free:
            self.pool.free(found)
            return
        self.tier.pin(block_hash for _, block_hash in lost)
        for (index, block_hash), block in zip(lost, self.pool.allocate(len(lost)), strict=True):
            self.hash_of.pop(block, None)
            found[index] = block
            self.tier.load(block, block_hash)
            self.loading[block] = block_hash
        self.tables.append(found)

    @rule()
    def run_plan(self):
        transfers = self.tier.take()
        if transfers is not None:
            for (block, slot), key in zip(transfers.saves.tolist(), transfers.save_keys, strict=True):
                assert self.contents[block] == key.tobytes()
                self.store[slot] = self.contents[block]
            for (slot, block), key in zip(transfers.loads.tolist(), transfers.load_keys, strict=True):
                assert self.store[slot] == key.tobytes() == self.loading.pop(block)
                self.contents[block] = key.tobytes()
        assert not self.loading

    @rule(number=st.integers(0, 5))
    def fail_a_load(self, number):
        self.run_plan()
        self.tier.fail(_hash(number))
        assert _hash(number) not in self.tier

    @invariant()
    def agrees(self):
        self.pool.check()
        self.tier.check()
        owners = {}
        for table in self.tables:
            for block in table:
                owners[block] = owners.get(block, 0) + 1
        for block in range(self.pool.num_blocks):
            assert owners.get(block, 0) == self.pool.num_owners(block)
            readers = owners.get(block, 0) + (block in self.hash_of)
            assert (readers > 1) == is_shared(self.pool, block)
        assert len(owners) == self.pool.num_used


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)


def test_check_notices_a_lost_block():
    """A block that is neither owned nor free fails the check."""
    pool = _pool()
    (block,) = pool.allocate(1)
    pool._ref[block] = 0
    with pytest.raises(AssertionError, match="num_free"):
        pool.check()
