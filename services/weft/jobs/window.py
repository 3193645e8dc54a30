"""How many requests of a job are in flight."""

import asyncio
from collections import deque
from collections.abc import Callable

from weft.jobs.throughput_limit import ThroughputLimit

#: Half of the requests in flight set off together, if they need not wait for longer: what is received at once is read,
#: batched and answered at once. A mesh of processes on 2 cores answers 7,200 requests of 8 rows a second that come in
#: halves of 64, and 3,800 where each of 32 comes by itself; a wait of 5 ms is little to requests that are slow.
_NUM_GROUPS = 2
_MAX_WAIT_S = 0.005
#: Requests in flight before anything is known.
_INITIAL, _INITIAL_YIELDING = 16, 4


class Window:
    """Lets through no more requests than make the servers faster; see ``ThroughputLimit``.

    Not thread-safe. A cancelled wait takes no place.

    Args:
        maximum: Never more than these.
        clock_ns: Monotonic.
        yields: Others go first: it begins with few requests, and these set off one by one.

    Attributes:
        maximum: As given.
    """

    def __init__(self, maximum: int, clock_ns: Callable[[], int], *, yields: bool = False) -> None:
        self.maximum = maximum
        self._limit = ThroughputLimit(maximum, _INITIAL_YIELDING if yields else _INITIAL)
        self._num_groups = maximum if yields else _NUM_GROUPS
        self._clock_ns = clock_ns
        self._num_taken = self._num_inflight = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._ready: list[asyncio.Future[None]] = []
        self._departure: asyncio.TimerHandle | None = None

    @property
    def limit(self) -> int:
        """Requests that may be in flight now."""
        return self._limit.limit

    def place(self) -> "Place":
        """A place for one request after another: ``async with window.place() as place``; given in the order asked."""
        return Place(self)

    async def enter(self) -> None:
        """Take a place, once one is free."""
        if not self._waiting and self._num_taken < self._limit.limit:
            self._num_taken += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()
            raise

    def leave(self) -> None:
        """Give up a place."""
        self._num_taken -= 1
        self._admit()

    @property
    def is_too_full(self) -> bool:
        """Whether more places are taken than there are, as these became fewer."""
        return self._num_taken > self._limit.limit

    async def set_off(self) -> None:
        """Wait for others who want to send, for 5 ms at most."""
        size = self._limit.limit // self._num_groups
        if size <= 1:
            return
        loop = asyncio.get_running_loop()
        ready = loop.create_future()
        self._ready.append(ready)
        if len(self._ready) >= size or not self._num_inflight:
            self._depart()
        elif self._departure is None:
            self._departure = loop.call_later(_MAX_WAIT_S, self._depart)
        await ready

    def _depart(self) -> None:
        if self._departure is not None:
            self._departure.cancel()
            self._departure = None
        for ready in self._ready:
            if not ready.done():
                ready.set_result(None)
        self._ready.clear()

    def begin(self) -> None:
        """A request is sent."""
        self._num_inflight += 1
        self._limit.enter(self._clock_ns())

    def end(self, *, is_refused: bool = False) -> None:
        """A request has ended, or the server had too much to do for it."""
        self._num_inflight -= 1
        self._limit.leave(self._clock_ns(), is_refused=is_refused)
        self._admit()

    def _admit(self) -> None:
        """Give the places that are free to who waits longest."""
        while self._waiting and self._num_taken < self._limit.limit:
            turn = self._waiting.popleft()
            if not turn.done():
                self._num_taken += 1
                turn.set_result(None)


class Place:
    """A place in the window for one request at a time, which its server may refuse several times.

    Who has many requests keeps the place for all of them: to ask for one again costs 5 us a request, of the 18 that a
    job spends on one outside of its call (8 rows of 16 numbers; AMD EPYC).
    """

    __slots__ = ("_is_taken", "_window")

    def __init__(self, window: Window) -> None:
        self._window = window
        self._is_taken = False

    async def __aenter__(self) -> "Place":
        await self._window.enter()
        self._is_taken = True
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._is_taken:  # else the wait for it was cancelled
            self._leave()

    def _leave(self) -> None:
        self._is_taken = False
        self._window.leave()

    async def begin(self) -> None:
        """A request is sent, once the window has room for it (there may be less than before) and others are ready."""
        if self._window.is_too_full:
            self._leave()
            await self.__aenter__()
        await self._window.set_off()
        self._window.begin()

    def refused(self) -> None:
        """The server had too much to do; the request is tried again."""
        self._window.end(is_refused=True)
        self._window.begin()

    def end(self) -> None:
        """The request was answered."""
        self._window.end()
