"""The priority queue of one model: levels, queue policies, cancellation, expiry.

Plain data structure, one owner, the time is passed in. One place decides the order of service, ``__iter__``: a batcher
walks it, chooses, and takes what it chose.
"""

import heapq
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from itertools import chain, count
from operator import attrgetter
from typing import NamedTuple, Protocol

from weft.base.errors import DeadlineExceededError, ResourceExhaustedError, WeftError
from weft.base.statistics import MAX_COUNTED_LEVEL
from weft.serving.queues.expiries import Expiries
from weft.serving.queues.settings import QueuePolicy, SchedulerSettings
from weft.serving.request.request import InferenceRequest

#: Empty levels that are kept for their next request. Clients choose the level, so their number is bounded.
_MAX_IDLE_LEVELS = 16

#: Multiple of its measured median that an execution gets before the deadline of a member that waits for others.
_ROOM = 2

_rank = attrgetter("rank_ns")


class Expired(NamedTuple):
    """A request that expired in the queue, and the error to answer it with."""

    request: InferenceRequest
    error: WeftError


class RequestQueue(Sized, Iterable[InferenceRequest], Protocol):
    """Requests that wait for an instance, in the order of service."""

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""

    def num_rows_before(self, number: int, /) -> int:
        """Rows of the requests that a new one of level ``number`` would wait for."""

    def num_by_level(self) -> dict[int, int]:
        """Requests that wait, by level. Any thread."""

    def add(self, request: InferenceRequest, now_ns: int) -> None:
        """Queue the request. Raises a WeftError, and changes nothing, where it cannot wait."""

    def take(self, requests: Iterable[InferenceRequest], now_ns: int) -> None:
        """Remove requests, to be executed."""

    def remove(self, request: InferenceRequest) -> bool:
        """Remove a withdrawn request; returns whether it waited."""

    def expire(self, now_ns: int) -> list[Expired]:
        """Remove the requests that have waited too long."""

    def next_expiry_ns(self) -> int | None:
        """When ``expire`` has something to do next; None if never."""


class _Level:
    """Requests of one priority: those in time, then those that a DELAY policy put behind them, each FIFO."""

    __slots__ = ("delayed", "num_rows", "policy", "waiting")

    def __init__(self, policy: QueuePolicy) -> None:
        self.policy = policy
        self.num_rows = 0
        # OrderedDict: removing any entry and reading the first are both O(1), which dict is not after many removals.
        self.waiting: OrderedDict[InferenceRequest, None] = OrderedDict()
        self.delayed: OrderedDict[InferenceRequest, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self.waiting) + len(self.delayed)


class LevelRange:
    """Requests of neighbouring levels of a queue in the order of service; made by ``PriorityQueue.within``."""

    def __init__(self, levels: Mapping[int, _Level], order: Sequence[int], best: int, worst: int) -> None:
        self._levels = levels
        self._order = order
        self._best = best
        self._worst = worst

    def __len__(self) -> int:
        return sum(len(level) for number, level in self._levels.items() if self._best <= number <= self._worst)

    def __iter__(self) -> Iterator[InferenceRequest]:
        for number in self._order:
            if self._best <= number <= self._worst:
                yield from self._levels[number].waiting
                yield from self._levels[number].delayed


