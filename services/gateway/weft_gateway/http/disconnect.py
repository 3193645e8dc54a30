"""Work that ends when the client leaves."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from weft_common.cancellation import cancel_and_wait
from weft_common.errors import UnavailableError

T = TypeVar("T")


class ClientLeftError(Exception):
    """The client closed the connection; nobody reads an answer."""


async def unless_left(receive: Receive, stopping: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` gives; it is cancelled as soon as the client leaves or the gateway must end.

    Args:
        receive: Of the request, whose body was read.
        stopping: Set when what is in work has no time left.
        work: Is over in any case when this returns or raises.

    Raises:
        ClientLeftError: The client left first.
        UnavailableError: The gateway stops.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_left(receive))
    ending = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait((working, leaving, ending), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        if leaving.done():
            leaving.result()  # a defect of ours is no leave
            raise ClientLeftError
        raise UnavailableError("the gateway stops, and has no time left for this answer; ask again")
    finally:
        await cancel_and_wait((working, leaving, ending))


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
