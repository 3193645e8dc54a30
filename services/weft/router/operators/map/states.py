"""Models that keep the state of sequences, which rows at the same time and in no order would break."""

from weft.language.compiler.name_table import NameTable
from weft.language.compiler.names import StepNames, describe, target_path
from weft.language.compiler.resolve import ModelTarget, NodeTarget
from weft.language.compiler.scope import Scope
from weft.language.syntax.report import GraphReport
from weft.router.operators.map.chunk_size import targets_of


def check_states(scope: Scope, names: NameTable, report: GraphReport) -> None:
    """Report such models, also within the nodes and graphs that the step of a map runs (G030)."""
    for step, own in zip(scope.node.steps, scope.names.steps, strict=True):
        if found := _stateful(own, names, set()):
            text = f"{found} keeps the state of sequences (sequence_batching), and a map runs rows at the same time"
            cure = "call it outside of the map, or use a model without 'sequence_batching'"
            report.error("G030", scope.file, target_path(step), f"{text}; {cure}")


def _stateful(step: StepNames, names: NameTable, seen: set[tuple[str, str]]) -> str:
    """The first such model that a step calls, as messages name it; "" if there is none."""
    for target in targets_of(step):
        if isinstance(target, ModelTarget) and target.signature.is_stateful:
            return describe(target)
        if isinstance(target, NodeTarget) and target.key not in seen:
            seen.add(target.key)
            node = names.of(target.file, target.node)
            for one in (*node.steps, *node.shadows, *node.customs.values()):
                if found := _stateful(one, names, seen):
                    return found
    return ""
