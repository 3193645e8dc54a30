"""Weights of a splitter as a change of its graph's text."""

from dataclasses import replace
from math import isfinite

from weft.base.errors import InvalidArgumentError
from weft.base.text.suggestion import suggestion
from weft.language.syntax.file import GraphSource, NodeDefinition
from weft.language.syntax.parse import parse_graph
from weft.router.operators import KINDS
from weft.router.policies import POLICIES


def reweighed(source: GraphSource, node: str, weights: dict[str, float]) -> GraphSource:
    """The graph with other weights of a splitter's steps; the rest of its text stays.

    Raises InvalidArgumentError: no such splitter or step, a weight that is not allowed, or something else sets them.
    """
    file = parse_graph(source, KINDS, POLICIES)
    splitters = {name: one for name, one in file.nodes.items() if one.kind is not None and one.kind.name == "splitter"}
    if node not in splitters:
        raise InvalidArgumentError(f"{file.title} has no splitter '{node[:80]}'{suggestion(node, splitters)}")
    found = splitters[node]
    for name in ("bandit", "rollout"):
        if found.message.splitter.HasField(name):
            raise InvalidArgumentError(f"splitter '{node}' has a '{name}', which sets its shares; remove it first")
    known = _weights(found)
    if unknown := sorted(weights.keys() - known.keys()):
        raise InvalidArgumentError(f"splitter '{node}' has no step '{unknown[0][:80]}'{suggestion(unknown[0], known)}")
    wrong = [value for value in weights.values() if not (isfinite(value) and value >= 0)]
    if wrong or not weights or not any((known | weights).values()):
        raise InvalidArgumentError(
            f"weights must be numbers of at least 0, one of the splitter's above 0; got {weights}"
        )
    values = {f"{step.path}.weight": f"{weights[step.name]!r}" for step in found.steps if step.name in weights}
    return replace(source, text=file.positions.replaced(values).encode())


def weights_of(source: GraphSource, node: str) -> dict[str, float]:
    """The weights of a splitter's steps, by name."""
    return _weights(parse_graph(source, KINDS, POLICIES).nodes[node])


def _weights(node: NodeDefinition) -> dict[str, float]:
    steps = {step.name: step.message for step in node.steps}
    return {name: step.weight if step.HasField("weight") else 1.0 for name, step in steps.items()}
