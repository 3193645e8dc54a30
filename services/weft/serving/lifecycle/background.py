"""Runs functions on daemon threads, and coroutines on an event loop from other threads."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from weft.base.errors import UnavailableError
from weft.base.processes.forks import IN_COPY, is_copy

T = TypeVar("T")


async def in_daemon_thread(function: Callable[[], T], *, name: str) -> T:
    """Run ``function`` on a daemon thread, which does not keep the process alive if it never returns.

    Cancelling the awaiting task does not stop the thread.
    """
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()  # from here on it cannot be cancelled

    def run() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(outcome)


def on_loop(coroutine: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop, too_late: str) -> "Future[Any]":
    """Run the coroutine on the event loop of another thread; cancelling the future cancels it.

    If the loop is closed, or this is a forked copy of the process, where nothing runs it, the future has an
    UnavailableError: ``too_late``.
    """
    if not is_copy():
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, loop)
        except RuntimeError:  # the loop is closed
            pass
    else:
        too_late = IN_COPY
    coroutine.close()
    future: Future[Any] = Future()
    future.set_exception(UnavailableError(too_late))
    return future
