"""The ensemble: runs all steps at once and combines their answers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from typing_extensions import override

from weft.language.compiler.names import NodeNames, Wire
from weft.language.compiler.nodes import NodeBuilder, NodeKind
from weft.language.compiler.scope import Scope
from weft.language.plan import NodePlan
from weft.language.syntax.file import GraphFile, GraphReport, NodeDefinition
from weft.language.types.signatures import TensorType
from weft.router.operators.ensemble.build import EnsembleBuilder
from weft.router.operators.ensemble.checks import (
    MASK,
    check_combines,
    check_idle,
    check_quorum,
    combined_tensor,
    combines_of,
    keyed_outputs,
    method_of,
)
from weft.router.operators.ensemble.run import CombinePlan, EnsemblePlan
from weft_protos import graph_pb2 as pb

__all__ = ["CombinePlan", "EnsembleKind", "EnsemblePlan"]


class EnsembleKind(NodeKind):
    """The ensemble in graph files: fields, checks, compilation."""

    plan = EnsemblePlan
    step_fields = frozenset({"weight"})
    custom_words = "the model of a CUSTOM"

    @override
    def custom_steps(self, message: pb.Node, path: str) -> Iterator[tuple[int, str, pb.Step]]:
        for i, combine in enumerate(message.ensemble.combine):
            if method_of(combine).calls_model:
                yield i, f"{path}.combine[{i}].custom", combine.custom

    @override
    def check(self, file: GraphFile, node: NodeDefinition, report: GraphReport) -> None:
        check_combines(file, node, report)
        check_quorum(file, node, report)

    @override
    def check_fields(self, file: GraphFile, node: NodeDefinition, report: GraphReport) -> None:
        check_idle(file, node, report)

    @override
    def why_no_stream(self, node: NodeDefinition) -> str:
        """One step may stream; several only if their responses are not combined, which ``build`` checks."""
        return ""

    @override
    def tensors_read(self, node: NodeDefinition, names: NodeNames) -> set[str]:
        read: set[str] = set()
        for combine in combines_of(node):
            tensor = combined_tensor(combine)
            read |= {tensor} if tensor else {one for step in names.steps for one in step.outputs.values()}
        return read

    @override
    def custom_wires(self, node: NodeDefinition, key: int, wires: Sequence[Wire]) -> list[Wire]:
        """Remove the combined tensor and the mask, which the node itself provides."""
        combined = combined_tensor(node.message.ensemble.combine[key])
        is_fed = any(wire.tensor == combined for wire in wires)  # reported later if not
        return [one for one in wires if one.tensor not in (combined, MASK) and (is_fed or one.is_mapped)]

    @override
    def outputs(self, node: NodeDefinition, names: NodeNames) -> Iterator[str]:
        for combine in combines_of(node):
            if method_of(combine).is_keyed:
                yield from (name for name, _, _ in keyed_outputs(node, names, getattr(combine, "from")))
            else:
                yield combine.output

    @override
    def has_known_outputs(self, node: NodeDefinition) -> bool:
        return all(one.output or method_of(one).is_keyed for one in node.message.ensemble.combine)

    @override
    def output_cure(self, name: str, given: Sequence[str]) -> str:
        """Suggest a combine of the steps' tensors of that name."""
        if not any(one.endswith(f".{name}") for one in given):
            return ""
        return f'to make it of the steps\' tensors, add combine {{ output: "{name}" method: ... }}'

    @override
    def build(
        self, builder: NodeBuilder, scope: Scope, declared: Mapping[str, TensorType]
    ) -> tuple[NodePlan | None, dict[str, TensorType]]:
        built, types = EnsembleBuilder(builder, scope).build()
        if built is None:
            return None, types
        (steps, combines), message = built, scope.node.message.ensemble
        plan = scope.node_plan(EnsemblePlan, steps, {name: combine.output for name, combine in combines.items()})
        own = tuple(combines.values())
        return replace(plan, combines=own, quorum=message.quorum, straggler_ms=message.straggler_ms), types
