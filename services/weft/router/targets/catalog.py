"""What the targets serve: discovered at start, refreshed in the background, read without waiting; also counts calls."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from typing_extensions import override

from weft.base.cancellation import cancel_and_wait
from weft.base.core import CallContext, IndexEntry, InferCall, InferResult
from weft.base.errors import WeftError
from weft.base.observing.logs import get_logger
from weft.base.repository.layout import version_order
from weft.base.signature import ModelSignature
from weft.base.statistics import ModelStatistics
from weft.router import DEFAULT_RETRY_PERCENT
from weft.router.reporting.counters import count_answer
from weft.router.target import LOADING, RetryBudget, Target, TargetModel
from weft.router.targets.in_process import InProcessTarget
from weft.router.targets.replicated import ReplicatedTarget

#: Pause between two discoveries of a target that answers, in seconds.
POLL_S = 2.0
#: How long one answer may take.
TIMEOUT_S = 2.0
#: First and longest pause after a failed attempt; it doubles. The first is also the shortest between two questions.
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.1, 0.5

#: After this time a target that never answered makes no unknown model UNAVAILABLE any more, in seconds.
FIRST_ANSWER_S = 30.0

ModelVersion = tuple[str, str]

_log = get_logger("weft.router.catalog")


class ObservedTarget(Target):
    """Wraps a target: counts calls by model version and keeps the result of its last discovery.

    Each call counts as one request and one execution, or one hit of the model's response cache. Its whole duration is
    ``compute_infer``; queueing on the other side shows only in its own statistics, so ``queue`` counts calls and no
    time.

    Args:
        statistics: Receives the counters by (model, version); shared by the targets of a router. None: the target keeps
            counters itself.
        on_unavailable: Called with the target's name when an answer is UNAVAILABLE.
        signature_of: Signature of a model by name and version ("" = default), if known.
        budget: Earns from calls that no policy of a graph repeats.

    Attributes:
        num_unavailable: Calls that ended UNAVAILABLE, and requests that ``TargetCatalog.count_missed`` adds.
    """

    def __init__(
        self,
        target: Target,
        statistics: dict[ModelVersion, ModelStatistics] | None,
        on_unavailable: Callable[[str], None],
        signature_of: Callable[[str, str], ModelSignature | None],
        budget: RetryBudget,
    ) -> None:
        self.name = target.name
        self.address = target.address
        self.budget = budget
        self.num_unavailable = 0
        self.wake = asyncio.Event()
        self.models: dict[ModelVersion, TargetModel] = {}
        self.is_reachable = self.has_answered = False
        self.backoff_s = FIRST_BACKOFF_S
        self._target = target
        self._statistics = statistics
        self._on_unavailable = on_unavailable
        self._signature_of = signature_of

    @property
    def num_serving(self) -> int:
        """Number of replicas that take calls; for a single server 1 while it answers."""
        return self._target.num_serving if isinstance(self._target, ReplicatedTarget) else int(self.is_reachable)

    @override
    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        start_ns = time.monotonic_ns()
        if context.tried is None:
            self.budget.earn()
        try:
            result = await self._target.infer(call, context)
        except (WeftError, asyncio.CancelledError) as error:
            self._failed(call, error, start_ns)
            raise
        if self._statistics is not None:
            self._answered(self._statistics, call, context, result.model_version, start_ns, is_cached=result.is_cached)
        return result

    @override
    async def stream_infer(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        """As ``Target.stream_infer``; a stream is one request, which lasts until its end."""
        start_ns = time.monotonic_ns()
        if context.tried is None:
            self.budget.earn()
        version = ""
        try:
            async with contextlib.aclosing(self._target.stream_infer(call, context)) as results:
                async for result in results:
                    version = result.model_version
                    yield result
        except (WeftError, asyncio.CancelledError, GeneratorExit) as error:
            self._failed(call, error, start_ns)
            raise
        if self._statistics is not None:
            self._answered(self._statistics, call, context, version, start_ns)

    @override
    async def discover(self, *, timeout_s: float) -> list[TargetModel]:
        return await self._target.discover(timeout_s=timeout_s)

    @override
    async def close(self) -> None:
        await self._target.close()

    def _answered(
        self,
        statistics: dict[ModelVersion, ModelStatistics],
        call: InferCall,
        context: CallContext,
        version: str,
        start_ns: int,
        *,
        is_cached: bool = False,
    ) -> None:
        counters = statistics.get((call.model_name, version)) or _counters_of(statistics, call, version)
        count_answer(counters, call, context, start_ns, start_ns, is_cached=is_cached)

    def _failed(self, call: InferCall, error: BaseException, start_ns: int) -> None:
        if isinstance(error, WeftError) and error.code == "UNAVAILABLE":
            self.num_unavailable += 1
            self._on_unavailable(self.name)
        if self._statistics is not None:
            signature = self._signature_of(call.model_name, call.model_version)
            version = call.model_version or (signature.version if signature is not None else "1")
            _counters_of(self._statistics, call, version).record_failure(error, time.monotonic_ns() - start_ns)


def _counters_of(statistics: dict[ModelVersion, ModelStatistics], call: InferCall, version: str) -> ModelStatistics:
    """The counters of the version that answered, created at its first call; "" is the requested version."""
    key = call.model_name, version or call.model_version
    counters = statistics.get(key)
    if counters is None:
        counters = statistics[key] = ModelStatistics(*key)
    return counters


class CatalogEntry(NamedTuple):
    """A model version and the name of the target that serves it."""

    target: str
    model: TargetModel


class TargetCatalog:
    """The models of all targets; if several have a model ready, the target given first is used.

    A model stays known, but not ready, while its target does not answer or lists it as loading or broken. Readiness,
    names and versions are read without waiting.

    Args:
        poll_s: Pause between two discoveries of a target, in seconds.
        on_change: Called when a model appears, disappears, changes, or becomes ready or not.
        retry_percent: As of ``RetryBudget``, of each target.

    Attributes:
        targets: By name; calls through them are counted, except by targets in this process, which count themselves.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        *,
        poll_s: float = POLL_S,
        on_change: Callable[[], None] = lambda: None,
        retry_percent: float = DEFAULT_RETRY_PERCENT,
    ) -> None:
        self.budgets: Mapping[str, RetryBudget] = {target.name: RetryBudget(retry_percent) for target in targets}
        self.statistics: dict[ModelVersion, ModelStatistics] = {}
        self.targets: Mapping[str, ObservedTarget] = {
            target.name: ObservedTarget(
                target,
                None if isinstance(target, InProcessTarget) else self.statistics,
                self.wake,
                self._signature_of,
                self.budgets[target.name],
            )
            for target in targets
        }
        self._in_process = [target for target in targets if isinstance(target, InProcessTarget)]
        self.replicated = [target for target in targets if isinstance(target, ReplicatedTarget)]
        #: Targets that are one server each, behind gRPC.
        self.servers = [
            self.targets[one.name] for one in targets if not isinstance(one, InProcessTarget | ReplicatedTarget)
        ]
        for target in self.replicated:
            target.on_change = self.targets[target.name].wake.set
            target.budget = self.budgets[target.name]
        self._poll_s = poll_s
        self._on_change = on_change
        self._known_by_s = 0.0
        self._tasks: list[asyncio.Task[None]] = []
        self._warned: set[str] = set()
        #: Replaced as a whole, never changed, so that another thread may read it.
        self._models: dict[str, dict[str, CatalogEntry]] = {}
        self._defaults: dict[str, CatalogEntry] = {}
        #: Models that were never served so far: the target that is loading one, by name.
        self._loading: dict[str, str] = {}
        #: Models that could not be loaded: why, by name.
        self._faults: dict[str, str] = {}
        #: Models that graphs ask for and that no target has served yet.
        self._missed: set[str] = set()

    @property
    def may_know_more(self) -> bool:
        """Whether a target that never answered may still have models of which nothing is known; for 30 s at most."""
        is_young = asyncio.get_running_loop().time() < self._known_by_s
        return is_young and not all(target.has_answered for target in self.targets.values())

    @property
    def unreachable(self) -> list[str]:
        """Targets that did not answer the last discovery, as ``name (address)``."""
        return [f"{one.name} ({one.address})" for one in self.targets.values() if not one.is_reachable]

    def count_missed(self) -> None:
        """Count a request for an unknown model at every target that does not answer, since any may have it."""
        for target in self.targets.values():
            if not target.is_reachable:
                target.num_unavailable += 1

    async def start(self) -> None:
        """Discover every target once, then periodically."""
        self._known_by_s = asyncio.get_running_loop().time() + FIRST_ANSWER_S
        await asyncio.gather(*map(self._refresh, self.targets.values()))
        self._tasks = [asyncio.create_task(self._watch(target)) for target in self.targets.values()]

    async def close(self) -> None:
        """Stop discovery and close every target."""
        await cancel_and_wait(self._tasks)
        for target in self.targets.values():
            await target.close()

    def wake(self, target: str) -> None:
        """Discover ``target`` now, unless it is lost and polled anyway."""
        if self.targets[target].is_reachable:
            self.targets[target].wake.set()

    def entry(self, name: str, version: str) -> CatalogEntry | None:
        """Find a model version; "" means the highest that is ready, else the highest."""
        return self._models.get(name, {}).get(version) if version else self._defaults.get(name)

    def find(self, model_name: str, version: str) -> tuple[str, ModelSignature] | None:
        """For the compiler: the target that serves a model, and the model's signature."""
        entry = self.entry(model_name, version)
        if entry is None:
            self._missed.add(model_name)
            return None
        return entry.target, entry.model.signature

    def awaited(self) -> Mapping[str, IndexEntry]:
        """Models that may be served soon, and why not yet: those that targets load, and those that graphs name.

        The latter only while a target that may have them does not answer.
        """
        found = {
            name: IndexEntry(name, "", "LOADING", f"target '{target}' is loading it")
            for name, target in self._loading.items()
        }
        if silent := self.unreachable:
            reason = f"a graph calls it, and these targets do not answer: {', '.join(silent)}"
            found = {name: IndexEntry(name, "", "UNAVAILABLE", reason) for name in self._missed} | found
        return {name: entry for name, entry in found.items() if name not in self._models}

    def counters(self) -> list[ModelStatistics]:
        """Counters of every model: its own if it is in this process, else those of calls from here."""
        own = {(c.name, c.version): c for target in reversed(self._in_process) for c in target.statistics()}
        return [own.get(key, seen) for key, seen in self.statistics.items()]

    async def refresh(self, target: str) -> None:
        """Discover ``target`` and return when that is done."""
        await self._refresh(self.targets[target])

    def names(self) -> list[str]:
        """Every model name, of those too that could not be loaded."""
        return [*self._models, *self._faults]

    def fault(self, model_name: str) -> str:
        """Why the target does not serve a model that it lists, in its words; "" if unknown."""
        return self._faults.get(model_name, "")

    def entries(self) -> Iterator[CatalogEntry]:
        """Every model version."""
        for versions in self._models.values():
            yield from versions.values()

    def _signature_of(self, name: str, version: str) -> ModelSignature | None:
        entry = self.entry(name, version)
        return None if entry is None else entry.model.signature

    async def _watch(self, target: ObservedTarget) -> None:
        while True:
            await asyncio.sleep(FIRST_BACKOFF_S)
            pause_s = self._poll_s
            if not target.is_reachable:
                pause_s = target.backoff_s - FIRST_BACKOFF_S
                target.backoff_s = min(2 * target.backoff_s, MAX_BACKOFF_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await target.wake.wait()
            await self._refresh(target)

    async def _refresh(self, target: ObservedTarget) -> None:
        target.wake.clear()
        was_reachable, known = target.is_reachable, target.models
        try:
            models = await target.discover(timeout_s=TIMEOUT_S)
        except Exception as error:
            target.is_reachable = False
            models = [model._replace(is_ready=False, reason="the target does not answer") for model in known.values()]
            if was_reachable or target.backoff_s == FIRST_BACKOFF_S:
                text = error.message if isinstance(error, WeftError) else repr(error)
                _log.warning("target '%s' (%s) does not answer: %s", target.name, target.address, text)
        else:
            target.is_reachable = target.has_answered = True
            target.backoff_s = FIRST_BACKOFF_S
            if not was_reachable:
                _log.info("target '%s' (%s) answers: %d models", target.name, target.address, len(models))
        target.models = {
            key: _stamped(model, known.get(key))
            for model in _with_former(models, known)
            for key in [(model.signature.name, model.signature.version)]
        }
        self._publish()

    def _publish(self) -> None:
        models: dict[str, dict[str, CatalogEntry]] = {}
        loading: dict[str, str] = {}
        faults: dict[str, str] = {}
        ready: dict[str, str] = {}
        used: dict[str, str] = {}  # the first target that has a model, but one where it is ready goes before
        for name, target in self.targets.items():
            for (model, _), found in target.models.items():
                if found.is_described:
                    used.setdefault(model, name)
                if found.is_ready:
                    ready.setdefault(model, name)
        used |= ready
        for key in self.statistics.keys() - {key for target in self.targets.values() for key in target.models}:
            del self.statistics[key]
        for name, target in self.targets.items():
            for (model, version), found in target.models.items():
                if not found.is_described:
                    if found.reason == LOADING:
                        loading.setdefault(model, name)
                    elif found.reason:
                        faults.setdefault(model, found.reason)
                elif used[model] != name:
                    self._warn_twice_served(model, used[model], name)
                else:
                    models.setdefault(model, {})[version] = CatalogEntry(name, found)
                    if (model, version) not in self.statistics:  # a model that was never called has counters too
                        self.statistics[model, version] = ModelStatistics(model, version)
        self._loading, self._faults = loading, faults
        self._missed.difference_update(models)
        if models != self._models:
            self._models = models
            self._defaults = {name: max(versions.values(), key=_preference) for name, versions in models.items()}
            self._on_change()

    def _warn_twice_served(self, model: str, used: str, other: str) -> None:
        if model not in self._warned:
            self._warned.add(model)
            _log.warning(
                "model '%s' is served by the targets '%s' and '%s'; of those where it is ready, the one that was given "
                "first is used", model, used, other,
            )  # fmt: skip


def _with_former(models: Sequence[TargetModel], known: Mapping[ModelVersion, TargetModel]) -> list[TargetModel]:
    """The models; one that is listed but not described keeps its former description, as not ready."""
    found = {(model.signature.name, model.signature.version): model for model in models if model.is_described}
    names = {name for name, _ in found}
    for model in models:
        if not model.is_described:
            name, version = model.signature.name, model.signature.version
            former = {
                key: before._replace(is_ready=False, reason=model.reason)
                for key, before in known.items()
                if before.is_described and key[0] == name and (key[1] == version or (not version and name not in names))
            }
            found |= former or {(name, version): model}
    return list(found.values())


def _stamped(model: TargetModel, before: TargetModel | None) -> TargetModel:
    """The model with the time since which it is not ready."""
    if model.is_ready:
        return model
    since = before.not_ready_since if before is not None else ""
    return model._replace(not_ready_since=since or datetime.now(UTC).isoformat(timespec="seconds"))


def _preference(entry: CatalogEntry) -> tuple[bool, int]:
    return entry.model.is_ready, version_order(entry.model.signature.version)
