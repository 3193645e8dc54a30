"""The idle instances of a model, also where they share resources with those of other models."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Mapping, Sequence
from typing import TypeVar

from typing_extensions import override

from weft.base.errors import UnavailableError
from weft.base.observing.logs import get_logger
from weft.serving.backends.base import InstanceContext
from weft.serving.queues.queue import RequestQueue
from weft.serving.request.request import InferenceRequest
from weft.serving.scheduler.admission import callers_of
from weft.serving.scheduler.rate_limiter import Contender, RateLimit, RateLimiter, ResourceKey

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
    """Calls ``on_slow`` when a load has taken ``SLOW_S``, ``on_limit`` after ``limit_s`` (0: no limit)."""

    def __init__(
        self,
        what: str,
        limit_s: float,
        on_slow: Callable[[str], None],
        on_limit: Callable[[str], None],
    ) -> None:
        self._what = what
        self._limit_s = limit_s
        self._on_slow = on_slow
        self._on_limit = on_limit
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
        self._timer = asyncio.get_running_loop().call_later(pause_s, self._report, passed_s + pause_s)

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


_InstanceT = TypeVar("_InstanceT", bound=Hashable)


class IdleInstances(deque[_InstanceT]):
    """Idle instances, the longest idle first."""

    def take(self, wanted: Hashable = None) -> _InstanceT:
        """Remove and return an instance: ``wanted``, which must be idle, or the first."""
        if wanted is None:
            return self.popleft()
        index = self.index(wanted)  # type: ignore[arg-type]  # equal to an element is enough
        instance = self[index]
        del self[index]
        return instance

    def give_back(self, instance: _InstanceT, *, is_lost: bool) -> None:
        """Return an instance that has executed; it is idle, unless it is lost."""
        if not is_lost:
            self.append(instance)

    def discard(self, instance: _InstanceT) -> None:
        """Remove an instance, if it is idle."""
        if instance in self:
            self.remove(instance)

    def check_call(self, request: InferenceRequest) -> None:
        """Check that a request that another model sent can get an instance."""

    def open(self) -> None:
        """Start to take part in the sharing of resources."""

    def close(self) -> None:
        """End to take part in the sharing of resources."""


def make_limiter(limits: Mapping[ResourceKey, int]) -> RateLimiter:
    """A limiter on the running event loop."""
    loop = asyncio.get_running_loop()

    def set_alarm(at_ns: int) -> None:
        loop.call_later(max(at_ns - time.monotonic_ns(), 0) / 1e9, limiter.serve)

    limiter = RateLimiter(limits, set_alarm=set_alarm)
    return limiter


def idle_instances(
    limiter: RateLimiter | None,
    instances: Sequence[_InstanceT],
    places: Sequence[InstanceContext],
    queued: Callable[[], RequestQueue],
    dispatch: Callable[[], None],
) -> IdleInstances[_InstanceT]:
    """An empty collection of idle instances; that of a model that shares resources asks the limiter, if any."""
    if limiter is None or all(place.rate_limit is None for place in places):
        return IdleInstances()
    contenders: dict[_InstanceT, Contender] = {}
    for instance, place in zip(instances, places, strict=True):
        limit = place.rate_limit or RateLimit()
        contenders[instance] = Contender(place.name, limit.priority, limit.demands(place.device_id), place.token)
    return RateLimitedInstances(limiter, contenders, queued=queued, dispatch=dispatch)


class RateLimitedInstances(IdleInstances[_InstanceT]):
    """Idle instances that may start now, by the rate limiter; false where none may."""

    def __init__(
        self,
        limiter: RateLimiter,
        contenders: Mapping[_InstanceT, Contender],
        *,
        queued: Callable[[], RequestQueue],
        dispatch: Callable[[], None],
    ) -> None:
        super().__init__()
        self._limiter = limiter
        self._contenders = contenders
        self._queued = queued
        self._dispatch = dispatch
        self._may_start_one: bool | None = None  # None: as many as have resources

    __hash__ = object.__hash__  # type: ignore[assignment]  # a deque has none

    def __eq__(self, other: object) -> bool:
        return self is other

    def __bool__(self) -> bool:
        return any(True for _ in self)

    def __iter__(self) -> Iterator[_InstanceT]:
        """Instances that may start now, in the order of their turns."""
        if self._may_start_one is False:
            return iter(())
        now_ns = time.monotonic_ns()
        idle = sorted(super().__iter__(), key=lambda instance: self._contenders[instance].next_turn)
        return iter([instance for instance in idle if self._limiter.may_start(self._contenders[instance], now_ns)])

    @override
    def take(self, wanted: Hashable = None) -> _InstanceT:
        instance = super().take(next(iter(self)) if wanted is None else wanted)
        self._limiter.start(self._contenders[instance])
        if self._may_start_one is not None:
            self._may_start_one = False
        return instance

    @override
    def give_back(self, instance: _InstanceT, *, is_lost: bool) -> None:
        super().give_back(instance, is_lost=is_lost)
        self._limiter.finish(self._contenders[instance])

    @override
    def check_call(self, request: InferenceRequest) -> None:
        self._limiter.check_call(list(self._contenders.values()), callers_of(request.context.headers))

    @override
    def open(self) -> None:
        self._limiter.join(self, list(self._contenders.values()))

    @override
    def close(self) -> None:
        self._limiter.leave(self)

    def waiting(self) -> list[Contender]:
        """See ``Pool``."""
        queue = self._queued()
        return [self._contenders[instance] for instance in super().__iter__() if queue.has_work_for(instance)]

    def callers(self) -> set[str]:
        """See ``Pool``."""
        return {token for request in self._queued() for token in callers_of(request.context.headers)}

    def run_one(self) -> None:
        """See ``Pool``."""
        self._may_start_one = True
        try:
            self._dispatch()
        finally:
            self._may_start_one = None
