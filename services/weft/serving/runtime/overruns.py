"""Executions that hold the event loop for too long."""

from weft.base.observing.logs import get_logger
from weft.base.statistics import ModelStatistics

#: Longest execution of a model that declares that it executes inline; everything else waits meanwhile.
LIMIT_NS = 5_000_000
#: Least time between two log lines of one model, as a busy machine can make every model late.
_PAUSE_NS = 10_000_000_000

_LOG = get_logger("weft.serving")


class Overruns:
    """Counts and logs the inline executions of one model that take longer than ``LIMIT_NS``.

    Args:
        statistics: Of the model; ``inline_overrun_count`` is counted there.
    """

    def __init__(self, statistics: ModelStatistics) -> None:
        self._statistics = statistics
        statistics.inline_overrun_count = statistics.inline_overrun_count or 0
        self._logged_ns = -_PAUSE_NS

    def add(self, duration_ns: int, now_ns: int) -> None:
        """Count an execution that took too long, and log it unless another was logged within ten seconds."""
        statistics = self._statistics
        count = statistics.inline_overrun_count = (statistics.inline_overrun_count or 0) + 1
        if now_ns - self._logged_ns >= _PAUSE_NS:
            self._logged_ns = now_ns
            _LOG.warning(
                "model '%s' held the event loop for %.1f ms, %d times so far; EXECUTION inline is for models that take "
                "at most %g ms",
                statistics.name,
                duration_ns / 1e6,
                count,
                LIMIT_NS / 1e6,
                extra={"model": statistics.name},
            )
