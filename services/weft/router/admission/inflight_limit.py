"""How many requests may be in flight; the one beyond is refused before any work is done for it."""

from weft.base.errors import ResourceExhaustedError

_MIN_RETRY_MS = 10
_MAX_RETRY_MS = 5_000
#: Weight of the newest request in the running mean of durations.
_SMOOTHING = 0.1


class InflightLimit:
    """Counts requests in flight against a limit.

    Args:
        subject: What is limited, for messages, for example ``graph 'sentiment'``.
        limit: Requests at once; 0 means no limit.
        setting: Where the limit is set, for messages.
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
            retry_after_ms = min(max(int(self._mean_duration_ns / 1e6), _MIN_RETRY_MS), _MAX_RETRY_MS)
            raise ResourceExhaustedError(
                f"{self._subject} has {self.num_inflight} requests in flight, and {self._setting} allows "
                f"{self._limit}; try again in {retry_after_ms} ms",
                retry_after_ms=retry_after_ms,
            )
        self.num_inflight += 1

    def leave(self, duration_ns: int) -> None:
        """A request that was in flight for ``duration_ns`` is over."""
        self.num_inflight -= 1
        if self._mean_duration_ns:
            self._mean_duration_ns += _SMOOTHING * (duration_ns - self._mean_duration_ns)
        else:
            self._mean_duration_ns = duration_ns
