"""The graphs of a repository that call the model, and the one that the data goes through."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from weft.base.errors import InvalidArgumentError, WeftError
from weft.language import GraphPlan
from weft.language.plan import CallPlan
from weft.optimize.repository.source import RepositoryModel
from weft.router.repository.files import GraphRepository
from weft.router.repository.serving import steps_of
from weft.tools.compiled import load_plan
from weft.tools.offline import GRAPH_FOLDER


class GraphUse(NamedTuple):
    """A graph that calls the model.

    Attributes:
        name: Of the graph.
        versions: Of the model, that its steps name; those that name none are left out.
    """

    name: str
    versions: frozenset[int]


def graphs_that_call(repository: Path, name: str) -> list[GraphUse]:
    """The graphs of a repository, their latest versions, that call a model. Graphs with errors are left out."""
    found = []
    for graph in _graph_names(repository):
        try:
            plan = load_plan(graph, repository)
        except (WeftError, OSError):
            continue
        calls = [step.action for _, step in steps_of(plan.root) if isinstance(step.action, CallPlan)]
        own = [call.model_version for call in calls if call.model_name == name]
        if own or any(model == name for _, model in plan.dependencies):
            found.append(GraphUse(graph, frozenset(int(version) for version in own if version)))
    return found


def _graph_names(repository: Path) -> list[str]:
    folder = repository / GRAPH_FOLDER
    return sorted(GraphRepository(folder if folder.is_dir() else repository).scan())


def nested_graphs(plan: GraphPlan) -> set[str]:
    """Names of the graphs that run inside a graph."""
    return {node.graph.partition("/")[0] for node, _ in steps_of(plan.root) if node.graph}


def choose_graph(asked: str, model: RepositoryModel, uses: Sequence[GraphUse]) -> GraphPlan | None:
    """The graph that the data goes through; None: straight to the model.

    Args:
        asked: NAME or NAME/VERSION; "": the only one that calls the model, none where no graph does; the model's own
            name: none.
        model: That is optimised.
        uses: The graphs that call it.

    Raises:
        InvalidArgumentError: Several call it and none is chosen, or the chosen one does not.
        WeftError: The graph cannot be compiled.
    """
    name = model.source.name
    known = [use.name for use in uses]
    if asked == name or (not asked and not known):
        return None
    if not asked and len(known) > 1:
        raise InvalidArgumentError(
            f"the graphs {', '.join(known)} call '{name}'; --graph names the one that the data is for, or --graph "
            f"{name} for data that goes straight to the model"
        )
    plan = load_plan(asked or known[0], model.repository)
    if plan.signature.name not in known:
        raise InvalidArgumentError(
            f"graph '{asked}' does not call '{name}'; graphs that do: {', '.join(known) or 'none'}"
        )
    return plan


def check_pinned(model: RepositoryModel, number: int, uses: Sequence[GraphUse]) -> None:
    """Refuse a new version that would take one away from a graph which asks for it.

    Raises:
        InvalidArgumentError: A graph names a version that ``version_policy`` would no longer serve.
    """
    gone = {*model.serves(model.versions)} - {*model.serves([*model.versions, number])}
    for use in uses:
        if asked := sorted(use.versions & gone):
            raise InvalidArgumentError(
                f"graph '{use.name}' asks for version {asked[0]} of '{model.source.name}', which would no longer be "
                f"served beside a version {number}; put version_policy {{ all {{ }} }} into its config.pbtxt first"
            )
