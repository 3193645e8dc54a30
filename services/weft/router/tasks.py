"""Tasks of one request: concurrent steps, and items of several sources by arrival or in order."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from typing import Any, Generic, TypeVar

from weft.base.cancellation import cancel_and_wait
from weft.base.errors import RequestCancelledError, WeftError

_Item = TypeVar("_Item")
_END: Any = object()


class Fork:
    """Tasks that succeed together: the first failure cancels the others.

    Cancelling the task that awaits ``join`` cancels every task of the fork; none is left when ``join`` is over.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] | None = self._loop.create_future()
        self._tasks: list[asyncio.Task[int]] = []
        self._num_running = 0
        self._timer: asyncio.TimerHandle | None = None  # of a kind that acts later; ends with the fork

    def start(self, coroutine: Coroutine[Any, Any, int]) -> None:
        """Run ``coroutine`` as another task; its value says whether it succeeded, if that matters."""
        task = self._loop.create_task(coroutine)
        self._tasks.append(task)
        self._num_running += 1
        task.add_done_callback(self._task_done)

    async def join(self) -> None:
        """Wait until every task has ended."""
        over = self._over
        if over is None:
            raise RuntimeError("a fork is joined once")
        try:
            await over
        finally:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
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
    """Tasks of which the first success, a true value, cancels the others.

    If all fail, the error of the task started first is raised.

    Args:
        fatal: An error of this class ends the race.

    Attributes:
        winner: Number of the task that succeeded, counted from 0 in the order of starting; -1 if none succeeded and
            none raised.
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
    """Tasks of which ``needed`` must succeed, that is return a true value; late soft ones are cancelled.

    The first error of a hard task cancels the others and is raised. So is an error of a soft task, except
    DEADLINE_EXCEEDED when all hard tasks have ended and ``needed`` have succeeded. It ends early, without an error,
    when so many have failed that ``needed`` cannot succeed any more.

    Args:
        needed: Required successes; 1 or more.
        is_hard: For each task, in the order of starting.
        straggler_s: How long to wait for soft tasks, in seconds; None: until they end.
        waits_for_hard: That time starts when all hard tasks have ended too; else with the ``needed``-th success.

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
        self._is_time_up = False

    @property
    def is_reached(self) -> bool:
        """Whether enough tasks have succeeded."""
        return len(self.answered) >= self._needed

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
        """Whether the answer is complete without a soft task: it was late, or timed out after all others had ended."""
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


class Arrivals(Generic[_Item]):
    """Runs several sources concurrently and returns their items by arrival.

    Each source is asked for one item, and for the next one after that item was taken.

    Args:
        sources: Closed here.
        limit: Sources that are asked at once; another starts when one has ended. None: all.
    """

    def __init__(self, sources: Iterable[AsyncGenerator[_Item, None]], limit: int | None = None) -> None:
        self._sources = tuple(sources)
        self._waiting = deque(self._sources)
        self._limit = len(self._sources) if limit is None else limit
        self._idle: list[AsyncGenerator[_Item, None]] = []
        self._asked: dict[asyncio.Task[_Item], AsyncGenerator[_Item, None]] = {}
        self._arrived: deque[asyncio.Task[_Item]] = deque()
        self._has_arrived = asyncio.Event()

    @property
    def has_one_left(self) -> bool:
        """Whether only the source of the latest item can have another."""
        return not self._waiting and all(map(_has_ended, self._asked))

    async def settle(self, own: "asyncio.Task[bool]", timeout_s: float) -> None:
        """Find out, within ``timeout_s``, whether an item follows the latest; none is lost.

        Args:
            own: Whether the source of the latest item has ended.
        """
        end_s = asyncio.get_running_loop().time() + timeout_s
        while not self._waiting and all(_has_ended(task) for task in self._asked if task.done()):
            pending = [task for task in (own, *self._asked) if not task.done()]
            left_s = end_s - asyncio.get_running_loop().time()
            if not pending or left_s <= 0 or (own.done() and not own.result()):
                return
            await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)

    async def next(self) -> _Item | None:
        """The next item; None when every source has ended.

        Cancelling the awaiting task loses no item.
        """
        self._ask()
        while self._asked:
            while not self._arrived:
                self._has_arrived.clear()
                await self._has_arrived.wait()
            task = self._arrived.popleft()
            source = self._asked.pop(task)
            item = task.result()
            if item is not _END:
                self._idle.append(source)
                return item
            self._ask()
        return None

    async def close(self) -> None:
        """End every source; no task is left."""
        async with contextlib.AsyncExitStack() as closing:
            for source in self._sources:
                closing.push_async_callback(source.aclose)
            tasks = [*self._asked]
            self._asked.clear()
            await cancel_and_wait(tasks)

    def _ask(self) -> None:
        while self._waiting and len(self._asked) + len(self._idle) < self._limit:
            self._idle.append(self._waiting.popleft())
        for source in self._idle:
            task = asyncio.create_task(_next(source))
            self._asked[task] = source
            task.add_done_callback(self._on_arrival)
        self._idle.clear()

    def _on_arrival(self, task: "asyncio.Task[_Item]") -> None:
        self._arrived.append(task)
        self._has_arrived.set()


