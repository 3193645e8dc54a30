"""Who runs and who waits, with seats and blocks handed over between them: ``Seating``."""

from collections.abc import Callable
from itertools import islice

from weft_model.llm.scheduler.admission import BlockAdmission
from weft_model.llm.scheduler.blocks import BlockPool
from weft_model.llm.scheduler.penalty_row import PenaltyRow
from weft_model.llm.scheduler.ranking import RankedLine, Ranking
from weft_model.llm.scheduler.sequence import Sequence, SequenceStatus


class Seating:
    """Gives sequences a seat (a row in the runner's tables) and blocks, and takes them away.

    Args:
        pool: The blocks.
        ranking: Who is strictly better than whom, and who goes first for lack of room.
        admission: Who may come in.
        num_seats: Seats.
        clock_ns: Time in nanoseconds.

    Attributes:
        running: Sequences with a seat.
        waiting: Sequences that want one.
        num_preemptions: Times that one lost its seat to another.
        num_asking: Running sequences that ask for log probabilities or penalties.
        changed: Running sequences whose table or slot the runner does not know yet, in the order of the changes.
    """

    def __init__(
        self, pool: BlockPool, ranking: Ranking, admission: BlockAdmission, num_seats: int, clock_ns: Callable[[], int]
    ) -> None:
        self.running = RankedLine()
        self.waiting = RankedLine()
        self.num_preemptions = 0
        self.num_asking = 0
        self.changed: dict[Sequence, None] = {}
        self._pool = pool
        self._ranking = ranking
        self._admission = admission
        self._clock_ns = clock_ns
        self._slots = list(reversed(range(num_seats)))
        self._computing: dict[bytes, Sequence] = {}  # who will commit the block of this hash
        self._copied: set[int] = set()
        self._held: list[int] = []
        # Refused, and nothing has changed since that could help it: the answer is known without asking again.
        self._refused: Sequence | None = None
        # A sequence lost its blocks because they ran out; until one ends, its return would only repeat that.
        self._is_short = False
        self._has_forked = False

    def next_waiting(self, count: int) -> list[Sequence]:
        """Waiting sequences in the order of service, at most ``count``; none while the first would be refused again."""
        first = self.waiting.first(count)
        return [] if first and first[0] is self._refused else first

    def wait(self, seq: Sequence) -> None:
        """``seq`` waits for a seat."""
        seq.start()
        seq.status = SequenceStatus.WAITING
        self.waiting.add(seq)

    def has_place(self, seq: Sequence) -> bool:
        """Whether the waiting ``seq`` could be admitted if there are blocks enough."""
        if self._slots and not (self._is_short and self.running):
            return True
        if self._ranking.worse_than(seq, self.running):
            return True
        self._refused = seq
        return False

    def cached_blocks(self, seq: Sequence) -> list[int] | None:
        """Cached blocks that the waiting ``seq`` can begin with; at least its last token is left to compute.

        Returns:
            None: a sequence in this step computes the next one, so that waiting for the next step saves computing it.
        """
        if not self._pool.enable_prefix_caching:
            return []
        if self._is_computed_now(seq):
            return None
        num_blocks = (len(seq.tokens) - 1) // self._pool.block_size
        self._hash(seq, num_blocks)
        blocks = self._pool.match(islice(seq.hashes, num_blocks))
        seq.num_found = len(blocks)
        return None if self._is_computed_now(seq) else blocks

    def least_remaining(self, seq: Sequence) -> int:
        """Tokens that the waiting ``seq`` has to compute, or fewer; unlike ``cached_blocks`` it costs nothing."""
        if not self._pool.enable_prefix_caching:
            return len(seq.tokens)
        missing = seq.hashes[seq.num_found : seq.num_found + 1] if seq.num_found >= 0 else []
        if not missing or self._pool.match(missing):
            return 0
        return len(seq.tokens) - seq.num_found * self._pool.block_size

    def admit(self, seq: Sequence, cached: list[int]) -> list[Sequence] | None:
        """The waiting ``seq`` has a seat and blocks for all its known tokens, if that can be.

        Args:
            seq: Its request's salt and tokens decide what is cached.
            cached: What ``cached_blocks`` found for it.

        Returns:
            The sequences that were preempted for it, whose ``num_scheduled`` is as it was; None: it goes on waiting.
        """
        worse = self._ranking.worse_than(seq, self.running)
        others = self.running.first(len(self.running) - len(worse))
        num_new = -(-len(seq.tokens) // self._pool.block_size) - len(cached)
        self._pool.acquire(cached)
        victims = self._admission.victims(
            seq, num_new, has_seat=bool(self._slots), others=others, worse=worse, kept=self._copied
        )
        if victims is None:
            self._pool.free(cached)
            self._refused = seq
            return None
        for victim in victims:
            self.preempt(victim)
        self.waiting.remove(seq)
        seq.num_done = len(cached) * self._pool.block_size
        self._seat(seq, cached + self._pool.allocate(num_new))
        for block_hash in islice(seq.hashes, len(cached), None):
            self._computing.setdefault(block_hash, seq)
        return victims

    def make_room(self, seq: Sequence) -> None:
        """The running ``seq`` may write its next token, or was preempted because it has to give way itself."""
        pool, table = self._pool, seq.table
        index = seq.num_done // pool.block_size
        while index == len(table) or pool.is_shared(table[index]):
            if pool.num_free:
                (block,) = pool.allocate(1)
                self.changed[seq] = None
                if index == len(table):
                    table.append(block)
                else:
                    self._copy_on_write(seq, index, block)
                return
            victim = max(self.running, key=self._ranking.badness)
            if len(self.running) == 1:
                self.end_step()  # all that were to be copied have lost their blocks, and only these are missing
                continue
            self._is_short = True
            self.preempt(victim)
            if victim is seq:
                return

    def preempt(self, seq: Sequence) -> None:
        """The running ``seq`` waits again, without seat and blocks; its full blocks can still be found."""
        self._unseat(seq)
        seq.num_done = 0
        seq.num_preempted += 1
        self.num_preemptions += 1
        self.wait(seq)

    def fork(self, parent: Sequence) -> None:
        """``parent.forks`` begin: seated as owners of its blocks where that goes, else as any sequence that waits.

        The prompt of ``parent`` must just have been computed. The copies compute its last token again, each to sample
        from it.
        """
        first_waiting = self.waiting.first(1)
        for count, child in enumerate(parent.forks, 1):
            is_overtaking = bool(first_waiting) and first_waiting[0].rank < child.rank
            child.root, child.hashes = parent.root, parent.hashes[:]
            if is_overtaking or not self._slots or not self._admission.has_spare_blocks(count):
                self.wait(child)
                continue
            child.start()
            child.num_done = parent.num_prompt - 1
            self._seat(child, self._pool.fork(parent.table))
            self._has_forked = True
        parent.forks = []

    def take_forked(self) -> bool:
        """Whether any have forked since the last call, so that running ones may share the block they write next."""
        has_forked, self._has_forked = self._has_forked, False
        return has_forked

    def commit(self, seq: Sequence, first: int) -> None:
        """Blocks of ``seq`` from index ``first`` on that are full and computed can be found by others."""
        if not self._pool.enable_prefix_caching:
            return
        num_full = seq.num_done // self._pool.block_size
        self._hash(seq, num_full)
        for index in range(first, num_full):
            block_hash = seq.hashes[index]
            self._pool.commit(seq.table[index], block_hash)
            if self._computing.get(block_hash) is seq:
                del self._computing[block_hash]
                self._refused = None  # it may need fewer blocks now

    def leave(self, seq: Sequence) -> None:
        """``seq``, which waits or runs, has ended and owns nothing."""
        if seq.status is SequenceStatus.RUNNING:
            self._unseat(seq)
            self._is_short = False
        else:
            self.waiting.remove(seq)
        seq.status = SequenceStatus.ENDED
        self._refused = None

    def end_step(self) -> None:
        """The step is over; blocks that were copied in it need no longer be kept."""
        if self._copied:
            self._pool.free(self._held)
            self._held = []
            self._copied.clear()
            self._refused = None

    def check(self) -> None:
        """Raise AssertionError unless seats, tables and pool agree; for tests and idle times."""
        owners: dict[int, int] = dict.fromkeys(self._held, 1)
        for seq in self.running:
            for block in seq.table:
                owners[block] = owners.get(block, 0) + 1
        slots = [*self._slots, *(seq.slot for seq in self.running)]
        if not (
            all(self._pool.num_owners(block) == owners.get(block, 0) for block in range(self._pool.num_blocks))
            and sorted(slots) == list(range(len(slots)))
            and not any(seq.table or seq.slot >= 0 for seq in self.waiting)
            and all(seq.status is SequenceStatus.RUNNING for seq in self._computing.values())
        ):
            raise AssertionError(f"{list(self.running)=} {list(self.waiting)=} {slots=} {owners=} {self._computing=}")
        self._pool.check()

    def _is_computed_now(self, seq: Sequence) -> bool:
        """Whether somebody in this step computes the first block of ``seq`` that was not found."""
        num_blocks = (len(seq.tokens) - 1) // self._pool.block_size
        if not 0 <= seq.num_found < min(num_blocks, len(seq.hashes)):
            return False
        owner = self._computing.get(seq.hashes[seq.num_found])
        return owner is not None and owner.num_scheduled > 0

    def _hash(self, seq: Sequence, num_blocks: int) -> None:
        seq.root = seq.root or self._pool.hasher.root(seq.request.salt)
        self._pool.hasher.extend(seq.hashes, seq.root, seq.tokens, num_blocks)

    def _copy_on_write(self, seq: Sequence, index: int, block: int) -> None:
        source = seq.table[index]
        seq.table[index] = block
        seq.copy_source = source
        seq.num_synced = min(seq.num_synced, index)
        self._copied.add(source)
        self._let_go([source])

    def _seat(self, seq: Sequence, table: list[int]) -> None:
        seq.slot = self._slots.pop()
        seq.table = table
        seq.status = SequenceStatus.RUNNING
        seq.num_synced = -1
        if not seq.first_seat_ns:
            seq.first_seat_ns = self._clock_ns()
            seq.num_cached = seq.num_done
        if seq.penalties is None and seq.params.has_penalties:
            seq.penalties = PenaltyRow(seq.params, seq.tokens, seq.num_prompt, seq.stop_ids)
        self.num_asking += seq.num_logprobs >= 0 or seq.penalties is not None
        self.changed[seq] = None
        self.running.add(seq)

    def _unseat(self, seq: Sequence) -> None:
        self.running.remove(seq)
        for block_hash in islice(seq.hashes, seq.num_done // self._pool.block_size, None):
            if self._computing.get(block_hash) is seq:
                del self._computing[block_hash]
        self.num_asking -= seq.num_logprobs >= 0 or seq.penalties is not None
        self.changed.pop(seq, None)
        self._slots.append(seq.slot)
        self._let_go(seq.table)
        seq.table = []
        seq.slot = seq.copy_source = -1

    def _let_go(self, table: list[int]) -> None:
        # A block that this step copies must not be allocated before it did: it could be what another copy writes.
        if self._copied:
            held = [block for block in table if block in self._copied and self._pool.num_owners(block) == 1]
            self._held += held
            table = [block for block in table if block not in held]
        self._pool.free(table)
