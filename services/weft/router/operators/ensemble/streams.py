"""Streams in an ensemble: they are merged, the first of them is taken, or there is one."""

from weft.language.compiler.names import target_path
from weft.language.compiler.nodes import NodeBuilder
from weft.language.compiler.scope import ResponseCount, Scope
from weft.router.operators.ensemble.messages import is_merge, is_race


def check_streams(scope: Scope, builder: NodeBuilder) -> None:
    """Find out how many responses the ensemble gives, and report streams that its combines would join (G019)."""
    node, streaming = scope.node, scope.streaming
    if is_merge(node):
        streaming.update(dict.fromkeys(range(len(node.steps)), ResponseCount.MANY))
    elif not is_race(node) and len(streaming) > 1:
        first, *others = sorted(streaming)
        for index in others:
            text = (
                f"step '{node.steps[index].name}' streams, and so does '{node.steps[first].name}': their responses may "
                f"differ in number, so that no 'combine' can join them; take method: FIRST (the one that speaks first) "
                f"or MERGE (each response as it comes)"
            )
            builder.report.error("G019", scope.file, target_path(node.steps[index]), text)
