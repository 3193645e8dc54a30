"""A thread that looks whether the event loop turns: measures how late it is, says where it hangs, can end the process.

A loop that hangs answers nothing, no health check either, so nobody learns the reason from outside. The thread logs the
stacks of all threads once a stall, while it lasts. It needs the interpreter lock: a library that keeps that for ever
stops this thread too. For that case ``faulthandler``, which needs no lock, ends the process ``_LOCKED_S`` later, with
exit status 1 and the stacks as plain text on standard error.
"""

import asyncio
import faulthandler
import os
import sys
import threading
import time
import traceback
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import NoReturn

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from weft_common.observing.logs import flush, get_logger

#: Exit status of a process that its watchdog ended.
EXIT_HUNG = 70
#: How often the loop is asked to answer, in seconds.
PERIOD_S = 0.5
#: A loop that has not answered for so long is reported, in seconds.
STALL_S = 5.0

_LOCKED_S = 5.0
_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

_log = get_logger("weft.watchdog")


class Pulse:
    """Decides from the answers of a loop whether it hangs; plain Python, times are seconds on one clock.

    Args:
        stall_s: An answer that is missing for longer is a stall.
        abort_s: And for longer than this the process is to end; 0: never.
        period_s: How often ``look`` is called.

    Attributes:
        counts: Answers by lag, for each bucket and beyond the last.
        lag_sum_s: Sum of all lags.
        num_stalls: How many there were, one that lasts included.
    """

    def __init__(self, stall_s: float, abort_s: float, period_s: float) -> None:
        self.counts = [0] * (len(_BUCKETS_S) + 1)
        self.lag_sum_s = 0.0
        self.num_stalls = 0
        self._stall_s = stall_s
        self._abort_s = abort_s
        self._period_s = period_s
        self._asked_s: float | None = None
        self._looked_s: float | None = None
        self._is_stalled = False

    def ask(self, now_s: float) -> bool:
        """Whether the loop is to be asked now: the last answer has come."""
        if self._asked_s is not None:
            return False
        self._asked_s = now_s
        return True

    def answer(self, now_s: float) -> float:
        """The loop has answered; the length of the stall that this ends, or 0."""
        if self._asked_s is None:
            return 0.0
        lag_s = max(0.0, now_s - self._asked_s)
        self.counts[bisect_left(_BUCKETS_S, lag_s)] += 1
        self.lag_sum_s += lag_s
        self._asked_s = None
        was_stalled, self._is_stalled = self._is_stalled, False
        return lag_s if was_stalled else 0.0

    def look(self, now_s: float) -> str:
        """``"stall"`` when one is found, ``"abort"`` when it has lasted too long, else ``""``.

        A look that comes late itself, as after SIGCONT, says nothing about the loop: the waiting begins anew.
        """
        late_s = 0.0 if self._looked_s is None else now_s - self._looked_s - self._period_s
        self._looked_s = now_s
        if self._asked_s is None:
            return ""
        if late_s > self._period_s:
            self._asked_s = min(now_s, self._asked_s + late_s)
        waited_s = now_s - self._asked_s
        if self._abort_s and waited_s >= self._abort_s:
            return "abort"
        if waited_s < self._stall_s or self._is_stalled:
            return ""
        self._is_stalled = True
        self.num_stalls += 1
        return "stall"


class LoopWatchdog(Collector):
    """Watches the running event loop from a thread, until ``close``; collects its own metrics.

    Args:
        stall_s: After how long without a turn of the loop its stack is logged.
        abort_s: After how long the process ends with ``EXIT_HUNG``; 0: never.
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
        self._pulse = Pulse(stall_s, abort_s, PERIOD_S)
        self._lock = threading.Lock()
        self._num_tasks = 0
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="loop-watchdog", daemon=True).start()

    def close(self) -> None:
        """It looks no longer."""
        self._closed.set()
        if self._abort_s:
            faulthandler.cancel_dump_traceback_later()

    def collect(self) -> Iterator[Metric]:
        """How late the loop was, how often it stalled, and how many tasks it has."""
        with self._lock:
            counts, lag_sum_s, num_stalls = list(self._pulse.counts), self._pulse.lag_sum_s, self._pulse.num_stalls
        total = 0
        buckets = []
        for bound, count in zip([*map(str, _BUCKETS_S), "+Inf"], counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
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
                must_ask = self._pulse.ask(time.monotonic())
            if must_ask:
                if self._abort_s:
                    faulthandler.dump_traceback_later(self._abort_s + _LOCKED_S, exit=True)
                try:
                    self._loop.call_soon_threadsafe(self._answer)
                except RuntimeError:  # it is closed
                    self.close()
                    return
            with self._lock:
                verdict = self._pulse.look(time.monotonic())
            if verdict:
                self._tell(verdict)

    def _answer(self) -> None:
        self._num_tasks = len(asyncio.all_tasks(self._loop))
        with self._lock:
            stalled_s = self._pulse.answer(time.monotonic())
        if stalled_s:
            _log.warning("the event loop turns again after %.1f s", stalled_s)

    def _tell(self, verdict: str) -> None:
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
