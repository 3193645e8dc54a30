"""Expiry times of waiting requests."""

import heapq

from weft.serving.request.request import InferenceRequest

#: Stale times that may accumulate, beside one for each live one, before they are removed.
_MAX_STALE = 64


class Expiries:
    """Expiry times by request. Adding and removing cost O(log n) at most.

    The key of a request is its ``sequence``, its number in its queue.

    Args:
        num_times: Times that a request may have.

    Attributes:
        requests: Those that have times, passed ones included, by their number; read only.
    """

    def __init__(self, num_times: int = 1) -> None:
        self._num_times = num_times
        # Only numbers, so that a stale time does not keep a request and its tensors in memory.
        self._times: list[tuple[int, int]] = []
        self.requests: dict[int, InferenceRequest] = {}

    def __len__(self) -> int:
        """Times that are kept, stale ones included."""
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

    def is_sound(self) -> bool:
        """Whether every request that has times has one that is kept; for tests."""
        return self.requests.keys() <= {number for _, number in self._times}

    def next_ns(self) -> int | None:
        """The first time; None if there is none."""
        while self._times and self._times[0][1] not in self.requests:
            heapq.heappop(self._times)
        return self._times[0][0] if self._times else None
