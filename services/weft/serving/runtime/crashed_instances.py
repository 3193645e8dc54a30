"""Crashed instances, which take no batches until they are loaded again, and loads that take long."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Hashable

from weft.base.errors import UnavailableError
from weft.base.observing.logs import get_logger

#: Pauses between the attempts to load a lost backend again, in seconds; the last one repeats. The first attempt is
#: immediate, unless the backend was lost again within ``STABLE_S``.
PAUSES_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
#: A backend that runs for so long counts as repaired.
STABLE_S = 30.0
#: A load is logged after so many seconds, and again after each further period. It then no longer counts against the
#: loads at once, and a lost instance that is loaded again no longer keeps its model's calls waiting.
SLOW_S = 30.0
PERIOD_S = 60.0
_LOG = get_logger("weft.serving")


class CrashedInstances:
    """Which instances have crashed or hang, and why; lives on the event loop.

    Attributes:
        reasons: By lost instance.
        includes_all: Every instance hangs, or is lost and could not be loaded again, or not soon.
        is_loading: That is so because they are still being loaded.
    """

    def __init__(self, model: str, num_instances: int) -> None:
        self._model = model
        self._num_instances = num_instances
        self.reasons: dict[Hashable, str] = {}
        self.includes_all = self.is_loading = False
        self._failed: set[Hashable] = set()

    def add(self, instance: Hashable, reason: str, *, is_hung: bool = False, is_loading: bool = False) -> None:
        """Note that the instance is lost or hangs, or that the latest attempt to load it again failed or takes long."""
        if is_hung or instance in self.reasons:
            self._failed.add(instance)
        self.is_loading = is_loading
        self.reasons[instance] = reason
        self.includes_all = len(self._failed) == self._num_instances

    def remove(self, instance: Hashable) -> None:
        """Note that the instance is loaded again."""
        self.reasons.pop(instance, None)
        self._failed.discard(instance)
        self.includes_all = False

    def __str__(self) -> str:
        """Every reason; "" if none is lost."""
        return "; ".join(self.reasons.values())

    def error(self) -> UnavailableError:
        """Error for a request while no instance is left."""
        return UnavailableError(f"no instance of model '{self._model}' runs: {self}; it is tried again and again")


@contextlib.asynccontextmanager
async def until_slow(turn: asyncio.Lock | asyncio.Semaphore) -> AsyncIterator[None]:
    """Hold a turn during a load, and give it back early if the load takes long: it then holds up no other."""
    await turn.acquire()
    with contextlib.ExitStack() as held:
        held.callback(turn.release)
        held.callback(asyncio.get_running_loop().call_later(SLOW_S, held.close).cancel)
        yield


class LoadWatch:
    """Watches one load after another of an instance; lives on ``loop``. ``what`` names the instance in messages.

    ``on_slow`` is called with a message when a load has taken ``SLOW_S``, ``on_limit`` after ``limit_s`` (0: no limit).
    """

    def __init__(
        self,
        what: str,
        limit_s: float,
        on_slow: Callable[[str], None],
        on_limit: Callable[[str], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._what = what
        self._limit_s = limit_s
        self._on_slow = on_slow
        self._on_limit = on_limit
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """A load begins."""
        self._wait(0.0, SLOW_S)

    def stop(self) -> None:
        """It has ended."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self, passed_s: float, pause_s: float) -> None:
        if self._limit_s:
            pause_s = min(pause_s, self._limit_s - passed_s)
        self._timer = self._loop.call_later(pause_s, self._report, passed_s + pause_s)

    def _report(self, passed_s: float) -> None:
        if self._limit_s and passed_s >= self._limit_s:
            self._timer = None
            text = f"{self._what} was not loaded within {passed_s:g} s, its load_timeout_s"
            _LOG.error("%s", text)
            self._on_limit(text)
            return
        text = f"{self._what} has been loading for {passed_s:g} s: its import or initialize does not return"
        _LOG.warning("%s", text)
        if passed_s == SLOW_S:
            self._on_slow(text)
        self._wait(passed_s, PERIOD_S)
