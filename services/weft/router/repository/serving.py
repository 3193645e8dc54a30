"""``ServingGraph``: a compiled graph in service; immutable."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import NamedTuple

from weft.base.observing.logs import get_logger
from weft.base.signature import ModelSignature
from weft.base.text.pbtxt import render
from weft.language.plan import CallPlan, GraphPlan, NodePlan, StepPlan, steps_of
from weft.language.syntax.file import GraphSource
from weft.language.types.signatures import shape_text
from weft.router.bandits.store import KnownArm
from weft.router.compile import compile_with_warnings
from weft.router.executor import GraphExecutor
from weft.router.reporting.counters import StepCounters
from weft.router.repository.config import config_of_graph, set_digest, with_models
from weft.router.repository.files import GraphRepository
from weft.router.runtime import Runtime
from weft.router.targets.catalog import TargetCatalog
from weft_protos.model_config_pb2 import ModelConfig

#: The sources in service under a graph's name, by version.
ServedSources = Callable[[str], Mapping[str, GraphSource]]

_log = get_logger("weft.router.graphs")
IsReady = Callable[[CallPlan], bool]


class Missing(NamedTuple):
    """A step whose model is not ready."""

    step: StepPlan
    call: CallPlan


def missing_call(node: NodePlan, is_ready: IsReady) -> Missing | None:
    """Return a call that prevents the node from answering some request, None if there is none.

    A step can do without its model if one of its fallbacks is ready; a node can do without a soft step if enough
    answers remain. Shadows do not count. Of alternatives, every step that may be chosen is needed.
    """
    for custom in node.customs:
        if (missing := _missing_of(custom, is_ready)) is not None:
            return missing
    steps = {index: _missing_of(step, is_ready) for index, step in enumerate(node.steps) if step.shadow is None}
    lost = node.first_lost([index for index, missing in steps.items() if missing is not None])
    return None if lost is None else steps[lost]


def tolerated_calls(node: NodePlan, is_ready: IsReady) -> list[Missing]:
    """Calls to models that are not ready and that the node can answer without."""
    return [
        Missing(step, step.action)
        for _, step in steps_of(node)
        if step.shadow is None and isinstance(step.action, CallPlan) and not is_ready(step.action)
    ]


def _missing_of(step: StepPlan, is_ready: IsReady) -> Missing | None:
    """The call without which the step fails: its own, if its fallbacks cannot answer either."""
    if isinstance(step.action, CallPlan):
        missing = None if is_ready(step.action) else Missing(step, step.action)
    else:
        missing = missing_call(step.action, is_ready)
    if missing is None or step.fallback is None:
        return missing
    return missing if _missing_of(step.fallback, is_ready) is not None else None


class GraphSources:
    """The graphs that steps of a graph may name: the one in service, else the file in the repository.

    So a changed file that is not loaded, or fails to load, does not change a graph that contains it.

    Attributes:
        found: Result of each ``find``, by name and version.
    """

    def __init__(self, served: ServedSources, repository: GraphRepository) -> None:
        self._served = served
        self._repository = repository
        self.found: dict[tuple[str, str], GraphSource | None] = {}

    def find(self, name: str, version: str) -> GraphSource | None:
        """A graph for the compiler, which inlines it; version "" means the latest."""
        versions = self._served(name)
        source = versions.get(version or max(versions, key=int, default=""))
        if source is None:
            source = self._repository.find(name, version)
        self.found[name, version] = source
        return source

    def names(self) -> list[str]:
        """Every graph name."""
        return self._repository.names()


def compiled(source: GraphSource, catalog: TargetCatalog, graphs: GraphSources) -> tuple[GraphPlan, ModelConfig]:
    """Compile a graph and log its warnings; runs on any thread. Raises GraphError with every error, or OSError."""
    plan, warnings = compile_with_warnings(source, catalog, graphs)
    if warnings:
        _log.warning("graph '%s' version %s:\n%s", source.name, source.version, render(warnings))
    config = config_of_graph(source, plan)
    set_digest(config, source, graphs.found)
    return plan, config


class ServingGraph:
    """A compiled graph with its executor and counters; requests in flight keep theirs when it is replaced.

    Raises KeyError: the plan names an unknown target.
    """

    def __init__(
        self,
        source: GraphSource,
        plan: GraphPlan,
        config: ModelConfig,
        nested: Mapping[tuple[str, str], GraphSource | None],
        runtime: Runtime,
    ) -> None:
        self.source, self.plan, self.config = source, plan, config
        self.executor = GraphExecutor(plan, runtime)
        steps = list(steps_of(plan.root))
        self.calls = tuple(step.action for _, step in steps if isinstance(step.action, CallPlan))
        name, version = plan.signature.name, plan.signature.version
        paths = dict.fromkeys(step.path for _, step in steps)
        self.step_counters: tuple[StepCounters, ...] = tuple(
            runtime.step_counters.of(name, version, path) for path in paths
        )
        bandits = {node.path: node for node, _ in steps if node.bandit is not None}
        self.arms: tuple[KnownArm, ...] = tuple(
            arm for node in bandits.values() for arm in runtime.bandits.arms(name, node)
        )
        rollouts = {node.path: node.rollout for node, _ in steps if node.rollout is not None}
        self.rollouts = tuple(runtime.rollouts.register(name, path, one) for path, one in rollouts.items())
        self._nested = dict(nested)

    @property
    def sources(self) -> list[GraphSource]:
        """The graph, and those in it."""
        return [self.source, *(source for source in self._nested.values() if source is not None)]

    def config_with(self, catalog: TargetCatalog) -> ModelConfig:
        """The configuration; its digest changes when a model that the graph calls changes."""
        models = []
        for call in self.calls:
            entry = catalog.entry(call.model_name, call.signature.version)
            models.append((call.signature, None if entry is None else entry.model.config))
        return with_models(self.config, models)

    def fits(self, catalog: TargetCatalog) -> bool:
        """Whether every known model that it calls still has the signature that it was compiled with."""
        return not self.misfit(catalog)

    def misfit(self, catalog: TargetCatalog) -> str:
        """Describe the first known model whose signature changed since compilation, with both signatures; "": none."""
        for call in self.calls:
            found = catalog.find(call.model_name, call.model_version)
            if found is not None and found != (call.target, call.signature):
                target, signature = found
                return (
                    f"when it was compiled, model '{call.model_name}' was {_signature_text(call.signature)} on target "
                    f"'{call.target}', and now it is {_signature_text(signature)} on target '{target}'"
                )
        return ""

    def contains(self, names: Collection[str]) -> bool:
        """Whether it contains one of these graphs."""
        return any(name in names for (name, _), source in self._nested.items() if source is not None)

    def is_made_of(self, graphs: GraphSources) -> bool:
        """Whether the nested graphs are unchanged since compilation. Reads files."""
        try:
            return all(graphs.find(*key) == source for key, source in self._nested.items())
        except OSError:
            return False


def why_not_ready(plan: GraphPlan, catalog: TargetCatalog) -> str:
    """The step and model that prevent a graph from answering every request; "" if none does."""
    missing = missing_call(plan.root, partial(_is_ready, catalog))
    return "" if missing is None else _described(missing, catalog)


def why_degraded(plan: GraphPlan, catalog: TargetCatalog) -> str:
    """The steps whose models are not ready, but which a ready graph can do without; "" if none."""
    missing = tolerated_calls(plan.root, partial(_is_ready, catalog))
    return "; ".join(_described(one, catalog) for one in missing)


def _is_ready(catalog: TargetCatalog, call: CallPlan) -> bool:
    found = catalog.entry(call.model_name, call.model_version)
    return found is not None and found.model.is_ready


def _signature_text(signature: ModelSignature) -> str:
    """As ``X FP32 [-1,4] -> Y FP32 [-1,2]``."""
    inputs, outputs = (
        ", ".join(f"{spec.name} {spec.datatype} {shape_text(signature.full_shape(spec))}" for spec in specs)
        for specs in (signature.inputs, signature.outputs)
    )
    return f"{inputs} -> {outputs}"


def _described(missing: Missing, catalog: TargetCatalog) -> str:
    step, call = missing
    version = f" version {call.model_version}" if call.model_version else ""
    text = f"step '{step.path}': model '{call.model_name}'{version} on target '{call.target}' is not ready"
    found = catalog.entry(call.model_name, call.model_version)
    if found is None:
        return f"{text}: the target has no such model"
    since = f" since {found.model.not_ready_since}" if found.model.not_ready_since else ""
    return text + since + (f": {found.model.reason}" if found.model.reason else "")
