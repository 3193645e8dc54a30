"""The interface of request queues, and ``PolicyQueue``, the base of queue policies.

A queue is a plain data structure with one owner; the time is an argument. Only ``__iter__`` decides the order of
service: a batcher walks it, chooses requests, and takes them.
"""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Sized
from itertools import count
from typing import ClassVar, NamedTuple, Protocol

from typing_extensions import override

from weft.base.errors import DeadlineExceededError, ResourceExhaustedError, WeftError
from weft.serving.queues.settings import SchedulerSettings, WaitPolicy
from weft.serving.request.request import InferenceRequest

#: Stale times that may accumulate, beside one for each live one, before they are removed.
_MAX_STALE = 64
#: Multiple of its measured median that an execution gets before the deadline of a member that waits for others.
_ROOM = 2


class Expiries:
    """Expiry times of requests, up to ``num_times`` for each, by their ``sequence``. All is O(log n) at most."""

    def __init__(self, num_times: int = 1) -> None:
        self._num_times = num_times
        # Only numbers, so that a stale time does not keep a request and its tensors in memory.
        self._times: list[tuple[int, int]] = []
        self.requests: dict[int, InferenceRequest] = {}

    def __len__(self) -> int:
        """Number of times kept, stale ones included."""
        return len(self._times)

    def add(self, request: InferenceRequest, expiry_ns: int) -> None:
        """Add an expiry time of the request."""
        if len(self._times) > 2 * self._num_times * len(self.requests) + _MAX_STALE:
            self._times = [entry for entry in self._times if entry[1] in self.requests]
            heapq.heapify(self._times)
        self.requests[request.sequence] = request
        heapq.heappush(self._times, (expiry_ns, request.sequence))

    def discard(self, request: InferenceRequest) -> None:
        """Remove all times of the request."""
        self.requests.pop(request.sequence, None)

    def pop(self, now_ns: int) -> InferenceRequest | None:
        """Remove one expiry time that has passed, and return its request; None if no time has passed."""
        next_ns = self.next_ns()
        if next_ns is None or next_ns > now_ns:
            return None
        return self.requests[heapq.heappop(self._times)[1]]

    def next_ns(self) -> int | None:
        """The first time; None if there is none."""
        while self._times and self._times[0][1] not in self.requests:
            heapq.heappop(self._times)
        return self._times[0][0] if self._times else None


class Expired(NamedTuple):
    """A request that expired in the queue, and the error to answer it with."""

    request: InferenceRequest
    error: WeftError


class Waiting(Sized, Iterable[InferenceRequest], Protocol):
    """Requests in the order of service."""


class RequestQueue(ABC):
    """Requests that wait for an instance, iterated in the order of service; ``num_waiting`` is thread-safe.

    ``has_levels``: the queue supports ``priority_levels``; otherwise a configuration with it is rejected.
    """

    has_levels: ClassVar[bool] = False

    def __init__(self) -> None:
        self.num_waiting = 0

    def __len__(self) -> int:
        return self.num_waiting

    @abstractmethod
    def __iter__(self) -> Iterator[InferenceRequest]:
        """Waiting requests in service order. The queue must not change during iteration."""

    @abstractmethod
    def add(self, request: InferenceRequest, now_ns: int) -> None:
        """Queue the request. Raises a WeftError, and queues nothing, if it cannot wait."""

    @abstractmethod
    def take(self, requests: Iterable[InferenceRequest], now_ns: int) -> None:
        """Remove waiting requests, which are executed now, and set their ``start_ns``."""

    @abstractmethod
    def remove(self, request: InferenceRequest) -> bool:
        """Remove a withdrawn request; return whether it was waiting."""

    @abstractmethod
    def expire(self, now_ns: int) -> list[Expired]:
        """Remove the requests that have waited too long."""

    @abstractmethod
    def next_expiry_ns(self) -> int | None:
        """Next time at which ``expire`` has work; None if never."""

    def limit_for(self, request: InferenceRequest) -> int:
        """Most requests that may wait in the same place as this one; 0: no limit."""
        return 0

    def num_rows_before(self, request: InferenceRequest) -> int:
        """Least number of rows that are served before a request about to be queued; used to check its deadline."""
        return 0

    def num_by_level(self) -> dict[int, int]:
        """Waiting requests by priority level, for metrics. Thread-safe."""
        return {0: self.num_waiting}

    def has_work_for(self, instance: Hashable) -> bool:
        """Whether a request waits that the instance may execute."""
        return self.num_waiting > 0

    def overtakes(self, request: InferenceRequest, other: InferenceRequest) -> bool:
        """Whether a request may enter a full backend because ``other`` is in it; true for at most one of two."""
        return False

    def apart(self, level: int) -> tuple[Waiting, Waiting]:
        """Two live views: the waiting requests better than a level, and those of it."""
        return self, ()


