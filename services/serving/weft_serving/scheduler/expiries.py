"""When requests that wait will be too late."""

import heapq
from collections.abc import Iterator

from weft_serving.request.request import InferenceRequest

#: Stale times that may pile up, beside one for each live one, before they are swept out.
_MAX_STALE = 64


class Expiries:
    """Times by request. Adding and removing cost O(log n) at most.

    A request is known by its ``sequence``, its number in its queue.

    Args:
        num_times: How many a request may have.
    """

    def __init__(self, num_times: int = 1) -> None:
        self._num_times = num_times
        # Only numbers, so that a stale time does not keep a request and its tensors in memory.
        self._times: list[tuple[int, int]] = []
        self._requests: dict[int, InferenceRequest] = {}

    def __iter__(self) -> Iterator[InferenceRequest]:
        """Requests that have times, passed ones included."""
        return iter(self._requests.values())

    def __len__(self) -> int:
        """Times that are kept, stale ones included."""
        return len(self._times)

    def add(self, request: InferenceRequest, expiry_ns: int) -> None:
        """The request is due at ``expiry_ns`` too."""
        if len(self._times) > 2 * self._num_times * len(self._requests) + _MAX_STALE:
            self._times = [entry for entry in self._times if entry[1] in self._requests]
            heapq.heapify(self._times)
        self._requests[request.sequence] = request
        heapq.heappush(self._times, (expiry_ns, request.sequence))

    def discard(self, request: InferenceRequest) -> None:
        """The request has no times any more."""
        self._requests.pop(request.sequence, None)

    def pop(self, now_ns: int) -> InferenceRequest | None:
        """A request one of whose times has come; that time is forgotten. None: there is none."""
        next_ns = self.next_ns()
        if next_ns is None or next_ns > now_ns:
            return None
        return self._requests[heapq.heappop(self._times)[1]]

    def is_sound(self) -> bool:
        """Whether every request that has times has one that is kept; for tests."""
        return self._requests.keys() <= {number for _, number in self._times}

    def next_ns(self) -> int | None:
        """The first time; None if there is none."""
        while self._times and self._times[0][1] not in self._requests:
            heapq.heappop(self._times)
        return self._times[0][0] if self._times else None
