"""The serving core: the models of one repository behind the V2 interface."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from weft.base.caching import CoalescingCache
from weft.base.classification import check_classification, classified
from weft.base.core import CallContext, IndexEntry, InferCall, InferenceCore, InferResult, ParameterValue
from weft.base.errors import InvalidArgumentError, NotFoundError, UnavailableError, UnsupportedError, WeftError
from weft.base.repository.control import DEFAULT_POLL_S, ClientControl, RepositoryWatcher
from weft.base.signature import ModelSignature
from weft.base.statistics import ModelStatistics
from weft.serving.backends.base import Backend
from weft.serving.backends.custom_metrics import CustomMetrics
from weft.serving.block_exchange import BlockExchange
from weft.serving.calls import Callee, ModelControl, NestedCalls, RouterCallee
from weft.serving.config import ModelDefinition, config_override, define_model
from weft.serving.config.placement import count_gpus
from weft.serving.lifecycle.lifecycle import ManagedModel
from weft.serving.lifecycle.repository import Fingerprint, ModelRepository, check_name
from weft.serving.lifecycle.sent_files import SentFiles
from weft.serving.lifecycle.warm_pool import WarmLimits, WarmPool
from weft.serving.metrics import ExportedMetrics, attach_gpus, inline_metrics, load_metrics, warm_pool_metrics
from weft.serving.runtime.idle import make_limiter
from weft.serving.scheduler.rate_limiter import ResourceKey
from weft.v2.client.wires import WireName
from weft.v2.protocol.handover import SOURCE
from weft.v2.security.channel import ChannelSecurity
from weft.v2.server.health import LoadReporter
from weft.v2.server.servicer import Extension
from weft_protos.model_config_pb2 import ModelConfig

DEFAULT_RESPONSE_CACHE_BYTES = 64 << 20
#: Of a model whose configuration a client gives; each may be a process.
DEFAULT_MAX_INSTANCES = 16
#: Pause between two scans when a model has changed, in seconds: one that is being copied changes meanwhile.
SETTLE_S = 0.5
LOAD_CONCURRENCY = 4
DRAIN_GRACE_S = 60.0


class ServingCore(InferenceCore):
    """Loads the models of a repository and answers requests. Lives on one event loop; create it there.

    Args:
        model_control: ``"none"``: load every model at start; ``"poll"``: also follow changes of the repository;
            ``"explicit"``: load ``load_models`` (``"*"`` is all), and let clients load and unload.
        load_concurrency: Models that load at once.
        drain_grace_s: Time for the requests of a replaced or unloaded version.
        on_demand: Limits within which models load on their first request; None: they load at once.
        router: Address of the router, through which models call other models; "": they call ``callee``.
        callee: Answers nested calls without a router; None: this core.
        rate_limits: Of resources that instances share; None: ``rate_limiter`` of the configurations has no effect.
        response_cache_bytes: Of the cached answers of all models.
        completes_configs: Fill in missing configuration from the models' files.
        max_instances: Of one model whose configuration a client gives.
        max_sent_bytes: Of the files of all models that clients load with their files; 0: they cannot.
        mesh_key: Secret that the services of the mesh share; "": there is none.
        peer_security: Of channels to other model services.
    """

    def __init__(
        self,
        repository: Path,
        backends: Mapping[str, type[Backend]],
        *,
        model_control: str = "none",
        load_models: Sequence[str] = (),
        num_gpus: int | None = None,
        load_concurrency: int = LOAD_CONCURRENCY,
        drain_grace_s: float = DRAIN_GRACE_S,
        repository_poll_s: float = DEFAULT_POLL_S,
        on_demand: WarmLimits | None = None,
        router: str = "",
        router_security: ChannelSecurity | None = None,
        router_wire: WireName | None = None,
        callee: Callee | None = None,
        rate_limits: Mapping[ResourceKey, int] | None = None,
        response_cache_bytes: int = DEFAULT_RESPONSE_CACHE_BYTES,
        completes_configs: bool = True,
        max_instances: int = DEFAULT_MAX_INSTANCES,
        max_sent_bytes: int = 0,
        mesh_key: str = "",
        peer_security: ChannelSecurity | None = None,
    ) -> None:
        self._repository = ModelRepository(repository)
        self._backends = backends
        self._completes_configs = completes_configs
        self._clients = ClientControl(model_control, "service")
        self._load_models = load_models
        self._max_instances = max_instances
        self._sent_files = SentFiles(max_sent_bytes)
        self._num_gpus = count_gpus() if num_gpus is None else num_gpus
        self._slots = asyncio.Semaphore(load_concurrency)
        self._drain_grace_s = drain_grace_s
        self._models: dict[str, ManagedModel] = {}
        self._followers: list[asyncio.Task[None]] = []
        self._changes: dict[str, asyncio.Task[None]] = {}  # the latest that the repository asked for, by model
        self._known: dict[str, Fingerprint] = {}
        self._overrides: dict[str, str] = {}  # configurations that clients gave, until they unload the model
        self._watcher = RepositoryWatcher(
            "model repository",
            lambda: self._repository.fingerprints(self._known),
            self._known,
            self._take_over,
            SETTLE_S,
        )
        self._repository_poll_s = repository_poll_s
        self._pool = None if on_demand is None else WarmPool(on_demand)
        self._limiter = None if rate_limits is None else make_limiter(rate_limits)
        self._answers = CoalescingCache(response_cache_bytes, 0, time.monotonic_ns)
        self._metrics = CustomMetrics()
        self._mesh_key = mesh_key
        self._blocks = BlockExchange(mesh_key, peer_security)
        self._exports = ExportedMetrics()
        self._control = ModelControl(self, partial(self.load, is_nested=True), asyncio.get_running_loop())
        self._is_started = False
        self._router = RouterCallee(router, router_security, wire=router_wire) if router else None
        self._caller = NestedCalls(self._router or callee or self, asyncio.get_running_loop())

    async def start(self) -> None:
        """Load the models; the index says why one cannot be loaded. Raises OSError for an unreadable repository."""
        if self._clients.mode == "poll":
            self._known.update(await asyncio.to_thread(self._repository.fingerprints))
        present = await asyncio.to_thread(self._repository.names)
        for name in present:
            self._manage(name)
        is_all = self._clients.mode != "explicit" or "*" in self._load_models
        wanted = present if is_all else list(dict.fromkeys(self._load_models))
        loading = [self._change(name, self._load_if_it_can(name)) for name in wanted]
        if self._clients.mode == "poll":
            self._followers.append(asyncio.create_task(self._watcher.run(self._repository_poll_s)))
        if loading:
            await asyncio.wait(loading)
        self._is_started = True
        if self._pool is not None:
            self._followers.append(asyncio.create_task(self._pool.run()))

    async def close(self, *, grace_s: float) -> None:
        """Stop every model; running requests have ``grace_s`` to end."""
        following = [*self._followers, *self._changes.values()]
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)
        await self._clients.close()
        await asyncio.gather(*(model.close(grace_s=grace_s) for model in self._models.values()))
        await self._blocks.close()
        if self._router is not None:
            await self._router.close()

    def extension(self) -> Extension:
        """Load reports, and metrics of models, GPUs and loads on demand."""
        exports, models, pool = self._exports, self._models, self._pool
        exports.attach("inline models", lambda: inline_metrics(self.statistics("", "")))
        exports.attach("loads", lambda: load_metrics({name: each.has_failed for name, each in list(models.items())}))
        attach_gpus(exports)
        if pool is not None:
            exports.attach("loads on demand", lambda: warm_pool_metrics(pool))
        return Extension(LoadReporter(lambda: self.statistics("", "")).add_to, (self._metrics, exports))

    def is_ready(self) -> bool:
        """Whether the start has ended and every model that should serve does."""
        return self._is_started and all(model.is_ready for model in self._models.values() if model.is_wanted)

    def is_model_ready(self, name: str, version: str) -> bool:
        """Whether the version ("" = any) serves; False for an unknown version. Raises NotFoundError."""
        model = self._find(name)
        if not version:
            return any(not ready.served.crashed.includes_all for ready in model.ready_versions())
        try:
            return not model.select(version).served.crashed.includes_all
        except (NotFoundError, UnavailableError):
            return False

    async def has_model(self, name: str) -> bool:
        """Whether a model of that name is known, or is in the repository now."""
        return name in self._models or await self._is_present(name)

    async def _is_present(self, name: str) -> bool:
        try:
            return bool(await asyncio.to_thread(self._repository.directory, name))
        except (NotFoundError, InvalidArgumentError):
            return False

    def signature(self, name: str, version: str) -> ModelSignature:
        """Names, types and shapes. Raises NotFoundError or UnavailableError."""
        return self._find(name).select(version).served.signature

    def config(self, name: str, version: str) -> ModelConfig:
        """The completed configuration. Raises NotFoundError or UnavailableError."""
        return self._find(name).select(version).config

    def index(self, *, ready_only: bool) -> list[IndexEntry]:
        """Every version of every known model, by name."""
        entries = [entry for _, model in sorted(self._models.items()) for entry in model.index()]
        return [entry for entry in entries if entry.state == "READY"] if ready_only else entries

    def statistics(self, name: str, version: str) -> list[ModelStatistics]:
        """Counters of the versions that serve; thread-safe."""
        if name and version:
            return [self._find(name).select(version).served.statistics]
        models = [self._find(name)] if name else list(self._models.values())
        return [version.served.statistics for model in models for version in model.ready_versions()]

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        """Answer one request. Cancelling the awaiting task withdraws it."""
        if SOURCE in call.parameters and not call.outputs:
            return await self._blocks.answer(call)
        model = self._models.get(call.model_name) or self._find(call.model_name)
        served = model.serving(call)
        if served.signature.is_decoupled and not served.signature.can_collect:
            raise UnsupportedError("ModelInfer RPC doesn't support models with decoupled transaction policy")
        asks_for_classes = check_classification(call.outputs) if call.outputs else False
        result = await served.infer(call, context)
        return await classified(result, call.outputs, served.signature) if asks_for_classes else result

    async def stream_infer(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        """Yield every response of a decoupled model, the one answer of any other."""
        served = self._find(call.model_name).serving(call)
        if not served.signature.is_decoupled:
            yield await self.infer(call, context)
            return
        check_classification(call.outputs)
        async with contextlib.aclosing(served.stream(call, context)) as responses:
            async for response in responses:
                yield await classified(response, call.outputs, served.signature)

    async def load(
        self, name: str, parameters: Mapping[str, ParameterValue | bytes], *, is_nested: bool = False
    ) -> None:
        """Load or reload a model from its folder; the old version drains, or stays if this fails.

        A load that has started continues if the awaiting task is cancelled. The parameter ``config`` is a configuration
        as JSON, in place of ``config.pbtxt`` until the model is unloaded. Parameters ``file:PATH`` are files in place
        of the model's folder, which need not exist, until the model is unloaded or loaded without files. With
        ``is_nested`` another load waits for this one, so it does not wait for a free load slot.

        Raises:
            UnavailableError: Model control is off.
            InvalidArgumentError: Name, parameters or configuration are wrong.
            NotFoundError: The repository has no such model.
            WeftError: As of ``SentFiles.write``; or it cannot be loaded.
        """
        self._clients.check()
        override = config_override(name, parameters)
        check_name(name)

        async def load() -> None:
            sent = await asyncio.to_thread(self._sent_files.write, name, parameters)
            if sent is None:
                await self._check_present(name)
            given = self._overrides.get(name) if override is None else override
            repository = self._repository if sent is None else ModelRepository(sent.root)
            define = partial(self._define, name, given, repository)
            model = self._manage(name)
            try:
                await model.load(define, is_nested=is_nested, folder=sent)
            except WeftError:
                if not await self._is_present(name) and model.is_unused and self._models.get(name) is model:
                    del self._models[name]  # as if it had never been sent
                raise
            if sent is not None:
                self._overrides.pop(name, None)  # it is that of the files
            elif given is not None:
                self._overrides[name] = given

        await self._clients.finish(load())

    async def unload(self, name: str, *, unload_dependents: bool) -> None:
        """Unload the model, once its requests are answered. Raises UnavailableError or NotFoundError."""
        self._clients.check()
        await self._find(name).unload()
        self._overrides.pop(name, None)

    async def _check_present(self, name: str) -> None:
        try:
            await asyncio.to_thread(self._repository.directory, name)
        except NotFoundError as error:
            raise error.with_message(
                f"failed to load '{name}', failed to poll from model repository: {error.message}"
            ) from None

    def _find(self, name: str) -> ManagedModel:
        model = self._models.get(name)
        if model is None:
            raise NotFoundError(f"Request for unknown model: '{name}' is not found").refused()
        return model

    def _manage(self, name: str) -> ManagedModel:
        if name not in self._models:
            self._models[name] = ManagedModel(
                name,
                slots=self._slots,
                drain_grace_s=self._drain_grace_s,
                pool=self._pool,
                limiter=self._limiter,
                answers=self._answers,
            )
        return self._models[name]

    def _define(
        self, name: str, override: str | None = None, repository: ModelRepository | None = None
    ) -> ModelDefinition:
        repository = repository or self._repository
        return define_model(
            repository.directory(name),
            repository.versions(name),
            self._backends,
            num_gpus=self._num_gpus,
            completes=self._completes_configs,
            override=override,
            max_override_instances=self._max_instances,
            caller=self._caller,
            metrics=self._metrics,
            control=self._control,
            exports=self._exports,
            mesh_key=self._mesh_key,
            blocks=self._blocks,
        )

    async def _load_if_it_can(self, name: str) -> None:
        with contextlib.suppress(WeftError):
            await self._manage(name).load(partial(self._define, name))

    async def _take_over(self, changes: Mapping[str, Fingerprint | None]) -> None:
        """Start loading new or changed models and unloading removed ones; changes do not wait for each other."""
        for name, fingerprint in changes.items():
            if fingerprint is not None:
                self._change(name, self._load_if_it_can(name))
            elif name in self._models:  # else it went while the service started
                self._change(name, self._find(name).unload())

    def _change(self, name: str, change: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Start a change of a model that the repository requires, cancelling one in progress."""
        if (earlier := self._changes.get(name)) is not None:
            earlier.cancel()
        task = self._changes[name] = asyncio.create_task(change)
        task.add_done_callback(lambda _: self._changes.pop(name) if self._changes.get(name) is task else None)
        return task
