"""How many lines one place in the code may log, so that nobody outside can fill a disk by causing them."""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

#: Lines of one place and level a minute that are logged whole; the others are counted.
MAX_LINES = 100
#: The same for lines below a warning, of which a repository of many models causes some for each.
MAX_INFO_LINES = 1000
#: The same for lines with a traceback.
MAX_TRACEBACKS = 10
WINDOW_S = 60.0


@dataclass(slots=True)
class _Place:
    """Lines of one place since ``start_s``."""

    start_s: float
    last: logging.LogRecord | None = None
    num_lines: int = 0
    num_dropped: int = 0


class LogLimit:
    """Admits the first lines of each place in a minute, and tells at its end how many more there were.

    Not thread-safe: a ``logging.Handler`` calls it under its lock.

    Args:
        clock_s: Monotonic clock in seconds.
        exempt: Names of loggers that are not limited: what a program prints.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic, exempt: frozenset[str] = frozenset()) -> None:
        self._clock_s = clock_s
        self._exempt = exempt
        self._windows: dict[tuple[str, int, int], _Place] = {}
        self._next_end_s = clock_s() + WINDOW_S

    def admits(self, record: logging.LogRecord) -> bool:
        """Whether to log a record whole."""
        if record.name in self._exempt:
            return True
        place = (record.pathname, record.lineno, record.levelno)
        window = self._windows.get(place)
        if window is None:
            window = self._windows[place] = _Place(self._clock_s())
        window.num_lines += 1
        limit = MAX_LINES if record.levelno >= logging.WARNING else MAX_INFO_LINES
        if window.num_lines <= (MAX_TRACEBACKS if record.exc_info else limit):
            return True
        where = (record.levelno, record.pathname, record.lineno)
        window.last = logging.LogRecord(record.name, *where, record.getMessage(), (), None)  # not what the line holds
        window.num_dropped += 1
        return False

    def counts(self, *, is_end: bool = False) -> Iterator[tuple[logging.LogRecord, int]]:
        """For each place with lines left out, the last of them and their number; once a minute, and at the end."""
        now_s = self._clock_s()
        if now_s < self._next_end_s and not is_end:
            return
        self._next_end_s = now_s + WINDOW_S
        windows, self._windows = self._windows, {}
        for window in windows.values():
            if window.last:
                yield window.last, window.num_dropped
