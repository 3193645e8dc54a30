"""``cancel_and_wait``: cancels tasks that must not outlive their block."""

import asyncio
from collections.abc import Collection
from typing import Any


async def cancel_and_wait(tasks: Collection["asyncio.Task[Any]"]) -> None:
    """Cancel all tasks and wait for their end; their exceptions are retrieved and dropped.

    If the awaiting task is cancelled in the meantime, CancelledError is raised after all have ended.
    """
    interrupt: asyncio.CancelledError | None = None
    while rest := [task for task in tasks if not task.done()]:
        for task in rest:
            task.cancel()
        try:
            await asyncio.wait(rest)
        except asyncio.CancelledError as error:
            interrupt = error
    for task in tasks:
        if not task.cancelled():
            task.exception()
    if interrupt is not None:
        try:
            raise interrupt
        finally:
            interrupt = None  # breaks the reference cycle between error and frame
