"""How many requests of a job are in flight."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from weft_common.adaptive_limit import AdaptiveLimit, Outcome


class Window:
    """Lets through as many requests as the servers work on at once, and a tenth more; see ``AdaptiveLimit``.

    Not thread-safe. A cancelled wait takes no place.

    Args:
        maximum: Never more than these.
        clock_ns: Monotonic.
    """

    def __init__(self, maximum: int, clock_ns: Callable[[], int]) -> None:
        self._limit = AdaptiveLimit(maximum)
        self._clock_ns = clock_ns
        self._num_inflight = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def limit(self) -> int:
        """Requests that may be in flight now."""
        return self._limit.limit

    @asynccontextmanager
    async def place(self) -> AsyncIterator["Place"]:
        """A place for one request, in the order asked for."""
        if self._waiting or self._num_inflight >= self._limit.limit:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._leave()
                raise
        else:
            self._num_inflight += 1
        place = Place(self._limit, self._clock_ns)
        try:
            yield place
        finally:
            place.leave()
            self._leave()

    def _leave(self) -> None:
        """Give up a place, and give those that are free to who waits longest."""
        self._num_inflight -= 1
        while self._waiting and self._num_inflight < self._limit.limit:
            turn = self._waiting.popleft()
            if not turn.done():
                self._num_inflight += 1
                turn.set_result(None)


class Place:
    """A request's place in the window, from which its server may refuse it several times."""

    def __init__(self, limit: AdaptiveLimit, clock_ns: Callable[[], int]) -> None:
        self._limit = limit
        self._clock_ns = clock_ns
        self._enter()

    def refused(self) -> None:
        """The server had too much to do; the request is tried again."""
        self._end(Outcome.REFUSED)
        self._enter()

    def leave(self) -> None:
        """The request was answered."""
        self._end(Outcome.ANSWERED)

    def _enter(self) -> None:
        self._since_ns = self._clock_ns()
        self._limit.enter(self._since_ns)

    def _end(self, outcome: Outcome) -> None:
        now_ns = self._clock_ns()
        self._limit.leave(now_ns - self._since_ns, now_ns, outcome)
