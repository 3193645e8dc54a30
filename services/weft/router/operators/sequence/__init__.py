"""A sequence: a pipeline, whose steps see one another's outputs; it may run in a loop."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from typing_extensions import override

from weft.language.checks.fields import check_choices
from weft.language.compiler.names import NodeNames
from weft.language.compiler.nodes import NodeBuilder, NodeKind
from weft.language.compiler.scope import Scope
from weft.language.plan import NodePlan
from weft.language.syntax.file import GraphFile, GraphReport, NodeDefinition
from weft.language.types.signatures import TensorType
from weft.router.operators.sequence.build import build_pipeline, check_followed
from weft.router.operators.sequence.run import LoopPlan, SequencePlan
from weft_protos import graph_pb2 as pb

__all__ = ["LoopPlan", "SequenceKind", "SequencePlan"]


class SequenceKind(NodeKind):
    """Sequences in a file."""

    plan = SequencePlan
    step_fields = frozenset({"after"})
    sees_answers = True

    @override
    def conditions(self, message: pb.Node) -> Iterable[tuple[str, str]]:
        return [("loop.while", getattr(message.sequence.loop, "while"))]

    @override
    def tensors_read(self, node: NodeDefinition, names: NodeNames) -> set[str]:
        return set(node.message.sequence.loop.carry)

    @override
    def tensors_needed(self, node: NodeDefinition, needed: set[str]) -> set[str]:
        return {output for output, target in node.message.sequence.loop.carry.items() if target in needed}

    @override
    def outputs(self, node: NodeDefinition, names: NodeNames) -> Iterator[str]:
        """What no step reads."""
        read = {read for step in names.steps for read in step.reads.items()}
        yield from (tensor for tensor in names.producers if (tensor, names.last(tensor)) not in read)

    @override
    def why_no_stream(self, node: NodeDefinition) -> str:
        """Any step may; a loop is told by the checks of its streams."""
        return ""

    @override
    def build(
        self, builder: NodeBuilder, scope: Scope, declared: Mapping[str, TensorType]
    ) -> tuple[NodePlan | None, dict[str, TensorType]]:
        """As ``NodeKind.build``; steps that nothing reads are left out."""
        steps, loop, outputs = build_pipeline(builder, scope)
        if steps is None:
            return None, outputs
        limit = scope.node.message.sequence.max_inflight_responses
        plan = scope.node_plan(SequencePlan, steps, {**scope.slots, **scope.given_slots})
        return replace(plan, loop=loop, max_inflight_responses=limit if scope.streaming else 0), outputs

    @override
    def check(self, file: GraphFile, node: NodeDefinition, report: GraphReport) -> None:
        for step in node.steps:
            check_followed(file, node, step.message.after, f"{step.path}.after", report)
        check_followed(file, node, node.message.sequence.answer_after, f"{node.kind_path}.answer_after", report)

    @override
    def check_fields(self, file: GraphFile, node: NodeDefinition, report: GraphReport) -> None:
        sequence = node.message.sequence
        check_choices(file, node, [("ordered", sequence.ordered)], report)
        for step in node.steps if sequence.ordered else ():
            why = "in an 'ordered' sequence, where each step waits for the one before it"
            report.refuse(file, step.path, [("after", len(step.message.after) > 0)], why)
