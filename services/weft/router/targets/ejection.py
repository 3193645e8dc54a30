"""Outlier detection: leaves out replicas of a target that answer badly, for a while."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

#: So many calls in a row that were lost at one replica eject it.
CONSECUTIVE_FAILURES = 5
#: Failures of a replica are counted over its calls of so many last seconds, and of these over so many last ones, so
#: that a change shows at once; with fewer than the least its share of failures says nothing.
WINDOW_S, WINDOW_CALLS, MIN_CALLS = 10.0, 50, 10
#: A replica is ejected whose share of failures, 0 to 1, is higher by more than this than that of the others together.
FAILURE_GAP = 0.3
#: The first ejection lasts so long, each further one twice as long as the one before, none longer than the most.
BASE_S, MAX_S = 1.0, 300.0
#: So long without an ejection makes the next one shorter by a step, in seconds.
CREDIT_S = 10.0
#: Of the replicas so many may be ejected at once; one of two or more always may.
MAX_SHARE = 0.5

#: Statuses that count against a replica in a row: it was down, or did not answer in time.
_LOST = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED"})
#: Statuses that count against its share beside.
_FAILED = _LOST | {"DATA_LOSS", "INTERNAL", "UNKNOWN"}
_NS_PER_S = 1_000_000_000
_NEVER_NS = 2**63


@dataclass(slots=True, eq=False)
class Record:
    """Recent answers of one replica.

    Attributes:
        num_in_a_row: Lost calls since the last good one.
        calls: Those in the window, oldest first: when each ended, and whether it failed.
        num_failed: Failed calls in the window.
        until_ns: End of its ejection; 0: it is not ejected.
        returned_ns: When the last ejection ends or has ended.
        is_on_trial: It was ejected, and no call has succeeded since.
        num_ejections: Ejections, less one for each ``CREDIT_S`` without.
        num_ejected: Ejections ever.
    """

    num_in_a_row: int = 0
    calls: deque[tuple[int, bool]] = field(default_factory=deque)
    num_failed: int = 0
    until_ns: int = 0
    returned_ns: int = 0
    is_on_trial: bool = False
    num_ejections: int = 0
    num_ejected: int = 0


class OutlierDetector:
    """Ejects replicas that answer worse than the others.

    An ejected replica returns after a while; then one more failure ejects it again, until a call has succeeded. If all
    replicas answer badly, none is worse than the others; at most ``MAX_SHARE`` are ejected for failures in a row.
    """

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self._clock_ns = clock_ns
        self._records: list[Record] = []
        # Of all windows together: to count them for each failure would take long where replicas are many.
        self._num_calls = 0
        self._num_failed = 0

    def join(self) -> Record:
        """Add a replica and return its record."""
        record = Record()
        self._records.append(record)
        return record

    def leave(self, record: Record) -> None:
        """Remove a replica."""
        self._clear(record)
        self._records.remove(record)

    def forgive(self, record: Record) -> None:
        """Reset the failures of a replica that is a new process; the number of ejections stays."""
        record.until_ns = record.num_in_a_row = 0
        record.is_on_trial = False
        self._clear(record)

    def is_ejected(self, record: Record) -> bool:
        """Whether the replica is left out now."""
        if record.until_ns and record.until_ns <= self._clock_ns():
            record.until_ns = 0
        return record.until_ns > 0

    def next_return_ns(self) -> int:
        """When the next ejection ends; far in the future if there is none."""
        return min((record.until_ns for record in self._records if self.is_ejected(record)), default=_NEVER_NS)

    def note(self, record: Record, status: str) -> bool:
        """Count a call that ended with ``status``; return whether this ejects the replica.

        Calls that end during an ejection do not count: they began before, or had no other replica to go to.
        """
        now_ns = self._clock_ns()
        if status == "CANCELLED" or record.until_ns > now_ns:
            return False
        is_failed = status in _FAILED
        self._count(record, now_ns, is_failed=is_failed)
        record.num_in_a_row = record.num_in_a_row + 1 if status in _LOST else 0
        if not is_failed:
            record.is_on_trial = False
            return False
        is_bad = record.is_on_trial or record.num_in_a_row >= CONSECUTIVE_FAILURES or self._is_worse(record)
        return is_bad and self._eject(record, now_ns)

    def _count(self, record: Record, now_ns: int, *, is_failed: bool) -> None:
        """Add a call to the window, and drop expired ones."""
        calls, since_ns = record.calls, now_ns - int(WINDOW_S * _NS_PER_S)
        calls.append((now_ns, is_failed))
        num_calls, num_failed = 1, int(is_failed)
        while len(calls) > WINDOW_CALLS or calls[0][0] < since_ns:
            num_failed -= calls.popleft()[1]
            num_calls -= 1
        record.num_failed += num_failed
        self._num_calls += num_calls
        self._num_failed += num_failed

    def _clear(self, record: Record) -> None:
        self._num_calls -= len(record.calls)
        self._num_failed -= record.num_failed
        record.num_failed = 0
        record.calls.clear()

    def _is_worse(self, record: Record) -> bool:
        num_calls, num_others = len(record.calls), self._num_calls - len(record.calls)
        if num_calls < MIN_CALLS or not num_others:
            return False
        share_there = (self._num_failed - record.num_failed) / num_others
        return record.num_failed / num_calls - share_there > FAILURE_GAP

    def _eject(self, record: Record, now_ns: int) -> bool:
        num_out = sum(self.is_ejected(other) for other in self._records if other is not record)
        num_allowed = int(MAX_SHARE * len(self._records)) or len(self._records) > 1
        if self.is_ejected(record) or num_out >= num_allowed:
            return False
        num_credits = (now_ns - record.returned_ns) // int(CREDIT_S * _NS_PER_S)
        record.num_ejections = max(record.num_ejections - num_credits, 0) + 1
        record.num_ejected += 1
        duration_s = min(BASE_S * 2.0 ** min(record.num_ejections - 1, 62), MAX_S)
        record.until_ns = record.returned_ns = now_ns + int(duration_s * _NS_PER_S)
        record.is_on_trial = True
        record.num_in_a_row = 0
        self._clear(record)
        return True