class PriorityQueue:
    """Requests that wait for an instance, iterated in the order of service: by level, first in first out within one.

    With ageing, a request of level n is served as one of level 1 that came ``(n - 1) * priority_aging_us`` later. So
    the order of two requests never changes while they wait, and none is overtaken for ever. A request that a DELAY
    policy puts back starts again then, one level lower.

    Adding, removing and expiring a request cost O(log n) at most.

    Attributes:
        num_waiting: Requests that wait.
    """

    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        self._aging_ns = settings.priority_aging_us * 1000
        self._delay_ns = settings.max_queue_delay_us * 1000
        self._levels: dict[int, _Level] = {}
        self._order: list[int] = []  # keys of _levels, sorted
        self._sequence = count()
        self._expiries = Expiries()
        self.num_waiting = 0

    def __len__(self) -> int:
        return self.num_waiting

    def __iter__(self) -> Iterator[InferenceRequest]:
        """Waiting requests in the order of service. The queue must not be changed while it is walked."""
        if len(self._order) == 1 and not (level := self._levels[self._order[0]]).delayed:
            return iter(level.waiting)
        lines: list[OrderedDict[InferenceRequest, None]] = []
        for number in self._order:
            level = self._levels[number]
            lines += (level.waiting, level.delayed) if level.delayed else (level.waiting,)
        return heapq.merge(*lines, key=_rank) if self._aging_ns and len(lines) > 1 else chain.from_iterable(lines)

    def within(self, best: int, worst: int) -> "LevelRange":
        """The waiting requests of levels ``best`` to ``worst``, as they are when they are asked for; without ageing."""
        return LevelRange(self._levels, self._order, best, worst)

    def num_rows_before(self, number: int) -> int:
        """Rows of the requests that a new one of level ``number`` would wait for, without ageing."""
        return sum(self._levels[other].num_rows for other in self._order[: bisect_right(self._order, number)])

    def num_by_level(self) -> dict[int, int]:
        """Waiting requests by level, for metrics; levels above ``MAX_COUNTED_LEVEL`` are counted there. Any thread."""
        counts: dict[int, int] = {}
        for number, level in list(self._levels.items()):
            counted = min(number, MAX_COUNTED_LEVEL)
            counts[counted] = counts.get(counted, 0) + len(level)
        return counts

    def add(self, request: InferenceRequest, now_ns: int) -> None:
        """Queue the request, and set its level, timeout, times and sequence number.

        Args:
            request: With the client's ``priority`` and ``queue_timeout_us``; 0 for none.
            now_ns: Time, ``time.monotonic_ns``.

        Raises:
            ResourceExhaustedError: The level is full. Nothing was changed.
            DeadlineExceededError: The request's deadline has passed. Nothing was changed.
        """
        number = self._settings.level_of(request.priority) if self._settings.priority_levels else 0
        level = self._levels.get(number)
        policy = level.policy if level is not None else self._settings.policy_of(number)
        if 0 < policy.max_queue_size <= (0 if level is None else len(level)):
            where = f" at priority level {number}" if number else ""
            raise ResourceExhaustedError(
                f"Exceeds maximum queue size: {policy.max_queue_size} requests wait{where} already; try again later"
            )
        deadline_ns = request.context.deadline_ns
        if deadline_ns is not None and deadline_ns <= now_ns:
            raise deadline_error(request, now_ns)
        if level is None:
            level = self._add_level(number, policy)
        request.priority = number
        asked_us = request.queue_timeout_us
        request.queue_timeout_us = policy.timeout_us(asked_us) if asked_us else policy.default_timeout_us
        request.enqueue_ns = now_ns
        request.sequence = next(self._sequence)
        request.num_queued_at_arrival = self.num_waiting
        if self._aging_ns:
            request.rank_ns = now_ns + (number - 1) * self._aging_ns
        request.send_by_ns = now_ns + self._delay_ns
        if deadline_ns is not None:
            room_ns = _ROOM * request.expected_ns or (deadline_ns - now_ns) // 2
            request.send_by_ns = max(now_ns, min(request.send_by_ns, deadline_ns - room_ns))
        level.waiting[request] = None
        level.num_rows += request.num_rows
        self.num_waiting += 1
        if request.queue_timeout_us:
            timeout_ns = now_ns + request.queue_timeout_us * 1000
            self._expiries.add(request, timeout_ns if deadline_ns is None else min(timeout_ns, deadline_ns))
        elif deadline_ns is not None:
            self._expiries.add(request, deadline_ns)

    def remove(self, request: InferenceRequest) -> bool:
        """Remove the request; returns whether it waited."""
        level = self._levels.get(request.priority)
        if level is None:
            return False
        if request in level.waiting:
            del level.waiting[request]
        elif request in level.delayed:
            del level.delayed[request]
        else:
            return False
        if self._expiries.requests:
            self._expiries.discard(request)
        level.num_rows -= request.num_rows
        self.num_waiting -= 1
        if len(self._order) > _MAX_IDLE_LEVELS:
            self._forget_if_idle(request.priority, level)
        return True

    def take(self, requests: Iterable[InferenceRequest], now_ns: int) -> None:
        """Remove waiting requests, which are executed now, and set their ``start_ns``."""
        levels, expiries = self._levels, self._expiries
        for request in requests:
            level = levels[request.priority]
            if request in level.waiting:
                del level.waiting[request]
            else:
                del level.delayed[request]
            if expiries.requests:
                expiries.discard(request)
            level.num_rows -= request.num_rows
            self.num_waiting -= 1
            request.start_ns = now_ns
            if len(self._order) > _MAX_IDLE_LEVELS:
                self._forget_if_idle(request.priority, level)

    def expire(self, now_ns: int) -> list[Expired]:
        """Apply timeouts and deadlines that have passed at ``now_ns``.

        Returns:
            Requests that were removed, in the order in which they expired: their deadline has passed, or their queue
            timeout where the policy is REJECT. With DELAY a request moves behind those of its level and stays.
        """
        expired: list[Expired] = []
        while (request := self._expiries.pop(now_ns)) is not None:
            deadline_ns = request.context.deadline_ns
            level = self._levels[request.priority]
            if deadline_ns is not None and deadline_ns <= now_ns:
                self.remove(request)
                expired.append(Expired(request, deadline_error(request, now_ns)))
            elif level.policy.timeout_action == "REJECT":
                self.remove(request)
                expired.append(Expired(request, DeadlineExceededError("Request timeout expired")))
            else:
                del level.waiting[request]
                level.delayed[request] = None
                request.rank_ns = now_ns + request.priority * self._aging_ns
                self._expiries.discard(request)
                if deadline_ns is not None:
                    self._expiries.add(request, deadline_ns)
        return expired

    def next_expiry_ns(self) -> int | None:
        """When ``expire`` has something to do next; None if never."""
        return self._expiries.next_ns() if self._expiries.requests else None

    def check_integrity(self) -> None:
        """Raise AssertionError unless sizes, levels and expiries agree; for tests."""
        waiting = list(self)
        if not (
            len(waiting) == len(set(waiting)) == self.num_waiting
            and sum(request.num_rows for request in waiting) == sum(level.num_rows for level in self._levels.values())
            and self._order == sorted(self._levels)
            and set(self._expiries.requests.values()) <= set(waiting)
            and self._expiries.is_sound()
        ):
            raise AssertionError(f"{self.num_waiting=} {self._order=} {waiting=} {self._expiries.requests=}")

    def _forget_if_idle(self, number: int, level: _Level) -> None:
        if not len(level):
            self._order.remove(number)
            del self._levels[number]

    def _add_level(self, number: int, policy: QueuePolicy) -> _Level:
        level = self._levels[number] = _Level(policy)
        insort(self._order, number)
        return level


def deadline_error(request: InferenceRequest, now_ns: int) -> DeadlineExceededError:
    """Error for a request whose deadline passed in the queue."""
    waited_ms = (now_ns - request.enqueue_ns) / 1e6 if request.enqueue_ns else 0.0
    return DeadlineExceededError(f"deadline passed before execution, after {waited_ms:.1f} ms in the queue")
