"""An ensemble: all steps at once, and one answer made of theirs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from typing_extensions import override

from weft.language.compiler.names import NodeNames, Wire
from weft.language.compiler.nodes import NodeBuilder, NodeKind
from weft.language.compiler.scope import Scope
from weft.language.description import given, offered, shadow_flows, slot_name, target_text, when_notes
from weft.language.path_form import PathForm
from weft.language.plan import Description, End, Flow, NodePlan, StepPlan, TensorUse
from weft.language.syntax.file import GraphFile, GraphReport, NodeDefinition
from weft.language.types.signatures import TensorType
from weft.router.operators.ensemble.build import build_members
from weft.router.operators.ensemble.checks import (
    MASK,
    check_combines,
    check_idle,
    check_quorum,
    check_streams,
    combined_tensor,
    combines_of,
    keyed_outputs,
    method_of,
)
from weft.router.operators.ensemble.run import CombinePlan, EnsembleNode
from weft.router.operators.ensemble.streamed import MergedEnsemble, StreamedEnsemble
from weft.router.steps import Node, NodeParts, OperatorPlan
from weft_protos import graph_pb2 as pb


@dataclass(frozen=True, slots=True)
class EnsemblePlan(OperatorPlan):
    """An ensemble.

    Attributes:
        quorum: Answers that are needed. 0 means every HARD step, and at least one step.
        straggler_ms: From the quorum-th answer, how long SOFT steps are still waited for; 0: until they end.
    """

    kind: ClassVar[str] = "ensemble"
    path_form: ClassVar[PathForm] = PathForm.of("{", "}")

    combines: tuple[CombinePlan, ...] = ()
    quorum: int = 0
    straggler_ms: int = 0

    @property
    def is_race(self) -> bool:
        """Whether the first answer counts and the other steps are cancelled."""
        return bool(self.combines) and self.quorum <= 1 and all(one.method.is_first for one in self.combines)

    @property
    def is_merge(self) -> bool:
        """Whether each response of each step is one of the ensemble."""
        return any(one.method.is_merged for one in self.combines)

    @property
    def streams(self) -> bool:
        """Whether a step does, or the responses of several are merged."""
        return self.is_merge or any(step.streams for step in self.steps)

    @property
    def customs(self) -> tuple[StepPlan, ...]:
        """The models that combine."""
        return tuple(combine.custom for combine in self.combines if combine.custom is not None)

    def first_lost(self, lost: Sequence[int]) -> int | None:
        """A step that must not fail, or the first where too few are left."""
        hard = next((index for index in lost if not self.steps[index].is_soft), None)
        if hard is not None and not self.is_race:
            return hard
        return lost[0] if lost and len(self.steps) - len(lost) < max(self.quorum, 1) else None

    @override
    def node(self, parts: NodeParts) -> Node:
        node = MergedEnsemble if self.is_merge else StreamedEnsemble if self.streams else EnsembleNode
        return node(
            self, parts, self.combines, quorum=self.quorum, straggler_ms=self.straggler_ms, is_race=self.is_race
        )

    def describe(self) -> Description:
        """Every step, and how its tensors are combined."""
        notes = [f"{slot_name(self, combine.output)}: {_combine_text(combine)}" for combine in self.combines]
        if self.quorum:
            notes.append(f"quorum {self.quorum} of {len(self.steps)}")
        if self.straggler_ms:
            notes.append(f"stragglers {self.straggler_ms} ms")
        own_names = {
            binding.slot: spec.name.removeprefix(f"{step.name}.")  # in the frame it is gnn.SCORE
            for step in self.steps
            for binding in step.outputs
            if (spec := self.specs.get(binding.slot))
        }
        return Description(
            kind=self.kind,
            steps=(*self.steps, *self.shadows, *self.customs),
            entry=End("all at once"),
            exit=End("first answer" if self.is_race else "combine", tuple(notes)),
            flows=(*_flows(self), *shadow_flows(self)),
            names=own_names,
        )


class EnsembleKind(NodeKind):
    """Ensembles in a file."""

    plan = EnsemblePlan
    step_fields = frozenset({"weight"})
    custom_words = "the model of a CUSTOM"

    def custom_steps(self, message: pb.Node, path: str) -> Iterator[tuple[int, str, pb.Step]]:
        """The models that combine, by the index of their combine."""
        for i, combine in enumerate(message.ensemble.combine):
            if method_of(combine).calls_model:
                yield i, f"{path}.combine[{i}].custom", combine.custom

    def check(self, file: GraphFile, node: NodeDefinition, report: GraphReport) -> None:
        """Combines and the quorum."""
        check_combines(file, node, report)
        check_quorum(file, node, report)

    def check_fields(self, file: GraphFile, node: NodeDefinition, report: GraphReport) -> None:
        """Fields that the methods, or the dependencies of the steps, leave without effect."""
        check_idle(file, node, report)

    def why_no_stream(self, node: NodeDefinition) -> str:
        """One of them may, or any where they do not come together; ``build`` tells."""
        return ""

    def tensors_read(self, node: NodeDefinition, names: NodeNames) -> set[str]:
        """What the combines take."""
        read: set[str] = set()
        for combine in combines_of(node):
            tensor = combined_tensor(combine)
            read |= {tensor} if tensor else {one for step in names.steps for one in step.outputs.values()}
        return read

    def custom_wires(self, node: NodeDefinition, key: int, wires: Sequence[Wire]) -> list[Wire]:
        """Without the combined tensor and the mask, which the node makes."""
        combined = combined_tensor(node.message.ensemble.combine[key])
        is_fed = any(wire.tensor == combined for wire in wires)  # reported later if not
        return [one for one in wires if one.tensor not in (combined, MASK) and (is_fed or one.is_mapped)]

    def outputs(self, node: NodeDefinition, names: NodeNames) -> Iterator[str]:
        """What the combines make."""
        for combine in combines_of(node):
            if method_of(combine).is_keyed:
                yield from (name for name, _, _ in keyed_outputs(node, names, getattr(combine, "from")))
            else:
                yield combine.output

    def has_known_outputs(self, node: NodeDefinition) -> bool:
        """Whether no combine lacks its 'output'."""
        return all(one.output or method_of(one).is_keyed for one in node.message.ensemble.combine)

    def output_cure(self, name: str, given: Sequence[str]) -> str:
        """A combine of the tensors that the steps give by that name."""
        if not any(one.endswith(f".{name}") for one in given):
            return ""
        return f'to make it of the steps\' tensors, add combine {{ output: "{name}" method: ... }}'

    @override
    def build(
        self, builder: NodeBuilder, scope: Scope, declared: Mapping[str, TensorType]
    ) -> tuple[NodePlan | None, dict[str, TensorType]]:
        members, types = build_members(builder, scope)
        check_streams(scope, builder)
        if members is None:
            return None, types
        message = scope.node.message.ensemble
        slots = {name: combine.output for name, combine in members.combines.items()}
        return replace(
            scope.node_plan(EnsemblePlan, members.steps, slots),
            combines=tuple(members.combines.values()),
            quorum=message.quorum,
            straggler_ms=message.straggler_ms,
        ), types


def _flows(plan: "EnsemblePlan") -> Iterator[Flow]:
    first_custom = len(plan.steps) + len(plan.shadows)
    customs = [combine for combine in plan.combines if combine.custom is not None]
    places = {combine.output: first_custom + number for number, combine in enumerate(customs)}
    is_weighted = any(combine.is_weighted for combine in plan.combines)
    for index, step in enumerate(plan.steps):
        weight = [f"weight {step.weight:g}"] if is_weighted else []
        yield Flow(None, index, (*when_notes(step), *weight), given(step))
        outputs = {binding.slot: binding.name for binding in step.outputs}
        for combine in plan.combines:
            for slot in (slot for source, slot in combine.sources if source == index):
                use = TensorUse(slot, given_as=outputs.get(slot, ""))
                yield Flow(index, places.get(combine.output), tensors=(use,), gives=True)
    for combine in customs:
        if combine.custom is not None:
            made = (combine.stack, combine.mask)
            own = tuple(use for use in given(combine.custom) if use.slot not in made)
            if own:
                yield Flow(None, places[combine.output], tensors=own)
            yield Flow(places[combine.output], None, tensors=offered(combine.custom), gives=True)


def _combine_text(combine: CombinePlan) -> str:
    axis = f" on axis {combine.axis}" if combine.method.takes_axis else ""
    by = f" by {target_text(combine.custom.action)}" if combine.custom is not None else ""
    return f"{combine.method.name}{by}{axis}{', weighted' * combine.is_weighted}"
