"""Items of several sources in order, while later sources already run."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any, Generic, TypeVar

from weft.base.cancellation import cancel_and_wait

_Item = TypeVar("_Item")
_END: Any = object()


async def in_order(
    sources: AsyncGenerator[AsyncGenerator[_Item, None], None], limit: int
) -> AsyncGenerator[_Item, None]:
    """All items of the first source, then those of the second, and so on; each as soon as it is there.

    Args:
        sources: Closed by the caller; the sources that it yields are closed here.
        limit: Open sources at once. The first item of each is fetched; further items only of the first, and another
            source is not opened before that one has ended.

    Raises:
        Exception: As a source raised it, in its turn; as ``sources`` raised it, after the items of those before.

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
    """A source, and the task that waits for its next item."""

    def __init__(self, source: AsyncGenerator[_Item, None]) -> None:
        self.source = source
        self.ask()

    def ask(self) -> None:
        self.first: asyncio.Task[_Item] = asyncio.create_task(_next(self.source))


class _SourceWindow(Generic[_Item]):
    """The sources that are in work; a task of its own opens them."""

    def __init__(self, sources: AsyncGenerator[AsyncGenerator[_Item, None], None], limit: int) -> None:
        self._ahead: deque[_Ahead[_Item]] = deque()
        self._room = asyncio.Semaphore(limit)
        self._is_changed = asyncio.Event()
        self._filling: asyncio.Task[None] | None = asyncio.create_task(self._fill(sources))
        self._filling.add_done_callback(lambda _: self._is_changed.set())

    async def head(self) -> _Ahead[_Item] | None:
        """The first source; None when all have ended. Raises what opening them raised."""
        while not self._ahead:
            if self._filling is None or self._filling.done():
                if self._filling is not None:
                    self._filling.result()
                return None
            self._is_changed.clear()
            await self._is_changed.wait()
        return self._ahead[0]

    def pass_on(self) -> None:
        """The first source has ended; another may be opened."""
        self._ahead.popleft()
        self._room.release()

    async def close(self) -> None:
        """Every task and every source has ended."""
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
        """All sources are in work, or have been."""
        while True:
            await self._room.acquire()
            source = await _next(sources)
            if source is _END:
                return
            self._ahead.append(_Ahead(source))
            self._is_changed.set()


async def _next(source: AsyncGenerator[_Item, None]) -> _Item:
    return await anext(source, _END)
