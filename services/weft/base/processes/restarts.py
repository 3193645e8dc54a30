"""When to start a service again that died."""

import random
import time
from collections import deque
from collections.abc import Callable

#: Pause before the first attempt, in seconds; drawn between the two, so that services that died together start at
#: different moments.
FIRST_PAUSE_S = (0.1, 0.5)
#: Longest pause, in seconds.
MAX_PAUSE_S = 30.0
#: A service that has served for so long counts as stable: the pauses begin anew.
STABLE_S = 60.0
#: A service that dies so often within the window cannot stay up.
MAX_DEATHS = 5
DEATH_WINDOW_S = 300.0


class RestartPolicy:
    """Pauses that double up to a cap; one policy for each service.

    Args:
        clock_s: Seconds that never go back.
        draw: A number from 0 to 1, for the jitter.

    Attributes:
        attempt: Number of the next start, counted from when the service was last stable.
    """

    def __init__(
        self, clock_s: Callable[[], float] = time.monotonic, draw: Callable[[], float] = random.random
    ) -> None:
        self.attempt = 0
        self._clock_s = clock_s
        self._draw = draw
        self._deaths: deque[float] = deque()
        self._serving_since_s: float | None = None

    @property
    def num_deaths(self) -> int:
        """Deaths within the last ``DEATH_WINDOW_S``."""
        return len(self._deaths)

    @property
    def is_hopeless(self) -> bool:
        """Whether it died so often that a person must help; attempts go on, at the longest pause."""
        return self.num_deaths >= MAX_DEATHS

    def serves(self) -> None:
        """Note that the service serves from now on."""
        self._serving_since_s = self._clock_s()

    def died(self) -> float:
        """Note that the service died or could not start; returns the pause before the next start, in seconds."""
        now_s = self._clock_s()
        if self._serving_since_s is not None and now_s - self._serving_since_s >= STABLE_S:
            self.attempt = 0
            self._deaths.clear()
        self._serving_since_s = None
        self._deaths.append(now_s)
        while now_s - self._deaths[0] > DEATH_WINDOW_S:
            self._deaths.popleft()
        self.attempt += 1
        if self.attempt == 1:
            least_s, most_s = FIRST_PAUSE_S
        else:
            doubled_s = FIRST_PAUSE_S[1] * 2.0 ** min(self.attempt - 1, 10)  # unbounded it would overflow one day
            most_s = MAX_PAUSE_S if self.is_hopeless else min(doubled_s, MAX_PAUSE_S)
            least_s = most_s / 2
        return least_s + (most_s - least_s) * self._draw()
