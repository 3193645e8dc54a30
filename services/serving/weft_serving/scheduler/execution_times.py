"""How long executions take, from what was measured lately."""

from bisect import bisect_left, insort
from collections import deque

#: With fewer measurements than this nothing is said.
MIN_MEASUREMENTS = 16
#: Older measurements are forgotten, so that a model that has become faster is found out.
MAX_AGE_NS = 10_000_000_000
_MAX_MEASUREMENTS = 64


class ExecutionTimes:
    """Medians of execution times by batch size; sizes up to 1, 2, 4, 8, ... rows are taken together."""

    def __init__(self) -> None:
        self._windows: dict[int, _DurationWindow] = {}

    def add(self, num_rows: int, duration_ns: int, now_ns: int) -> None:
        """A batch of ``num_rows`` took ``duration_ns`` and ended at ``now_ns``."""
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
    """The latest durations, in the order of time and in that of size."""

    def __init__(self) -> None:
        self._latest: deque[tuple[int, int]] = deque()  # (end, duration)
        self._sorted: list[int] = []

    def add(self, duration_ns: int, now_ns: int) -> None:
        if len(self._latest) == _MAX_MEASUREMENTS:
            self._forget_first()
        self._latest.append((now_ns, duration_ns))
        insort(self._sorted, duration_ns)

    def median_ns(self, now_ns: int) -> int:
        while self._latest and self._latest[0][0] < now_ns - MAX_AGE_NS:
            self._forget_first()
        count = len(self._sorted)
        return self._sorted[count // 2] if count >= MIN_MEASUREMENTS else 0

    def _forget_first(self) -> None:
        _, duration_ns = self._latest.popleft()
        del self._sorted[bisect_left(self._sorted, duration_ns)]
