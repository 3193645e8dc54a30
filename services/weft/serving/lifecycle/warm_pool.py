"""Which models that load on demand are loaded: as many as fit; the least recently used are unloaded first."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from weft.base.errors import UnavailableError, WeftError
from weft.base.observing.logs import get_logger
from weft.base.signature import ModelSignature
from weft.base.statistics import LatencyHistogram
from weft.serving.runtime.crashed_instances import until_slow

_log = get_logger("weft.serving.warm_pool")


@dataclass(frozen=True, slots=True)
class WarmLimits:
    """Limits on what is loaded at once; 0: no limit.

    Attributes:
        num_bytes: Sum of the sizes of the versions' files. A larger version is loaded alone.
        idle_s: A version without a request for so long is unloaded.
    """

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
    """Of one model version: durations of loads, failed loads, unloads to make room and after idle time."""

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

    Requests for a model that is not loaded share one load. A model in use, or held, is never unloaded: where all are,
    the next load waits until one is free.
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
        """Model versions that are loaded."""
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
                    member.loading.add_done_callback(_ignore_error)
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
            self._wake()

    def freed(self) -> None:
        """Note that a model is no longer held."""
        self._wake()

    async def remove(self, model: Warmable) -> None:
        """Unload the model for good; the caller ensures that nobody enters any longer."""
        member = self._members.pop(model, None)
        if member is None:
            return
        if member.loading is not None:
            member.loading.cancel()
            await asyncio.wait([member.loading])
        if member.is_warm:
            member.is_warm = False
            await model.cool()
        self._wake()

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

    def _wake(self) -> None:
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
                    await self._make_room()
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
            self._wake()

    def _has_room(self, num_bytes: int) -> bool:
        num_warm, limits = self.num_warm, self._limits
        return not num_warm or not (
            0 < limits.num_models <= num_warm or 0 < limits.num_bytes < self.num_warm_bytes + num_bytes
        )

    async def _make_room(self) -> None:
        free = self._free()
        if free:
            self._counters(free[0]).num_evicted += 1
            await self._cool(free[0])
        else:
            await self._changed.wait()

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
            self._wake()
        _log.info("unloaded until it is asked for", extra={"model": member.model.signature.name})

    def _counters(self, member: _Member) -> ColdStarts:
        signature = member.model.signature
        return self.cold_starts.setdefault((signature.name, signature.version), ColdStarts())


def _ignore_error(task: "asyncio.Task[None]") -> None:
    if not task.cancelled():
        task.exception()  # whoever waited has left
