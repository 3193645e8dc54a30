"""A timer of an event loop that is exact to microseconds.

Event loops count timers in milliseconds, while a usual batch delay is 100 us: asyncio would be up to 1 ms late, and
uvloop turns what is below 0.5 ms into a busy loop. On Linux a timerfd is exact to tens of microseconds; elsewhere
``loop.call_later`` has to do.
"""

import asyncio
import ctypes
import os
import sys
from collections.abc import Callable
from contextlib import suppress

_CLOCK_MONOTONIC = 1
_TFD_TIMER_ABSTIME = 1
_NS_PER_S = 1_000_000_000


class _TimerSpec(ctypes.Structure):
    """``struct itimerspec`` of timerfd_settime(2): interval, then first expiration; seconds and nanoseconds each."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class Alarm:
    """Calls back on the running event loop at the earliest of the times set since the last callback."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._at_ns: int | None = None
        self._handle: asyncio.TimerHandle | None = None
        self._spec = _TimerSpec()
        self._fd = -1
        if sys.platform == "linux":
            self._libc = ctypes.CDLL(None)
            self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd >= 0:
            loop.add_reader(self._fd, self._ring)

    def set(self, at_ns: int, now_ns: int) -> None:
        """Have the callback run at ``at_ns`` (``time.monotonic_ns``) or before.

        It never moves to a later time: an early callback is cheaper than setting a timer for every request.
        """
        if self._at_ns is not None and self._at_ns <= at_ns:
            return
        self._at_ns = at_ns
        if self._fd >= 0:
            self._spec.value_s, self._spec.value_ns = divmod(max(at_ns, 1), _NS_PER_S)
            self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(self._spec), None)
            return
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._loop.call_later(max(at_ns - now_ns, 0) / _NS_PER_S, self._ring)

    def close(self) -> None:
        """Cancel the timer. May be called again."""
        if self._handle is not None:
            self._handle.cancel()
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _ring(self) -> None:
        if self._fd >= 0:
            with suppress(BlockingIOError):  # it was set again after the loop saw it
                os.read(self._fd, 8)
        self._at_ns = self._handle = None
        self._callback()
