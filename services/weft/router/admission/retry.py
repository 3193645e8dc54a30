"""When those that were refused should come back."""

import random

_MIN_RETRY_MS, MAX_RETRY_MS = 10, 5_000
#: Weight of the newest request in the mean time between two that end.
_SMOOTHING = 0.05
_MAX_INTERVAL_NS = 1_000_000_000
#: Each hint is longer or shorter by this share at most.
_JITTER = 0.25


class RetrySlots:
    """Gives each refused request the time at which a slot becomes free for it.

    So they come back as fast as slots become free, and not all at once: each refused request is told to come later
    than the one before, by the mean time between two requests that end.

    Args:
        generator: Draws the jitter.
    """

    __slots__ = ("_generator", "_interval_ns", "_last_end_ns", "_next_ns")

    def __init__(self, generator: random.Random) -> None:
        self._generator = generator
        self._interval_ns = 0.0
        self._last_end_ns = 0
        self._next_ns = 0.0

    def ended(self, now_ns: int) -> None:
        """A request has ended, and its slot is free."""
        if self._last_end_ns:
            interval_ns = min(now_ns - self._last_end_ns, _MAX_INTERVAL_NS)
            self._interval_ns += _SMOOTHING * (interval_ns - self._interval_ns) if self._interval_ns else interval_ns
        self._last_end_ns = now_ns

    def retry_after_ms(self, now_ns: int) -> int:
        """Time for the next refused request, between 10 ms and 5 s."""
        latest_ns = now_ns + MAX_RETRY_MS * 1e6
        self._next_ns = min(max(self._next_ns, now_ns) + self._interval_ns, latest_ns)
        # The jitter must not be cut off where everyone waits for the longest time.
        wait_ms = min((self._next_ns - now_ns) / 1e6, MAX_RETRY_MS / (1 + _JITTER))
        wait_ms *= self._generator.uniform(1 - _JITTER, 1 + _JITTER)
        return max(round(wait_ms), _MIN_RETRY_MS)
