"""Event-loop watchdog: a thread that measures the loop's lag, logs where it hangs, and can abort the process.

A hanging loop answers nothing, not even health checks, so its cause is invisible from outside. The thread logs the
stacks of all threads once per stall, while it lasts. It needs the GIL: a library that never releases it stops this
thread as well. For that case ``faulthandler``, which needs no GIL, ends the process ``_LOCKED_S`` later, with exit
status 1 and the stacks as plain text on standard error.
"""

import asyncio
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import NoReturn

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from weft.base.errors import EXIT_HUNG
from weft.base.observing.logs import flush, get_logger
from weft.base.statistics import LatencyHistogram

#: Period of pings to the loop, in seconds.
PERIOD_S = 0.5
#: Time without an answer after which a stall is reported, in seconds.
STALL_S = 5.0

_LOCKED_S = 5.0
_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

_log = get_logger("weft.watchdog")


class StallDetector:
    """Detects stalls of a loop from its answers to pings; plain Python, times are seconds on one clock.

    Args:
        stall_s: Time without an answer that counts as a stall.
        abort_s: Time without an answer after which the process should abort; 0: never.
        period_s: Period of ``check`` calls.

    Attributes:
        lag: Times until the answers.
        num_stalls: Stalls so far, including a current one.
    """

    def __init__(self, stall_s: float, abort_s: float, period_s: float) -> None:
        self.lag = LatencyHistogram(_BUCKETS_S)
        self.num_stalls = 0
        self._stall_s = stall_s
        self._abort_s = abort_s
        self._period_s = period_s
        self._pinged_s: float | None = None
        self._checked_s: float | None = None
        self._is_stalled = False

    def ping(self, now_s: float) -> bool:
        """Whether to ping the loop now: the last ping was answered."""
        if self._pinged_s is not None:
            return False
        self._pinged_s = now_s
        return True

    def pong(self, now_s: float) -> float:
        """Record an answer; returns the length of the stall that it ends, or 0."""
        if self._pinged_s is None:
            return 0.0
        lag_s = max(0.0, now_s - self._pinged_s)
        self.lag.observe(lag_s)
        self._pinged_s = None
        was_stalled, self._is_stalled = self._is_stalled, False
        return lag_s if was_stalled else 0.0

    def check(self, now_s: float) -> str:
        """``"stall"`` when one is detected, ``"abort"`` when it has lasted too long, else ``""``.

        If the check itself is late, for example after SIGCONT, it says nothing about the loop: the time is not counted.
        """
        late_s = 0.0 if self._checked_s is None else now_s - self._checked_s - self._period_s
        self._checked_s = now_s
        if self._pinged_s is None:
            return ""
        if late_s > self._period_s:
            self._pinged_s = min(now_s, self._pinged_s + late_s)
        waited_s = now_s - self._pinged_s
        if self._abort_s and waited_s >= self._abort_s:
            return "abort"
        if waited_s < self._stall_s or self._is_stalled:
            return ""
        self._is_stalled = True
        self.num_stalls += 1
        return "stall"


class LoopWatchdog(Collector):
    """Watches the running event loop from a thread, until ``close``; exports its own metrics.

    Args:
        stall_s: Time without an answer after which stacks are logged.
        abort_s: Time without an answer after which the process exits with ``EXIT_HUNG``; 0: never.
        abort: Ends the process; never returns.
    """

    def __init__(
        self,
        *,
        stall_s: float = STALL_S,
        abort_s: float = 0.0,
        abort: Callable[[int], NoReturn] = os._exit,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._abort_s = abort_s
        self._abort = abort
        self._detector = StallDetector(stall_s, abort_s, PERIOD_S)
        self._lock = threading.Lock()
        self._num_tasks = 0
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="loop-watchdog", daemon=True).start()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        if self._abort_s:
            faulthandler.cancel_dump_traceback_later()

    def collect(self) -> Iterator[Metric]:
        """Lag, stalls and number of tasks of the event loop."""
        with self._lock:
            buckets, lag_sum_s = self._detector.lag.cumulative(), self._detector.lag.sum_s
            num_stalls = self._detector.num_stalls
        lag = HistogramMetricFamily("weft_event_loop_lag_seconds", "How late the event loop runs what is due")
        lag.add_metric((), buckets, lag_sum_s)
        yield lag
        stalls = CounterMetricFamily("weft_event_loop_stalls", "Times that the event loop did not turn for long")
        stalls.add_metric((), num_stalls)
        yield stalls
        yield GaugeMetricFamily("weft_event_loop_tasks", "Tasks of the event loop that have not ended", self._num_tasks)

    def _run(self) -> None:
        while not self._closed.wait(PERIOD_S):
            with self._lock:
                must_ping = self._detector.ping(time.monotonic())
            if must_ping:
                if self._abort_s:
                    faulthandler.dump_traceback_later(self._abort_s + _LOCKED_S, exit=True)
                try:
                    self._loop.call_soon_threadsafe(self._pong)
                except RuntimeError:  # it is closed
                    self.close()
                    return
            with self._lock:
                verdict = self._detector.check(time.monotonic())
            if verdict:
                self._report(verdict)

    def _pong(self) -> None:
        self._num_tasks = len(asyncio.all_tasks(self._loop))
        with self._lock:
            stalled_s = self._detector.pong(time.monotonic())
        if stalled_s:
            _log.warning("the event loop turns again after %.1f s", stalled_s)

    def _report(self, verdict: str) -> None:
        frames = sys._current_frames()
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        here = threading.get_ident()
        stacks = {
            names.get(ident, str(ident)): "".join(traceback.format_stack(frame))
            for ident, frame in frames.items()
            if ident not in (here, self._loop_thread)
        }
        where = frames.get(self._loop_thread)
        stack = "".join(traceback.format_stack(where)) if where is not None else ""
        is_end = verdict == "abort"
        _log.error(
            "the event loop hangs%s",
            f"; the process ends with status {EXIT_HUNG}" if is_end else ": nothing is answered until it goes on",
            extra={"stack": stack, "stacks_of_other_threads": stacks},
        )
        if is_end:
            flush()
            self._abort(EXIT_HUNG)
