"""Limits on requests in flight: one with slots reserved for higher priorities and other clients, and a plain one."""

import random
from typing import Any, Generic, TypeVar

from weft.base.errors import ResourceExhaustedError
from weft.base.limits import AdaptiveLimit, Outcome

T = TypeVar("T")

#: Priorities below this one (larger numbers) are as this one.
LOWEST_LEVEL = 6
#: One slot in so many is reserved, for each level between a request and the highest one seen lately.
_RESERVE = 10
#: How long a level counts as seen.
_SEEN_NS = 10_000_000_000
#: A client may have so many times more in flight than there is room left.
_CLIENT_FACTOR = 8
#: Steps of the running median, and answers before it is believed.
_MEDIAN_UP, _MEDIAN_DOWN, _MIN_ANSWERS = 1.05, 0.95, 16
#: Without an answer for this long, and twice itself, the median is not believed.
_MEDIAN_AGE_NS = 1_000_000_000

#: How long a request may wait in the queue, in median latencies.
_MAX_WAIT_LATENCIES, _MIN_LATENCY_NS = 4, 5_000_000

_MIN_RETRY_MS, MAX_RETRY_MS = 10, 5_000
#: Weight of the newest request in the mean time between two that end, and in the mean of durations.
_INTERVAL_SMOOTHING, _DURATION_SMOOTHING = 0.05, 0.1
_MAX_INTERVAL_NS = 1_000_000_000
#: Each hint of when to come back is longer or shorter by this share at most.
_JITTER = 0.25

_NEVER = -(1 << 62)


