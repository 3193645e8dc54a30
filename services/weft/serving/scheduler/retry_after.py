"""The hint ``retry_after_ms`` for requests that find the queue full."""

import math

#: Hint before anything was measured, and the least for stateful sequences, whose end is not known.
DEFAULT_RETRY_AFTER_MS = 100
#: Weight of the newest execution in the running mean of the time that a request takes.
_NEWEST_WEIGHT = 0.1


class RetryAfter:
    """Estimates when the requests that wait now will have been executed, from measured executions.

    Args:
        num_instances: That execute at once.
        has_sequences: The hint is at least ``DEFAULT_RETRY_AFTER_MS``.
    """

    def __init__(self, num_instances: int, *, has_sequences: bool) -> None:
        self._num_instances = num_instances
        self._least_ms = DEFAULT_RETRY_AFTER_MS if has_sequences else 1
        self._request_ns = 0.0

    def measured(self, num_requests: int, duration_ns: int) -> None:
        """Add the duration of an execution of at least one request."""
        request_ns = duration_ns / num_requests
        self._request_ns += (request_ns - self._request_ns) * (_NEWEST_WEIGHT if self._request_ns else 1.0)

    def hint_ms(self, num_queued: int) -> int:
        """Milliseconds until so many requests have been executed."""
        if not self._request_ns:
            return DEFAULT_RETRY_AFTER_MS
        return max(self._least_ms, math.ceil(num_queued * self._request_ns / self._num_instances / 1e6))
