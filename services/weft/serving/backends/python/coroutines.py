"""Runs a model whose ``execute`` is a coroutine, on an event loop of its own."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

#: Time that a close waits for cancelled coroutines, in seconds.
_CLOSE_WAIT_S = 5.0


class Coroutines:
    """An event loop on a thread.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        #: A loop knows its tasks by weak references: one that waits for what only it knows would be collected.
        self._started: set[Future[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"{name}-loop", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run the coroutine and return its result."""
        return asyncio.run_coroutine_threadsafe(_guarded(coroutine), self._loop).result()

    def start(self, coroutine: Coroutine[Any, Any, Any], on_end: Callable[[Any, BaseException | None], None]) -> None:
        """Start the coroutine; ``on_end`` is called on the loop with its result, or with its error."""

        async def watched() -> None:
            try:
                result = await _guarded(coroutine)
            except asyncio.CancelledError as error:
                on_end(None, error)
                raise
            except Exception as error:
                on_end(None, error)
            else:
                on_end(result, None)

        future = asyncio.run_coroutine_threadsafe(watched(), self._loop)
        self._started.add(future)
        future.add_done_callback(self._started.discard)

    def close(self) -> None:
        """Cancel every coroutine, and end the thread unless one of them blocks it."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        self._thread.join(_CLOSE_WAIT_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _end(self) -> None:
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        if rest:
            await asyncio.wait(rest, timeout=_CLOSE_WAIT_S / 2)
        self._loop.stop()


async def _guarded(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The same coroutine; an exit would end the loop and is an error instead."""
    try:
        return await coroutine
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"execute raised {type(error).__name__}") from error
