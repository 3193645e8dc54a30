"""The graphs of a router: versions, the default one, and why others cannot serve."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from weft.base.core import IndexEntry
from weft.base.errors import NotFoundError
from weft.base.repository.layout import version_number
from weft.base.statistics import ModelStatistics
from weft.language.plan import GraphPlan
from weft.language.syntax.file import GraphSource
from weft.router.reporting.counters import StepCounters
from weft.router.repository.files import VersionFile
from weft.router.repository.serving import ServingGraph, why_degraded, why_not_ready
from weft.router.rollouts.store import Rollout
from weft.router.targets.catalog import TargetCatalog
from weft_protos.model_config_pb2 import ModelConfig

#: Reason of a version that a rollback took out of service.
ROLLED_BACK = "rolled back"


@dataclass(slots=True, eq=False)
class GraphVersion:
    """One version of a graph, loaded or not.

    Attributes:
        misfit: How it stopped fitting its models, which took it out of service; "": it still fits.
        reason: Why it is unloaded, why ``candidate`` cannot be loaded, or why it serves without a file.
        logged: The reason that was logged last.
        is_failing: Whether its last load failed, other than for a target that does not answer yet.
        num_load_failures: Failed loads; repeated failures for one reason count once.
    """

    file: VersionFile
    statistics: ModelStatistics
    serving: ServingGraph | None = None
    candidate: GraphSource | None = None
    misfit: str = ""
    is_wanted: bool = True
    is_gone: bool = False
    reason: str = ""
    is_loading: bool = False
    logged: str = field(default="", repr=False)
    is_failing: bool = False
    num_load_failures: int = 0

    @property
    def label(self) -> str:
        """Name and version, for messages."""
        return f"graph '{self.file.name}' version {self.file.version}"

    def put(self, serving: ServingGraph) -> None:
        """Put a graph into service."""
        self.serving, self.candidate, self.reason, self.logged, self.misfit = serving, None, "", "", ""
        self.is_wanted, self.is_gone, self.is_failing = True, False, False

    def withdraw(self, reason: str) -> None:
        """Take it out of service for good; requests in flight finish."""
        self.serving, self.candidate, self.reason, self.logged, self.misfit = None, None, reason, "", ""
        self.is_wanted, self.is_gone, self.is_failing = False, False, False


@dataclass(slots=True)
class Graph:
    """A graph with its versions.

    Attributes:
        previous: What served before the last change of its files, by version; None: unchanged.
    """

    versions: dict[str, GraphVersion] = field(default_factory=dict)
    previous: Mapping[str, ServingGraph] | None = None

    @property
    def serving(self) -> dict[str, ServingGraph]:
        """The graphs in service, by version."""
        return {version: entry.serving for version, entry in self.versions.items() if entry.serving is not None}

    def entry(self, file: VersionFile) -> GraphVersion:
        """The version of a file, added if it is new; marks it as wanted."""
        entry = self.versions.get(file.version)
        if entry is None:
            entry = self.versions[file.version] = GraphVersion(file, ModelStatistics(file.name, file.version))
        entry.file, entry.is_wanted, entry.is_gone = file, True, False
        return entry


def texts(serving: Mapping[str, ServingGraph]) -> dict[str, str | bytes]:
    """Texts of graph files, by version."""
    return {version: graph.source.text for version, graph in serving.items()}


class GraphTable:
    """All graphs of a router; changed by a ``GraphLifecycle``.

    ``on_choice`` is called whenever the default version may have changed. A graph that is gone has no versions.
    """

    def __init__(self, catalog: TargetCatalog, on_choice: Callable[[], None] = lambda: None) -> None:
        self.graphs: dict[str, Graph] = {}
        self._catalog = catalog
        self._on_choice = on_choice
        self._defaults: dict[str, GraphVersion] = {}

    def __iter__(self) -> Iterator[GraphVersion]:
        """Every version of every graph; copies, because the metrics thread reads too."""
        for graph in list(self.graphs.values()):
            yield from list(graph.versions.values())

    def find(self, name: str, version: str) -> GraphVersion | None:
        """Find a graph's version; "" means the highest that is ready, else the highest. None: no graph has that name.

        Raises NotFoundError, or InvalidArgumentError if ``version`` is not a number.
        """
        default = self._defaults.get(name)
        if default is None or not version:
            return default
        number = version_number(version)
        versions = self.graphs[name].versions
        found = versions.get(str(number))
        if found is None:
            raise NotFoundError(
                f"Request for unknown model: '{name}' version {number} is not found; the graph has versions "
                f"{', '.join(versions)}"
            )
        return found

    def plans(self, name: str, version: int = 0) -> list[GraphPlan]:
        """The plans in service for a graph, the default version first; or only that of ``version`` above 0."""
        entry = self.find(name, str(version) if version else "")
        if entry is None:
            return []
        entries = [entry] if version else [entry, *reversed(self.graphs[name].versions.values())]
        return list({id(e): e.serving.plan for e in entries if e.serving is not None}.values())

    def rollouts(self, name: str) -> list[Rollout]:
        """The rollouts of a graph; of versions that have one at the same node, that of the default one or the last."""
        entries = [*self.graphs[name].versions.values(), *filter(None, [self.find(name, "")])]
        rollouts = (one for entry in entries if entry.serving is not None for one in entry.serving.rollouts)
        return list({one.node: one for one in rollouts}.values())

    def served(self, name: str) -> Mapping[str, GraphSource]:
        """The sources in service under a name, by version."""
        graph = self.graphs.get(name)
        return {} if graph is None else {version: serving.source for version, serving in graph.serving.items()}

    def why_not_ready(self, entry: GraphVersion) -> str:
        """Why a graph cannot answer now; "" if it can."""
        if entry.serving is None:
            return entry.reason or "not loaded"
        return why_not_ready(entry.serving.plan, self._catalog)

    def why_degraded(self, entry: GraphVersion) -> str:
        """The soft steps or steps with fallbacks whose models a ready graph lacks; "" if none."""
        serving = entry.serving
        return "" if serving is None or self.why_not_ready(entry) else why_degraded(serving.plan, self._catalog)

    def config(self, serving: ServingGraph) -> ModelConfig:
        """Configuration of a graph, with the digest of its files and of the models that it calls now."""
        return serving.config_with(self._catalog)

    def index_entry(self, entry: GraphVersion) -> IndexEntry:
        """State of a version; the reason of a READY one names a failed reload, or missing models."""
        name, version = entry.file.name, entry.file.version
        if not entry.is_wanted and not entry.reason:
            return IndexEntry(name, version, "", "")  # never loaded
        if entry.is_loading:
            return IndexEntry(name, version, "LOADING", "")
        fault = self.why_not_ready(entry)
        pending = f"reload failed: {entry.reason}" if entry.serving is not None and entry.reason else ""
        degraded = f"degraded: {reason}" if not fault and (reason := self.why_degraded(entry)) else ""
        reasons = "\n".join(filter(None, (fault, degraded, pending)))
        return IndexEntry(name, version, "UNAVAILABLE" if fault else "READY", reasons)

    def step_counters(self) -> Iterator[StepCounters]:
        """Counters of every step in service."""
        for entry in self:
            if (serving := entry.serving) is not None:  # read once: this is the metrics thread
                yield from serving.step_counters

    def choose_defaults(self, names: Iterable[str] | None = None) -> None:
        """Choose the default version, the highest ready one, of all graphs or of ``names``.

        Call it when readiness may have changed.
        """
        for name in list(self.graphs) if names is None else names:
            versions = self.graphs[name].versions
            if versions:
                self._defaults[name] = max(
                    versions.values(), key=lambda entry: (not self.why_not_ready(entry), int(entry.file.version))
                )
            else:
                self._defaults.pop(name, None)
        self._on_choice()
