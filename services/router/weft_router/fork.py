"""Steps that run at once: tasks that are all over when the block that waits for them is left."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from weft_common.errors import RequestCancelledError


class Fork:
    """Tasks that succeed together: the first failure cancels the others.

    Cancelling the task that awaits ``join`` cancels every task of the fork; none is left when ``join`` is over.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[int] | None = self._loop.create_future()
        self._tasks: list[asyncio.Task[int]] = []
        self._num_running = 0

    def start(self, coroutine: Coroutine[Any, Any, int]) -> None:
        """Run ``coroutine`` as one more task; its value matters to a ``Race`` only."""
        task = self._loop.create_task(coroutine)
        self._tasks.append(task)
        self._num_running += 1
        task.add_done_callback(self._task_done)

    async def join(self) -> int:
        """Every task has ended.

        Returns:
            0 here; the value of the winner in a ``Race``.

        Raises:
            Exception: What the first failing task raised.
        """
        over = self._over
        if over is None:
            raise RuntimeError("a fork is joined once")
        try:
            return await over
        finally:
            if self._num_running:
                await self._cancel_rest()
            if over.done() and not over.cancelled():
                over.exception()  # seen, even where a cancel came first
            # An error holds the frames that it passed, and these the fork, which must not hold the error in turn.
            self._over = over = None
            self._tasks.clear()

    def _task_done(self, task: asyncio.Task[int]) -> None:
        self._num_running -= 1
        error = _error_of(task)
        if self._over is not None and not self._over.done():
            self._settle(self._over, task, error)

    def _settle(self, over: asyncio.Future[int], task: asyncio.Task[int], error: BaseException | None) -> None:
        if error is not None:
            over.set_exception(error)
        elif self._num_running == 0:
            over.set_result(0)

    async def _cancel_rest(self) -> None:
        """Cancel what still runs and wait for it; a cancel meanwhile is raised when all are over."""
        interrupt: asyncio.CancelledError | None = None
        while rest := [task for task in self._tasks if not task.done()]:
            for task in rest:
                task.cancel()
            try:
                await asyncio.wait(rest)
            except asyncio.CancelledError as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt


class Race(Fork):
    """Tasks of which one success is enough: the first cancels the others; ``join`` returns its value.

    If all fail, the error of the task that was started first is raised.
    """

    def _settle(self, over: asyncio.Future[int], task: asyncio.Task[int], error: BaseException | None) -> None:
        if error is None:
            over.set_result(task.result())
        elif self._num_running == 0:
            over.set_exception(_error_of(self._tasks[0]) or error)


def _error_of(task: asyncio.Task[int]) -> BaseException | None:
    """Why a finished task failed; a task that something else cancelled failed too."""
    if task.cancelled():
        return RequestCancelledError("a step was cancelled from outside")
    return task.exception()
