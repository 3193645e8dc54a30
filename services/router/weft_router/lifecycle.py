"""Graphs from file to ready to unloaded: each version has one reference to what serves it, and it is swapped whole."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from weft_common.errors import InternalError, NotFoundError, UnavailableError, WeftError
from weft_common.logs import get_logger
from weft_common.pbtxt import render
from weft_common.statistics import ModelStatistics
from weft_common.validation import version_number
from weft_protos.model_config_pb2 import ModelConfig
from weft_router.admission import Admission
from weft_router.catalog import Catalog
from weft_router.executor import GraphExecutor, calls_of, nested_graphs_of
from weft_router.graph.compile import check_graph, compile_graph
from weft_router.graph.plan import CallPlan, GraphPlan
from weft_router.graph_config import config_of_graph
from weft_router.graphs import GraphFile, GraphRepository

_log = get_logger("weft.router.graphs")


class ServingGraph:
    """A compiled graph and what belongs to it; in-flight requests keep theirs when it is replaced.

    Args:
        plan: The compiled graph.
        config: The graph as a model's configuration.
        catalog: Gives the targets.
    """

    def __init__(self, plan: GraphPlan, config: ModelConfig, catalog: Catalog) -> None:
        self.plan = plan
        self.executor = GraphExecutor(plan, catalog.targets)
        self.config = config
        self.calls: tuple[CallPlan, ...] = tuple(calls_of(plan.root))
        self.nested: frozenset[str] = frozenset(nested_graphs_of(plan.root))
        self.admission = Admission(
            f"graph '{plan.signature.name}'", plan.max_inflight, "'max_inflight' of the graph's policy"
        )


@dataclass(slots=True)
class GraphVersion:
    """One version of a graph, loaded or not.

    Attributes:
        file: Where it is written.
        statistics: Counters; they outlive a reload.
        serving: What answers; None while it cannot.
        reason: Why it does not serve; "" while it does.
        state: LOADING or UNLOADING while it changes, else "".
    """

    file: GraphFile
    statistics: ModelStatistics
    serving: ServingGraph | None = None
    reason: str = ""
    state: str = ""
    is_wanted: bool = True
    logged: str = field(default="", repr=False)


class GraphTable:
    """Owns the graphs of a router.

    Args:
        repository: Where the files are.
        catalog: What the targets serve.
    """

    def __init__(self, repository: GraphRepository, catalog: Catalog) -> None:
        self._repository = repository
        self._catalog = catalog
        self._versions: dict[str, dict[str, GraphVersion]] = {}
        self._lock = asyncio.Lock()

    def __iter__(self) -> Iterator[GraphVersion]:
        """Every version of every graph; copied first, because the metrics thread reads too."""
        for versions in list(self._versions.values()):
            yield from list(versions.values())

    def find(self, name: str, version: str) -> GraphVersion | None:
        """A graph's version; "" means the highest that is ready, else the highest. None: no graph has that name.

        Raises:
            NotFoundError: The graph has no such version.
            InvalidArgumentError: ``version`` is no number.
        """
        versions = self._versions.get(name)
        if not versions:
            return None
        if version:
            number = version_number(version)
            found = versions.get(str(number))
            if found is None:
                raise NotFoundError(
                    f"Request for unknown model: '{name}' version {number} is not found; the graph has versions "
                    f"{', '.join(versions)}"
                )
            return found
        if len(versions) == 1:
            return next(iter(versions.values()))
        return max(versions.values(), key=lambda entry: (not self.why_not_ready(entry), int(entry.file.version)))

    def why_not_ready(self, entry: GraphVersion) -> str:
        """Why a graph cannot answer now; "" if it can.

        It does not compile, it is unloaded, or a model that it needs is not ready.
        """
        if entry.serving is None:
            return entry.reason or "not loaded"
        for call in entry.serving.calls:
            found = self._catalog.entry(call.model_name, call.model_version)
            if found is None or not found.model.is_ready:
                version = f" version {call.model_version}" if call.model_version else ""
                return f"model '{call.model_name}'{version} on target '{call.target}' is not ready"
        return ""

    async def load_at_start(self, names: Sequence[str]) -> None:
        """Every graph of the repository is known, and those of ``names`` ("*" is all) were tried.

        What cannot serve says why in ``reason``.
        """
        async with self._lock:
            try:
                files = await asyncio.to_thread(self._repository.scan)
            except OSError as error:
                _log.error("the graph repository cannot be read: %s", error)
                return
            for name in set(names) - set(files) - {"*"}:
                _log.error("graph '%s' is to be loaded at the start, but the repository has no such graph", name)
            for name, graph_files in files.items():
                for file in graph_files:
                    entry = self._entry(file)
                    entry.is_wanted = "*" in names or name in names
                    if entry.is_wanted:
                        await self._try(entry)

    async def recheck(self) -> None:
        """Graphs that failed were tried again; those whose models changed were compiled anew.

        A graph that does not fit its models any more is taken out of service.
        """
        async with self._lock:
            for entry in list(self):
                if entry.is_wanted and (entry.serving is None or not self._fits(entry.serving)):
                    await self._try(entry, is_strict=True)

    async def load(self, name: str) -> None:
        """Load or reload every version of a graph, and compile anew the graphs that contain it.

        What cannot be compiled does not replace what serves.

        Raises:
            NotFoundError: The repository has no graph of that name.
            WeftError: The highest version cannot be compiled; the message shows where and why.
        """
        async with self._lock:
            files = (await asyncio.to_thread(self._repository.scan)).get(name)
            if not files:
                raise NotFoundError(
                    f"failed to load '{name}', failed to poll from model repository: it has no graph of that name; a "
                    f"graph is a file {name}/<version>/graph.pbtxt"
                )
            gone = set(self._versions.get(name, {})) - {file.version for file in files}
            for version in gone:
                del self._versions[name][version]
            failure: WeftError | None = None
            for file in files:
                failure = await self._try(self._entry(file))
            for entry in list(self):
                if entry.serving is not None and name in entry.serving.nested:
                    await self._try(entry)
            if failure is not None:
                raise failure

    async def unload(self, name: str) -> None:
        """No version of the graph takes requests; those in flight finish.

        Raises:
            NotFoundError: No graph has that name.
        """
        async with self._lock:
            versions = self._versions.get(name)
            if not versions:
                raise NotFoundError(f"Request for unknown model: '{name}' is not found; it is no graph of this router")
            for entry in versions.values():
                entry.serving, entry.reason, entry.is_wanted = None, "unloaded", False

    def _entry(self, file: GraphFile) -> GraphVersion:
        versions = self._versions.setdefault(file.name, {})
        entry = versions.get(file.version)
        if entry is None:
            entry = versions[file.version] = GraphVersion(file, ModelStatistics(file.name, file.version))
        entry.file = file
        entry.is_wanted = True
        return entry

    def _fits(self, serving: ServingGraph) -> bool:
        """Whether every model that the graph calls still has the signature that it was compiled with."""
        for call in serving.calls:
            found = self._catalog.find(call.model_name, call.model_version)
            if found is not None and found != (call.target, call.signature):
                return False
        return True

    async def _try(self, entry: GraphVersion, *, is_strict: bool = False) -> WeftError | None:
        """Compile a version and put it into service; on failure keep what serves, unless ``is_strict``, and say why."""
        file = entry.file
        entry.state = "" if entry.serving else "LOADING"
        try:
            plan, config = await asyncio.to_thread(self._compile, file)
            entry.serving, entry.reason, entry.logged = ServingGraph(plan, config, self._catalog), "", ""
        except OSError as error:
            failure: WeftError = UnavailableError(f"graph file {file.path} cannot be read: {error.strerror}")
        except WeftError as error:
            failure = error
        except Exception:
            failure = InternalError("the graph compiler failed")
            _log.exception("%s", failure.message, extra={"error_id": failure.error_id, "file": str(file.path)})
        else:
            _log.info("graph '%s' version %s is loaded", file.name, file.version)
            return None
        finally:
            entry.state = ""
        if is_strict:
            entry.serving = None
        self._report(entry, failure)
        return failure

    def _compile(self, file: GraphFile) -> tuple[GraphPlan, ModelConfig]:
        """Plan and configuration of a graph; warnings are logged."""
        source = file.read()
        plan = compile_graph(source, self._catalog, self._repository)
        if warnings := check_graph(source, self._catalog, self._repository):
            _log.warning("graph '%s' version %s:\n%s", file.name, file.version, render(warnings))
        return plan, config_of_graph(source, plan)

    def _report(self, entry: GraphVersion, failure: WeftError) -> None:
        """Keep the reason for the index, and log it once."""
        reason = failure.message
        if unreachable := self._catalog.unreachable:
            reason += f"\ntargets that do not answer yet: {', '.join(unreachable)}"
        if entry.serving is None:
            entry.reason = reason
        if reason != entry.logged:
            entry.logged = reason
            kept = "; the version that was loaded before goes on serving" if entry.serving is not None else ""
            _log.warning(
                "graph '%s' version %s cannot be loaded%s:\n%s", entry.file.name, entry.file.version, kept, reason
            )
