"""What the targets serve: discovered at the start, kept up to date, read without waiting."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import NamedTuple

from weft.base.core import IndexEntry
from weft.base.errors import WeftError
from weft.base.observing.logs import get_logger
from weft.base.signature import ModelSignature
from weft.base.statistics import ModelStatistics
from weft.base.versions import version_order
from weft.router.target import DEFAULT_RETRY_PERCENT, LOADING, RetryBudget, Target, TargetModel
from weft.router.targets.in_process import InProcessTarget
from weft.router.targets.observed import ObservedTarget
from weft.router.targets.replicated import ReplicatedTarget

#: Pause between two discoveries of a target that answers, in seconds.
POLL_S = 2.0
#: How long one answer may take.
TIMEOUT_S = 2.0
#: First and longest pause after a failed attempt; it doubles. The first is also the shortest between two questions.
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.1, 0.5

_log = get_logger("weft.router.catalog")


class Availability(NamedTuple):
    """How far a target is there.

    Attributes:
        target: Its name.
        num_serving: Its replicas that take calls; of one server 1 while it answers.
        num_unavailable: Requests that it was not there for.
    """

    target: str
    num_serving: int
    num_unavailable: int


class CatalogEntry(NamedTuple):
    """A model version and the target that serves it."""

    target: str
    model: TargetModel


@dataclass(slots=True)
class _Watched:
    """A target and what it last said."""

    target: ObservedTarget
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    models: dict[tuple[str, str], TargetModel] = field(default_factory=dict)
    is_reachable: bool = False
    backoff_s: float = FIRST_BACKOFF_S


class TargetCatalog:
    """The models of all targets; of those where a model is ready, the one that was given first is used.

    A model of a target that does not answer stays known, but is not ready, and so does one that the target has served
    before and lists as loading or broken now. Readiness, names and versions are read without waiting.

    Args:
        targets: In the order of the command line.
        poll_s: Pause between two questions to a target, in seconds.
        on_change: Called when a model appears, disappears, changes, or becomes ready or not.
        retry_percent: As of ``RetryBudget``, of each target.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        *,
        poll_s: float = POLL_S,
        on_change: Callable[[], None] = lambda: None,
        retry_percent: float = DEFAULT_RETRY_PERCENT,
    ) -> None:
        #: By name: how many calls may be repeated.
        self.budgets: Mapping[str, RetryBudget] = {target.name: RetryBudget(retry_percent) for target in targets}
        self.statistics: dict[tuple[str, str], ModelStatistics] = {}
        self._watched = {
            target.name: _Watched(
                ObservedTarget(
                    target,
                    None if isinstance(target, InProcessTarget) else self.statistics,
                    self.wake,
                    self._signature_of,
                    self.budgets[target.name],
                )
            )
            for target in targets
        }
        #: By name; calls through them are counted, those of targets in this process by the targets themselves.
        self.targets: Mapping[str, Target] = {name: watched.target for name, watched in self._watched.items()}
        self._in_process = [target for target in targets if isinstance(target, InProcessTarget)]
        self.replicated = [target for target in targets if isinstance(target, ReplicatedTarget)]
        for target in self.replicated:
            target.on_change = self._watched[target.name].wake.set
            target.budget = self.budgets[target.name]
        self._poll_s = poll_s
        self._on_change = on_change
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
    def unreachable(self) -> list[str]:
        """Targets that did not answer the last question, as ``name (address)``."""
        return [f"{w.target.name} ({w.target.address})" for w in self._watched.values() if not w.is_reachable]

    def availability(self) -> list[Availability]:
        """Of every target; on any thread."""
        replicated = {target.name: target for target in self.replicated}
        found = []
        for name, watched in self._watched.items():
            replicas = replicated.get(name)
            num_serving = int(watched.is_reachable) if replicas is None else replicas.num_serving
            found.append(Availability(name, num_serving, watched.target.num_unavailable))
        return found

    def count_missed(self) -> None:
        """Count a request for what may be on any target that does not answer: nothing says on which."""
        for watched in self._watched.values():
            if not watched.is_reachable:
                watched.target.num_unavailable += 1

    async def start(self) -> None:
        """Discover every target once, and from now on periodically."""
        await asyncio.gather(*(self._refresh(watched) for watched in self._watched.values()))
        self._tasks = [asyncio.create_task(self._watch(watched)) for watched in self._watched.values()]

    async def close(self) -> None:
        """Stop discovery and close every target."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for watched in self._watched.values():
            await watched.target.close()

    def wake(self, target: str) -> None:
        """Discover ``target`` now instead of at the next turn; a target that is lost is polled anyway."""
        watched = self._watched[target]
        if watched.is_reachable:
            watched.wake.set()

    def entry(self, name: str, version: str) -> CatalogEntry | None:
        """A model version; "" means the highest that is ready, or else the highest."""
        return self._models.get(name, {}).get(version) if version else self._defaults.get(name)

    def find(self, model_name: str, version: str) -> tuple[str, ModelSignature] | None:
        """Name of the target that serves a model, and its signature, for the compiler."""
        entry = self.entry(model_name, version)
        if entry is None:
            self._missed.add(model_name)
            return None
        return entry.target, entry.model.signature

    def awaited(self) -> Mapping[str, IndexEntry]:
        """Models that may be served soon, and why they are not yet: what targets load, and what graphs ask for.

        The latter only while a target does not answer, because it may have them.
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
        """Of every model: its own, where it is in this process, else what was seen of it from here."""
        own = {(c.name, c.version): c for target in reversed(self._in_process) for c in target.statistics()}
        return [own.get(key, seen) for key, seen in self.statistics.items()]

    async def refresh(self, target: str) -> None:
        """What ``target`` serves now is known."""
        await self._refresh(self._watched[target])

    def names(self) -> list[str]:
        """Every model name."""
        return list(self._models)

    def fault(self, model_name: str) -> str:
        """Why the target that lists the model does not serve it, as the target says; "" where none is known."""
        return self._faults.get(model_name, "")

    def entries(self) -> Iterator[CatalogEntry]:
        """Every model version."""
        for versions in self._models.values():
            yield from versions.values()

    def _signature_of(self, name: str, version: str) -> ModelSignature | None:
        entry = self.entry(name, version)
        return None if entry is None else entry.model.signature

    async def _watch(self, watched: _Watched) -> None:
        while True:
            await asyncio.sleep(FIRST_BACKOFF_S)
            pause_s = self._poll_s
            if not watched.is_reachable:
                pause_s = watched.backoff_s - FIRST_BACKOFF_S
                watched.backoff_s = min(2 * watched.backoff_s, MAX_BACKOFF_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await watched.wake.wait()
            await self._refresh(watched)

    async def _refresh(self, watched: _Watched) -> None:
        watched.wake.clear()
        target = watched.target
        was_reachable = watched.is_reachable
        known = watched.models
        try:
            models = await target.discover(timeout_s=TIMEOUT_S)
        except Exception as error:
            watched.is_reachable = False
            models = [model._replace(is_ready=False, reason="the target does not answer") for model in known.values()]
            if was_reachable or watched.backoff_s == FIRST_BACKOFF_S:
                text = error.message if isinstance(error, WeftError) else repr(error)
                _log.warning("target '%s' (%s) does not answer: %s", target.name, target.address, text)
        else:
            watched.is_reachable = True
            watched.backoff_s = FIRST_BACKOFF_S
            if not was_reachable:
                _log.info("target '%s' (%s) answers: %d models", target.name, target.address, len(models))
        watched.models = {
            key: _stamped(model, known.get(key))
            for model in _with_former(models, known)
            for key in [(model.signature.name, model.signature.version)]
        }
        self._publish()

    def _publish(self) -> None:
        models: dict[str, dict[str, CatalogEntry]] = {}
        loading: dict[str, str] = {}
        faults: dict[str, str] = {}
        used = self._targets_in_use()
        known = {key for watched in self._watched.values() for key in watched.models}
        for key in self.statistics.keys() - known:
            del self.statistics[key]
        for name, watched in self._watched.items():
            for (model, version), found in watched.models.items():
                if not found.is_described:
                    if found.reason == LOADING:
                        loading.setdefault(model, name)
                    elif found.reason:
                        faults.setdefault(model, found.reason)
                    continue
                if used[model] != name:
                    self._warn_twice_served(model, used[model], name)
                    continue
                models.setdefault(model, {})[version] = CatalogEntry(name, found)
                if (model, version) not in self.statistics:  # a model that was never called has counters too
                    self.statistics[model, version] = ModelStatistics(model, version)
        self._loading, self._faults = loading, faults
        self._missed.difference_update(models)
        if models != self._models:
            self._models = models
            self._defaults = {name: max(versions.values(), key=_preference) for name, versions in models.items()}
            self._on_change()

    def _targets_in_use(self) -> dict[str, str]:
        """For each model the first target where a version of it is ready, or else the first that has it."""
        ready: dict[str, str] = {}
        known: dict[str, str] = {}
        for name, watched in self._watched.items():
            for (model, _), found in watched.models.items():
                if found.is_described:
                    known.setdefault(model, name)
                if found.is_ready:
                    ready.setdefault(model, name)
        return known | ready

    def _warn_twice_served(self, model: str, used: str, other: str) -> None:
        if model not in self._warned:
            self._warned.add(model)
            _log.warning(
                "model '%s' is served by the targets '%s' and '%s'; of those where it is ready, the one that was given "
                "first is used", model, used, other,
            )  # fmt: skip


def _with_former(models: Sequence[TargetModel], known: Mapping[tuple[str, str], TargetModel]) -> list[TargetModel]:
    """The models, and for those that are listed and not described what was known of them before, as not ready."""
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
    """The model with the time since when it is not ready."""
    if model.is_ready:
        return model
    since = before.not_ready_since if before is not None else ""
    return model._replace(not_ready_since=since or datetime.now(UTC).isoformat(timespec="seconds"))


def _preference(entry: CatalogEntry) -> tuple[bool, int]:
    """Orders versions: ready ones last, then by number; what is no number comes before."""
    return entry.model.is_ready, version_order(entry.model.signature.version)
