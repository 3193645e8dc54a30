"""A runner without a model, that notices wrong plans: what it samples depends on every entry that it reads."""

import zlib

import numpy as np

from weft.llm.config import EngineConfig, KvWindow
from weft.llm.request import EngineRequest, SamplingParams
from weft.llm.scheduler.blocks import NULL_BLOCK, BlockPool, OffloadTier
from weft.llm.scheduler.scheduler import Scheduler
from weft.llm.scheduler.sequence import Sequence

VOCAB = 50


def entry(before, token):
    """What the cache holds at a position: a digest of the token and of the entry before."""
    return zlib.crc32(b"%d %d" % (before, token))


def sample(last_entry, seed, position):
    """The token that follows."""
    return zlib.crc32(b"%d %d %d" % (last_entry, seed, position)) % VOCAB


def undisturbed(seq):
    """All tokens that ``seq`` has after running alone."""
    tokens = seq.tokens[: seq.num_prompt].tolist()
    value = 0
    for token in tokens:
        value = entry(value, token)
    while len(tokens) < seq.max_len:
        token = sample(value, seq.seed, len(tokens))
        tokens.append(token)
        value = entry(value, token)
        if token in seq.stop_ids and len(tokens) - seq.num_prompt > seq.params.min_tokens:
            break
    return tokens


def is_shared(pool, block):
    """Whether a block has two owners, or one and can be found, so that its owner must not write to it."""
    return pool.num_owners(block) + (pool._hash[block] is not None) > 1


