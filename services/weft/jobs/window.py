"""Limits the requests of a job in flight to as few as give full throughput."""

import asyncio
from collections import deque
from collections.abc import Callable, Generator, Mapping
from typing import NamedTuple, TypeAlias

#: Half of the requests in flight set off together, if they need not wait for longer: what is received at once is read,
#: batched and answered at once. A mesh of processes on 2 cores answers 7,200 requests of 8 rows a second that come in
#: halves of 64, and 3,800 where each of 32 comes by itself; a wait of 5 ms is little to requests that are slow.
_NUM_GROUPS = 2
_MAX_WAIT_S = 0.005
#: Requests in flight before anything is known.
_INITIAL, _INITIAL_YIELDING = 16, 4
#: How many times as much must be answered with more in flight, to be worth it.
_GAIN = 1.04
#: A window lasts as long, and until so many requests have ended, by the limit and at the least.
_WINDOW_NS = 300_000_000
_ENDED_BY_LIMIT, _MIN_ENDED = 2, 10
#: Time between two looks for a better limit; it doubles while there is none.
_MIN_REST_NS, _MAX_REST_NS = 2_000_000_000, 16_000_000_000
#: Share of refused requests from which on the limit falls, and to what share of it.
_MAX_REFUSED, _REFUSED_CUT = 0.05, 0.5


class Window:
    """Limits requests in flight by a ``ThroughputLimit``, up to ``maximum``.

    Not thread-safe. A cancelled wait takes no place. One that ``yields``, since others go first, starts with few
    requests, sent one by one.
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
        """Current limit of requests in flight."""
        return self._limit.limit

    def place(self) -> "Place":
        """A place for one request at a time: ``async with window.place() as place``; granted in order."""
        return Place(self)

    async def enter(self) -> None:
        """Wait for a free place and take it."""
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
        """Release a place."""
        self._num_taken -= 1
        self._admit()

    @property
    def is_too_full(self) -> bool:
        """Whether more places are taken than the lowered limit allows."""
        return self._num_taken > self._limit.limit

    async def set_off(self) -> None:
        """Wait at most 5 ms for others that want to send, so that requests leave together."""
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
        """Count a request as sent."""
        self._num_inflight += 1
        self._limit.enter(self._clock_ns())

    def end(self, *, is_refused: bool = False) -> None:
        """Count the end of a request, or its refusal by an overloaded server."""
        self._num_inflight -= 1
        self._limit.leave(self._clock_ns(), is_refused=is_refused)
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._num_taken < self._limit.limit:
            turn = self._waiting.popleft()
            if not turn.done():
                self._num_taken += 1
                turn.set_result(None)


class Place:
    """A place in the window for one request at a time, which its server may refuse several times.

    A sender of many requests keeps the place for all of them: asking again costs 5 us a request, of the 18 that a job
    spends on one outside of its call (8 rows of 16 numbers; AMD EPYC).
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
        """Send a request, once the window has room (its limit may have dropped) and others are ready."""
        if self._window.is_too_full:
            self._leave()
            await self.__aenter__()
        await self._window.set_off()
        self._window.begin()

    def refused(self) -> None:
        """The server was overloaded; the request is tried again."""
        self._window.end(is_refused=True)
        self._window.begin()

    def end(self) -> None:
        """The request was answered."""
        self._window.end()


class _Hold(NamedTuple):
    limit: int
    duration_ns: int = _WINDOW_NS


#: Yields windows, and gets the requests that were answered in each, per ns.
_Search: TypeAlias = Generator[_Hold, float, None]


