"""A limit on requests in flight that is the least at which the servers are about as fast as they can be."""

from collections.abc import Generator
from typing import NamedTuple, TypeAlias

#: Requests in flight before anything is known.
_INITIAL = 4
#: How many times as much must be answered with twice as many in flight, to be worth it.
_GAIN = 1.04
#: A window lasts as long, and until so many requests have ended, by the limit and at the least.
_WINDOW_NS = 200_000_000
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
    """Holds as few requests in flight as answer, but for 4 %, as many a second as twice as many would.

    For whom throughput is all and latency nothing: requests that share a batch, a system call or a turn of an event
    loop cost less each, so servers that are busy all the time still answer more when more is in flight, where
    ``AdaptiveLimit`` sees a queue. Beyond that, more in flight only makes others wait.

    The limit doubles until that does not pay. From then on it is compared with its double and its half from time to
    time. Time in which it is not used does not count.

    Args:
        maximum: The limit is never above it.

    Attributes:
        limit: Requests in flight.
    """

    def __init__(self, maximum: int) -> None:
        self._maximum = max(maximum, 1)
        self._num_inflight = self._peak = self._num_ended = self._num_refused = 0
        self._since_ns: int | None = None
        self._num_settling = 0  # requests that end before the window begins
        self.limit = min(_INITIAL, self._maximum)
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
        if duration_ns >= self._window.duration_ns and self._num_ended + self._num_refused >= num_wanted:
            self._end_window(now_ns, duration_ns)

    def _begin(self, now_ns: int) -> None:
        self._since_ns = now_ns
        self._peak = self._num_inflight
        self._num_ended = self._num_refused = 0

    def _end_window(self, now_ns: int, duration_ns: int) -> None:
        if self._num_refused > _MAX_REFUSED * self._num_ended:
            self._search = self._follow(max(int(_REFUSED_CUT * self.limit), 1))
            self._window = next(self._search)
        elif self._peak >= self.limit:
            self._window = self._search.send(self._num_ended / duration_ns)
        self._num_settling = max(self._window.limit, self._num_inflight) if self._window.limit != self.limit else 0
        self.limit = self._window.limit
        self._begin(now_ns)

    def _ramp(self, limit: int) -> _Search:
        """Double the limit for as long as that pays, then follow."""
        rate = yield _Window(limit)
        while (double := min(2 * limit, self._maximum)) > limit:
            before, rate = rate, (yield _Window(double))
            if rate < _GAIN * before:
                break
            limit = double
        yield from self._follow(limit)

    def _follow(self, limit: int) -> _Search:
        """Look for a better limit from time to time: more if that pays, else less if that costs nothing."""
        rest_ns = _MIN_REST_NS
        while True:
            yield _Window(limit, rest_ns)
            before = limit
            limit = yield from self._climb(limit, is_upward=True)
            if limit == before:
                limit = yield from self._climb(limit, is_upward=False)
            rest_ns = _MIN_REST_NS if limit != before else min(2 * rest_ns, _MAX_REST_NS)

    def _climb(self, limit: int, *, is_upward: bool) -> Generator[_Window, float, int]:
        """Double the limit while that pays, or halve it while twice as much does not."""
        while True:
            other = min(2 * limit, self._maximum) if is_upward else limit // 2
            if other in (0, limit):
                return limit
            low, high = sorted((limit, other))
            gain = 1.0
            # In this order servers that slowly become faster or slower favour neither.
            for each, power in ((low, -0.5), (high, 0.5), (high, 0.5), (low, -0.5)):
                gain *= (yield _Window(each)) ** power
            if (gain >= _GAIN) is not is_upward:
                return limit
            limit = other
