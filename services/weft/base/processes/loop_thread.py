"""``LoopThread``: an event loop for callers that have none, or one that must not wait."""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent import futures
from typing import Any, TypeVar

T = TypeVar("T")
_STOP_TIMEOUT_S = 5.0


class LoopThread:
    """An event loop on a daemon thread of its own, from now until ``stop``.

    Args:
        end: Runs last on the loop, when it stops.

    Attributes:
        pid: The process that has the thread; one that it forks has not.
    """

    def __init__(self, name: str, end: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        self.pid = os.getpid()
        self._end = end
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def begin(self, work: Coroutine[Any, Any, T]) -> "futures.Future[T]":
        """Start ``work``; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def result(self, work: Coroutine[Any, Any, T]) -> T:
        """Result of ``work``; an interrupt, as Ctrl-C, cancels it."""
        future = self.begin(work)
        try:
            return future.result()
        finally:
            future.cancel()

    def stop(self) -> None:
        """Cancel what runs, and wait until the thread has ended; nothing, if it has or is another process's."""
        if self.pid == os.getpid() and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            if threading.current_thread() is not self._thread:
                self._thread.join(_STOP_TIMEOUT_S)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.get_loop().run_forever()
            if self._end is not None:
                runner.run(self._end())
