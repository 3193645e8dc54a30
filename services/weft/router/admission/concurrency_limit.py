"""Limits on requests in flight: with slots reserved for higher priorities and for other clients, or plain."""

import random
from typing import Any, Generic, TypeVar

from weft.base.adaptive_limit import AdaptiveLimit, Outcome
from weft.base.errors import ResourceExhaustedError

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

    Slots are reserved for higher levels: a tenth of the limit, at least one slot, for each level between a request
    and the highest level seen in the last 10 s, at most half of the limit together; so all of it is there for the
    highest level, and for everyone where one level is used. Of what a level may use, a client gets at most eight times
    as much as is still free. Clients that want more than there is come to hold equally many, those that want less hold
    what they want (max-min), and there is a slot for a new one. Neither begins before half of the
    limit is used.

    Args:
        subject: What is limited, for messages, for example ``graph 'sentiment'``.
        adaptive: Gives the limit, at most ``limit``; None: the limit is ``limit``.
        is_timed: How long its requests take says something of the load; of streams it does not.

    Attributes:
        limit: Requests at once; 0 means no limit.
        maximum: What ``limit`` is never above; 0 means nothing.
        setting: Where the limit is set, for messages.
        num_named: Of these, those of clients with a key.
        seen_ns: When a request of each level came last; the controller writes it.
        median_ns: Of the latency of answers; 0 while it is not known.
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
        """What it limits streams now: the limit is ``maximum`` alone."""
        self.is_timed, self._adaptive, self.limit = False, None, self.maximum
        self.setting, self.median_ns = self._setting, 0.0

    def set_maximum(self, maximum: int) -> None:
        """The limit is, or where it is adaptive is not above, ``maximum``; 0 means that there is none."""
        self.maximum = self.limit = maximum
        if self._adaptive is not None:
            self._adaptive.set_maximum(maximum)
            self.limit = self._adaptive.limit

    @property
    def is_crowded(self) -> bool:
        """Whether half of the limit is in flight: from here on requests may be refused."""
        return 2 * self.num_inflight >= self.limit > 0

    @property
    def is_busy(self) -> bool:
        """Whether more than three quarters of the limit are in flight: optional work is skipped."""
        return 4 * self.num_inflight > 3 * self.limit > 0

    def num_slots(self, level: int, now_ns: int) -> int:
        """How many more requests of the level may be admitted now; not above 0 for none. Only with a limit."""
        limit = self.limit
        num_free = limit - self.num_inflight
        if num_free <= 0 or not self.is_crowded:
            return num_free
        top = next(i for i, at_ns in enumerate(self.seen_ns) if now_ns - at_ns < _SEEN_NS or i == level)
        num_levels = level - top
        return num_free - min(max(num_levels, -(-num_levels * limit // _RESERVE)), limit // 2)

    def why_refused(self, level: int, client: str, now_ns: int) -> str:
        """Why a request cannot be admitted now: ``limit``, ``priority`` or ``client_share``; "" where it can."""
        if not self.is_crowded:
            return ""
        num_slots = self.num_slots(level, now_ns)
        if num_slots <= 0:
            return "limit" if self.num_inflight >= self.limit else "priority"
        is_shared = client or self.num_named
        return "client_share" if is_shared and self.num_of(client) >= _CLIENT_FACTOR * num_slots else ""

    def may_wait(self, level: int, client: str, reason: str) -> bool:
        """Whether a request that cannot be admitted may wait: where the limit is adaptive.

        Beside others a client may wait while it has less in flight than the limit divided by the clients.
        """
        if self._adaptive is None or reason == "client_share":
            return False
        num_clients = len(self._clients) + (self.num_inflight > self.num_named)
        if num_clients > 1 and self.num_of(client) * num_clients >= self.limit:
            return False
        return self.queue.num_waiting < self.max_waiting or self.queue.last_below(level) is not None

    @property
    def max_waiting(self) -> int:
        """How many may wait: as many as the limit."""
        return max(2, self.limit)

    @property
    def max_wait_s(self) -> float:
        """How long each may wait."""
        return _MAX_WAIT_LATENCIES * max(self.median_ns, _MIN_LATENCY_NS) / 1e9

    def is_too_late(self, deadline_ns: int | None, now_ns: int) -> bool:
        """Whether a request has no time left, or less than half of the latest answers took."""
        if deadline_ns is None:
            return False
        left_ns = deadline_ns - now_ns
        return left_ns <= 0 or left_ns < self.expected_ns(now_ns)

    def num_of(self, client: str) -> int:
        """Requests that a client has in flight."""
        return self._clients.get(client, 0) if client else self.num_inflight - self.num_named

    def expected_ns(self, now_ns: int) -> float:
        """Median latency of the latest answers; 0 where it is not known, or nothing is in flight."""
        if self._num_answers < _MIN_ANSWERS or not self.num_inflight:
            return 0.0
        is_old = now_ns - self._last_answer_ns > _MEDIAN_AGE_NS + 2 * self.median_ns
        return 0.0 if is_old else self.median_ns

    def enter(self, client: str, now_ns: int) -> None:
        """One more request is in flight; ``leave`` must follow."""
        self.num_inflight += 1
        if client:
            self.num_named += 1
            self._clients[client] = self._clients.get(client, 0) + 1
        if self._adaptive is not None:
            self._adaptive.enter(now_ns)

    def leave(self, client: str, duration_ns: int, now_ns: int, outcome: Outcome) -> None:
        """A request that was in flight for ``duration_ns`` has ended."""
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
    """Gives each refused request the time at which a slot becomes free for it.

    So they come back as fast as slots become free, and not all at once: each refused request is told to come later
    than the one before, by the mean time between two requests that end.
    """

    def __init__(self, generator: random.Random) -> None:
        self._generator = generator
        self._interval_ns = 0.0
        self._last_end_ns = 0
        self._next_ns = 0.0

    def ended(self, now_ns: int) -> None:
        """A request has ended, and its slot is free."""
        if self._last_end_ns:
            interval_ns = min(now_ns - self._last_end_ns, _MAX_INTERVAL_NS)
            smoothing = _INTERVAL_SMOOTHING if self._interval_ns else 1.0
            self._interval_ns += smoothing * (interval_ns - self._interval_ns)
        self._last_end_ns = now_ns

    def retry_after_ms(self, now_ns: int) -> int:
        """Time for the next refused request, between 10 ms and 5 s."""
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
        """Remove a waiter; whether it was there."""
        if waiter not in self._levels[level]:
            return False
        del self._levels[level][waiter]
        self.num_waiting -= 1
        return True

    def next(self) -> tuple[int, T] | None:
        """The next to be admitted, with its level."""
        return next(((i, next(reversed(level))) for i, level in enumerate(self._levels) if level), None)

    def last_below(self, level: int) -> tuple[int, T] | None:
        """The one to refuse for one of this level: of the lowest level below it, the one that has waited longest."""
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
        """One more request is in flight; ``leave`` must follow.

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
        """A request that was in flight for ``duration_ns`` is over."""
        self.num_inflight -= 1
        smoothing = _DURATION_SMOOTHING if self._mean_duration_ns else 1.0
        self._mean_duration_ns += smoothing * (duration_ns - self._mean_duration_ns)
