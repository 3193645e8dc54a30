"""What is awaited no longer than until a deadline; one timer of the event loop serves all.

``asyncio.timeout`` sets a timer for each, which is nearly always cancelled: 5 us there, 1.5 us here.
"""

import asyncio
import heapq
import itertools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")

#: Event loops count timers in whole milliseconds, and may be early by one.
_EARLY_S = 0.001
#: Entries that are over and may stay beside those that are not.
_MAX_STALE = 64


class _Wait:
    """A task that awaits something until a deadline."""

    __slots__ = ("is_expired", "num_cancels", "task")

    def __init__(self, task: "asyncio.Task[Any]") -> None:
        self.task: asyncio.Task[Any] | None = task
        self.num_cancels = task.cancelling()
        self.is_expired = False


class Deadlines:
    """Ends what tasks await when its time is over. Lives on one event loop."""

    def __init__(self) -> None:
        self._waits: list[tuple[float, int, _Wait]] = []  # a heap, by time
        self._numbers = itertools.count()
        self._num_running = 0
        self._timer: asyncio.TimerHandle | None = None

    async def within(self, awaitable: Awaitable[T], left_s: float, late: Callable[[], Exception]) -> T:
        """What the awaitable gives. After so many seconds it is cancelled, and what ``late`` gives is raised."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        if task is None:
            raise RuntimeError("a deadline needs a task")
        wait = _Wait(task)
        self._add(loop, wait, loop.time() + left_s)
        try:
            return await awaitable
        except asyncio.CancelledError as error:
            if wait.is_expired and task.uncancel() <= wait.num_cancels:
                wait.is_expired = False
                raise late() from error
            wait.is_expired = False
            raise
        finally:
            if wait.is_expired:  # it ended otherwise in the same turn of the event loop
                task.uncancel()
            wait.task = None
            self._num_running -= 1

    def close(self) -> None:
        """Cancel the timer; nothing may be awaited any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _add(self, loop: asyncio.AbstractEventLoop, wait: _Wait, at_s: float) -> None:
        if len(self._waits) > 2 * self._num_running + _MAX_STALE:
            self._waits = [entry for entry in self._waits if entry[2].task is not None]
            heapq.heapify(self._waits)
        self._num_running += 1
        heapq.heappush(self._waits, (at_s, next(self._numbers), wait))
        if self._timer is None or at_s < self._timer.when():
            self._set_timer(loop, at_s)

    def _set_timer(self, loop: asyncio.AbstractEventLoop, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(at_s, self._ring, loop)

    def _ring(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancel the tasks whose time is over, and wait for the next."""
        self._timer = None
        waits, now_s = self._waits, loop.time() + _EARLY_S
        while waits and (waits[0][2].task is None or waits[0][0] <= now_s):
            _, _, wait = heapq.heappop(waits)
            if wait.task is not None:
                wait.is_expired = True
                wait.task.cancel()
        if waits:
            self._set_timer(loop, waits[0][0])
