"""Cancellation of work when the client disconnects."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from weft.base.cancellation import cancel_and_wait
from weft.base.errors import UnavailableError

T = TypeVar("T")


class ClientDisconnectedError(Exception):
    """The client closed the connection before the response."""


async def run_until_disconnect(receive: Receive, stopping: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled if the client disconnects or the gateway must stop.

    Args:
        receive: ASGI ``receive`` of the request, whose body was read.
        stopping: Set when the grace period is over.
        work: Has ended in any case when this returns or raises.

    Raises:
        ClientDisconnectedError: The client disconnected first.
        UnavailableError: The gateway stops.
    """
    working = asyncio.create_task(work)
    disconnecting = asyncio.create_task(_disconnected(receive))
    ending = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait((working, disconnecting, ending), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        if disconnecting.done():
            disconnecting.result()  # raises if receiving failed
            raise ClientDisconnectedError
        raise UnavailableError("the gateway stops, and has no time left for this answer; ask again")
    finally:
        await cancel_and_wait((working, disconnecting, ending))
        del working  # it holds the error that is raised, whose traceback holds this frame


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
