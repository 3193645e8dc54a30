"""Resolves targets of steps: a model, a node of the file, or another graph; reports invalid ones."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from weft.base.signature import ModelSignature
from weft.base.text.pbtxt import PbtxtError, suggestion
from weft.language.checks.fields import check_features
from weft.language.checks.structure import check_structure
from weft.language.plan import NodePlan
from weft.language.syntax.file import (
    GraphFile,
    GraphLookup,
    GraphReport,
    GraphSource,
    KindSyntax,
    ModelCatalog,
    ModelFaults,
    NodeDefinition,
    PolicyKind,
    StepDefinition,
)
from weft.language.syntax.parse import parse_graph

#: Nodes of one file, and steps of one node.
MAX_ENTRIES = 1000


@dataclass(frozen=True, slots=True)
class ModelTarget:
    """A model; ``version`` as sent in calls."""

    target: str
    signature: ModelSignature
    version: str


@dataclass(frozen=True, slots=True)
class NodeTarget:
    """A node of the same file, or the root of another graph."""

    file: GraphFile
    node: NodeDefinition
    is_graph: bool

    @property
    def key(self) -> tuple[str, str]:
        """Identity, for finding cycles."""
        return self.file.label, self.node.name


class UnknownTarget:
    """An unknown target: an error was reported, or there is no catalog."""


Target = ModelTarget | NodeTarget | UnknownTarget


class Resolver:
    """Finds targets and loads the files of other graphs, each once.

    Args:
        report: Receives unknown names (G002) and all errors in the files of other graphs.
    """

    def __init__(
        self,
        kinds: Mapping[str, KindSyntax],
        policies: Mapping[str, PolicyKind],
        catalog: ModelCatalog | None,
        graphs: GraphLookup | None,
        report: GraphReport,
    ) -> None:
        self._kinds = kinds
        self._policies = policies
        self._catalog = catalog
        self._graphs = graphs
        self._report = report
        self._files: dict[tuple[str, str], GraphFile | None] = {}

    @cached_property
    def _models(self) -> list[str]:
        return self._catalog.names() if self._catalog else []

    @cached_property
    def _graph_names(self) -> list[str]:
        return self._graphs.names() if self._graphs else []

    def load(self, source: GraphSource) -> GraphFile | None:
        """Load and check a file; None after reporting that it cannot be compiled."""
        try:
            file = parse_graph(source, self._kinds, self._policies)
        except PbtxtError as error:
            self._report.extend(error.diagnostics)
            return None
        if max(len(file.all_nodes), *(len(node.steps) for node in file.all_nodes), 0) > MAX_ENTRIES:
            text = f"more than {MAX_ENTRIES} nodes, or steps in one node, are not supported by this version of Weft"
            self._report.error("G024", file, "name", text)
            return None
        check_features(file, self._report)
        check_structure(file, self._report)
        return file

    def resolve(self, file: GraphFile, step: StepDefinition) -> Target:
        """Resolve the target of a step; report errors."""
        message = step.message
        if message.node:
            node = file.nodes.get(message.node)
            return NodeTarget(file, node, is_graph=False) if node else UnknownTarget()
        version = str(message.model_version) if message.model_version > 0 else ""
        if message.graph:
            return self._imported(file, step, version)
        return self._model(file, step, version) if message.model_name else UnknownTarget()

    def _model(self, file: GraphFile, step: StepDefinition, version: str) -> Target:
        name, path = step.message.model_name, f"{step.path}.model_name"
        if self._catalog is not None and (found := self._catalog.find(name, version)):
            return ModelTarget(found[0], found[1], version)
        target = self._graph(name, version)
        is_itself = isinstance(target, NodeTarget) and target.file.label == file.label
        if target and not is_itself:
            return target
        if self._catalog is None:
            return UnknownTarget()
        known = self._models
        fault = self._catalog.fault(name) if isinstance(self._catalog, ModelFaults) else ""
        if fault:
            text = f"model '{name}' is not ready: {fault.splitlines()[0]}"
        elif name in known:
            text = f"model '{name}' has no version {version} on any target"
            if other := self._catalog.find(name, ""):
                text += f"; without 'model_version' the step calls version {other[1].version}"
        else:
            hint = "; the graph cannot call itself" if is_itself else suggestion(name, [*known, *self._graph_names])
            text = f"unknown model '{name}'{hint}"
        self._report.error("G002", file, path, text)
        return UnknownTarget()

    def _imported(self, file: GraphFile, step: StepDefinition, version: str) -> Target:
        name, path = step.message.graph, f"{step.path}.graph"
        imports = getattr(file.message, "import")  # a Python keyword
        names = {getattr(entry, "as") or entry.graph: entry for entry in imports}
        wrong_name = wrong_version = path
        if name in names:
            entry = names[name]
            at = f"import[{list(imports).index(entry)}]"
            wrong_name, wrong_version = f"{at}.graph", f"{at}.version" if entry.version > 0 else path
            name, version = entry.graph, str(entry.version) if entry.version > 0 else version
        target = self._graph(name, version)
        if target or self._graphs is None:
            return target or UnknownTarget()
        known = self._graph_names
        if name in known:
            latest = self._graphs.find(name, "")
            hint = f"; the latest is {latest.version}" if latest else ""
            self._report.error("G002", file, wrong_version, f"graph '{name}' has no version {version}{hint}")
        else:
            text = f"unknown graph '{name}'{suggestion(name, [*known, *names])}"
            self._report.error("G002", file, wrong_name, text)
        return UnknownTarget()

    def _graph(self, name: str, version: str) -> NodeTarget | UnknownTarget | None:
        """Root of the graph; unknown if its file has (reported) errors; None if there is no such graph."""
        source = self._graphs.find(name, version) if self._graphs else None
        if source is None:
            return None
        key = (name, source.version)
        if key not in self._files:
            self._files[key] = self.load(source)
        file = self._files[key]
        node = file.nodes.get(file.root) if file else None
        return NodeTarget(file, node, is_graph=True) if file and node else UnknownTarget()


def cycle_text(trail: Sequence[tuple[str, str]], target: NodeTarget) -> str:
    """Error message for a step whose target is a node around it, one of ``trail``."""
    cycle = (*trail[trail.index(target.key) :], target.key)
    is_local = len({label for label, _ in cycle}) == 1
    shown = [name for _, name in cycle] if is_local else _without_repeats(label for label, _ in cycle)
    what = "node" if is_local else "graph"
    return f"cycle: {' -> '.join(shown)}; a {what} cannot run itself, a 'loop' in a sequence repeats its steps"


def check_nesting(file: GraphFile, outer: int, path: str, target: NodeTarget, report: GraphReport) -> None:
    """Report a nested graph that batches differently from ``file``, and a cache without effect within it.

    Args:
        outer: Rows that the step gets at once; 0: its tensors have no batch dimension.
    """
    message = target.file.message
    inner = message.max_batch_size
    if inner == 0 < outer:
        text = (
            f"graph '{file.name}' has max_batch_size {outer} and graph '{target.file.name}' has none, so that it takes "
            "no batch; rows go to it one by one in a 'map' alone: use one, or give it a 'max_batch_size'"
        )
        report.error("G024", file, path, text)
    elif inner < outer:
        report.error("G009", file, path, too_small_text(file, outer, f"graph {target.file.name}", inner))
    if target.is_graph and (message.policy.HasField("cache") or message.response_cache.enable):
        text = (
            f"the cache of graph '{target.file.name}' has no effect where it is a step of another graph; give the "
            "step a 'cache'"
        )
        report.warning("G018", file, path, text)


def too_small_text(file: GraphFile, own: int, what: str, limit: int) -> str:
    """Error message for a callee ``what`` whose batch ``limit`` is below the graph's ``own``."""
    return (
        f"{file.dialect.platform} {file.name} allows maximum batch size {own}, but it contains "
        f"{what} which only allows maximum batch size to be {limit}; lower that of {file.name}, or raise that of the "
        "other"
    )


def with_limits(plan: NodePlan, file: GraphFile) -> NodePlan:
    """The root of a nested graph, with the limits of its graph added."""
    policy = file.message.policy
    return replace(
        plan,
        graph=file.label,
        timeout_ms=_smaller(plan.timeout_ms, policy.timeout_ms),
        max_inflight=_smaller(plan.max_inflight, policy.max_inflight),
    )


def _smaller(one: int, other: int) -> int:
    """The smaller of two limits; 0 is no limit."""
    return min(one, other) or max(one, other)


def _without_repeats(names: Iterable[str]) -> list[str]:
    shown: list[str] = []
    for name in names:
        if not shown or shown[-1] != name:
            shown.append(name)
    return shown
