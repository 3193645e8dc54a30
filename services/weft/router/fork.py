"""Steps that run at once: tasks that are all over when the block that waits for them is left."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from typing_extensions import override

from weft.base.cancellation import cancel_and_wait
from weft.base.errors import RequestCancelledError, WeftError


class Fork:
    """Tasks that succeed together: the first failure cancels the others.

    Cancelling the task that awaits ``join`` cancels every task of the fork; none is left when ``join`` is over.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] | None = self._loop.create_future()
        self._tasks: list[asyncio.Task[int]] = []
        self._num_running = 0

    def start(self, coroutine: Coroutine[Any, Any, int]) -> None:
        """Run ``coroutine`` as one more task; its value says whether it succeeded, where that matters."""
        task = self._loop.create_task(coroutine)
        self._tasks.append(task)
        self._num_running += 1
        task.add_done_callback(self._task_done)

    async def join(self) -> None:
        """Every task has ended."""
        over = self._over
        if over is None:
            raise RuntimeError("a fork is joined once")
        try:
            await over
        finally:
            if self._num_running:
                await cancel_and_wait(self._tasks)
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

    def _settle(self, over: asyncio.Future[None], task: asyncio.Task[int], error: BaseException | None) -> None:
        if error is not None:
            over.set_exception(error)
        elif self._num_running == 0:
            over.set_result(None)


class Race(Fork):
    """Tasks of which one success, a true value, is enough: the first cancels the others.

    If all fail, the first started of the errors is raised.

    Args:
        fatal: An error of this class ends the race.

    Attributes:
        winner: Number of the task that succeeded, counted from 0 in the order of starting; -1 where none did, and none
            raised either.
    """

    def __init__(self, fatal: type[Exception]) -> None:
        super().__init__()
        self.winner = -1
        self._fatal = fatal

    def _settle(self, over: asyncio.Future[None], task: asyncio.Task[int], error: BaseException | None) -> None:
        if error is None and task.result():
            self.winner = self._tasks.index(task)
            over.set_result(None)
        elif error is not None and isinstance(error, self._fatal):
            over.set_exception(error)
        elif self._num_running == 0:
            errors = [failure for each in self._tasks if (failure := _error_of(each)) is not None]
            if errors:
                over.set_exception(errors[0])
            else:
                over.set_result(None)


class Quorum(Fork):
    """Tasks of which some must succeed, that is return a true value; the late ones among the soft are cancelled.

    The first error of a hard task cancels the others and is raised. So is an error of a soft task, except
    DEADLINE_EXCEEDED where all hard tasks have ended and ``needed`` have succeeded. It is over early, without an
    error, when so many have failed that ``needed`` cannot succeed any more.

    Args:
        needed: Successes that are needed; 1 or more.
        is_hard: For each task, in the order of starting.
        straggler_s: How long soft tasks are waited for, in seconds; None: until they end.
        waits_for_hard: The wait starts when all hard tasks have ended too; else with the ``needed``-th success.

    Attributes:
        answered: Numbers of the tasks that succeeded, in that order.
    """

    def __init__(
        self, needed: int, is_hard: Sequence[bool], straggler_s: float | None, *, waits_for_hard: bool
    ) -> None:
        super().__init__()
        self.answered: list[int] = []
        self._needed = needed
        self._is_hard = is_hard
        self._num_hard = sum(is_hard)
        self._straggler_s = straggler_s
        self._waits_for_hard = waits_for_hard
        self._timer: asyncio.TimerHandle | None = None
        self._is_time_up = False

    @property
    def is_reached(self) -> bool:
        """Whether enough tasks have succeeded."""
        return len(self.answered) >= self._needed

    @override
    async def join(self) -> None:
        try:
            await super().join()
        finally:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _settle(self, over: asyncio.Future[None], task: asyncio.Task[int], error: BaseException | None) -> None:
        index = self._tasks.index(task)
        is_hard = self._is_hard[index]
        self._num_hard -= is_hard
        if error is None:
            if task.result():
                self.answered.append(index)
        elif is_hard or not self._may_be_missing(error):
            over.set_exception(error)
            return
        if self._num_running == 0 or len(self.answered) + self._num_running < self._needed:
            over.set_result(None)
        elif (
            self._straggler_s is not None
            and self._timer is None
            and self.is_reached
            and (self._num_hard == 0 or not self._waits_for_hard)
        ):
            self._timer = self._loop.call_later(self._straggler_s, self._end_waiting)

    def _may_be_missing(self, error: BaseException) -> bool:
        """Whether the answer stands without a soft task: it was late, or ran out of time when all else was there."""
        return self._is_time_up or (
            self.is_reached
            and self._num_hard == 0
            and isinstance(error, WeftError)
            and error.code == "DEADLINE_EXCEEDED"
        )

    def _end_waiting(self) -> None:
        self._is_time_up = True
        for task, is_hard in zip(self._tasks, self._is_hard, strict=True):
            if not is_hard:
                task.cancel()


def _error_of(task: asyncio.Task[int]) -> BaseException | None:
    if task.cancelled():
        return RequestCancelledError("a step was cancelled from outside")
    return task.exception()
