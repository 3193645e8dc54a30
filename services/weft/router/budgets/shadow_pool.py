"""Owner of background tasks."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from weft.base.cancellation import cancel_and_wait

#: Copies of all graphs together; each holds the tensors that it is made of.
MAX_SHADOWS = 1024


class ShadowPool:
    """Background tasks that end with the router.

    Args:
        max_inflight: Tasks at once.
    """

    def __init__(self, max_inflight: int = MAX_SHADOWS) -> None:
        self._max_inflight = max_inflight
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @property
    def has_room(self) -> bool:
        """Whether one more may start; never after ``close``."""
        return not self._is_closed and len(self._tasks) < self._max_inflight

    @property
    def num_inflight(self) -> int:
        """Tasks that run."""
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, None], on_end: Callable[[asyncio.Task[None]], None]) -> None:
        """Run ``work``, which raises nothing, as a task; ``on_end`` is called however it ends."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(on_end)

    async def close(self) -> None:
        """Every task was cancelled and has ended; none starts any more."""
        self._is_closed = True
        await cancel_and_wait(list(self._tasks))
