"""Tasks that must not outlive the block that started them."""

import asyncio
from collections.abc import Collection
from typing import Any


async def cancel_and_wait(tasks: Collection["asyncio.Task[Any]"]) -> None:
    """Every task has ended, those that still ran by a cancel; what they raised is taken note of and dropped.

    A cancel of the awaiting task meanwhile is raised when all are over.
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
            interrupt = None  # an error that holds a frame that holds the error is freed late
