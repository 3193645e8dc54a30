"""When a channel may dial again. Policy without I/O."""

from collections.abc import Callable

from weft.wire.client.options import ChannelOptions

#: A connection that ends sooner counts as a failed attempt, if the one before it did too, in seconds.
_SHORT_LIFE_S = 1.0


class Backoff:
    """Exponential backoff between attempts to connect.

    Args:
        options: Times, factor and jitter.
        random: Uniform from 0 to 1.
    """

    def __init__(self, options: ChannelOptions, random: Callable[[], float]) -> None:
        self._options = options
        self._random = random
        self._num_failures = 0
        self._num_short_lives = 0
        self._begun_s = float("-inf")
        self._ready_s = float("-inf")

    def begin(self, now_s: float) -> None:
        """An attempt begins."""
        self._begun_s = now_s

    def succeed(self, now_s: float) -> None:
        """The attempt has given a connection."""
        self._num_failures = 0
        self._ready_s = now_s

    def fail(self, now_s: float) -> float:
        """The attempt has failed; returns the delay before the next one, counted from the start of this one."""
        delay_s = self._delay_s(self._num_failures)
        self._num_failures += 1
        return max(0.0, self._begun_s + delay_s - now_s)

    def lose(self, now_s: float, *, has_served: bool = False) -> float:
        """The connection has ended; returns the delay before the next attempt.

        There is none, unless connections end again and again as soon as they are made and have served no call.
        """
        if has_served or now_s - self._ready_s >= _SHORT_LIFE_S:
            self._num_short_lives = 0
            return 0.0
        self._num_short_lives += 1
        if self._num_short_lives == 1:
            return 0.0
        return max(0.0, self._begun_s + self._delay_s(self._num_short_lives - 2) - now_s)

    def _delay_s(self, num_failures: int) -> float:
        options = self._options
        base_s = options.initial_backoff_s * options.backoff_factor ** min(num_failures, 64)
        jitter = 1.0 + options.backoff_jitter * (2.0 * self._random() - 1.0)
        return min(base_s, options.max_backoff_s) * jitter
