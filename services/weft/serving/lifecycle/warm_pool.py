"""Keeps as many on-demand models loaded as fit; unloads the least recently used first."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from weft.base.core import CallContext, InferCall, InferResult
from weft.base.errors import DeadlineExceededError, RequestCancelledError, UnavailableError, WeftError
from weft.base.observing.logs import get_logger
from weft.base.signature import ModelSignature
from weft.base.statistics import LatencyHistogram, ModelStatistics
from weft.serving.backends.base import ModelContext
from weft.serving.runtime.idle import SLOW_S, CrashedInstances, until_slow
from weft.serving.runtime.model import SequenceModel, ServedModel

_log = get_logger("weft.serving.warm_pool")


@dataclass(frozen=True, slots=True)
class WarmLimits:
    """Limits on what is loaded at once; 0: no limit. A version larger than ``num_bytes`` is loaded alone."""

    num_models: int = 0
    num_bytes: int = 0
    idle_s: float = 0.0


class Warmable(Protocol):
    """A model version that can be loaded and unloaded; only the pool calls these."""

    signature: ModelSignature

    @property
    def is_held(self) -> bool:
        """Whether it must stay loaded without a running request, because a stateful sequence has not ended."""

    async def num_bytes(self) -> int:
        """Size of its files."""

    async def warm(self) -> None:
        """Load it. Raises WeftError."""

    async def cool(self) -> None:
        """Unload it."""


@dataclass(slots=True)
class ColdStarts:
    """Load counters of one model version: durations, failures, unloads to make room and after idle time."""

    seconds: LatencyHistogram = field(default_factory=LatencyHistogram)
    num_failed: int = 0
    num_evicted: int = 0
    num_idled: int = 0


@dataclass(slots=True, eq=False)
class _Member:
    model: Warmable
    num_bytes: int
    used_s: float
    num_users: int = 0
    is_warm: bool = False
    is_leaving: bool = False
    loading: "asyncio.Task[None] | None" = None


class WarmPool:
    """Loads models on use and unloads them. Lives on one event loop.

    Requests for a model that is not loaded share one load. A model in use, or held, is never unloaded: if all are, the
    next load waits until one is free.
    """

    def __init__(self, limits: WarmLimits, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock_s = clock_s
        self._members: dict[Warmable, _Member] = {}
        self._changed = asyncio.Event()
        self._turn = asyncio.Lock()
        self.cold_starts: dict[tuple[str, str], ColdStarts] = {}

    @property
    def num_warm(self) -> int:
        """Number of loaded model versions."""
        return sum(member.is_warm for member in self._members.values())

    @property
    def num_warm_bytes(self) -> int:
        """Sum of their files' sizes."""
        return sum(member.num_bytes for member in self._members.values() if member.is_warm)

    def try_enter(self, model: Warmable) -> bool:
        """As ``enter`` if the model is loaded; else return False and do nothing."""
        member = self._members.get(model)
        if member is None or not member.is_warm or member.is_leaving:
            return False
        member.num_users += 1
        return True

    async def enter(self, model: Warmable) -> None:
        """Load the model, if needed, and keep it loaded until ``leave``.

        Raises a WeftError; the next request tries again. Cancelling the awaiting task does not cancel a load that
        others wait for, or that has started.
        """
        member = self._members.get(model)
        if member is None:
            member = self._members.setdefault(model, _Member(model, await model.num_bytes(), self._clock_s()))
        member.num_users += 1
        try:
            while not member.is_warm or member.is_leaving:
                if member.loading is None:
                    member.loading = asyncio.create_task(self._load(member))
                    member.loading.add_done_callback(lambda task: task.cancelled() or task.exception())
                await self._loaded(member, member.loading)
        except BaseException:
            self.leave(model)
            raise

    def leave(self, model: Warmable) -> None:
        """End one use of the model."""
        member = self._members.get(model)
        if member is None:  # it was removed meanwhile
            return
        member.num_users -= 1
        member.used_s = self._clock_s()
        if not member.num_users:
            self.wake()

    async def remove(self, model: Warmable) -> None:
        """Unload the model for good; the caller ensures that nobody enters it any more."""
        member = self._members.pop(model, None)
        if member is None:
            return
        if member.loading is not None:
            member.loading.cancel()
            await asyncio.wait([member.loading])
        if member.is_warm:
            member.is_warm = False
            await model.cool()
        self.wake()

    async def run(self) -> None:
        """Unload idle models, for ever."""
        idle_s = self._limits.idle_s
        while idle_s:
            await self.cool_idle()
            used_s = [member.used_s for member in self._members.values() if member.is_warm]
            await asyncio.sleep(max(min(used_s, default=self._clock_s()) + idle_s - self._clock_s(), idle_s / 10))

    async def cool_idle(self) -> None:
        """Unload the models that have been idle for long enough."""
        before_s = self._clock_s() - self._limits.idle_s
        for member in self._free():
            if member.used_s <= before_s:
                self._counters(member).num_idled += 1
                await self._cool(member)

    async def _loaded(self, member: _Member, loading: "asyncio.Task[None]") -> None:
        try:
            await asyncio.shield(loading)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if loading.cancelled() and not (task and task.cancelling()):
                raise UnavailableError(
                    f"model '{member.model.signature.name}' is being unloaded; try again later"
                ) from None
            raise

    def wake(self) -> None:
        """Look again for models to unload: one is no longer held, or something else changed."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _load(self, member: _Member) -> None:
        """Make room and load, one model at a time unless one takes long, so that two do not evict each other."""
        counters = self._counters(member)
        try:
            async with until_slow(self._turn):
                while member.is_leaving:
                    await self._changed.wait()
                while not self._has_room(member.num_bytes):
                    if free := self._free():
                        self._counters(free[0]).num_evicted += 1
                        await self._cool(free[0])
                    else:
                        await self._changed.wait()
                start_s = time.monotonic()
                await member.model.warm()
                counters.seconds.observe(time.monotonic() - start_s)
                member.is_warm = True
                member.used_s = self._clock_s()
        except WeftError:
            counters.num_failed += 1
            raise
        finally:
            member.loading = None
            self.wake()

    def _has_room(self, num_bytes: int) -> bool:
        num_warm, limits = self.num_warm, self._limits
        return not num_warm or not (
            0 < limits.num_models <= num_warm or 0 < limits.num_bytes < self.num_warm_bytes + num_bytes
        )

    def _free(self) -> list[_Member]:
        warm = [m for m in self._members.values() if m.is_warm and not m.num_users and not m.is_leaving]
        free = [member for member in warm if not member.model.is_held]
        return sorted(free, key=lambda member: member.used_s)

    async def _cool(self, member: _Member) -> None:
        member.is_leaving = True
        try:
            await member.model.cool()
        finally:
            member.is_warm = member.is_leaving = False
            self.wake()
        _log.info("unloaded until it is asked for", extra={"model": member.model.signature.name})

    def _counters(self, member: _Member) -> ColdStarts:
        signature = member.model.signature
        return self.cold_starts.setdefault((signature.name, signature.version), ColdStarts())


class OnDemandModel:
    """Answers like a ``ServedModel``; the first request after a pause waits until the model is loaded.

    It is ready as soon as its configuration is valid. Requests for a model that cannot be loaded get the reason.
    ``make`` creates the model for each load, with the statistics of all loads; the size of the version folder counts
    against the limit of ``pool``.
    """

    def __init__(self, make: Callable[[ModelStatistics], ServedModel], context: ModelContext, pool: WarmPool) -> None:
        self.signature = signature = context.signature
        self.statistics = ModelStatistics(signature.name, signature.version)
        self.label = f"'{signature.name}' version {signature.version}"
        self._make = make
        self._directory = context.directory
        self._pool = pool
        self._served: ServedModel | None = None
        self._none_crashed = CrashedInstances(signature.name, 1)
        self._is_accepting = False
        self._grace_s = 0.0

    async def start(self) -> None:
        """Accept requests, without loading."""
        self._is_accepting = True

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        """As ``ServedModel.infer``, once loaded. Raises DeadlineExceededError or a WeftError for the load."""
        async with self._in_use(context) as served:
            return await served.infer(call, context)

    async def stream(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        """As ``ServedModel.stream``, once the model is loaded. Raises as ``infer``."""
        async with (
            self._in_use(context) as served,
            contextlib.aclosing(served.stream(call, context)) as responses,
        ):
            async for response in responses:
                yield response

    @property
    def crashed(self) -> CrashedInstances:
        """Lost instances, while the model is loaded; a load that takes long counts as one."""
        return self._none_crashed if self._served is None else self._served.crashed

    async def stop(self, *, grace_s: float) -> None:
        """As ``ServedModel.stop``."""
        self._is_accepting = False
        self._grace_s = grace_s
        await self._pool.remove(self)

    async def num_bytes(self) -> int:
        """Size of the files in the version folder."""

        def size_bytes() -> int:
            return sum(path.stat().st_size for path in self._directory.rglob("*") if path.is_file())

        return await asyncio.to_thread(size_bytes)

    @property
    def is_held(self) -> bool:
        """Whether it has a stateful sequence, which an unload would end."""
        return isinstance(self._served, SequenceModel) and self._served.has_sequences

    async def warm(self) -> None:
        """Load the model. Raises WeftError."""
        served = self._make(self.statistics)
        if isinstance(served, SequenceModel):
            served.when_free(self._pool.wake)
        reason = f"model {self.label} has been loading for {SLOW_S:g} s"
        add = partial(self._none_crashed.add, self, reason, is_hung=True, is_loading=True)
        slow = asyncio.get_running_loop().call_later(SLOW_S, add)
        try:
            await served.start()
        finally:
            slow.cancel()
            self._none_crashed.remove(self)
        self._served = served

    async def cool(self) -> None:
        """Unload the model; running requests are answered within the grace of ``stop``."""
        served, self._served = self._served, None
        if served is not None:
            await served.stop(grace_s=self._grace_s)

    @contextlib.asynccontextmanager
    async def _in_use(self, context: CallContext) -> AsyncIterator[ServedModel]:
        if not self._is_accepting:
            raise self._unloading()
        if not self._pool.try_enter(self):
            await self._enter(context)
        try:
            if self._served is None:
                raise self._unloading()
            yield self._served
        finally:
            self._pool.leave(self)

    async def _enter(self, context: CallContext) -> None:
        left_s = None if context.deadline_ns is None else max(0.0, (context.deadline_ns - time.monotonic_ns()) / 1e9)
        try:
            async with asyncio.timeout(left_s):
                await self._pool.enter(self)
        except TimeoutError:
            raise self._failed(
                DeadlineExceededError(
                    f"the deadline passed while model {self.label} was being loaded; it loads on the first request, so "
                    "give that one more time"
                ),
                context,
            ) from None
        except WeftError as error:
            raise self._failed(
                UnavailableError(f"model {self.label} cannot be loaded: {error.message}"), context
            ) from error
        except asyncio.CancelledError:
            self._failed(RequestCancelledError("the request was cancelled"), context)
            raise

    def _unloading(self) -> UnavailableError:
        return UnavailableError(f"model {self.label} is not at ready state: it is being unloaded; try again later")

    def _failed(self, error: WeftError, context: CallContext) -> WeftError:
        self.statistics.record_failure(error, time.monotonic_ns() - context.arrival_ns)
        return error