def _has_ended(task: "asyncio.Task[Any]") -> bool:
    return task.done() and not task.cancelled() and task.exception() is None and task.result() is _END


async def _next(source: AsyncGenerator[_Item, None]) -> _Item:
    return await anext(source, _END)


async def in_order(
    sources: AsyncGenerator[AsyncGenerator[_Item, None], None], limit: int
) -> AsyncGenerator[_Item, None]:
    """Yield all items of the first source, then those of the second, and so on, each as soon as it exists.

    Args:
        sources: Closed by the caller; the sources that it yields are closed here.
        limit: Open sources at once. The first item of each is fetched; further items only of the first, and another
            source is not opened before that one has ended.

    Raises:
        Exception: From a source, in its turn; from ``sources``, after the items of the sources before.

    Closing the generator, or cancelling the task that awaits it, closes what was opened; no task is left.
    """
    if limit == 1:
        async for source in sources:
            try:
                async for item in source:
                    yield item
            finally:
                await source.aclose()
        return
    window = _SourceWindow(sources, limit)
    try:
        while (head := await window.head()) is not None:
            while (item := await head.first) is not _END:
                yield item
                head.ask()
            window.pass_on()
    finally:
        await window.close()


class _Ahead(Generic[_Item]):
    """A source, and the task that reads its next item."""

    def __init__(self, source: AsyncGenerator[_Item, None]) -> None:
        self.source = source
        self.ask()

    def ask(self) -> None:
        self.first: asyncio.Task[_Item] = asyncio.create_task(_next(self.source))


class _SourceWindow(Generic[_Item]):
    """The open sources; a separate task opens them."""

    def __init__(self, sources: AsyncGenerator[AsyncGenerator[_Item, None], None], limit: int) -> None:
        self._ahead: deque[_Ahead[_Item]] = deque()
        self._room = asyncio.Semaphore(limit)
        self._is_changed = asyncio.Event()
        self._filling: asyncio.Task[None] | None = asyncio.create_task(self._fill(sources))
        self._filling.add_done_callback(lambda _: self._is_changed.set())

    async def head(self) -> _Ahead[_Item] | None:
        while not self._ahead:
            if self._filling is None or self._filling.done():
                if self._filling is not None:
                    self._filling.result()
                return None
            self._is_changed.clear()
            await self._is_changed.wait()
        return self._ahead[0]

    def pass_on(self) -> None:
        self._ahead.popleft()
        self._room.release()

    async def close(self) -> None:
        tasks: list[asyncio.Task[Any]] = [each.first for each in self._ahead]
        if self._filling is not None:
            tasks.append(self._filling)
            self._filling = None  # its error holds frames that hold it
        try:
            await cancel_and_wait(tasks)
        finally:
            for each in self._ahead:
                await each.source.aclose()

    async def _fill(self, sources: AsyncGenerator[AsyncGenerator[_Item, None], None]) -> None:
        while True:
            await self._room.acquire()
            source = await _next(sources)
            if source is _END:
                return
            self._ahead.append(_Ahead(source))
            self._is_changed.set()
