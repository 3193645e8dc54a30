"""Order of service: sequences kept by rank, who is strictly better than whom, who goes first for lack of room."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from weft_model.llm.scheduler.sequence import Sequence

_rank = attrgetter("rank")

#: Preemptions after which a sequence goes only after all others of its level, and then by age, so that it ends.
_MAX_PREEMPTIONS = 3


class RankedLine:
    """Sequences in the order of service. Adding and removing cost O(log n) comparisons."""

    __slots__ = ("_line",)

    def __init__(self) -> None:
        self._line: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._line)

    def first(self, count: int) -> list[Sequence]:
        """The ``count`` that are served soonest, or fewer."""
        return self._line[:count]

    def add(self, seq: Sequence) -> None:
        """``seq``, which is not in the line, stands in it."""
        insort(self._line, seq, key=_rank)

    def remove(self, seq: Sequence) -> None:
        """``seq``, which is in the line, does not stand in it any longer."""
        del self._line[bisect_left(self._line, seq.rank, key=_rank)]

    def from_rank(self, rank: tuple[int, ...]) -> list[Sequence]:
        """Those that are served at ``rank`` or later."""
        return self._line[bisect_left(self._line, rank, key=_rank) :]


class Ranking:
    """Static order of sequences by priority level and arrival. Since no rank changes, none preempts its preemptor.

    Without ageing a smaller level is served first, then who came earlier, and a smaller level is *strictly better*.
    With ageing a sequence of level n counts as one of level 1 that came ``(n - 1) * aging_ns`` later, and is strictly
    better than those that count as coming at least ``aging_ns`` after it.

    Args:
        aging_ns: Waiting so long counts as one level, in nanoseconds; 0: no ageing.
    """

    def __init__(self, aging_ns: int) -> None:
        self._aging_ns = aging_ns

    def rank(self, seq: Sequence) -> tuple[int, ...]:
        """Place in the order of service; unique, smaller is sooner."""
        arrival_ns = seq.request.arrival_ns
        if self._aging_ns:
            return (arrival_ns + (seq.level - 1) * self._aging_ns, seq.id)
        return (seq.level, arrival_ns, seq.id)

    def worse_than(self, seq: Sequence, line: RankedLine) -> list[Sequence]:
        """Those of ``line`` than which ``seq`` is strictly better, in the order of service."""
        return line.from_rank((seq.rank[0] + (self._aging_ns or 1),))

    def badness(self, seq: Sequence) -> tuple[int, ...]:
        """Larger goes first for lack of room: worst level, least computed, youngest.

        Within a level, those that were preempted often go after the others and by age alone: the oldest of them keeps
        its blocks until it ends, so every sequence ends.
        """
        grade = seq.rank[0] // (self._aging_ns or 1)
        if seq.num_preempted >= _MAX_PREEMPTIONS:
            return (grade, 0, 0, *seq.rank)
        return (grade, 1, -seq.num_done, *seq.rank)
