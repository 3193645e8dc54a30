"""Order of service, preemption and admission: ``Ranking``, ``BlockAdmission``."""

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from operator import attrgetter

import numpy as np

from weft.llm.scheduler.blocks import BlockPool
from weft.llm.scheduler.sequence import Sequence

_rank = attrgetter("rank")

#: After this many preemptions a sequence is preempted only after all others of its level, so that it finishes.
_MAX_PREEMPTIONS = 3
#: Weight of the latest output length in the exponential moving average.
_SMOOTHING = 0.05
#: No sequence has more tokens.
_LONGEST = 2**31


class RankedQueue:
    """Sequences in the order of service. Adding and removing cost O(log n) comparisons."""

    __slots__ = ("_queue",)

    def __init__(self) -> None:
        self._queue: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue)

    def first(self, count: int) -> list[Sequence]:
        """The first ``count`` sequences, or fewer."""
        return self._queue[:count]

    def add(self, seq: Sequence) -> None:
        """Insert ``seq``, which is not in the queue."""
        insort(self._queue, seq, key=_rank)

    def remove(self, seq: Sequence) -> None:
        """Remove ``seq``, which is in the queue."""
        del self._queue[bisect_left(self._queue, seq.rank, key=_rank)]

    def from_rank(self, rank: tuple[int, ...]) -> list[Sequence]:
        """The sequences at ``rank`` or behind it."""
        return self._queue[bisect_left(self._queue, rank, key=_rank) :]


class Ranking:
    """Static order of sequences by level and arrival; ranks never change, so no two sequences preempt each other.

    Without ageing, a smaller level is served first, then the earlier arrival, and a smaller level may preempt. With
    ageing, a sequence of level n ranks as one of level 1 that arrived ``(n - 1) * aging_ns`` later, and may preempt
    those that rank as arriving at least ``aging_ns`` after it.

    Args:
        aging_ns: Waiting time that counts as one level, in nanoseconds; 0: no ageing.
    """

    def __init__(self, aging_ns: int) -> None:
        self._aging_ns = aging_ns

    def rank(self, seq: Sequence) -> tuple[int, ...]:
        """Position in the order of service; unique, smaller is sooner."""
        arrival_ns = seq.request.arrival_ns
        if self._aging_ns:
            return (arrival_ns + (seq.level - 1) * self._aging_ns, seq.id)
        return (seq.level, arrival_ns, seq.id)

    def preemptible_by(self, seq: Sequence, queue: RankedQueue) -> list[Sequence]:
        """Sequences of ``queue`` that ``seq`` may preempt, in the order of service."""
        return queue.from_rank((seq.rank[0] + (self._aging_ns or 1),))

    def preemption_key(self, seq: Sequence) -> tuple[int, ...]:
        """Sort key: the largest is preempted first. Worst level, then least computed, then youngest.

        Within a level, sequences that were preempted often come after the others and by age alone: the oldest of them
        keeps its blocks until it ends, so every sequence ends.
        """
        grade = seq.rank[0] // (self._aging_ns or 1)
        if seq.num_preemptions >= _MAX_PREEMPTIONS:
            return (grade, 0, 0, *seq.rank)
        return (grade, 1, -seq.num_computed_tokens, *seq.rank)


class BlockAdmission:
    """Admission rules over one block pool.

    A sequence is admitted if blocks for all its known tokens are free with a watermark to spare, and if it and the
    running sequences are not expected to exceed the pool at any time until they end. Sequences that it may preempt do
    not count against it; on an idle engine it is always admitted.

    Args:
        watermark: Share of all blocks to keep free.
    """

    def __init__(self, pool: BlockPool, ranking: Ranking, watermark: float) -> None:
        self._pool = pool
        self._ranking = ranking
        self._num_spare = math.ceil(watermark * pool.capacity)
        self._expected_output = math.inf
        self._most_owned = pool.window.num_blocks(_LONGEST)

    def observe_output_len(self, num_output: int) -> None:
        """Update the expected output length with that of a finished sequence, in tokens."""
        if math.isinf(self._expected_output):
            self._expected_output = num_output
        else:
            self._expected_output += _SMOOTHING * (num_output - self._expected_output)

    def has_spare_blocks(self, num_blocks: int) -> bool:
        """Whether ``num_blocks`` more can be allocated without touching the watermark."""
        return self._pool.num_free >= self._num_spare + num_blocks

    def victims(self, seq: Sequence, num_new: int, *, has_slot: bool, running: RankedQueue) -> list[Sequence] | None:
        """The sequences to preempt so that ``seq`` can be admitted: just enough, worst first; None if it cannot be.

        Args:
            seq: Its cached blocks are acquired already.
            num_new: Blocks that it needs besides.
            has_slot: A slot is free.
        """
        preemptible = self._ranking.preemptible_by(seq, running)
        retained = running.first(len(running) - len(preemptible))
        num_needed = num_new + (self._num_spare if retained else 0)
        num_free = self._pool.num_free
        victims: list[Sequence] = []
        if num_free < num_needed or not has_slot:
            owners: Counter[int] = Counter()
            for victim in sorted(preemptible, key=self._ranking.preemption_key, reverse=True):
                victims.append(victim)
                for block in victim.block_table:
                    owners[block] += 1
                    num_free += owners[block] == self._pool.num_owners(block)
                if num_free >= num_needed:
                    break
            if num_free < num_needed or not (has_slot or victims):
                return None
        if retained and self._may_exceed_pool(seq, num_new, retained, preemptible):
            return None
        return victims

    def _may_exceed_pool(
        self, seq: Sequence, num_new: int, retained: Seq[Sequence], preemptible: Seq[Sequence]
    ) -> bool:
        """Whether ``retained`` and ``seq`` are expected to own more blocks than there are, at any time.

        Sequences end in the order of their remaining output. When the k-th from the end ends, it and the k-1 that
        continue have each grown by its remaining output; the largest sum over k is the peak.

        Source:
            https://github.com/ModelTC/lightllm, the token estimate of its router; here in blocks.
        """
        pool, block_size = self._pool, self._pool.block_size
        # A cheap upper bound: as if all output were still to come and no sequence ended.
        growth = min(self._expected_output / block_size + 1, self._most_owned)
        if pool.num_used + num_new + (len(retained) + 1) * growth <= pool.capacity:
            return False
        left = np.array([other.max_len - len(other.tokens) for other in (*retained, seq)], np.float64)
        owned = [_num_own(other, block_size) for other in retained]
        owned_by_preemptible = sum(_num_own(other, block_size) for other in preemptible)
        # Blocks with several owners, such as those of a common prefix, count once, until the end.
        num_common = max(pool.num_used - sum(owned) - owned_by_preemptible, 0)
        order = np.argsort(-left, kind="stable")
        grown = np.ceil(np.minimum(left[order], self._expected_output) / block_size) * np.arange(1, len(left) + 1)
        peak = (np.cumsum(np.array([*owned, num_new])[order]) + grown).max()
        return num_common + int(min(peak, len(left) * self._most_owned)) > pool.capacity


def _num_own(seq: Sequence, block_size: int) -> int:
    """Number of blocks of the running ``seq``, without those from the prefix cache."""
    return len(seq.block_table) - max(seq.num_cached // block_size, seq.num_behind)
