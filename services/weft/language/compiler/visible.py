"""What the conditions of a node see of its tensors and steps."""

from collections.abc import Collection, Mapping

from weft.language.compiler.scope import Scope
from weft.language.syntax.file import GraphFile
from weft.language.types.compile_condition import VisibleBindings
from weft.language.types.signatures import TensorType


def visible_outputs(
    scope: Scope, path: str, types: Mapping[str, TensorType], slots: Mapping[str, int]
) -> VisibleBindings:
    """What the condition at ``path`` sees as ``outputs``; with models that nobody knows it may name any tensor."""
    condition = scope.names.conditions.get(path)
    names = [ref.name for ref in condition.expression.references] if condition else []
    unknown = dict.fromkeys(names, TensorType.unknown("a step")) if any(s.is_open for s in scope.names.steps) else {}
    return VisibleBindings({**unknown, **types}, {name: slots.get(name, -1) for name in names})


def visible_inputs(
    scope: Scope, index: int, named: Collection[str], certain: Mapping[str, TensorType], *, sees_outputs: bool
) -> VisibleBindings:
    """What a condition sees as ``inputs``: inputs of the node and outputs of the steps before ``index``."""
    types = {name: known for name, known in scope.call.visible.items() if name not in named} | scope.inputs
    hidden: dict[str, str] = {}
    for tensor, producers in scope.names.producers.items():
        if (producer := scope.names.seen(tensor, index)) is not None:
            types[tensor] = scope.produced.get(tensor) or TensorType.unknown(f"step '{producer}'")
        elif tensor not in types:
            hint = f"write outputs.{tensor}" if sees_outputs else "only outputs of earlier steps are seen"
            hidden[tensor] = f"is an output of step '{scope.node.steps[producers[0]].name}'; {hint}"
    is_open = any(step.is_open for step in scope.names.steps[:index])
    for name in named:
        is_reported = scope.names.inputs.get(name, False)  # at the step that runs the node
        if (is_open or is_reported) and name not in types and name not in hidden:
            types[name] = TensorType.unknown("an earlier step")
    slots = {name: scope.slot_of(name, scope.names.seen(name, index)) for name in named}
    return VisibleBindings({**types, **certain}, slots, hidden)


def visible_steps(scope: Scope, index: int, named: Collection[str]) -> VisibleBindings:
    """What a condition sees as ``steps``: those before ``index``."""
    types = dict.fromkeys((step.name for step in scope.node.steps[:index]), TensorType.unknown("a step"))
    indexes = {name: scope.names.indexes[name] for name in named if name in scope.names.indexes}
    hidden = {
        name: f"{'is this one' if i == index else 'stands later'}; only earlier steps are seen"
        for name, i in indexes.items()
        if i >= index
    }
    shadows = (name for name, i in indexes.items() if scope.node.steps[i].is_shadow and name not in hidden)
    hidden |= dict.fromkeys(shadows, "is a shadow, whose answer is dropped")
    return VisibleBindings(types, {name: scope.ok_slots.get(i, -1) for name, i in indexes.items()}, hidden)


def seen_by(file: GraphFile) -> dict[str, str]:
    """Which conditions see the outputs of a step, and the answers of others, for messages."""
    accepting = " or ".join(f"a {kind.name}" for kind in file.kinds.values() if "accept" in kind.step_fields)
    asking = " or ".join(f"a {kind.name}" for kind in file.kinds.values() if kind.sees_answers)
    outputs = f"'accept' in {accepting} and 'while' of a loop do; a step sees what earlier steps gave as 'inputs'"
    return {"outputs": outputs, "steps": f"'when', 'accept' and 'key' of a step in {asking} do"}
