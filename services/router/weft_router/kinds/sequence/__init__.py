"""A sequence: a pipeline, whose steps see one another's outputs; it may run in a loop."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from weft_protos import graph_pb2 as pb
from weft_router.graph.checks.fields import check_choices
from weft_router.graph.compiler.names import NodeNames
from weft_router.graph.compiler.nodes import NodeBuilder
from weft_router.graph.compiler.scope import Scope
from weft_router.graph.description import (
    Description,
    End,
    Flow,
    TensorUse,
    condition_text,
    counted,
    given,
    slot_name,
    when_notes,
)
from weft_router.graph.kind import NodeKind
from weft_router.graph.path_form import PathForm
from weft_router.graph.plan import Condition, NodePlan, StepPlan
from weft_router.graph.syntax.parse import GraphFile, NodeDefinition
from weft_router.graph.syntax.report import GraphReport
from weft_router.graph.types.signatures import TensorType
from weft_router.kinds.sequence.build import build_pipeline
from weft_router.kinds.sequence.run import Loop, LoopPlan, Pipeline
from weft_router.steps import Node, NodeParts


@dataclass(frozen=True, slots=True)
class SequencePlan(NodePlan):
    """A sequence; ``loop`` is None where it runs once."""

    kind: ClassVar[str] = "sequence"
    path_form: ClassVar[PathForm] = PathForm(("(", ")"), (".", ""))
    is_pipeline: ClassVar[bool] = True
    runs_shadows: ClassVar[bool] = True

    loop: LoopPlan | None = None

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """The test of the loop."""
        return () if self.loop is None else (self.loop.again,)

    @property
    def slots_read(self) -> tuple[int, ...]:
        """What the loop carries over and tests."""
        if self.loop is None:
            return ()
        return (*(slot for slot, _ in self.loop.carry), *(binding.slot for binding in self.loop.again.tensors))

    def followers(self) -> Sequence[Sequence[int]]:
        """Those that read from the step, or stand after it in an ordered sequence."""
        return [step.consumers for step in self.steps]

    def first_lost(self, lost: Sequence[int]) -> int | None:
        """A step that must not fail."""
        return next((index for index in lost if not self.steps[index].is_soft), None)

    def node(self, parts: NodeParts) -> Node:
        """As ``NodePlan.node``."""
        return Pipeline(self, parts) if self.loop is None else Loop(self, parts, self.loop)

    def describe(self) -> Description:
        """The data that passes between the steps, and the loop."""
        flows = [*_data_flows(self), *([_loop_flow(self, self.loop)] if self.loop else [])]
        optional = [
            {binding.slot for binding in step.outputs} - {default.slot for default in step.defaults}
            for step in self.steps
            if step.is_soft or step.when is not None
        ]
        return Description(
            kind=self.kind,
            steps=self.steps,
            entry=End("inputs", is_plain=True),
            exit=End("outputs", is_plain=True),
            flows=tuple(flows),
            notes=(f"at most {counted(self.loop.max_iterations, 'round')}",) if self.loop else (),
            step_notes={index: when_notes(step) for index, step in enumerate(self.steps)},
            maybe_absent=frozenset[int]().union(*optional),
        )


class SequenceKind(NodeKind):
    """Sequences in a file."""

    plan = SequencePlan
    sees_answers = True

    def conditions(self, message: pb.Node) -> Iterable[tuple[str, str]]:
        """The test of the loop."""
        return [("loop.while", getattr(message.sequence.loop, "while"))]

    def tensors_read(self, node: NodeDefinition, names: NodeNames) -> set[str]:
        """What the loop carries over."""
        return set(node.message.sequence.loop.carry)

    def outputs(self, node: NodeDefinition, names: NodeNames) -> Iterator[str]:
        """What no step reads."""
        read = {tensor for step in names.steps for tensor, producer in step.reads.items() if producer is not None}
        yield from (tensor for step in names.steps for tensor in step.outputs.values() if tensor not in read)

    def build(
        self, builder: NodeBuilder, scope: Scope, promised: Mapping[str, TensorType]
    ) -> tuple[NodePlan | None, dict[str, TensorType]]:
        """As ``NodeKind.build``; steps that nothing reads are left out."""
        steps, loop, outputs = build_pipeline(builder, scope)
        if steps is None:
            return None, outputs
        return replace(scope.node_plan(SequencePlan, steps, scope.slots), loop=loop), outputs

    def check_fields(self, file: GraphFile, node: NodeDefinition, report: GraphReport) -> None:
        """What has an effect in the root, or with several steps alone."""
        sequence = node.message.sequence
        check_choices(file, node, [("ordered", sequence.ordered)], report)
        is_idle = sequence.max_inflight_responses > 0 and node.name != file.root
        report.refuse(file, node.kind_path, [("max_inflight_responses", is_idle)], "in a node that is not the root")


def _data_flows(plan: "SequencePlan") -> Iterator[Flow]:
    producers: dict[int, int] = {}
    for index, step in enumerate(plan.steps):
        producers.update((binding.slot, index) for binding in step.outputs)
        if step.ok_slot >= 0:
            producers[step.ok_slot] = index
    joined: set[tuple[int, int]] = set()
    for index, step in enumerate(plan.steps):
        for use in _taken(step):
            source = producers.get(use.slot)
            yield _data_flow(plan, source, index, use)
            if source is not None:
                joined.add((source, index))
    for index, step in enumerate(plan.steps):
        for consumer in step.consumers:
            if (index, consumer) not in joined:
                yield Flow(index, consumer, ("then",))
    for binding in plan.outputs:
        yield _data_flow(plan, producers.get(binding.slot), None, TensorUse(binding.slot, taken_as=binding.name))


def _data_flow(plan: "SequencePlan", source: int | None, target: int | None, use: TensorUse) -> Flow:
    if source is None:
        return Flow(None, target, tensors=(use,))
    outputs = {binding.slot: binding.name for binding in plan.steps[source].outputs}
    return Flow(source, target, tensors=(use._replace(given_as=outputs.get(use.slot, "")),), gives=True)


def _taken(step: StepPlan) -> list[TensorUse]:
    """What a step reads for its target and for its conditions; each slot once."""
    found = {use.slot: use for use in given(step)}
    of_policies = ((policy.condition_words, policy.condition) for policy in step.policies)
    for what, condition in (("when", step.when), *of_policies):
        for binding in condition.tensors if condition is not None else ():
            found.setdefault(binding.slot, TensorUse(binding.slot, condition=f"{binding.name} (for {what})"))
    return list(found.values())


def _loop_flow(plan: "SequencePlan", loop: LoopPlan) -> Flow:
    carried = [f"{slot_name(plan, output)} becomes {slot_name(plan, taken)}" for output, taken in loop.carry]
    return Flow(None, None, (f"again while {condition_text(loop.again)}", *carried), is_back=True)
