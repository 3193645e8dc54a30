"""Which replicas of a target are left out for a while because they answer badly, and for how long."""

from collections.abc import Callable
from dataclasses import dataclass, field

#: Statuses that count against a replica in a row: it was down, or did not answer in time.
_LOST = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED"})
#: Statuses that count against its success rate beside.
_FAILED = _LOST | {"DATA_LOSS", "INTERNAL", "UNKNOWN"}
_NS_PER_S = 1_000_000_000
_NEVER_NS = 2**63


@dataclass(frozen=True, slots=True)
class EjectionSettings:
    """When a replica is ejected.

    Attributes:
        consecutive_failures: Calls in a row that were lost, at one replica.
        interval_s: Over which success rates are compared, seconds.
        min_requests: Of a replica in an interval; with fewer its success rate says nothing.
        success_gap: A replica whose success rate, 0 to 1, is lower by more than this than that of the others together.
        base_s: The first ejection lasts so long, the second twice that, and so on; seconds.
        max_s: None lasts longer, seconds.
        max_percent: Of the replicas may be ejected at once; one of two or more always may.
    """

    consecutive_failures: int = 5
    interval_s: float = 10.0
    min_requests: int = 20
    success_gap: float = 0.3
    base_s: float = 5.0
    max_s: float = 300.0
    max_percent: float = 50.0


@dataclass(slots=True, eq=False)
class Record:
    """How one replica has answered.

    Attributes:
        num_in_a_row: Calls that were lost since the last that was not.
        num_calls, num_failed: In this interval.
        until_ns: It is ejected until then; 0: it is not.
        num_ejections: So many times, less one for each interval without.
        num_ejected: So many times, ever.
    """

    num_in_a_row: int = 0
    num_calls: int = 0
    num_failed: int = 0
    until_ns: int = 0
    num_ejections: int = 0
    num_ejected: int = 0


@dataclass(slots=True)
class OutlierDetector:
    """Ejects replicas that answer worse than the others.

    A replica is back when its time has passed; then one more lost call ejects it again, until a call has succeeded.
    Where all replicas answer badly none is worse than the others, and at most ``max_percent`` are out for failures in
    a row.

    Args:
        clock_ns: Monotonic.
        settings: When.
    """

    clock_ns: Callable[[], int]
    settings: EjectionSettings = field(default_factory=EjectionSettings)
    _records: list[Record] = field(default_factory=list)
    _interval_end_ns: int = 0

    def join(self) -> Record:
        """The record of a further replica."""
        record = Record()
        self._records.append(record)
        return record

    def leave(self, record: Record) -> None:
        """The replica is gone."""
        self._records.remove(record)

    def forgive(self, record: Record) -> None:
        """The replica is another process now: what was held against it is void, but not how often it was ejected."""
        record.until_ns = record.num_in_a_row = record.num_calls = record.num_failed = 0

    def is_ejected(self, record: Record) -> bool:
        """Whether the replica is to be left out now."""
        if record.until_ns and record.until_ns <= self.clock_ns():
            record.until_ns = 0
        return record.until_ns > 0

    def next_return_ns(self) -> int:
        """When the next ejection ends; far in the future where there is none."""
        return min((record.until_ns for record in self._records if self.is_ejected(record)), default=_NEVER_NS)

    def note(self, record: Record, status: str) -> bool:
        """A call has ended with ``status``; returns whether the replica is ejected for it, or another one is."""
        now_ns = self.clock_ns()
        is_changed = self._end_interval(now_ns)
        if status == "CANCELLED":
            return is_changed
        record.num_calls += 1
        record.num_failed += status in _FAILED
        if status not in _LOST:
            record.num_in_a_row = 0
            return is_changed
        record.num_in_a_row += 1
        if record.num_in_a_row >= self.settings.consecutive_failures:
            is_changed = self._eject(record, now_ns) or is_changed
        return is_changed

    def _end_interval(self, now_ns: int) -> bool:
        """Compare success rates, if an interval is over; returns whether somebody is ejected."""
        if now_ns < self._interval_end_ns:
            return False
        is_first = self._interval_end_ns == 0
        self._interval_end_ns = now_ns + int(self.settings.interval_s * _NS_PER_S)
        if is_first:
            return False
        measured = [record for record in self._records if record.num_calls >= self.settings.min_requests]
        worst_first = sorted(measured, key=lambda record: record.num_failed / record.num_calls, reverse=True)
        num_calls, num_failed = sum(record.num_calls for record in measured), sum(r.num_failed for r in measured)
        is_changed = False
        for record in worst_first:
            if self._is_worse(record, num_calls, num_failed) and self._eject(record, now_ns):
                is_changed = True
            elif not record.until_ns:
                record.num_ejections = max(record.num_ejections - 1, 0)
        for record in self._records:
            record.num_calls = record.num_failed = 0
        return is_changed

    def _is_worse(self, record: Record, num_calls: int, num_failed: int) -> bool:
        """Whether a replica answers worse than the others; the numbers are of all together."""
        num_calls, num_failed = num_calls - record.num_calls, num_failed - record.num_failed
        if not num_calls:
            return False
        return record.num_failed / record.num_calls - num_failed / num_calls > self.settings.success_gap

    def _eject(self, record: Record, now_ns: int) -> bool:
        num_out = sum(self.is_ejected(other) for other in self._records if other is not record)
        num_allowed = int(self.settings.max_percent / 100 * len(self._records)) or len(self._records) > 1
        if record.until_ns or num_out >= num_allowed:
            return False
        record.num_ejections += 1
        record.num_ejected += 1
        duration_s = min(self.settings.base_s * record.num_ejections, self.settings.max_s)
        record.until_ns = now_ns + int(duration_s * _NS_PER_S)
        record.num_in_a_row = self.settings.consecutive_failures - 1
        return True
