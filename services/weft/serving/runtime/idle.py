"""The idle instances of a model, including those that share resources with other models."""

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
        includes_all: Every instance hangs, or is lost and not being restored soon.
        is_loading: The reason for that is that they are still loading.
    """

    def __init__(self, model: str, num_instances: int) -> None:
        self._model = model
        self._num_instances = num_instances
        self.reasons: dict[Hashable, str] = {}
        self.includes_all = self.is_loading = False
        self._failed: set[Hashable] = set()

    def add(self, instance: Hashable, reason: str, *, is_hung: bool = False, is_loading: bool = False) -> None:
        """Note that the instance crashed or hangs, or that reloading it failed or takes long."""
        if is_hung or instance in self.reasons:
            self._failed.add(instance)
        self.is_loading = is_loading
        self.reasons[instance] = reason
        self.includes_all = len(self._failed) == self._num_instances

    def remove(self, instance: Hashable) -> None:
        """Note that the instance was reloaded."""
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
    """Hold a lock during a load, but release it early if the load takes long, so that it delays no other."""
    await turn.acquire()
    with contextlib.ExitStack() as held:
        held.callback(turn.release)
        held.callback(asyncio.get_running_loop().call_later(SLOW_S, held.close).cancel)
        yield


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
        """Return an instance after an execution; it is idle, unless it crashed."""
        if not is_lost:
            self.append(instance)

    def discard(self, instance: _InstanceT) -> None:
        """Remove an instance, if it is idle."""
        if instance in self:
            self.remove(instance)

    def check_call(self, request: InferenceRequest) -> None:
        """Check that a nested request can get an instance."""

    def open(self) -> None:
        """Join the sharing of resources."""

    def close(self) -> None:
        """Give up the share of rate-limited resources."""


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
    """Create the collection of a model's idle instances, empty; with a limiter, one that shares resources."""
    if limiter is None or all(place.rate_limit is None for place in places):
        return IdleInstances()
    contenders: dict[_InstanceT, Contender] = {}
    for instance, place in zip(instances, places, strict=True):
        limit = place.rate_limit or RateLimit()
        contenders[instance] = Contender(place.name, limit.priority, limit.demands(place.device_id), place.token)
    return RateLimitedInstances(limiter, contenders, queued=queued, dispatch=dispatch)


class RateLimitedInstances(IdleInstances[_InstanceT]):
    """Idle instances that the rate limiter allows to start now; false if there are none."""

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
