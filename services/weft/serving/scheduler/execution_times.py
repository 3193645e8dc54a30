"""Durations of recent executions."""

from bisect import bisect_left, insort
from collections import deque

#: With fewer measurements the median is unknown.
MIN_MEASUREMENTS = 16
#: Older measurements are dropped, so that a model that has become faster is noticed.
MAX_AGE_NS = 10_000_000_000
_MAX_MEASUREMENTS = 64


class ExecutionTimes:
    """Medians of execution times by batch size; sizes up to 1, 2, 4, 8, ... rows share one."""

    def __init__(self) -> None:
        self._windows: dict[int, _DurationWindow] = {}

    def add(self, num_rows: int, duration_ns: int, now_ns: int) -> None:
        """Add a batch of ``num_rows`` that took ``duration_ns`` and ended at ``now_ns``."""
        size_class = (num_rows - 1).bit_length()
        window = self._windows.get(size_class)
        if window is None:
            window = self._windows[size_class] = _DurationWindow()
        window.add(duration_ns, now_ns)

    def median_ns(self, num_rows: int, now_ns: int) -> int:
        """Median of the latest executions of about ``num_rows``; 0 after too few of them."""
        window = self._windows.get((num_rows - 1).bit_length())
        return 0 if window is None else window.median_ns(now_ns)


class _DurationWindow:
    """The latest durations, by time and by size."""

    def __init__(self) -> None:
        self._added: deque[tuple[int, int]] = deque(maxlen=_MAX_MEASUREMENTS)  # (end, duration), not yet in the others
        self._latest: deque[tuple[int, int]] = deque()
        self._sorted: list[int] = []

    def add(self, duration_ns: int, now_ns: int) -> None:
        self._added.append((now_ns, duration_ns))

    def median_ns(self, now_ns: int) -> int:
        while self._added:  # sorted in here, as most models never have a deadline to hold a median against
            if len(self._latest) == _MAX_MEASUREMENTS:
                self._forget_first()
            measured = self._added.popleft()
            self._latest.append(measured)
            insort(self._sorted, measured[1])
        while self._latest and self._latest[0][0] < now_ns - MAX_AGE_NS:
            self._forget_first()
        count = len(self._sorted)
        return self._sorted[count // 2] if count >= MIN_MEASUREMENTS else 0

    def _forget_first(self) -> None:
        _, duration_ns = self._latest.popleft()
        del self._sorted[bisect_left(self._sorted, duration_ns)]
