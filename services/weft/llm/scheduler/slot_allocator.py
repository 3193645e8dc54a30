"""Running and waiting sequences, and their slots and blocks: ``SlotAllocator``."""

from collections.abc import Callable, Collection
from itertools import islice

from weft.llm.scheduler.admission import BlockAdmission, RankedQueue, Ranking
from weft.llm.scheduler.blocks import NULL_BLOCK, OFFLOADED, BlockPool
from weft.llm.scheduler.decodes import Decodes
from weft.llm.scheduler.sequence import PenaltyRow, Sequence, SequenceStatus


class SlotAllocator:
    """Assigns slots (rows in the runner's tables) and KV blocks to sequences, and takes them back.

    Attributes:
        decodes: Those of them with a single token to compute.
        num_with_sampling_extras: Running sequences with log probabilities, penalties or a grammar.
        num_with_history: Running sequences with penalties or a grammar, whose next token depends on all before.
        is_ahead: The step being planned follows one in flight.
        changed: Running sequences whose block table or slot is not uploaded, in the order of the changes.
    """

    def __init__(
        self, pool: BlockPool, ranking: Ranking, admission: BlockAdmission, num_slots: int, clock_ns: Callable[[], int]
    ) -> None:
        self.running = RankedQueue()
        self.waiting = RankedQueue()
        self.num_preemptions = 0
        self.num_with_sampling_extras = self.num_with_history = 0
        self.changed: dict[Sequence, None] = {}
        self.decodes = Decodes(num_slots, pool.block_size)
        self.is_ahead = False
        self._pool = pool
        self._ranking = ranking
        self._admission = admission
        self._clock_ns = clock_ns
        self._free_slots = list(reversed(range(num_slots)))
        self._computing: dict[bytes, Sequence] = {}  # the sequence that will commit the block with this hash
        self._loads: dict[Sequence, list[int]] = {}  # indices in the table of blocks that the current step loads
        # Rejected, and nothing has changed since that could help it, so trying again is pointless.
        self._blocked_seq: Sequence | None = None
        # Blocks ran out and a sequence was preempted; until one ends, readmitting it would repeat that.
        self._is_out_of_blocks = False

    def next_waiting(self, count: int) -> list[Sequence]:
        """The first ``count`` waiting sequences; none while the first is known not to fit."""
        first = self.waiting.first(count)
        return [] if first and first[0] is self._blocked_seq else first

    def retry(self) -> None:
        """Consider waiting sequences again that did not fit, because blocks were freed."""
        self._blocked_seq = None
        self._is_out_of_blocks = False

    def wait(self, seq: Sequence) -> None:
        """Put ``seq`` into the waiting queue."""
        seq.start()
        seq.status = SequenceStatus.WAITING
        self.waiting.add(seq)

    def has_slot_for(self, seq: Sequence) -> bool:
        """Whether a slot is free for the waiting ``seq`` or can be taken by preemption; blocks are not considered."""
        if self._free_slots and not (self._is_out_of_blocks and self.running):
            return True
        if self._ranking.preemptible_by(seq, self.running):
            return True
        self._blocked_seq = seq
        return False

    def cached_blocks(self, seq: Sequence) -> list[int] | None:
        """Prefix-cached blocks for the waiting ``seq``; at least its last token is left to compute.

        Returns:
            None: a sequence in this step computes or loads the next missing block, so waiting for one step saves doing
                it twice.
        """
        if not self._pool.enable_prefix_caching:
            return []
        if self._is_computed_now(seq):
            return None
        num_blocks = self._num_reusable(seq)
        self._hash(seq, num_blocks)
        blocks = self._pool.match(islice(seq.hashes, num_blocks))
        seq.num_matched_blocks = len(blocks)
        loading = self._pool.tier.loading
        if self._is_computed_now(seq) or (
            loading and any(seq.hashes[i] in loading for i, block in enumerate(blocks) if block == OFFLOADED)
        ):
            return None
        return blocks

    def min_remaining(self, seq: Sequence) -> int:
        """A lower bound of the tokens that the waiting ``seq`` must compute; much cheaper than ``cached_blocks``."""
        if not self._pool.enable_prefix_caching:
            return len(seq.tokens)
        missing = seq.hashes[seq.num_matched_blocks : seq.num_matched_blocks + 1] if seq.num_matched_blocks >= 0 else []
        if not missing or self._pool.match(missing):
            return 0
        return len(seq.tokens) - seq.num_matched_blocks * self._pool.block_size

    def admit(self, seq: Sequence, cached: list[int]) -> list[Sequence] | None:
        """Give the waiting ``seq`` a slot and blocks for all its known tokens, preempting others if necessary.

        Args:
            cached: The result of ``cached_blocks`` for it.

        Returns:
            The preempted sequences, with ``num_scheduled`` unchanged; None: ``seq`` keeps waiting.
        """
        pool, window = self._pool, self._pool.window
        num_behind = window.num_behind(len(cached) * pool.block_size)
        num_new = window.table_len(len(seq.tokens), num_behind) - len(cached) + cached.count(OFFLOADED)
        pool.acquire(cached)
        victims = self._admission.victims(seq, num_new, has_slot=bool(self._free_slots), running=self.running)
        if victims is None:
            pool.free(cached)
            self._blocked_seq = seq
            return None
        for victim in victims:
            self.preempt(victim)
        self.waiting.remove(seq)
        seq.remaining = len(seq.tokens) - len(cached) * pool.block_size
        seq.num_behind = num_behind
        loaded = [index for index, block in enumerate(cached) if block == OFFLOADED] if pool.tier.num_slots else []
        pool.tier.pin(seq.hashes[index] for index in loaded)  # what is allocated now may be saved, and evict them
        new = pool.allocate(num_new)
        table = cached + new[len(loaded) :]
        for index, block in zip(loaded, new, strict=False):
            table[index] = block
            pool.tier.load(block, seq.hashes[index])
        if loaded:
            self._loads[seq] = loaded
        self._assign_slot(seq, table)
        for block_hash in islice(seq.hashes, len(cached), None):
            self._computing.setdefault(block_hash, seq)
        return victims

    def finish_loads(self, failed: Collection[int]) -> list[Sequence]:
        """Add the loaded blocks of a step, except the ``failed`` ones, to the prefix cache.

        Until now no other sequence could find them, so a failed load affects one sequence, which is computed instead.

        Returns:
            The sequences that own failed blocks, reset to their first valid ``num_cached`` tokens.
        """
        pool, lost = self._pool, []
        for seq, indices in self._loads.items():
            bad = [index for index in indices if seq.block_table[index] in failed]
            for index in bad:
                pool.tier.fail(seq.hashes[index])
            for index in indices:
                if index not in bad:
                    self._commit_block(seq, index)
            if bad:
                seq.num_cached = min(seq.num_cached, bad[0] * pool.block_size)
                lost.append(seq)
        self._loads.clear()
        pool.tier.loading.clear()
        return lost

    def reserve_next_blocks(self) -> None:
        """Give each of ``decodes`` a block for its next token, preempting others if necessary.

        A sequence that ranks worst of all is preempted itself.
        """
        if self.try_reserve_next_blocks():
            return
        for seq in sorted(self._without_block(), key=lambda seq: seq.rank):
            while seq.row >= 0 and not self._pool.num_free:  # without a row it was preempted, by itself or before
                self._preempt_worst().num_scheduled = 0
            if seq.row >= 0:
                self._append_block(seq, *self._pool.allocate(1))

    def try_reserve_next_blocks(self) -> bool:
        """As ``reserve_next_blocks``, but if blocks are short, change nothing and return False."""
        seqs = self._without_block()
        if len(seqs) > self._pool.num_free:
            return False
        for seq, block in zip(seqs, self._pool.allocate(len(seqs)), strict=True):
            self._append_block(seq, block)
        return True

    def _without_block(self) -> list[Sequence]:
        return [seq for seq, num_blocks in self.decodes.at_block_start() if len(seq.block_table) <= num_blocks]

    def _append_block(self, seq: Sequence, block: int) -> None:
        seq.block_table.append(block)
        self.decodes.set_last_block(seq)
        self.changed[seq] = None

    def reserve_chunk(self, seq: Sequence, num_tokens: int) -> list[Sequence]:
        """Give the running ``seq`` blocks for its next ``num_tokens`` tokens, which with a window it may lack.

        Returns:
            The preempted sequences, with ``num_scheduled`` unchanged; the last is ``seq`` itself if it ranks worst.
        """
        pool, table = self._pool, seq.block_table
        num_missing = -(-(seq.num_computed_tokens + num_tokens) // pool.block_size) - len(table)
        if num_missing <= 0:
            return []
        self._free_behind_window(seq)
        victims: list[Sequence] = []
        while pool.num_free < num_missing:
            victims.append(self._preempt_worst())
            if victims[-1] is seq:
                return victims
        # More than this chunk needs: what it gave back at the other end is for its later chunks.
        num_wanted = pool.window.table_len(len(seq.tokens), seq.num_behind) - len(table)
        table += pool.allocate(min(num_wanted, pool.num_free))
        self.changed[seq] = None
        return victims

    def _preempt_worst(self) -> Sequence:
        victim = max(self.running, key=self._ranking.preemption_key)
        self._is_out_of_blocks = True
        self.preempt(victim)
        return victim

    def reserve_drafts(self, seq: Sequence, num_drafts: int) -> int:
        """Give the running ``seq``, which has a block for its next token, blocks for drafts.

        Returns:
            Number of drafts with room, at most ``num_drafts``: nothing is preempted for them, and the watermark is
                kept.
        """
        table, block_size = seq.block_table, self._pool.block_size
        num_places = len(table) * block_size - seq.num_computed_tokens - 1
        while num_places < num_drafts and self._admission.has_spare_blocks(1):
            table += self._pool.allocate(1)
            self.changed[seq] = None
            num_places += block_size
        return max(min(num_places, num_drafts), 0)

    def release_unused_blocks(self, seq: Sequence) -> None:
        """Free the last blocks of ``seq`` that hold no computed tokens: they were for rejected drafts."""
        num_used = -(-seq.num_computed_tokens // self._pool.block_size)
        if num_used < len(seq.block_table):
            self._pool.free(seq.block_table[num_used:])
            del seq.block_table[num_used:]
            seq.num_uploaded_blocks = min(seq.num_uploaded_blocks, num_used)

    def preempt(self, seq: Sequence) -> None:
        """Move the running ``seq`` back to the waiting queue without slot and blocks; its full blocks stay cached."""
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self._release_slot(seq)
        seq.remaining = len(seq.tokens)
        self.wait(seq)

    def requeue(self, seq: Sequence) -> None:
        """Like ``preempt``, for a sequence whose load failed."""
        self._release_slot(seq)
        seq.remaining = len(seq.tokens)
        self.wait(seq)
        self._blocked_seq = None

    def fork(self, parent: Sequence) -> None:
        """Start ``parent.forks``: on its full blocks if slots and blocks are free, else through the waiting queue.

        The prompt of ``parent`` must just have been computed. A fork recomputes the tokens behind these blocks, at
        least the last one, to sample from it: so shared blocks are never written to.
        """
        pool, first_waiting = self._pool, self.waiting.first(1)
        num_full = (parent.num_prompt - 1) // pool.block_size
        num_behind = pool.window.num_behind(num_full * pool.block_size)
        for child in parent.forks:
            is_overtaking = bool(first_waiting) and first_waiting[0].rank < child.rank
            has_room = self._free_slots and self._admission.has_spare_blocks(1)
            child.root, child.hashes = parent.root, parent.hashes[:]
            if is_overtaking or not has_room or parent.num_behind > num_behind:
                self.wait(child)
                continue
            child.start()
            child.remaining, child.num_behind = parent.num_prompt - num_full * pool.block_size, parent.num_behind
            shared = parent.block_table[:num_full]
            pool.acquire(shared)
            self._assign_slot(child, shared + pool.allocate(1))
        parent.forks = []

    def may_preempt(self) -> bool:
        """Whether the first waiting sequence may preempt a running one, if necessary."""
        return any(self._ranking.preemptible_by(seq, self.running) for seq in self.waiting.first(1))

    def upload_again(self, seq: Sequence) -> None:
        """Mark the block table of ``seq`` for upload after a failed step."""
        seq.num_uploaded_blocks, seq.num_uploaded_behind = -1, 0
        self.changed[seq] = None

    def commit(self, seq: Sequence, first: int) -> None:
        """Add the full blocks of ``seq`` from index ``first`` on to the prefix cache; free those behind its window."""
        if self._pool.enable_prefix_caching:
            num_full = seq.num_computed_tokens // self._pool.block_size
            self._hash(seq, num_full)
            for index in range(first, num_full):
                block_hash = seq.hashes[index]
                self._commit_block(seq, index)
                if self._computing.get(block_hash) is seq:
                    del self._computing[block_hash]
                    self._blocked_seq = None  # it may need fewer blocks than when it was rejected
        if self._pool.window.num_tokens:
            self._free_behind_window(seq)

    def _commit_block(self, seq: Sequence, index: int) -> None:
        pool = self._pool
        if pool.commit(seq.block_table[index], seq.hashes[index]) and pool.observer is not None:
            pool.observer.stored(seq.request, seq.hashes, seq.tokens, index)

    def commit_decodes(self) -> None:
        """Like ``commit``, for each of ``decodes`` that has just filled a block."""
        for seq, num_full in self.decodes.at_block_start():
            if num_full:  # else a fork of a prompt of one token
                self.commit(seq, num_full - 1)

    def _free_behind_window(self, seq: Sequence) -> None:
        pool, first, end = self._pool, seq.num_behind, self._pool.window.num_behind(seq.num_computed_tokens)
        if end <= first:
            return
        behind = seq.block_table[first:end]
        for block in behind[max(-(-seq.num_prompt // pool.block_size) - first, 0) :]:
            pool.forget(block)  # generated: a long answer would evict the prefixes of prompts
        self._pool.free(behind)
        seq.block_table[first:end] = [NULL_BLOCK] * len(behind)
        seq.num_behind = end
        self.changed[seq] = None
        self._blocked_seq = None

    def remove(self, seq: Sequence) -> None:
        """End ``seq``, waiting or running, and free what it owns."""
        if seq.status is SequenceStatus.RUNNING:
            self._release_slot(seq)
            self._is_out_of_blocks = False
        else:
            self.waiting.remove(seq)
        seq.status = SequenceStatus.ENDED
        self._blocked_seq = None

    def check(self) -> None:
        """Raise AssertionError unless slots, tables and pool agree; for tests and idle times."""
        owners: dict[int, int] = dict(self._pool.held)
        for seq in self.running:
            for block in seq.block_table[seq.num_behind :]:
                owners[block] = owners.get(block, 0) + 1
        slots = [*self._free_slots, *(seq.slot for seq in self.running)]
        if not (
            all(self._pool.num_owners(block) == owners.get(block, 0) for block in range(self._pool.num_blocks))
            and sorted(slots) == list(range(len(slots)))
            and not any(seq.block_table or seq.slot >= 0 for seq in self.waiting)
            and all(seq.status is SequenceStatus.RUNNING for seq in self._computing.values())
        ):
            raise AssertionError(f"{list(self.running)=} {list(self.waiting)=} {slots=} {owners=} {self._computing=}")
        self._pool.check()
        self._pool.tier.check()

    def _is_computed_now(self, seq: Sequence) -> bool:
        """Whether a sequence of this step, or in flight, computes the first uncached block of ``seq``."""
        num_blocks = self._num_reusable(seq)
        if not 0 <= seq.num_matched_blocks < min(num_blocks, len(seq.hashes)):
            return False
        owner = self._computing.get(seq.hashes[seq.num_matched_blocks])
        return owner is not None and (owner.num_scheduled > 0 or self.is_ahead)

    def _num_reusable(self, seq: Sequence) -> int:
        """Blocks that ``seq`` need not compute if they are cached: not the last token, nor what is to be scored."""
        num_tokens = len(seq.tokens) - 1
        return min(num_tokens, seq.num_scored if seq.scores is not None else num_tokens) // self._pool.block_size

    def _hash(self, seq: Sequence, num_blocks: int) -> None:
        seq.root = seq.root or self._pool.hasher.root(seq.request.cache_key)
        self._pool.hasher.extend(seq.hashes, seq.root, seq.tokens, num_blocks)

    def _assign_slot(self, seq: Sequence, table: list[int]) -> None:
        seq.slot = self._free_slots.pop()
        seq.block_table = table
        seq.status = SequenceStatus.RUNNING
        seq.num_uploaded_blocks = -1
        if not seq.first_scheduled_ns:
            seq.first_scheduled_ns = self._clock_ns()
            seq.num_cached = seq.num_computed_tokens
        if seq.penalties is None and seq.params.has_penalties:
            unique_prompt_ids = seq.request.unique_prompt_ids
            seq.penalties = PenaltyRow(seq.params, seq.tokens, seq.num_prompt, seq.stop_ids, unique_prompt_ids)
        self._count_extras(seq, 1)
        self.changed[seq] = None
        self.running.add(seq)

    def _count_extras(self, seq: Sequence, change: int) -> None:
        has_history = seq.penalties is not None or seq.matcher is not None
        self.num_with_history += change * has_history
        self.num_with_sampling_extras += change * (has_history or seq.num_logprobs >= 0)

    def _release_slot(self, seq: Sequence) -> None:
        self.running.remove(seq)
        if seq.row >= 0:
            self.decodes.remove(seq)
        for block_hash in islice(seq.hashes, seq.num_computed_tokens // self._pool.block_size, None):
            if self._computing.get(block_hash) is seq:
                del self._computing[block_hash]
        for index in self._loads.pop(seq, ()):
            self._pool.tier.cancel_load(seq.block_table[index], seq.hashes[index])
        self._count_extras(seq, -1)
        self.changed.pop(seq, None)
        self._free_slots.append(seq.slot)
        self._pool.free(seq.block_table)
        seq.block_table = []
        seq.num_behind = seq.num_uploaded_behind = 0
        seq.slot = -1
