"""Responses of several runs at once, by arrival."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Iterable
from typing import Any, TypeVar

from weft.base.cancellation import cancel_and_wait
from weft.router.steps.run import GraphRequest, Run
from weft.router.tasks.arrivals import Arrivals

_Key = TypeVar("_Key")


async def by_arrival(
    sources: Iterable[AsyncGenerator[tuple[_Key, Run], None]], limit: int | None = None
) -> AsyncGenerator[tuple[_Key, Run], None]:
    """The responses of all sources, each with its key; each knows whether others may follow.

    Args:
        sources: Closed here.
        limit: So many are open at once, the next when one of them has ended; None: all.

    Raises:
        WeftError: As a source raised it, after the responses before; the other sources are closed.

    Closing the generator, or cancelling the task that awaits it, closes every source; no task is left.
    """
    arrivals = Arrivals(sources, limit)
    count = _Count()
    try:
        while (arrived := await arrivals.next()) is not None:
            key, response = arrived
            count.num_responses += 1
            parts = ((_Merged(arrivals, count, response.request), count.num_responses), *response.request.parts)
            request = dataclasses.replace(response.request, parts=parts)
            yield key, Run(response.frame, request, response.deadline_ns, response.context, response.record)
    finally:
        await arrivals.close()


class _Count:
    """Responses of all sources so far."""

    num_responses = 0


class _Merged:
    """As a part of a response: all sources.

    Args:
        arrivals: The sources.
        count: Of their responses.
        own: The response, as its source gave it.
    """

    def __init__(self, arrivals: Arrivals[Any], count: _Count, own: GraphRequest) -> None:
        self._arrivals = arrivals
        self._count = count
        self._own = own

    @property
    def num_responses(self) -> int:
        """As of ``ResponsePart``."""
        return self._count.num_responses

    @property
    def has_ended(self) -> bool:
        """As of ``ResponsePart``."""
        return self._arrivals.has_one_left and self._own.is_known_last

    async def settle(self, timeout_s: float) -> None:
        """As of ``ResponsePart``; a response does not wait where another source has one already."""
        own = asyncio.create_task(self._own.is_last(timeout_s))
        try:
            await self._arrivals.settle(own, timeout_s)
        finally:
            await cancel_and_wait((own,))
