"""Responses of several runs at once, by arrival."""

import dataclasses
from collections.abc import AsyncGenerator, Iterable
from typing import Any, TypeVar

from weft_router.steps.run import Run
from weft_router.tasks.arrivals import Arrivals

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
    others = _Others(arrivals)
    try:
        while (arrived := await arrivals.next()) is not None:
            key, response = arrived
            others.num_responses += 1
            parts = ((others, others.num_responses), *response.request.parts)
            request = dataclasses.replace(response.request, parts=parts)
            yield key, Run(response.frame, request, response.deadline_ns, response.context, response.record)
    finally:
        await arrivals.close()


class _Others:
    """As a part of a response: the sources whose response it is not.

    Attributes:
        num_responses: Of all sources so far.
    """

    def __init__(self, arrivals: Arrivals[Any]) -> None:
        self.num_responses = 0
        self._arrivals = arrivals

    @property
    def has_ended(self) -> bool:
        """Whether it is known that all of them have ended."""
        return self._arrivals.has_one_left

    async def settle(self, timeout_s: float) -> None:
        """They are not waited for: a response is not held back for those of another source."""
