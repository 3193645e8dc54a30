"""A limit on requests in flight that is the least at which the servers are about as fast as they can be."""

from collections.abc import Generator, Mapping
from typing import NamedTuple, TypeAlias

#: How many times as much must be answered with more in flight, to be worth it.
_GAIN = 1.04
#: A window lasts as long, and until so many requests have ended, by the limit and at the least.
_WINDOW_NS = 300_000_000
_ENDED_BY_LIMIT, _MIN_ENDED = 2, 10
#: Time between two looks for a better limit; it doubles while there is none.
_MIN_REST_NS, _MAX_REST_NS = 2_000_000_000, 16_000_000_000
#: Share of refused requests from which on the limit falls, and to what share of it.
_MAX_REFUSED, _REFUSED_CUT = 0.05, 0.5


class _Window(NamedTuple):
    """A limit to hold for a time."""

    limit: int
    duration_ns: int = _WINDOW_NS


#: Yields windows, and gets the requests that were answered in each, per ns.
_Search: TypeAlias = Generator[_Window, float, None]


class ThroughputLimit:
    """Holds the fewest requests in flight with which, but for 4 %, as many a second are answered as with any.

    For whom throughput is all and latency nothing: requests that share a batch, a system call or a turn of an event
    loop cost less each, so servers that are busy all the time still answer more when more is in flight, where
    ``AdaptiveLimit`` sees a queue. Beyond that, more in flight only makes others wait.

    The limit doubles until that does not pay, twice. From then on it is compared with its double and its half from time
    to time. Time in which it is not used does not count.

    Args:
        maximum: The limit is never above it.
        initial: The limit before anything is known.

    Attributes:
        limit: Requests in flight.
    """

    def __init__(self, maximum: int, initial: int) -> None:
        self._maximum = max(maximum, 1)
        self._num_inflight = self._peak = self._num_ended = self._num_refused = 0
        self._since_ns: int | None = None
        self._num_settling = 0  # requests that end before the window begins
        self.limit = min(initial, self._maximum)
        self._search = self._ramp(self.limit)
        self._window = next(self._search)

    def enter(self, now_ns: int) -> None:
        """One more request is in flight; ``leave`` must follow."""
        if self._since_ns is None:
            self._since_ns = now_ns
        self._num_inflight += 1
        self._peak = max(self._peak, self._num_inflight)

    def leave(self, now_ns: int, *, is_refused: bool = False) -> None:
        """A request has ended, or the server had too much to do for it."""
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
        wanted_ns = _WINDOW_NS if is_refusing else self._window.duration_ns
        if duration_ns >= wanted_ns and self._num_ended + self._num_refused >= num_wanted:
            self._end_window(now_ns, duration_ns, is_refusing=is_refusing)

    def _begin(self, now_ns: int) -> None:
        self._since_ns = now_ns
        self._peak = self._num_inflight
        self._num_ended = self._num_refused = 0

    def _end_window(self, now_ns: int, duration_ns: int, *, is_refusing: bool) -> None:
        if is_refusing:
            self._search = self._follow(max(int(_REFUSED_CUT * self.limit), 1))
            self._window = next(self._search)
        elif self._peak >= self.limit:
            self._window = self._search.send(self._num_ended / duration_ns)
        self._num_settling = max(self._window.limit, self._num_inflight) if self._window.limit != self.limit else 0
        self.limit = self._window.limit
        self._begin(now_ns)

    def _ramp(self, limit: int) -> _Search:
        """Double the limit until two doublings in a row do not pay, then follow."""
        rates: dict[int, float] = {}
        while True:
            rates[limit] = yield _Window(limit)
            best = _least_of_the_best(rates)
            if limit == self._maximum or limit >= 4 * best:
                break
            limit = min(2 * limit, self._maximum)
        yield from self._follow(best)

    def _follow(self, limit: int) -> _Search:
        """Look for a better limit from time to time."""
        rest_ns = _MIN_REST_NS
        while True:
            yield _Window(limit, rest_ns)
            before = limit
            while (best := (yield from self._best_near(limit))) != limit:
                limit = best
            rest_ns = _MIN_REST_NS if limit != before else min(2 * rest_ns, _MAX_REST_NS)

    def _best_near(self, limit: int) -> Generator[_Window, float, int]:
        """The limit, its half or its double, each measured twice."""
        limits = sorted({max(limit // 2, 1), limit, min(2 * limit, self._maximum)})
        rates = dict.fromkeys(limits, 0.0)
        for each in (*limits, *reversed(limits)):  # so servers that slowly become slower or faster favour none
            rates[each] += yield _Window(each)
        return _least_of_the_best(rates)


def _least_of_the_best(rates: Mapping[int, float]) -> int:
    """The least limit of those that answer about as many requests as any."""
    most = max(rates.values())
    return min(limit for limit, rate in rates.items() if rate * _GAIN >= most)
