"""Steps that others are ``after``: the names that a file gives, and which steps run for them."""

from collections.abc import Mapping, Sequence, Set

from weft.base.text.pbtxt import suggestion
from weft.language.compiler.scope import Scope
from weft.language.syntax.file import GraphFile, GraphReport, NodeDefinition


def check_followed(file: GraphFile, node: NodeDefinition, names: Sequence[str], path: str, report: GraphReport) -> None:
    """Report names in an ``after`` or ``answer_after`` that no step of the sequence has, or nobody can wait for (G036).

    Args:
        file: The graph.
        node: The sequence.
        names: Of steps.
        path: Of the field.
        report: Receives them.
    """
    field = path.rpartition(".")[2]
    steps = {step.name: step for step in reversed(node.steps)}
    others = [name for name, step in steps.items() if not step.is_shadow and not path.startswith(f"{step.path}.")]
    seen: set[str] = set()
    for i, name in enumerate(names):
        text = ""
        if name not in steps:
            text = f"'{node.name}' has no step '{name}', which '{field}' names{suggestion(name, others)}"
        elif steps[name].is_shadow:
            text = f"step '{name}' is a shadow, for which nobody waits; leave it out"
        elif name in seen:
            text = f"'{field}' has step '{name}' already; leave one out"
        seen.add(name)
        if text:
            report.error("G036", file, f"{path}[{i}]", text)


def follows(scope: Scope, steps: Sequence[int]) -> dict[int, Set[int]]:
    """For each of some steps of a sequence, ascending, those of them that it is after.

    In an ordered sequence each is after the one before it; shadows are passed over, for which nobody waits.
    """
    if not scope.node.message.sequence.ordered:
        return {i: scope.names.steps[i].follows for i in steps}
    found: dict[int, Set[int]] = {}
    before: Set[int] = set()
    for i in steps:
        found[i] = before
        before = before if scope.node.steps[i].is_shadow else {i}
    return found


def live_steps(scope: Scope, order: Sequence[int], read: Set[str], after: Mapping[int, Set[int]]) -> set[int]:
    """Steps that must run, shadows among them.

    Args:
        scope: The node.
        order: Of its steps, each after those that it waits for.
        read: Tensors that a caller or the node itself reads, as the last steps give them.
        after: As ``follows`` gives it.
    """
    names, sequence = scope.names.steps, scope.node.message.sequence
    needed = {(tensor, scope.names.last(tensor)) for tensor in read}
    live = set(scope.names.indexes_of(scope.node, sequence.answer_after))
    for i in reversed(order):
        is_needed = any((tensor, i) in needed for tensor in names[i].outputs.values())
        if i in live or scope.node.steps[i].is_shadow or is_needed:
            live |= {i, *names[i].asks, *after[i]}
            needed.update(names[i].reads.items())
    return live