class PolicyQueue(RequestQueue):
    """Base of queue policies: a subclass orders the requests in ``_insert``, ``_discard`` and ``__iter__``.

    Timeouts, deadlines and expiry are the same for all policies.
    """

    def __init__(self, settings: SchedulerSettings) -> None:
        super().__init__()
        self._settings = settings
        self._delay_ns = settings.max_queue_delay_us * 1000
        self._numbers = count()
        self._expiries = Expiries()

    @abstractmethod
    def _insert(self, request: InferenceRequest) -> WaitPolicy:
        """Give the request its place; returns the policy for its wait.

        Its ``priority`` is the client's and may be changed to the level that is counted. ``enqueue_ns`` and
        ``sequence``, the order of arrival, are set. Raises ResourceExhaustedError, and changes nothing, without room
        (see ``check_room``).
        """

    @abstractmethod
    def _discard(self, request: InferenceRequest) -> bool:
        """Remove the request; returns whether it was there."""

    def _put_back(self, request: InferenceRequest, now_ns: int) -> None:
        """Serve a request whose timeout passed, with the action DELAY, last, if the policy has such an order."""

    def _policy_of(self, request: InferenceRequest) -> WaitPolicy:
        return self._settings.default_policy

    @override
    def add(self, request: InferenceRequest, now_ns: int) -> None:
        """Queue the request, which has the client's ``priority`` and ``queue_timeout_us``, 0 for none.

        Raises ResourceExhaustedError for a full queue, DeadlineExceededError for a deadline that has passed.
        """
        request.sequence = next(self._numbers)
        request.enqueue_ns = now_ns
        policy = self._insert(request)
        deadline_ns = request.context.deadline_ns
        if deadline_ns is not None and deadline_ns <= now_ns:
            self._discard(request)
            raise deadline_error(request, now_ns)
        asked_us = request.queue_timeout_us
        request.queue_timeout_us = policy.timeout_us(asked_us) if asked_us else policy.default_timeout_us
        request.num_queued_at_arrival = self.num_waiting
        request.send_by_ns = now_ns + self._delay_ns
        if deadline_ns is not None:
            room_ns = _ROOM * request.expected_ns or (deadline_ns - now_ns) // 2
            request.send_by_ns = max(now_ns, min(request.send_by_ns, deadline_ns - room_ns))
        self.num_waiting += 1
        if request.queue_timeout_us:
            timeout_ns = now_ns + request.queue_timeout_us * 1000
            self._expiries.add(request, timeout_ns if deadline_ns is None else min(timeout_ns, deadline_ns))
        elif deadline_ns is not None:
            self._expiries.add(request, deadline_ns)

    @override
    def remove(self, request: InferenceRequest) -> bool:
        if not self._discard(request):
            return False
        if self._expiries.requests:
            self._expiries.discard(request)
        self.num_waiting -= 1
        return True

    @override
    def take(self, requests: Iterable[InferenceRequest], now_ns: int) -> None:
        expiries = self._expiries
        for request in requests:
            self._discard(request)
            if expiries.requests:
                expiries.discard(request)
            self.num_waiting -= 1
            request.start_ns = now_ns

    @override
    def expire(self, now_ns: int) -> list[Expired]:
        """Apply timeouts and deadlines up to ``now_ns``; return removed requests, in order. DELAY puts one back."""
        expired: list[Expired] = []
        while (request := self._expiries.pop(now_ns)) is not None:
            deadline_ns = request.context.deadline_ns
            if deadline_ns is not None and deadline_ns <= now_ns:
                self.remove(request)
                expired.append(Expired(request, deadline_error(request, now_ns)))
            elif self._policy_of(request).timeout_action == "REJECT":
                self.remove(request)
                expired.append(Expired(request, DeadlineExceededError("Request timeout expired")))
            else:
                self._put_back(request, now_ns)
                self._expiries.discard(request)
                if deadline_ns is not None:
                    self._expiries.add(request, deadline_ns)
        return expired

    @override
    def next_expiry_ns(self) -> int | None:
        return self._expiries.next_ns() if self._expiries.requests else None

    @override
    def limit_for(self, request: InferenceRequest) -> int:
        return self._settings.default_policy.max_queue_size

    def check_integrity(self) -> None:
        """Raise AssertionError unless sizes and expiries agree; for tests."""
        waiting = list(self)
        if not (
            len(waiting) == len(set(waiting)) == self.num_waiting
            and set(self._expiries.requests.values()) <= set(waiting)
        ):
            raise AssertionError(f"{self.num_waiting=} {waiting=} {self._expiries.requests=}")


def check_room(policy: WaitPolicy, num_waiting: int, where: str = "") -> None:
    """Raise ResourceExhaustedError if as many requests wait as the policy allows.

    ``where`` is the place in the message, for example ``" at priority level 1"``.
    """
    if 0 < policy.max_queue_size <= num_waiting:
        raise ResourceExhaustedError(
            f"Exceeds maximum queue size: {policy.max_queue_size} requests wait{where} already; try again later"
        )


def deadline_error(request: InferenceRequest, now_ns: int) -> DeadlineExceededError:
    """Error for a request whose deadline passed in the queue."""
    waited_ms = (now_ns - request.enqueue_ns) / 1e6 if request.enqueue_ns else 0.0
    return DeadlineExceededError(f"deadline passed before execution, after {waited_ms:.1f} ms in the queue")
