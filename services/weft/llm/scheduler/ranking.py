"""Order of service and of preemption."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from weft.llm.scheduler.sequence import Sequence

_rank = attrgetter("rank")

#: After this many preemptions a sequence is preempted only after all others of its level, so that it finishes.
_MAX_PREEMPTIONS = 3


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