class ConcurrencyLimit:
    """Counts requests in flight against a limit: of the router, of a graph, or of a model that is called by its name.

    Slots are reserved for higher priority levels: a tenth of the limit, at least one slot, for each level between a
    request and the highest level seen in the last 10 s, together at most half of the limit. The highest level may use
    all of it, and so may everyone while one level is used. Of the slots open to a level, a client gets at most eight
    times as many as are still free: greedy clients end up with equal shares, modest ones get what they ask for (max-min
    fairness), and a new client finds a slot. Both rules start when half of the limit is used.

    Args:
        subject: What is limited, for messages, for example ``graph 'sentiment'``.
        adaptive: Sets the limit, at most ``limit``; None: the limit is ``limit``.
        is_timed: Request durations reflect the load; those of streams do not.

    Attributes:
        limit: Concurrent requests; 0 means no limit.
        maximum: Upper bound of ``limit``; 0 means none.
        setting: Where the limit is set, for messages.
        num_named: Requests in flight of clients with a key.
        seen_ns: Latest request of each level; written by the controller.
        median_ns: Median latency of answers; 0 while unknown.
        refusals: By reason and level.
    """

    def __init__(
        self,
        subject: str,
        generator: random.Random,
        *,
        limit: int = 0,
        setting: str = "",
        adaptive: AdaptiveLimit | None = None,
        is_timed: bool = True,
    ) -> None:
        self.subject = subject
        self.is_timed = is_timed
        self._setting = setting
        self.limit = 0
        self.setting = setting if adaptive is None else "what was measured"
        self._adaptive = adaptive
        self.set_maximum(limit)
        self.slots = RetrySlots(generator)
        self.queue: WaitingQueue[Any] = WaitingQueue(LOWEST_LEVEL)
        self.num_inflight = 0
        self.num_named = 0
        self._clients: dict[str, int] = {}  # without those that have nothing in flight
        self.refusals: dict[tuple[str, int], int] = {}
        self.seen_ns = [_NEVER] * (LOWEST_LEVEL + 1)
        self.median_ns = 0.0
        self._num_answers = 0
        self._last_answer_ns = 0

    @property
    def is_adaptive(self) -> bool:
        """Whether the limit follows latency."""
        return self._adaptive is not None

    def become_stream(self) -> None:
        """Limit streams from now on: only ``maximum`` applies."""
        self.is_timed, self._adaptive, self.limit = False, None, self.maximum
        self.setting, self.median_ns = self._setting, 0.0

    def set_maximum(self, maximum: int) -> None:
        """Set the limit, or the upper bound of an adaptive one; 0 removes it."""
        self.maximum = self.limit = maximum
        if self._adaptive is not None:
            self._adaptive.set_maximum(maximum)
            self.limit = self._adaptive.limit

    @property
    def is_crowded(self) -> bool:
        """Whether half of the limit is in flight, from where on requests may be refused."""
        return 2 * self.num_inflight >= self.limit > 0

    @property
    def is_busy(self) -> bool:
        """Whether more than three quarters of the limit are in flight, from where on optional work is skipped."""
        return 4 * self.num_inflight > 3 * self.limit > 0

    def num_slots(self, level: int, now_ns: int) -> int:
        """Number of further requests of this level that fit now; may be negative. Only with a limit."""
        limit = self.limit
        num_free = limit - self.num_inflight
        if num_free <= 0 or not self.is_crowded:
            return num_free
        top = next(i for i, at_ns in enumerate(self.seen_ns) if now_ns - at_ns < _SEEN_NS or i == level)
        num_levels = level - top
        return num_free - min(max(num_levels, -(-num_levels * limit // _RESERVE)), limit // 2)

    def why_refused(self, level: int, client: str, now_ns: int) -> str:
        """Return why a request must be refused now (``limit``, ``priority``, ``client_share``), "" if it may enter."""
        if not self.is_crowded:
            return ""
        num_slots = self.num_slots(level, now_ns)
        if num_slots <= 0:
            return "limit" if self.num_inflight >= self.limit else "priority"
        is_shared = client or self.num_named
        return "client_share" if is_shared and self.num_of(client) >= _CLIENT_FACTOR * num_slots else ""

    def may_wait(self, level: int, client: str, reason: str) -> bool:
        """Whether a request that does not fit may wait; only with an adaptive limit.

        With several clients, one may wait while it has less in flight than an equal share of the limit.
        """
        if self._adaptive is None or reason == "client_share":
            return False
        num_clients = len(self._clients) + (self.num_inflight > self.num_named)
        if num_clients > 1 and self.num_of(client) * num_clients >= self.limit:
            return False
        return self.queue.num_waiting < self.max_waiting or self.queue.last_below(level) is not None

    @property
    def max_waiting(self) -> int:
        """Number of requests that may wait: as many as the limit."""
        return max(2, self.limit)

    @property
    def max_wait_s(self) -> float:
        """How long each may wait."""
        return _MAX_WAIT_LATENCIES * max(self.median_ns, _MIN_LATENCY_NS) / 1e9

    def is_too_late(self, deadline_ns: int | None, now_ns: int) -> bool:
        """Whether the deadline has passed, or leaves less time than half of the latest answers took."""
        if deadline_ns is None:
            return False
        left_ns = deadline_ns - now_ns
        return left_ns <= 0 or left_ns < self.expected_ns(now_ns)

    def num_of(self, client: str) -> int:
        """Requests that a client has in flight."""
        return self._clients.get(client, 0) if client else self.num_inflight - self.num_named

    def expected_ns(self, now_ns: int) -> float:
        """Median latency of recent answers; 0 if unknown or nothing is in flight."""
        if self._num_answers < _MIN_ANSWERS or not self.num_inflight:
            return 0.0
        is_old = now_ns - self._last_answer_ns > _MEDIAN_AGE_NS + 2 * self.median_ns
        return 0.0 if is_old else self.median_ns

    def enter(self, client: str, now_ns: int) -> None:
        """Count a request as in flight; ``leave`` must follow."""
        self.num_inflight += 1
        if client:
            self.num_named += 1
            self._clients[client] = self._clients.get(client, 0) + 1
        if self._adaptive is not None:
            self._adaptive.enter(now_ns)

    def leave(self, client: str, duration_ns: int, now_ns: int, outcome: Outcome) -> None:
        """Count the end of a request that was in flight for ``duration_ns``."""
        if 2 * self.num_inflight >= self.limit > 0:
            self.slots.ended(now_ns)
        self.num_inflight -= 1
        if client:
            self.num_named -= 1
            num_left = self._clients[client] - 1
            if num_left:
                self._clients[client] = num_left
            else:
                del self._clients[client]
        if outcome is Outcome.ANSWERED and self.is_timed:
            self._num_answers += 1
            self._last_answer_ns = now_ns
            if self._num_answers <= _MIN_ANSWERS:
                self.median_ns += (duration_ns - self.median_ns) / self._num_answers
            else:
                self.median_ns *= _MEDIAN_UP if duration_ns > self.median_ns else _MEDIAN_DOWN
        if self._adaptive is not None:
            self._adaptive.leave(duration_ns, now_ns, outcome)
            self.limit = self._adaptive.limit


class RetrySlots:
    """Tells each refused request when a slot should become free for it.

    Each gets a later time than the one before, by the mean time between two completions, so that clients come back as
    fast as slots become free, and not all at once.
    """

    def __init__(self, generator: random.Random) -> None:
        self._generator = generator
        self._interval_ns = 0.0
        self._last_end_ns = 0
        self._next_ns = 0.0

    def ended(self, now_ns: int) -> None:
        """Count a completion, which frees a slot."""
        if self._last_end_ns:
            interval_ns = min(now_ns - self._last_end_ns, _MAX_INTERVAL_NS)
            smoothing = _INTERVAL_SMOOTHING if self._interval_ns else 1.0
            self._interval_ns += smoothing * (interval_ns - self._interval_ns)
        self._last_end_ns = now_ns

    def retry_after_ms(self, now_ns: int) -> int:
        """Hint for the next refused request, 10 ms to 5 s."""
        latest_ns = now_ns + MAX_RETRY_MS * 1e6
        self._next_ns = min(max(self._next_ns, now_ns) + self._interval_ns, latest_ns)
        # The jitter must not be cut off where everyone waits for the longest time.
        wait_ms = min((self._next_ns - now_ns) / 1e6, MAX_RETRY_MS / (1 + _JITTER))
        wait_ms *= self._generator.uniform(1 - _JITTER, 1 + _JITTER)
        return max(round(wait_ms), _MIN_RETRY_MS)


class WaitingQueue(Generic[T]):
    """Requests that wait for a slot: higher levels are served first, and within a level the newest first.

    The newest have the most time left; those that have waited long are given up, instead of being all served late.

    Args:
        num_levels: Levels are 1, the highest, to this.
    """

    def __init__(self, num_levels: int) -> None:
        self._levels: list[dict[T, None]] = [{} for _ in range(num_levels + 1)]
        self.num_waiting = 0

    def __len__(self) -> int:
        return self.num_waiting

    def add(self, level: int, waiter: T) -> None:
        """Add a waiter as the newest of its level."""
        self._levels[level][waiter] = None
        self.num_waiting += 1

    def remove(self, level: int, waiter: T) -> bool:
        """Remove a waiter; return False if it was not there."""
        if waiter not in self._levels[level]:
            return False
        del self._levels[level][waiter]
        self.num_waiting -= 1
        return True

    def next(self) -> tuple[int, T] | None:
        """Remove and return the next waiter to admit, with its level."""
        return next(((i, next(reversed(level))) for i, level in enumerate(self._levels) if level), None)

    def last_below(self, level: int) -> tuple[int, T] | None:
        """Return the waiter to drop for a request of ``level``: the oldest of the lowest level below it."""
        for i in range(len(self._levels) - 1, level, -1):
            if self._levels[i]:
                return i, next(iter(self._levels[i]))
        return None


class InflightLimit:
    """Counts requests in flight against a limit.

    Args:
        limit: Requests at once; 0 means no limit.
    """

    def __init__(self, subject: str, limit: int, setting: str) -> None:
        self._subject = subject
        self._limit = limit
        self._setting = setting
        self._mean_duration_ns = 0.0
        self.num_inflight = 0

    def enter(self) -> None:
        """Count a request as in flight; ``leave`` must follow.

        Raises:
            ResourceExhaustedError: The limit is reached. ``retry_after_ms`` is the mean duration of a request.
        """
        if self._limit and self.num_inflight >= self._limit:
            retry_after_ms = min(max(int(self._mean_duration_ns / 1e6), _MIN_RETRY_MS), MAX_RETRY_MS)
            raise ResourceExhaustedError(
                f"{self._subject} has {self.num_inflight} requests in flight, and {self._setting} allows "
                f"{self._limit}; try again in {retry_after_ms} ms",
                retry_after_ms=retry_after_ms,
            )
        self.num_inflight += 1

    def leave(self, duration_ns: int) -> None:
        """Count the end of a request that was in flight for ``duration_ns``."""
        self.num_inflight -= 1
        smoothing = _DURATION_SMOOTHING if self._mean_duration_ns else 1.0
        self._mean_duration_ns += smoothing * (duration_ns - self._mean_duration_ns)
