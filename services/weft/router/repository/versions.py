"""The versions of a graph and their states."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.base.statistics import ModelStatistics
from weft.language.syntax.source import GraphSource
from weft.router.repository.files import VersionFile
from weft.router.repository.serving import ServingGraph


@dataclass(slots=True, eq=False)
class GraphVersion:
    """One version of a graph, loaded or not.

    Attributes:
        file: Its file.
        statistics: Counters; they outlive a reload.
        serving: The graph in service; None: it takes no requests.
        candidate: A source to load that cannot be loaded yet; None: there is none.
        misfit: Why it was taken out of service, where it no longer fits its models; "": it was not.
        is_wanted: Whether it is to serve at all.
        is_gone: Whether its file is gone.
        reason: Why it is not wanted, why ``candidate`` cannot be loaded, or why it serves without a file.
        is_loading: Whether its first load is in progress.
        logged: The reason that was logged last.
        is_failing: Whether its last load failed, for another reason than a target that does not answer yet.
        num_load_failures: Failed loads; those with the same reason in a row count once.
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
        """For messages."""
        return f"graph '{self.file.name}' version {self.file.version}"

    def put(self, serving: ServingGraph) -> None:
        """Put a graph into service."""
        self.serving, self.candidate, self.reason, self.logged, self.misfit = serving, None, "", "", ""
        self.is_wanted, self.is_gone, self.is_failing = True, False, False

    def withdraw(self, reason: str) -> None:
        """Take it out of service, and want it no longer; requests in flight finish."""
        self.serving, self.candidate, self.reason, self.logged, self.misfit = None, None, reason, "", ""
        self.is_wanted, self.is_gone, self.is_failing = False, False, False


@dataclass(slots=True)
class Graph:
    """A graph with its versions.

    Attributes:
        versions: By number.
        previous: What served before the last change of its files, by version; None: they have not changed.
    """

    versions: dict[str, GraphVersion] = field(default_factory=dict)
    previous: Mapping[str, ServingGraph] | None = None

    @property
    def serving(self) -> dict[str, ServingGraph]:
        """The graphs in service, by version."""
        return {version: entry.serving for version, entry in self.versions.items() if entry.serving is not None}

    def entry(self, file: VersionFile) -> GraphVersion:
        """The version of a file, added if it is new; it is wanted."""
        entry = self.versions.get(file.version)
        if entry is None:
            entry = self.versions[file.version] = GraphVersion(file, ModelStatistics(file.name, file.version))
        entry.file, entry.is_wanted, entry.is_gone = file, True, False
        return entry


def texts(serving: Mapping[str, ServingGraph]) -> dict[str, str | bytes]:
    """Texts of the files, by version."""
    return {version: graph.source.text for version, graph in serving.items()}