class ThroughputLimit:
    """Finds the fewest requests in flight that give at least 96 % of the best throughput.

    For jobs that need throughput, not latency: requests that share a batch, a system call or a loop iteration cost less
    each, so busy servers answer more when more is in flight, where ``AdaptiveLimit`` sees only a queue: with simulated
    batches of 32 that take 10 ms and 0.5 ms a row, this one reaches full throughput at 203 ms latency, that one 0.7 of
    it at 36 ms, as a router should.

    The limit doubles until that does not pay, twice. Then it is compared with its double and its half from time to
    time. Time in which it is not used up does not count.
    """

    def __init__(self, maximum: int, initial: int) -> None:
        self._maximum = max(maximum, 1)
        self._num_inflight = self._peak = self._num_ended = self._num_refused = 0
        self._since_ns: int | None = None
        self._num_settling = 0  # requests that end before the window begins
        self.limit = min(initial, self._maximum)
        self._search = self._ramp(self.limit)
        self._hold = next(self._search)

    def enter(self, now_ns: int) -> None:
        """Count a request as in flight; ``leave`` must follow."""
        if self._since_ns is None:
            self._since_ns = now_ns
        self._num_inflight += 1
        self._peak = max(self._peak, self._num_inflight)

    def leave(self, now_ns: int, *, is_refused: bool = False) -> None:
        """Count the end of a request, or its refusal by an overloaded server."""
        self._num_inflight -= 1
        if self._num_settling:
            self._num_settling -= 1
            if not self._num_settling:
                self._begin(now_ns)
            return
        self._num_refused += is_refused
        self._num_ended += not is_refused
        duration_ns = now_ns - (self._since_ns or 0)
        num_wanted = max(_MIN_ENDED, _ENDED_BY_LIMIT * self.limit)
        is_refusing = self._num_refused > _MAX_REFUSED * self._num_ended
        wanted_ns = _WINDOW_NS if is_refusing else self._hold.duration_ns
        if duration_ns >= wanted_ns and self._num_ended + self._num_refused >= num_wanted:
            self._end_window(now_ns, duration_ns, is_refusing=is_refusing)

    def _begin(self, now_ns: int) -> None:
        self._since_ns = now_ns
        self._peak = self._num_inflight
        self._num_ended = self._num_refused = 0

    def _end_window(self, now_ns: int, duration_ns: int, *, is_refusing: bool) -> None:
        if is_refusing:
            self._search = self._follow(max(int(_REFUSED_CUT * self.limit), 1))
            self._hold = next(self._search)
        elif self._peak >= self.limit:
            self._hold = self._search.send(self._num_ended / duration_ns)
        self._num_settling = max(self._hold.limit, self._num_inflight) if self._hold.limit != self.limit else 0
        self.limit = self._hold.limit
        self._begin(now_ns)

    def _ramp(self, limit: int) -> _Search:
        """Double the limit until two doublings in a row bring no gain, then follow."""
        rates: dict[int, float] = {}
        while True:
            rates[limit] = yield _Hold(limit)
            best = _least_of_the_best(rates)
            if limit == self._maximum or limit >= 4 * best:
                break
            limit = min(2 * limit, self._maximum)
        yield from self._follow(best)

    def _follow(self, limit: int) -> _Search:
        rest_ns = _MIN_REST_NS
        while True:
            yield _Hold(limit, rest_ns)
            before = limit
            while (best := (yield from self._best_near(limit))) != limit:
                limit = best
            rest_ns = _MIN_REST_NS if limit != before else min(2 * rest_ns, _MAX_REST_NS)

    def _best_near(self, limit: int) -> Generator[_Hold, float, int]:
        """The limit, its half or its double, each measured twice."""
        limits = sorted({max(limit // 2, 1), limit, min(2 * limit, self._maximum)})
        rates = dict.fromkeys(limits, 0.0)
        for each in (*limits, *reversed(limits)):  # so servers that slowly become slower or faster favour none
            rates[each] += yield _Hold(each)
        return _least_of_the_best(rates)


def _least_of_the_best(rates: Mapping[int, float]) -> int:
    """The smallest limit among those with about the best throughput."""
    most = max(rates.values())
    return min(limit for limit, rate in rates.items() if rate * _GAIN >= most)
