"""Blocking work on threads that the end of the process does not wait for."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def in_daemon_thread(function: Callable[[], T], *, name: str) -> T:
    """What ``function`` returns or raises; it runs on a thread of its own.

    Cancelling the awaiting task leaves the thread to itself. A function that never returns, as user code may not, does
    not keep the process alive, as one in ``asyncio.to_thread`` does.

    Args:
        function: Called once, on the thread.
        name: Of the thread.
    """
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()  # from here on it cannot be cancelled, only be left alone

    def run() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(outcome)
