"""The versions of one model, from load to unload.

A load is atomic: every version of the new definition starts beside the old ones, then one assignment makes the new ones
serve, then the old ones drain. If anything fails before that, the old ones continue to serve.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TypeVar

from weft.base.caching import CoalescingCache
from weft.base.core import IndexEntry, InferCall
from weft.base.errors import InternalError, NotFoundError, UnavailableError, WeftError
from weft.base.observing.failures import caused_by
from weft.base.observing.logs import get_logger
from weft.base.repository.layout import version_number
from weft.base.signature import LABELS_PARAMETER, VERSION_DIGEST_PARAMETER
from weft.serving.backends.base import ModelContext
from weft.serving.config import ModelDefinition
from weft.serving.lifecycle.repository import version_digest
from weft.serving.lifecycle.response_cache import CachedModel
from weft.serving.lifecycle.sent_files import SentFolder
from weft.serving.lifecycle.warm_pool import OnDemandModel, WarmPool
from weft.serving.runtime.idle import until_slow
from weft.serving.runtime.model import SequenceModel, ServedModel
from weft.serving.scheduler.rate_limiter import RateLimiter
from weft_protos.model_config_pb2 import ModelConfig

#: Answers the requests of a version.
Served = ServedModel | OnDemandModel | CachedModel
_UNLOADED = "unloaded"
#: Time limit for reading and completing a configuration, which may run the model's own code, in seconds.
DEFINE_LIMIT_S = 180.0
_log = get_logger("weft.serving.lifecycle")
#: A definition, and the configuration of each version with its digest.
_Digested = tuple[ModelDefinition, Mapping[int, ModelConfig]]
T = TypeVar("T")


async def in_daemon_thread(function: Callable[[], T], *, name: str) -> T:
    """Run ``function`` to its end on a daemon thread, even if cancelled; does not keep the process alive."""
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()  # from here on it cannot be cancelled

    def run() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(outcome)


class VersionState(StrEnum):
    """States of a version in ``RepositoryIndex``."""

    UNKNOWN = ""
    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(slots=True, eq=False)
class ModelVersion:
    """One version of a model, with its state and, if it does not serve, the reason."""

    number: int
    config: ModelConfig
    served: Served
    state: VersionState = VersionState.LOADING
    reason: str = ""
    folder: SentFolder | None = None

    @property
    def shown_state(self) -> VersionState:
        """The state that clients see; UNAVAILABLE or LOADING for a version that has lost every instance."""
        crashed = self.served.crashed
        if self.state is not VersionState.READY or not crashed.includes_all:
            return self.state
        return VersionState.LOADING if crashed.is_loading else VersionState.UNAVAILABLE


class ManagedModel:
    """One model of the repository, and the only writer of its versions' states; lives on the event loop.

    Its loads and unloads run one after another; ``slots`` limits those of all models. With a ``pool``, versions load on
    demand.
    """

    def __init__(
        self,
        name: str,
        *,
        slots: asyncio.Semaphore,
        drain_grace_s: float,
        pool: WarmPool | None = None,
        limiter: RateLimiter | None = None,
        answers: CoalescingCache,
    ) -> None:
        self.name = name
        self._answers = answers
        self._pool = pool
        self._limiter = limiter
        self.is_wanted = self.has_failed = False
        self._num_loads = 0
        self._slots = slots
        self._drain_grace_s = drain_grace_s
        self._lock = asyncio.Lock()
        self._versions: dict[int, ModelVersion] = {}
        self._draining: dict[ModelVersion, asyncio.Task[None]] = {}
        # While the model has no versions, its own state and reason; else the reason why the last reload failed.
        self._state = VersionState.UNKNOWN
        self._reason = ""

    @property
    def is_unused(self) -> bool:
        """Whether no version of it serves, drains or is being loaded."""
        return not (self._num_loads or self._draining or self.ready_versions())

    @property
    def is_ready(self) -> bool:
        """Whether every version serves that was not unloaded on purpose."""
        states = [version.shown_state for version in self._versions.values() if version.reason != _UNLOADED]
        return VersionState.READY in states and all(
            state in (VersionState.READY, VersionState.UNLOADING) for state in states
        )

    def select(self, version: str) -> ModelVersion:
        """The requested ready version; "" is the highest.

        Raises InvalidArgumentError if it is not an integer of at least 1, NotFoundError for an unknown version,
        UnavailableError while it loads or unloads, or if it could not be loaded.
        """
        unknown = f"Request for unknown model: '{self.name}'"
        if not version:
            newest: ModelVersion | None = None
            for known in self._versions.values():
                if known.state is VersionState.READY and (newest is None or known.number > newest.number):
                    newest = known
            if newest is not None:
                return newest
            states = [known.state for known in self._versions.values()] or [self._state]
            if VersionState.LOADING in states or VersionState.UNLOADING in states:
                raise UnavailableError(f"{unknown} is not at ready state; it is loading or unloading").refused()
            raise NotFoundError(f"{unknown} has no available versions").refused()
        number = version_number(version)
        chosen = self._versions.get(number)
        if chosen is None:
            raise NotFoundError(f"{unknown} version {number} is not found").refused()
        if chosen.state is not VersionState.READY:
            fault = f"{unknown} version {number} is not at ready state; it is {chosen.state}"
            raise UnavailableError(fault).refused()
        return chosen

    def serving(self, call: InferCall) -> Served:
        """The version for a call: as ``select``, or a draining one that has the call's stateful sequence."""
        if not self._draining:
            return self.select(call.model_version).served
        for old in self._draining:
            served = old.served
            is_asked = call.model_version in ("", str(old.number))
            if is_asked and isinstance(served, SequenceModel) and served.continues(call):
                return served
        return self.select(call.model_version).served

    def ready_versions(self) -> list[ModelVersion]:
        """Versions that serve, lowest first."""
        versions = sorted(self._versions.items())
        return [version for _, version in versions if version.state is VersionState.READY]

    def index(self) -> list[IndexEntry]:
        """One entry for each version; one without a version if there is none."""
        if not self._versions:
            return [IndexEntry(self.name, "", self._state.value, self._reason)]
        return [
            IndexEntry(
                self.name,
                str(number),
                version.shown_state.value,
                version.reason or self._reason or str(version.served.crashed),
            )
            for number, version in sorted(self._versions.items())
        ]

    async def load(
        self, define: Callable[[], ModelDefinition], *, is_nested: bool = False, folder: SentFolder | None = None
    ) -> None:
        """Serve the definition that ``define`` reads on a thread, and drain the old versions.

        The old versions stay if this raises a WeftError. With ``is_nested`` another load waits for this one, so it does
        not wait for a slot. A ``folder`` that has the files is removed when the last version of this load has stopped.
        """
        self._num_loads += 1
        try:
            await self._load(define, folder, is_nested=is_nested)
        except BaseException:
            await self._discard(folder)
            raise
        finally:
            self._num_loads -= 1

    async def _load(self, define: Callable[[], ModelDefinition], folder: SentFolder | None, *, is_nested: bool) -> None:
        self.is_wanted = True
        async with self._lock:
            if not self.ready_versions():
                self._versions, self._state, self._reason = {}, VersionState.LOADING, ""
            fresh: dict[int, ModelVersion] = {}
            try:
                async with contextlib.nullcontext() if is_nested else until_slow(self._slots):
                    definition, configs = await self._define(partial(_digested, define))
                    fresh = {
                        number: ModelVersion(
                            number, configs[number], self._make_served(definition, context), folder=folder
                        )
                        for number, context in definition.contexts.items()
                    }
                    await self._start(fresh)
            except (WeftError, asyncio.CancelledError) as error:
                if isinstance(error, WeftError):
                    where = {"exception": error.traceback} if error.traceback else {}
                    _log.error("%s", error.message, extra={"model": self.name, **where})
                self._note_failure(fresh, error.message if isinstance(error, WeftError) else "the load was cancelled")
                raise
            except Exception as error:
                failure = InternalError(f"failed to load '{self.name}': {type(error).__name__}: {error}")
                _log.exception("load failed", extra={"model": self.name, "error_id": failure.error_id})
                self._note_failure(fresh, failure.message)
                raise failure from error
            self._replace(fresh)
        _log.info("loaded", extra={"model": self.name, "versions": sorted(fresh)})

    async def unload(self) -> None:
        """Stop every version, replaced ones too, once its requests are answered or the grace has passed."""
        async with self._lock:
            self.is_wanted = self.has_failed = False
            for version in self.ready_versions():
                self._retire(version)
            self._state, self._reason = VersionState.UNAVAILABLE, _UNLOADED
            for version in self._versions.values():
                version.reason = _UNLOADED
            if self._draining:
                await asyncio.wait(list(self._draining.values()))
        _log.info("unloaded", extra={"model": self.name})

    async def close(self, *, grace_s: float) -> None:
        """Stop everything; running requests have ``grace_s`` to end. No request may follow."""
        self._drain_grace_s = grace_s
        for version in (*self._draining, *self.ready_versions()):
            if isinstance(version.served, SequenceModel):
                version.served.expect_no_more()
        for version, task in list(self._draining.items()):  # started earlier, with another grace
            task.cancel()
            await asyncio.wait([task])
            self._retire(version)
        for version in self.ready_versions():
            self._retire(version)
        if self._draining:
            await asyncio.wait(list(self._draining.values()))

    async def _define(self, define: Callable[[], _Digested]) -> _Digested:
        prefix = f"failed to load '{self.name}', failed to poll from model repository"
        try:
            async with asyncio.timeout(DEFINE_LIMIT_S):
                return await in_daemon_thread(define, name=f"define-{self.name}")
        except TimeoutError:
            raise UnavailableError(
                f"{prefix}: its configuration was not complete after {DEFINE_LIMIT_S:g} s; auto_complete_config of the "
                "model, or something that it imports, does not return"
            ) from None
        except WeftError as error:
            raise error.with_message(f"{prefix}: {error.message}") from error
        except Exception as error:
            raise caused_by(InternalError(prefix), error) from error

    def _make_served(self, definition: ModelDefinition, context: ModelContext) -> Served:
        served = ServedModel if definition.settings.sequences is None else SequenceModel
        make = partial(
            served, context, definition.backend, definition.settings, definition.instances, limiter=self._limiter
        )
        if self._limiter is None and any(place.rate_limit is not None for place in definition.instances):
            _log.warning("%s: rate_limiter is without effect; start the service with --rate-limit", self.name)
        made = make() if self._pool is None else OnDemandModel(make, context, self._pool)
        if not definition.config.response_cache.enable:
            return made
        return CachedModel(made, self._answers, definition.settings.level_of)

    async def _start(self, fresh: Mapping[int, ModelVersion]) -> None:
        if not self.ready_versions():
            self._versions = dict(fresh)
        starting = [asyncio.create_task(version.served.start()) for version in fresh.values()]
        try:
            await asyncio.wait(starting)
            for version, task in zip(fresh.values(), starting, strict=True):
                if error := task.exception():
                    version.reason = str(error) if isinstance(error, WeftError) else "internal error, see the log"
            failed = [version for version in fresh.values() if version.reason]
            if failed:
                raise self._start_error(failed, starting)
        except BaseException:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            await asyncio.gather(*(version.served.stop(grace_s=0) for version in fresh.values()))
            raise

    def _start_error(self, failed: Iterable[ModelVersion], starting: Iterable["asyncio.Task[None]"]) -> WeftError:
        cause = next(error for task in starting if (error := task.exception()))
        states = "; ".join(f"version {version.number} is at UNAVAILABLE state: {version.reason}" for version in failed)
        message = f"load failed for model '{self.name}': {states};"
        if isinstance(cause, WeftError):
            return cause.with_message(message)
        return caused_by(InternalError(message), cause)

    def _note_failure(self, fresh: Mapping[int, ModelVersion], reason: str) -> None:
        self.has_failed = True
        if self.ready_versions():
            self._reason = f"serving what was loaded before; the reload failed: {reason}"
            return
        self._versions = dict(fresh)
        self._state, self._reason = VersionState.UNAVAILABLE, reason
        for version in fresh.values():
            version.state = VersionState.UNAVAILABLE

    def _replace(self, fresh: Mapping[int, ModelVersion]) -> None:
        replaced = {version.number: version for version in self.ready_versions()}
        for version in fresh.values():
            version.state = VersionState.READY
        self._versions, self.has_failed = {**replaced, **fresh}, False
        self._state, self._reason = VersionState.READY, ""
        for version in replaced.values():
            self._retire(version)

    def _retire(self, version: ModelVersion) -> "asyncio.Task[None]":
        version.state = VersionState.UNLOADING
        task = self._draining[version] = asyncio.create_task(self._drain(version))
        return task

    async def _drain(self, version: ModelVersion) -> None:
        try:
            await version.served.stop(grace_s=self._drain_grace_s)
        except Exception:
            _log.exception("stop failed", extra={"model": self.name, "version": version.number})
        finally:
            version.state, version.reason = VersionState.UNAVAILABLE, _UNLOADED
            del self._draining[version]
            await self._discard(version.folder)

    async def _discard(self, folder: SentFolder | None) -> None:
        """Remove a folder of sent files, unless a version still runs from it."""
        running = (*self._draining, *self.ready_versions())
        if folder is not None and not any(version.folder is folder for version in running):
            await asyncio.to_thread(folder.remove)


def _digested(define: Callable[[], ModelDefinition]) -> _Digested:
    definition = define()
    configs: dict[int, ModelConfig] = {}
    for number, context in definition.contexts.items():
        config = configs[number] = ModelConfig()
        config.CopyFrom(definition.config)
        config.parameters[VERSION_DIGEST_PARAMETER].string_value = version_digest(context.directory)
        for spec in context.signature.outputs:
            if spec.labels:
                config.parameters[LABELS_PARAMETER + spec.name].string_value = "\n".join(spec.labels)
    return definition, configs
