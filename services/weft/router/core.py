"""The router as a V2 server: serves its graphs, and passes on calls for the models of its targets."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from weft.base.core import CallContext, IndexEntry, InferCall, InferResult, Parameters, ParameterValue
from weft.base.errors import NotFoundError, UnavailableError, UnsupportedError, WeftError
from weft.base.repository.control import DEFAULT_POLL_S, RepositoryWatcher
from weft.base.repository.layout import version_number
from weft.base.signature import ModelSignature
from weft.base.statistics import ModelStatistics
from weft.router import DEFAULT_RETRY_PERCENT
from weft.router.admission.controller import AdmissionController, AdmissionSettings, Permit, admissible_priority
from weft.router.bandits.exchange import BanditFile
from weft.router.feedback import GraphServicer, Siblings
from weft.router.metrics import (
    AdmissionCollector,
    RolloutCollector,
    RouterCollector,
    StepCollector,
    TargetCollector,
)
from weft.router.observe import Observer
from weft.router.recording import KEY_BYTES, RecordingLimits, Recordings
from weft.router.repository.files import GraphRepository
from weft.router.repository.lifecycle import GraphControl, GraphLifecycle
from weft.router.repository.table import ROLLED_BACK, GraphTable
from weft.router.repository.weights import reweighed
from weft.router.rollouts.owner import RolloutMember, shared_state
from weft.router.runtime import Runtime
from weft.router.serving import Served, ServedGraph, ServedTargetModel
from weft.router.steps.run import earlier
from weft.router.target import RetryBudget, Target
from weft.router.targets.catalog import CatalogEntry, TargetCatalog
from weft.router.targets.model_control import TargetModelControl
from weft.v2.protocol.handover import OF_ROUTERS
from weft.v2.server.model_metrics import MetricsSource, ModelMetricsCollector
from weft.v2.server.servicer import Extension
from weft_protos import graph_service_pb2 as graph_pb
from weft_protos import grpc_service_pb2 as pb
from weft_protos.model_config_pb2 import ModelConfig

#: Pause between two scans when a graph has changed, in seconds: a file that is being written changes meanwhile.
SETTLE_S = 0.1
_NO_LIMITS = AdmissionSettings()
_NO_RECORDINGS = RecordingLimits()


class RouterCore:
    """Serves every graph of a repository over some targets; create it on the event loop that runs it.

    Statistics of a graph: ``success`` is the time from arrival to answer, ``compute_infer`` the wall time of the
    execution (parallel steps count once), ``compute_input`` the time from arrival to its start, so that the parts never
    exceed the whole; ``queue`` counts requests and no time, because a graph has no queue. Models of targets are counted
    by the router, each call's whole duration as ``compute_infer``; for an ``InProcessTarget`` its core's counters are
    used.

    Args:
        targets: In order; the first that serves a model is used for it.
        model_control: ``"none"``: every graph is loaded at the start, once. ``"poll"``: changes of the repository are
            loaded too. ``"explicit"``: ``load_graphs`` are loaded ("*" is all), and clients load, reload and unload.
        poll_s: Pause between two discoveries of a target, in seconds.
        repository_poll_s: Poll mode: interval between scans of the repository, in seconds.
        state_dir: Folder where bandits keep what they have learned; None: nowhere.
        rollouts: Where they are kept, as ``shared_state`` takes it.
        allow_route_header: Whether clients may choose the steps of splitters with the header ``x-graph-route``.
        num_workers: Number of routers on one port, each with an equal part of the limits.
        retry_budget_percent: Of ``RetryBudget``, unless a graph's ``retry`` sets it.
        metrics_from: Services whose model-defined metrics are republished.
        recording: Where requests and answers are recorded when a client asks for it.
    """

    #: As of ``GraphServicer``.
    siblings: Siblings | None = None

    def __init__(
        self,
        repository: Path,
        targets: Sequence[Target],
        *,
        model_control: str = "none",
        load_graphs: Sequence[str] = (),
        admission: AdmissionSettings = _NO_LIMITS,
        poll_s: float = 2.0,
        repository_poll_s: float = DEFAULT_POLL_S,
        state_dir: Path | None = None,
        rollouts: str = "off",
        allow_route_header: bool = False,
        num_workers: int = 1,
        retry_budget_percent: float = DEFAULT_RETRY_PERCENT,
        metrics_from: Sequence[MetricsSource] = (),
        recording: RecordingLimits = _NO_RECORDINGS,
    ) -> None:
        self._changed = asyncio.Event()
        self._metrics_from = tuple(metrics_from)
        self._catalog = TargetCatalog(
            targets, poll_s=poll_s, on_change=self._on_catalog_change, retry_percent=retry_budget_percent
        )
        self._models = TargetModelControl(targets)
        self._runtime = Runtime(
            self._catalog.targets,
            budgets=self._catalog.budgets,
            node_budget=RetryBudget(retry_budget_percent),
            is_busy=lambda: self._admission.router.is_busy,
            is_pinning_allowed=allow_route_header,
            num_workers=num_workers,
        )
        self._bandit_file = None if state_dir is None else BanditFile(self._runtime.bandits, state_dir)
        self._rollouts = RolloutMember(self._runtime.rollouts, shared_state(rollouts))
        self._repository = GraphRepository(repository)
        self._graphs = GraphTable(self._catalog, self._renew_limits)
        self._lifecycle = GraphLifecycle(self._graphs, self._repository, self._catalog, self._runtime)
        self._watcher = RepositoryWatcher(
            "graph repository",
            self._lifecycle.scan_readable,
            self._lifecycle.files,
            self._lifecycle.take_over,
            SETTLE_S,
        )
        self._repository_poll_s = repository_poll_s
        self._control = GraphControl(self._lifecycle, model_control)
        self._is_polling = model_control == "poll"
        self._load_graphs = tuple(load_graphs) if model_control == "explicit" else ("*",)
        self._admission = AdmissionController(admission, num_workers=num_workers)
        self._observer = Observer(self._graphs, self._runtime, self._catalog, self._admission, model_control)
        self._recordings = Recordings(recording, num_workers)
        self._is_started = False
        self._followers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Discover every target and load every graph; failed loads are tried again when a target changes.

        Raises:
            UnavailableError: The bandits' state or the repository cannot be read.
            NotFoundError: The repository has no graph of one of the names in ``load_graphs``.
        """
        if self._bandit_file is not None:
            await self._bandit_file.start()
        await self._rollouts.start()
        await self._catalog.start()
        self._changed.clear()
        await self._load_at_start()
        self._is_started = True
        self._followers.append(asyncio.create_task(self._follow_catalog()))
        if self._is_polling:
            self._followers.append(asyncio.create_task(self._watcher.run(self._repository_poll_s)))

    async def _load_at_start(self) -> None:
        await self._lifecycle.load_at_start(self._load_graphs)

    async def close(self, *, grace_s: float) -> None:
        """Stop everything and close every target. The server waits for requests in flight before."""
        for follower in self._followers:
            follower.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await follower
        await self._recordings.close()
        await self._control.close()
        await self._runtime.close()
        await self._rollouts.close()
        await self._catalog.close()
        if self._bandit_file is not None:
            await self._bandit_file.close()

    def extension(self) -> Extension:
        """The service ``weft.graph.GraphService``, and the router's own metrics."""
        collectors = (
            self._recordings,
            RolloutCollector(self._rollouts),
            RouterCollector(self._graphs, self._repository),
            StepCollector(lambda: (*self._graphs.step_counters(), *self._runtime.step_counters.kept)),
            AdmissionCollector(self._admission),
            TargetCollector(self._catalog),
            ModelMetricsCollector(self._metrics_from),
        )
        return Extension(
            self.graph_service().add_to,
            collectors,
            self._check_early,
            own_statistics=self._own_statistics,
            is_serving=self._is_serving,
            pass_on=self.pass_on_settings,
        )

    def graph_service(self) -> GraphServicer:
        """What answers ``weft.graph.GraphService``."""
        return GraphServicer(
            self._graphs,
            self._runtime.bandits,
            self._catalog,
            self._observer,
            self.record,
            self._rollouts,
            self._change_weights,
            self.siblings,
        )

    def is_ready(self) -> bool:
        """Whether every graph that is not unloaded is ready."""
        return self._is_started and not any(
            entry.is_wanted and self._graphs.why_not_ready(entry) for entry in self._graphs
        )

    def _is_serving(self) -> bool:
        """Whether any graph that is not unloaded is ready; true without any. One broken graph stops no other."""
        wanted = [entry for entry in self._graphs if entry.is_wanted]
        return self._is_started and (not wanted or any(not self._graphs.why_not_ready(entry) for entry in wanted))

    def is_model_ready(self, name: str, version: str) -> bool:
        """Whether a graph, with all models that it needs, or a target's model is ready; False for an unknown version.

        Raises NotFoundError.
        """
        try:
            return self._served(name, version).is_ready
        except UnavailableError:
            return False
        except NotFoundError:
            self._served(name, "")
            return False

    def signature(self, name: str, version: str) -> ModelSignature:
        """Signature of a graph or of a target's model. Raises NotFoundError or UnavailableError."""
        return self._served(name, version).signature()

    def config(self, name: str, version: str) -> ModelConfig:
        """Configuration of a graph or of a target's model. Raises NotFoundError or UnavailableError."""
        return self._served(name, version).config()

    def index(self, *, ready_only: bool) -> list[IndexEntry]:
        """Graphs first, then the models of the targets; a graph hides a model of its name.

        A skipped or partly skipped folder of the repository is listed without a version.
        """
        names = {graph.file.name for graph in self._graphs}
        entries = [self._graphs.index_entry(graph) for graph in self._graphs]
        entries += (IndexEntry(name, "", "UNAVAILABLE", fault) for name, fault in self._repository.faults.items())
        entries += [_model_entry(entry) for entry in self._catalog.entries() if entry.model.signature.name not in names]
        entries += (entry for name, entry in self._catalog.awaited().items() if name not in names)
        return [entry for entry in entries if not ready_only or entry.state == "READY"]

    def statistics(self, name: str, version: str) -> list[ModelStatistics]:
        """Counters of graphs, and of the targets' models as the router sees them. Raises NotFoundError.

        Without a name, unloaded graphs are left out, but not versions that were rolled back.
        """
        if not name:
            wanted = [graph.statistics for graph in self._graphs if graph.is_wanted or graph.reason == ROLLED_BACK]
            return wanted + self._catalog.counters()
        found = self._served(name, version).version
        counters = [graph.statistics for graph in self._graphs if graph.file.name == name] or self._catalog.counters()
        return [c for c in counters if c.name == name and (not version or c.version == found)]

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        """Answer with a graph, or with a target's model of that name.

        Raises:
            ResourceExhaustedError: Too many requests are in flight.
            DeadlineExceededError: It probably cannot be answered in time.
            NotFoundError: There is no such graph or model.
            UnsupportedError: It is decoupled and cannot collect its responses into one.
            UnavailableError: The graph cannot run; says why.
            WeftError: From validation or a step.
        """
        served = self._called(call)
        if not served.can_answer_once:
            raise UnsupportedError("ModelInfer RPC doesn't support models with decoupled transaction policy")
        with self._admit(served, call.parameters, context) as permit:
            if permit.is_waiting:
                await self._wait(permit, served)
            kept = None if self._recordings.active is None else self._recordings.begin(call, context)
            inference = None
            try:
                inference = served.begin(call, context)
                result = inference.answer(await inference.work())
            except BaseException as error:
                if inference is not None:
                    inference.fail(error)
                if kept is not None:
                    kept.end(served.version, error)
                raise
            if kept is not None:
                kept.add(result)
                kept.end(served.version)
            return result

    async def stream_infer(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        """Yield every response of a decoupled graph or model, the one answer of any other. Raises like ``infer``."""
        served = self._called(call)
        if not served.is_decoupled:
            yield await self.infer(call, context)  # a client that is slow to read it holds no place
            return
        with self._admit(served, call.parameters, context) as permit:
            if permit.is_waiting:
                await self._wait(permit, served)
            kept = None if self._recordings.active is None else self._recordings.begin(call, context, is_stream=True)
            try:
                async with contextlib.aclosing(served.stream(call, context)) as results:
                    async for result in results:
                        result.is_unordered = True  # as of the model's own server
                        if kept is not None:
                            kept.add(result)
                        yield result
            except BaseException as error:
                if kept is not None:
                    kept.end(served.version, error)
                raise
            if kept is not None:
                kept.end(served.version)

    async def record(self, request: graph_pb.RecordingRequest) -> graph_pb.RecordingResponse:
        """As ``Recordings.answer``."""
        return await self._recordings.answer(request, secrets.token_bytes(KEY_BYTES))

    def has_graph(self, name: str) -> bool:
        """Whether a graph of that name is known, ready or not."""
        return any(graph.file.name == name for graph in self._graphs)

    async def refresh(self, target: str) -> None:
        """Discover what a target serves now, and update graphs accordingly."""
        await self._catalog.refresh(target)
        await self._lifecycle.recheck()

    async def load(self, name: str, parameters: Mapping[str, ParameterValue | bytes]) -> None:
        """Load a graph, as ``GraphControl.load``, or else a model, as ``TargetModelControl.load``.

        Models that a graph names and no target serves are loaded first; why one cannot be, the graph's error says.
        """
        has_files = any(isinstance(value, bytes) for value in parameters.values())
        if not await self._change_model(
            name,
            lambda target: self._models.load(target, name, parameters),
            self._models.for_new_models if has_files else "",
        ):
            for model in await self._lifecycle.missing_models(name) if self._control.mode == "explicit" else ():
                with contextlib.suppress(WeftError):
                    await self._change_model(model, partial(self._models.load, name=model, parameters={}))
            await self._load_graph(name, parameters)

    async def unload(self, name: str, *, unload_dependents: bool) -> None:
        """Unload a graph, as ``GraphControl.unload``, or else a model, as ``TargetModelControl.unload``."""
        unload = partial(self._models.unload, name=name, unload_dependents=unload_dependents)
        if not await self._change_model(name, unload):
            await self._unload_graph(name, unload_dependents=unload_dependents)

    async def _change_weights(self, request: graph_pb.SetWeightsRequest) -> None:
        self._control.check()
        edit = partial(reweighed, node=request.node, weights=dict(request.weight))
        await self._control.finish(self._lifecycle.edit(request.graph, str(request.version), edit))

    async def _load_graph(self, name: str, parameters: Mapping[str, ParameterValue | bytes]) -> None:
        await self._control.load(name, parameters)

    async def _unload_graph(self, name: str, *, unload_dependents: bool) -> None:
        await self._control.unload(name, unload_dependents=unload_dependents)

    async def _change_model(self, name: str, change: Callable[[str], Awaitable[None]], new_at: str = "") -> bool:
        """Change a model at its target, else at ``new_at``; False if there is neither, or a graph hides the model."""
        target = "" if self.has_graph(name) else await self._models.holder(name) or new_at
        if target:
            try:
                await change(target)
            finally:
                await self.refresh(target)
        return bool(target)

    async def pass_on_settings(self, request: pb.TraceSettingRequest | pb.LogSettingsRequest) -> None:
        """Change settings of traces or logs at the services behind, as ``TargetModelControl.change_settings``."""
        model = request.model_name if isinstance(request, pb.TraceSettingRequest) else ""
        if not (model and self.has_graph(model)):  # whose trace begins here
            await self._models.change_settings(request, model)

    async def _own_statistics(self, name: str, version: str) -> Sequence[pb.ModelStatistics]:
        """Statistics of models that no graph hides, from their services."""
        if name and self.has_graph(name):
            return ()
        return [one for one in await self._models.statistics(name, version) if not self.has_graph(one.name)]

    def _on_catalog_change(self) -> None:
        self._graphs.choose_defaults()
        self._changed.set()

    async def _follow_catalog(self) -> None:
        """Keep graphs in step with what the targets serve."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._lifecycle.recheck()

    def _admit(self, served: Served, parameters: Parameters, context: CallContext) -> Permit:
        """As ``AdmissionController.admit``; reads priority and ``timeout`` of the request into ``context``.

        Raises as ``AdmissionController.check``; InvalidArgumentError for a malformed priority or timeout, and
        UnavailableError for a graph that is not loaded, both counted by its graph.
        """
        admission = self._admission
        try:
            limit = served.limit(admission)
            if parameters:
                context.priority, timeout_us = served.scheduling(parameters)
                if timeout_us:
                    context.deadline_ns = earlier(context.deadline_ns, context.arrival_ns + timeout_us * 1_000)
            level = admission.level_of(context.priority)
            return admission.admit(limit, level, admission.client_of(context), context)
        except WeftError as error:
            served.count_refusal(error, context)
            if error.code == "UNAVAILABLE":
                self._catalog.count_missed()
            raise

    async def _wait(self, permit: Permit, served: Served) -> None:
        try:
            await permit.wait()
        except WeftError as error:
            served.count_refusal(error, permit.context)
            raise

    def _check_early(self, name: str, version: str, parameters: Callable[[], Parameters], context: CallContext) -> None:
        """Reject a request before its tensors are parsed.

        Raises as ``AdmissionController.check``, but NotFoundError or InvalidArgumentError for a missing version,
        because retrying that is useless.
        """
        admission = self._admission
        limit = admission.limits.get(name)
        if limit is None or not admission.is_crowded(limit):
            return
        try:
            level = admission.level_of(admissible_priority(parameters()))
            admission.check(limit, level, admission.client_of(context), context)
        except WeftError as error:
            self._served(name, version).count_refusal(error, context)
            raise

    def _renew_limits(self) -> None:
        kept = []
        for name in list(self._admission.limits):
            with contextlib.suppress(WeftError):  # it is gone, or takes no requests now
                self._served(name, "").limit(self._admission)
                kept.append(name)
        self._admission.keep(kept)

    def _called(self, call: InferCall) -> Served:
        if call.parameters and not OF_ROUTERS.isdisjoint(call.parameters):
            call.parameters = {name: value for name, value in call.parameters.items() if name not in OF_ROUTERS}
        try:
            return self._served(call.model_name, call.model_version)
        except WeftError:
            self._catalog.count_missed()
            raise

    def _served(self, name: str, version: str) -> Served:
        """The graph of that name, else the target's model. Raises NotFoundError or InvalidArgumentError."""
        graph = self._graphs.find(name, version)
        if graph is not None:
            return ServedGraph(graph, self._graphs)
        entry = self._model(name, version)
        return ServedTargetModel(self._catalog.targets[entry.target], entry.model)

    def _model(self, name: str, version: str) -> CatalogEntry:
        """A target's model, ready or not."""
        entry = self._catalog.entry(name, version)
        if entry is None and version and self._catalog.entry(name, "") is not None:
            version = str(version_number(version))
            entry = self._catalog.entry(name, version)
        if entry is None:
            awaited = self._catalog.awaited().get(name)
            if reason := self._catalog.fault(name) or (awaited and awaited.reason):
                raise UnavailableError(f"Request for unknown model: '{name}' is not at ready state; {reason}")
            shown = f"'{name}' version {version[:80]}" if version else f"'{name}'"
            silent = self._catalog.unreachable
            hint = f"; targets that do not answer: {', '.join(silent)}" if silent else ""
            if not self._is_started or self._catalog.may_know_more:
                raise UnavailableError(
                    f"Request for unknown model: {shown} is not at ready state; this router has just started and has "
                    f"not heard of it yet{hint}"
                )
            raise NotFoundError(f"Request for unknown model: {shown} is not found{hint}")
        return entry


def _model_entry(entry: CatalogEntry) -> IndexEntry:
    signature = entry.model.signature
    if entry.model.is_ready:
        return IndexEntry(signature.name, signature.version, "READY", "")
    return IndexEntry(signature.name, signature.version, "UNAVAILABLE", f"not ready on target '{entry.target}'")
