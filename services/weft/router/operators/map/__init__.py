"""A map: one step for every row of lists whose length the data decides."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from typing_extensions import override

from weft.language.compiler.names import NodeNames, narrowed
from weft.language.compiler.nodes import NodeBuilder, NodeKind
from weft.language.compiler.scope import Scope
from weft.language.plan import NodePlan
from weft.language.syntax.file import GraphFile, GraphReport, NodeDefinition
from weft.language.types.signatures import TensorType
from weft.router.operators.map.build import build_map, check_map, lengths_name
from weft.router.operators.map.run import MapPlan

__all__ = ["MapKind", "MapPlan"]


class MapKind(NodeKind):
    """Maps in a file."""

    plan = MapPlan

    @override
    def check(self, file: GraphFile, node: NodeDefinition, report: GraphReport) -> None:
        check_map(file, node, report)

    @override
    def why_no_stream(self, node: NodeDefinition) -> str:
        """Its step may; then it makes no lists."""
        return ""

    @override
    def tensors_read(self, node: NodeDefinition, names: NodeNames) -> set[str]:
        return set(node.message.map.over)

    @override
    def tensors_needed(self, node: NodeDefinition, needed: set[str]) -> set[str]:
        """The lists and their lengths, but for what the step's ``when`` tests."""
        tested = {tensor for step in node.steps if not step.is_shadow for tensor in narrowed(step)}
        return {*node.message.map.over, node.message.map.lengths} - {"", *tested}

    @override
    def inputs_read(self, node: NodeDefinition) -> set[str]:
        return {node.message.map.lengths} - {""}

    @override
    def outputs(self, node: NodeDefinition, names: NodeNames) -> Iterator[str]:
        tensors = dict.fromkeys(tensor for step in names.steps for tensor in step.outputs.values())
        yield from tensors
        yield from (name for tensor in tensors if (name := lengths_name(node, tensor)))
        yield from [node.message.map.index] * (node.message.map.index not in ("", *tensors))

    @override
    def build(
        self, builder: NodeBuilder, scope: Scope, declared: Mapping[str, TensorType]
    ) -> tuple[NodePlan | None, dict[str, TensorType]]:
        built, types = build_map(builder, scope)
        if built is None:
            return None, types
        steps, settings, slots = built
        return replace(scope.node_plan(MapPlan, steps, slots), settings=settings), types