class FakeRunner:
    """Keeps a cache and the tables that plans describe, knows nothing else, and checks each plan against the pool."""

    def __init__(self, config, pool):
        self.config, self.pool, self.size = config, pool, config.block_size
        self.cache = np.zeros((pool.num_blocks, self.size), np.int64)
        self.tokens = np.zeros((pool.num_blocks, self.size), np.int64)  # that the entries are of
        self.tables = {}
        self.sampled = {}  # by slot, the token sampled last
        self.tier = {}  # by slot: hash, entries and tokens of a block
        self.may_fail = lambda: False  # whether a load fails
        self.failed_loads = []  # of the last plan

    def run(self, plan):
        """Tokens of the plan's sample rows."""
        self.check(plan)
        self.transfer(plan.transfers)
        for slot, seed in zip(plan.new_slots.tolist(), plan.new_seeds.tolist(), strict=True):
            self.tables[slot] = ({}, seed)
        for slot, index, block in plan.table_delta.tolist():
            self.tables[slot][0][index] = block
        values = {}
        for row in np.flatnonzero(plan.token_ids < 0).tolist():
            assert row < len(plan.slots)
            plan.token_ids[row] = self.sampled[int(plan.slots[row])]
        q_start, slot_mapping, token_ids = plan.q_start.tolist(), plan.slot_mapping.tolist(), plan.token_ids.tolist()
        for row, slot in enumerate(plan.slots.tolist()):
            table = self.tables[slot][0]
            first = int(plan.ctx_len[row]) - (q_start[row + 1] - q_start[row])
            self.check_window(table, first)
            before = first - 1
            value = int(self.cache[table[before // self.size], before % self.size]) if first else 0
            for at in range(q_start[row], q_start[row + 1]):
                position = first + at - q_start[row]
                assert plan.positions[at] == position
                assert slot_mapping[at] == table[position // self.size] * self.size + position % self.size
                value = entry(value, token_ids[at])
                self.cache[divmod(slot_mapping[at], self.size)] = values[at] = value
                self.tokens[divmod(slot_mapping[at], self.size)] = token_ids[at]
        rows, slots, positions = plan.sample_rows.tolist(), plan.sample_slots.tolist(), plan.sample_positions.tolist()
        sampled = zip(rows, slots, positions, strict=True)
        tokens = [sample(values[row], self.tables[slot][1], pos) for row, slot, pos in sampled]
        self.sampled.update(zip(slots, tokens, strict=True))
        return np.array(tokens, np.int32)

    def spoil(self, plan):
        """What a step that has failed may leave behind: the cache where it writes, the tables that it sets."""
        for slot in set(plan.slot_mapping.tolist()):
            self.cache[divmod(slot, self.size)] = -1
        for slot in plan.slots.tolist():
            self.tables.pop(slot, None)
            self.sampled.pop(slot, None)

    def transfer(self, transfers):
        """Save and load; a load that fails leaves anything in its block."""
        self.failed_loads = []
        if transfers is None:
            return
        assert len(transfers.saves) == len(set(transfers.saves[:, 1].tolist())) == len(transfers.save_keys)
        assert len(transfers.loads) == len(set(transfers.loads[:, 1].tolist())) == len(transfers.load_keys)
        for (block, slot), key in zip(transfers.saves.tolist(), transfers.save_keys, strict=True):
            assert 0 <= slot
            self.tier[slot] = (key.tobytes(), self.cache[block].copy(), self.tokens[block].copy())
        for (slot, block), key in zip(transfers.loads.tolist(), transfers.load_keys, strict=True):
            assert self.pool.num_owners(block) == 1
            assert not is_shared(self.pool, block)
            saved, self.cache[block], self.tokens[block] = self.tier[slot]
            assert saved == key.tobytes()
            if self.may_fail():
                self.failed_loads.append(block)
                self.cache[block] = -1

    def check_window(self, table, first):
        """Whoever computes position ``first`` finds all that its window reads, and behind it nothing is owned."""
        window = self.pool.window.num_tokens
        if not window or not set(self.failed_loads).isdisjoint(table.values()):
            return
        for index in range((first // self.size * self.size - window) // self.size):  # since a block was full
            assert table[index] == NULL_BLOCK
        for position in range(max(first - window + 2, 1), first):
            at, before = (divmod(each, self.size) for each in (position, position - 1))
            assert NULL_BLOCK not in (table[at[0]], table[before[0]])
            own, last = self.cache[table[at[0]], at[1]], self.cache[table[before[0]], before[1]]
            assert own == entry(int(last), int(self.tokens[table[at[0]], at[1]]))

    def check(self, plan):
        """The plan is within the budget, its arrays fit together, and it writes no block that anybody else reads."""
        num_tokens = len(plan.token_ids)
        written = {slot // self.size for slot in plan.slot_mapping.tolist()}
        assert 0 < num_tokens <= self.config.max_num_batched_tokens
        assert num_tokens == plan.q_start[-1] == len(set(plan.slot_mapping.tolist()))
        assert len(plan.slots) == len(set(plan.slots.tolist())) <= self.config.max_num_seqs
        assert NULL_BLOCK not in written
        assert not any(is_shared(self.pool, block) for block in written)
        assert all(self.pool.num_owners(block) == 1 for block in written)
        assert plan.max_q_len == max(np.diff(plan.q_start))
        assert plan.max_ctx_len == max(plan.ctx_len)
        assert plan.sample_positions.tolist() == (plan.positions[plan.sample_rows] + 1).tolist()
        assert len(plan.sample_rows) == len(plan.num_logprobs) == len(plan.penalty_start) - 1


class Bench:
    """A scheduler with its pool, a fake runner and a clock that the test moves."""

    def __init__(self, *, num_blocks=64, key=b"key", window=0, num_offload_blocks=0, drafts=None, **config):
        defaults = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 96}
        self.config = EngineConfig(num_blocks=num_blocks, **defaults | config)
        caching = self.config.enable_prefix_caching
        size = self.config.block_size
        kv_window = KvWindow(window, size, self.config.max_num_batched_tokens)
        tier = OffloadTier(num_offload_blocks if caching else 0)
        self.pool = BlockPool(num_blocks, size, enable_prefix_caching=caching, key=key, window=kv_window, tier=tier)
        self.now_ns = 1
        self.scheduler = Scheduler(self.config, self.pool, clock_ns=lambda: self.now_ns, drafts=drafts)
        self.runner = FakeRunner(self.config, self.pool)
        self.sequences = []
        self.plan = None

    def add(self, prompt, *, level=0, arrival_ns=None, deadline_ns=None, salt=b"", eos=(), **params):
        """Sequences of a new request, one for each choice."""
        tokens = np.arange(prompt) % VOCAB if isinstance(prompt, int) else prompt
        request = EngineRequest(
            np.array(tokens, np.int32),
            SamplingParams(**params),
            lambda delta: None,
            level=level,
            arrival_ns=self.now_ns if arrival_ns is None else arrival_ns,
            deadline_ns=deadline_ns,
            salt=salt,
        )
        first = None
        for choice in range(request.params.n):
            number = len(self.sequences) + 1
            seq = Sequence(request, number, choice=choice, seed=choice, eos_token_ids=eos, parent=first)
            first = first or seq
            self.sequences.append(seq)
            self.scheduler.add(seq)
        return self.sequences[-request.params.n :]

    def step(self):
        """One step: its results, or None where there is nothing to do."""
        self.plan = self.scheduler.schedule()
        return None if self.plan is None else self.complete(self.runner.run(self.plan))

    def complete(self, tokens):
        """Give the scheduler the result of the plan that was run last."""
        return self.scheduler.complete(tokens, failed_loads=self.runner.failed_loads)

    def run(self, num_steps=10_000):
        """Steps until nothing is left to do; how many there were."""
        for number in range(num_steps):
            if self.step() is None:
                return number
        raise AssertionError(f"{self.sequences} after {num_steps} steps")

    def scheduled(self):
        """Tokens of the last plan by sequence."""
        counts = dict(zip(self.plan.slots.tolist(), np.diff(self.plan.q_start).tolist(), strict=True))
        return {seq: counts[seq.slot] for seq in self.sequences if seq.slot in counts}
