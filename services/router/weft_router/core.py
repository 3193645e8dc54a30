"""The router as a V2 server: its graphs, and the models of its targets, which can be called through it."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path

from weft_common.core import CallContext, IndexEntry, InferCall, InferResult, ParameterValue
from weft_common.errors import NotFoundError, UnavailableError, UnsupportedError, WeftError
from weft_common.signature import ModelSignature
from weft_common.statistics import ModelStatistics, failure_reason
from weft_common.validation import scheduling_parameters, validate, version_number
from weft_protos.model_config_pb2 import ModelConfig
from weft_router.admission import Admission
from weft_router.catalog import Catalog, Entry
from weft_router.counters import count_success
from weft_router.graph_config import config_of_signature
from weft_router.graphs import GraphRepository
from weft_router.lifecycle import GraphTable, GraphVersion, ServingGraph
from weft_router.passthrough import pass_through
from weft_router.steps import earlier
from weft_router.targets import Target

MODEL_CONTROL_MODES = ("none", "explicit")
DEFAULT_MAX_INFLIGHT = 2048


class RouterCore:
    """Serves every graph of a repository over some targets; make it on the event loop that it will run on.

    Statistics of a graph: ``success`` is the time from arrival to answer, ``compute_infer`` the wall time of the
    execution (parallel steps count once), ``compute_input`` the time from arrival to its start, so that the parts never
    exceed the whole; ``queue`` counts requests and no time, because a graph has no queue. The models of the targets are
    counted as seen from here: each call's whole duration is ``compute_infer``.

    Args:
        repository: Folder with the graphs.
        targets: In order; the first that serves a model is used for it.
        model_control: ``"none"``: every graph is loaded at the start, and that is all. ``"explicit"``: ``load_graphs``
            are, and clients load, reload and unload.
        load_graphs: Explicit mode: graphs to load at the start; ``"*"`` is all.
        max_inflight: Requests in the router at once; 0 means no limit.
        poll_s: How often each target is asked what it serves, in seconds.
    """

    def __init__(
        self,
        repository: Path,
        targets: Sequence[Target],
        *,
        model_control: str = "none",
        load_graphs: Sequence[str] = (),
        max_inflight: int = DEFAULT_MAX_INFLIGHT,
        poll_s: float = 2.0,
    ) -> None:
        self._changed = asyncio.Event()
        self._catalog = Catalog(targets, poll_s=poll_s, on_change=self._changed.set)
        self._graphs = GraphTable(GraphRepository(repository), self._catalog)
        self._model_control = model_control
        self._load_graphs = ("*",) if model_control == "none" else tuple(load_graphs)
        self._admission = Admission("the router", max_inflight, "--max-inflight")
        self._is_started = False
        self._follower: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Every target was asked once and every graph was tried; what failed is tried again when a target changes."""
        await self._catalog.start()
        self._changed.clear()
        await self._graphs.load_at_start(self._load_graphs)
        self._is_started = True
        self._follower = asyncio.create_task(self._follow_catalog())

    async def close(self, *, grace_s: float) -> None:
        """Nothing runs any more and every target is closed. Requests in flight are the server's to wait for."""
        if self._follower is not None:
            self._follower.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._follower
        await self._catalog.close()

    def is_ready(self) -> bool:
        """Whether every graph that is not unloaded is ready."""
        return self._is_started and not any(
            entry.is_wanted and self._graphs.why_not_ready(entry) for entry in self._graphs
        )

    def is_model_ready(self, name: str, version: str) -> bool:
        """Whether a graph with all that it needs, or a target's model, is ready. Raises NotFoundError."""
        graph = self._graphs.find(name, version)
        if graph is not None:
            return not self._graphs.why_not_ready(graph)
        return self._model(name, version).model.is_ready

    def signature(self, name: str, version: str) -> ModelSignature:
        """Signature of a graph or of a target's model. Raises NotFoundError or UnavailableError."""
        graph = self._graphs.find(name, version)
        if graph is not None:
            return _serving(graph).plan.signature
        return self._model(name, version).model.signature

    def config(self, name: str, version: str) -> ModelConfig:
        """Configuration of a graph or of a target's model. Raises NotFoundError or UnavailableError."""
        graph = self._graphs.find(name, version)
        if graph is not None:
            return _serving(graph).config
        model = self._model(name, version).model
        return model.config if model.config is not None else config_of_signature(model.signature)

    def index(self, *, ready_only: bool) -> list[IndexEntry]:
        """Graphs first, then the models of the targets; a graph hides a model of its name."""
        entries = [self._graph_entry(graph) for graph in self._graphs]
        names = {entry.name for entry in entries}
        entries += [_model_entry(entry) for entry in self._catalog.entries() if entry.model.signature.name not in names]
        return [entry for entry in entries if not ready_only or entry.state == "READY"]

    def statistics(self, name: str, version: str) -> list[ModelStatistics]:
        """Counters of graphs, and of the targets' models as seen from here. Raises NotFoundError."""
        counters: Iterable[ModelStatistics]
        if not name:
            counters = [graph.statistics for graph in list(self._graphs)] + list(self._catalog.statistics.values())
            return list(counters)
        graph = self._graphs.find(name, version)
        if graph is not None:
            found = graph.file.version
            counters = [graph.statistics for graph in self._graphs]
        else:
            found = self._model(name, version).model.signature.version
            counters = self._catalog.statistics.values()
        return [c for c in counters if c.name == name and (not version or c.version == found)]

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        """The answer of a graph, or of a target's model of that name.

        Raises:
            ResourceExhaustedError: Too many requests are in flight.
            NotFoundError: There is no such graph or model.
            UnavailableError: The graph cannot run; says why.
            WeftError: As validation or a step raised it.
        """
        self._admission.enter()
        try:
            graph = self._graphs.find(call.model_name, call.model_version)
            if graph is None:
                entry = self._model(call.model_name, call.model_version)
                version = entry.model.signature.version
                if call.model_version:
                    call.model_version = version  # "01" is 1
                return await pass_through(self._catalog.targets[entry.target], version, call, context)
            return await self._infer_counted(graph, call, context)
        finally:
            self._admission.leave(time.monotonic_ns() - context.arrival_ns)

    async def stream_infer(self, call: InferCall, context: CallContext) -> AsyncIterator[InferResult]:
        """One answer, as ``infer`` gives it."""
        yield await self.infer(call, context)

    async def load(self, name: str, parameters: Mapping[str, ParameterValue | bytes]) -> None:
        """Load or reload a graph; a version that does not compile does not replace one that serves.

        Raises:
            UnavailableError: Model control is off.
            UnsupportedError: Parameters are given.
            WeftError: As ``GraphTable.load``.
        """
        self._check_control()
        if parameters:
            raise UnsupportedError(
                f"load parameters {sorted(parameters)} are not supported for graphs; change the file and load it again"
            )
        await self._graphs.load(name)

    async def unload(self, name: str, *, unload_dependents: bool) -> None:
        """Unload a graph; requests in flight finish.

        Raises:
            UnavailableError: Model control is off.
            UnsupportedError: ``unload_dependents``: the models belong to other services.
            NotFoundError: No graph has that name.
        """
        self._check_control()
        if unload_dependents:
            raise UnsupportedError(
                f"unload_dependents is not supported for graphs: the models of '{name}' are unloaded at the services "
                "that serve them"
            )
        await self._graphs.unload(name)

    async def _follow_catalog(self) -> None:
        """Keep graphs in step with what the targets serve."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._graphs.recheck()

    async def _infer_counted(self, graph: GraphVersion, call: InferCall, context: CallContext) -> InferResult:
        counters = graph.statistics
        try:
            serving = _serving(graph)
            serving.admission.enter()
            try:
                num_rows = self._checked(serving, call, context)
                start_ns = time.monotonic_ns()
                result = await serving.executor.execute(call, context)
                end_ns = time.monotonic_ns()
            finally:
                serving.admission.leave(time.monotonic_ns() - context.arrival_ns)
        except WeftError as error:
            counters.record_failure(failure_reason(error.code), time.monotonic_ns() - context.arrival_ns)
            raise
        except asyncio.CancelledError:
            counters.record_failure("CANCELED", time.monotonic_ns() - context.arrival_ns)
            raise
        except Exception:
            counters.record_failure("BACKEND", time.monotonic_ns() - context.arrival_ns)
            raise
        count_success(
            counters,
            call,
            context,
            num_rows=num_rows,
            arrival_ns=context.arrival_ns,
            start_ns=start_ns,
            end_ns=end_ns,
        )
        return result

    def _checked(self, serving: ServingGraph, call: InferCall, context: CallContext) -> int:
        """Number of rows of a call that fits the graph; its ``timeout`` (microseconds) becomes part of the deadline."""
        num_rows = validate(call, serving.plan.signature)
        _, timeout_us = scheduling_parameters(call.parameters)
        if timeout_us:
            context.deadline_ns = earlier(context.deadline_ns, context.arrival_ns + timeout_us * 1_000)
        for output in call.outputs:
            if output.parameters:
                raise UnsupportedError(
                    f"parameters {sorted(output.parameters)} of output '{output.name}' are not supported for graphs by "
                    "this version; ask the model of the step for them"
                )
        return num_rows

    def _model(self, name: str, version: str) -> Entry:
        """A target's model, ready or not. Raises NotFoundError, or InvalidArgumentError for a version that is none."""
        entry = self._catalog.entry(name, version)
        if entry is None and version and self._catalog.entry(name, "") is not None:
            version = str(version_number(version))
            entry = self._catalog.entry(name, version)
        if entry is None:
            shown = f"'{name}' version {version[:80]}" if version else f"'{name}'"
            silent = self._catalog.unreachable
            hint = f"; targets that do not answer: {', '.join(silent)}" if silent else ""
            raise NotFoundError(f"Request for unknown model: {shown} is not found{hint}")
        return entry

    def _graph_entry(self, graph: GraphVersion) -> IndexEntry:
        name, version = graph.file.name, graph.file.version
        if not graph.is_wanted and not graph.reason:
            return IndexEntry(name, version, "", "")  # never loaded
        reason = self._graphs.why_not_ready(graph)
        return IndexEntry(name, version, graph.state or ("UNAVAILABLE" if reason else "READY"), reason)

    def _check_control(self) -> None:
        if self._model_control != "explicit":
            raise UnavailableError(
                "explicit model load / unload is not allowed; start the router with --model-control-mode explicit"
            )


def _serving(graph: GraphVersion) -> ServingGraph:
    """What answers for a graph. Raises UnavailableError when it is not loaded."""
    if graph.serving is None:
        shown = f"graph '{graph.file.name}' version {graph.file.version}"
        raise UnavailableError(f"{shown} is not at ready state: {graph.reason or 'not loaded'}")
    return graph.serving


def _model_entry(entry: Entry) -> IndexEntry:
    signature = entry.model.signature
    if entry.model.is_ready:
        return IndexEntry(signature.name, signature.version, "READY", "")
    return IndexEntry(signature.name, signature.version, "UNAVAILABLE", f"not ready on target '{entry.target}'")
