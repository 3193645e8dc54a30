"""Deadlines of many calls on one timer of the event loop.

A timer of the event loop costs 2 us to set and cancel, and nearly all calls end before their deadline. Here a call
costs a push to a heap; the one timer is set only for a deadline earlier than all others.
"""

import asyncio
import heapq
import itertools
from collections.abc import Callable

#: Ended entries that stay in the heap before it is rebuilt, at least.
_MIN_ENDED = 1024


class Deadline:
    """A deadline that can be cancelled.

    Attributes:
        when_s: By the clock of the event loop.
    """

    __slots__ = ("_expire", "_queue", "when_s")

    def __init__(self, queue: "DeadlineQueue", when_s: float, expire: Callable[[], None]) -> None:
        self._queue = queue
        self.when_s = when_s
        self._expire: Callable[[], None] | None = expire

    def cancel(self) -> None:
        """Forget what was to be done; no effect when it is done."""
        if self._expire is not None:
            self._expire = None
            self._queue.count_ended()

    def run(self) -> bool:
        """Do it, unless it was cancelled; returns whether it was done."""
        expire, self._expire = self._expire, None
        if expire is None:
            return False
        expire()
        return True

    @property
    def is_cancelled(self) -> bool:
        """Whether there is nothing to do any more."""
        return self._expire is None


class DeadlineQueue:
    """All deadlines of one server or channel.

    Args:
        loop: The running event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._heap: list[tuple[float, int, Deadline]] = []
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = float("inf")
        self._num_ended = 0

    def add(self, delay_s: float, expire: Callable[[], None]) -> Deadline:
        """Call ``expire`` in ``delay_s`` seconds, unless the deadline is cancelled before."""
        when_s = self._loop.time() + delay_s
        deadline = Deadline(self, when_s, expire)
        heapq.heappush(self._heap, (when_s, next(self._numbers), deadline))
        if when_s < self._timer_s:
            self._set_timer(when_s)
        return deadline

    def count_ended(self) -> None:
        """A deadline was cancelled; the heap is rebuilt when most of it has been."""
        self._num_ended += 1
        if self._num_ended > _MIN_ENDED and self._num_ended * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if not entry[2].is_cancelled]
            heapq.heapify(self._heap)
            self._num_ended = 0

    def close(self) -> None:
        """Forget all deadlines."""
        self._heap.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self, when_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = when_s
        self._timer = self._loop.call_at(when_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer, self._timer_s = None, float("inf")
        now_s = self._loop.time() + 0.0005  # a timer may fire early by its resolution
        heap = self._heap
        while heap and (heap[0][0] <= now_s or heap[0][2].is_cancelled):
            if not heapq.heappop(heap)[2].run():
                self._num_ended = max(0, self._num_ended - 1)
        if heap and self._timer is None:
            self._set_timer(heap[0][0])
