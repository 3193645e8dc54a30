"""A sequence: a pipeline, whose steps see one another's outputs; it may run in a loop."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from typing_extensions import override

from weft.language.checks.fields import check_choices
from weft.language.compiler.names import NodeNames
from weft.language.compiler.nodes import NodeBuilder, NodeKind
from weft.language.compiler.scope import Scope
from weft.language.description import condition_text, counted, given, slot_name, when_notes
from weft.language.path_form import PathForm
from weft.language.plan import THEN, Condition, Description, End, Flow, NodePlan, StepPlan, TensorUse
from weft.language.syntax.file import GraphFile, GraphReport, NodeDefinition
from weft.language.types.signatures import TensorType
from weft.router.operators.sequence.build import build_pipeline, check_followed
from weft.router.operators.sequence.run import Loop, LoopPlan, Pipeline
from weft.router.operators.sequence.stages import StagedPipeline
from weft.router.steps import Node, NodeParts, OperatorPlan
from weft_protos import graph_pb2 as pb


@dataclass(frozen=True, slots=True)
class SequencePlan(OperatorPlan):
    """A sequence.

    Attributes:
        loop: None where it runs once.
        max_inflight_responses: Where it streams: responses of a step that streams that are in work at once; the step's
            stream is not read further before one of them is done. 0: one.
    """

    kind: ClassVar[str] = "sequence"
    path_form: ClassVar[PathForm] = PathForm(("(", ")"), (".", ""))
    is_pipeline: ClassVar[bool] = True
    runs_shadows: ClassVar[bool] = True

    loop: LoopPlan | None = None
    max_inflight_responses: int = 0

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

    @override
    def node(self, parts: NodeParts) -> Node:
        if self.loop is not None:
            return Loop(self, parts, self.loop)
        pipeline = Pipeline(self, parts)
        return StagedPipeline(pipeline, self.max_inflight_responses) if self.streams else pipeline

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
            notes=self._notes(),
            step_notes={index: when_notes(step) for index, step in enumerate(self.steps)},
            maybe_absent=frozenset[int]().union(*optional),
        )

    def _notes(self) -> tuple[str, ...]:
        if self.loop is not None:
            return (f"at most {counted(self.loop.max_iterations, 'round')}",)
        limit = self.max_inflight_responses
        return (f"at most {counted(limit, 'response')} of a stream in work",) if limit else ()


class SequenceKind(NodeKind):
    """Sequences in a file."""

    plan = SequencePlan
    step_fields = frozenset({"after"})
    sees_answers = True

    def conditions(self, message: pb.Node) -> Iterable[tuple[str, str]]:
        """The test of the loop."""
        return [("loop.while", getattr(message.sequence.loop, "while"))]

    def tensors_read(self, node: NodeDefinition, names: NodeNames) -> set[str]:
        """What the loop carries over."""
        return set(node.message.sequence.loop.carry)

    def tensors_needed(self, node: NodeDefinition, needed: set[str]) -> set[str]:
        """What the loop carries over to an input that is needed."""
        return {output for output, target in node.message.sequence.loop.carry.items() if target in needed}

    def outputs(self, node: NodeDefinition, names: NodeNames) -> Iterator[str]:
        """What no step reads."""
        read = {read for step in names.steps for read in step.reads.items()}
        yield from (tensor for tensor in names.producers if (tensor, names.last(tensor)) not in read)

    def why_no_stream(self, node: NodeDefinition) -> str:
        """Any step may; a loop is told by the checks of its streams."""
        return ""

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

    def check(self, file: GraphFile, node: NodeDefinition, report: GraphReport) -> None:
        """Names of steps in ``after`` and ``answer_after``."""
        for step in node.steps:
            check_followed(file, node, step.message.after, f"{step.path}.after", report)
        check_followed(file, node, node.message.sequence.answer_after, f"{node.kind_path}.answer_after", report)

    def check_fields(self, file: GraphFile, node: NodeDefinition, report: GraphReport) -> None:
        """What has an effect with several steps alone, or where the file does not order the steps."""
        sequence = node.message.sequence
        check_choices(file, node, [("ordered", sequence.ordered)], report)
        for step in node.steps if sequence.ordered else ():
            why = "in an 'ordered' sequence, where each step waits for the one before it"
            report.refuse(file, step.path, [("after", len(step.message.after) > 0)], why)


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
                yield Flow(index, consumer, (THEN,))
    sources = [producers.get(binding.slot) for binding in plan.outputs]
    for source, binding in zip(sources, plan.outputs, strict=True):
        yield _data_flow(plan, source, None, TensorUse(binding.slot, taken_as=binding.name))
    for index, step in enumerate(plan.steps):
        if step.is_awaited and index not in sources:
            yield Flow(index, None, (THEN,))


def _data_flow(plan: "SequencePlan", source: int | None, target: int | None, use: TensorUse) -> Flow:
    if source is None:
        return Flow(None, target, tensors=(use,))
    outputs = {binding.slot: binding.name for binding in plan.steps[source].outputs}
    return Flow(source, target, tensors=(use._replace(given_as=outputs.get(use.slot, "")),), gives=True)


def _taken(step: StepPlan) -> list[TensorUse]:
    found = {use.slot: use for use in given(step)}
    of_policies = ((policy.condition_words, policy.condition) for policy in step.policies)
    for what, condition in (("when", step.when), *of_policies):
        for binding in condition.tensors if condition is not None else ():
            found.setdefault(binding.slot, TensorUse(binding.slot, condition=f"{binding.name} (for {what})"))
    return list(found.values())


def _loop_flow(plan: "SequencePlan", loop: LoopPlan) -> Flow:
    carried = [f"{slot_name(plan, output)} becomes {slot_name(plan, taken)}" for output, taken in loop.carry]
    return Flow(None, None, (f"again while {condition_text(loop.again)}", *carried), is_back=True)
