"""A cascade: alternatives that run one after another until an answer is accepted."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from typing_extensions import override

from weft.language.checks.fields import check_choices
from weft.language.compiler.nodes import NodeBuilder
from weft.language.compiler.scope import Scope
from weft.language.compiler.uses import visible_outputs
from weft.language.description import condition_text, given, offered, shadow_flows, when_notes
from weft.language.path_form import PathForm, StepOutcome
from weft.language.plan import Description, End, Flow
from weft.language.syntax.file import GraphFile, GraphReport, NodeDefinition, StepDefinition
from weft.language.types.conditions import Purpose
from weft.language.types.expression import read_expression
from weft.router.operators.alternatives import AlternativesKind, BuiltAlternative
from weft.router.operators.cascade.run import CascadeNode, CascadeNodeByRow
from weft.router.steps import Node, NodeParts, OperatorPlan
from weft_protos import graph_pb2 as pb

_ACCEPT = Purpose("accept")


def _last_answer(steps: Sequence[StepOutcome]) -> str:
    return next((step.name for step in reversed(steps) if step.has_answered), "")


@dataclass(frozen=True, slots=True)
class CascadePlan(OperatorPlan):
    """A cascade.

    Attributes:
        per_row: Each row of the batch goes its own way. Every tensor of the node has a batch dimension.
    """

    kind: ClassVar[str] = "cascade"
    path_form: ClassVar[PathForm] = PathForm.of("<", ">", _last_answer)
    watches: ClassVar[frozenset[str]] = frozenset({"when", "min_remaining_ms"})

    per_row: bool = False

    def followers(self) -> Sequence[Sequence[int]]:
        """The next step, where the answer is not accepted."""
        last = len(self.steps) - 1
        return [(i + 1,) if i < last else () for i in range(len(self.steps))]

    def first_lost(self, lost: Sequence[int]) -> int | None:
        """A step that must not fail, or the first where none is left."""
        hard = next((index for index in lost if not self.steps[index].is_soft), None)
        return lost[0] if hard is None and len(lost) == len(self.steps) else hard

    @override
    def node(self, parts: NodeParts) -> Node:
        return (CascadeNodeByRow if self.per_row else CascadeNode)(self, parts)

    def describe(self) -> Description:
        """The steps in order, and what is accepted."""
        return Description(
            kind=self.kind,
            steps=(*self.steps, *self.shadows),
            entry=End("each row: in order until accepted" if self.per_row else "in order until accepted"),
            exit=End("first accepted, else the last answer"),
            flows=(*self._flows(), *shadow_flows(self)),
        )

    def _flows(self) -> Iterator[Flow]:
        onward: list[str] = []
        for index, step in enumerate(self.steps):
            is_last = index == len(self.steps) - 1
            yield Flow(index - 1 if index else None, index, (*onward, *when_notes(step)), given(step))
            accept = (f"accept {condition_text(step.accept)}",) if step.accept is not None and not is_last else ()
            yield Flow(index, None, accept, offered(step), gives=True)
            onward = ["not accepted, or failed" if step.is_soft else "not accepted"]


class CascadeKind(AlternativesKind):
    """Cascades in a file."""

    plan = CascadePlan
    step_fields = frozenset({"accept"})
    sees_answers = True

    def why_no_default(self, step: pb.Step) -> str:
        """It never has an effect."""
        return "in a cascade, where a step without an answer is passed over; give it to the step that runs this node"

    def per_row(self, node: NodeDefinition) -> bool:
        """As the file says."""
        return node.message.cascade.per_row

    def own_fields(self, builder: NodeBuilder, scope: Scope) -> dict[str, Any]:
        """Whether rows go their own ways."""
        return {"per_row": self.per_row(scope.node)}

    def build_step(self, builder: NodeBuilder, scope: Scope, index: int, slots: Mapping[str, int]) -> BuiltAlternative:
        """A step with its ``accept``; what it offers is its answer, since a failed or skipped one is passed over."""
        step = scope.node.steps[index]
        path = f"{step.path}.accept"
        accept_slots = _accept_slots(scope, index, path, slots)
        own = {**slots, **accept_slots}
        built = builder.step(scope, index, own)
        for name, slot in accept_slots.items():
            scope.note(slot, name, built.answered[name])
        bindings = visible_outputs(scope, path, built.answered, own)
        accept = builder.condition(scope, path, _ACCEPT, builder.narrowing(scope, step), outputs=bindings)
        plan = replace(built.plan, accept=accept) if built.plan is not None else None
        return BuiltAlternative(plan, built.answered, list(own))

    def check_fields(self, file: GraphFile, node: NodeDefinition, report: GraphReport) -> None:
        """What a single step leaves without effect."""
        check_choices(file, node, [("per_row", self.per_row(node))], report)

    def check(self, file: GraphFile, node: NodeDefinition, report: GraphReport) -> None:
        """Steps behind one that always answers; tests that are always true or never; the idle test of the last step."""
        certain = ""
        for step in node.steps:
            if certain:
                text = (
                    f"step '{step.name}' is never reached: the answer of '{certain}' always counts; give that one an "
                    "'accept'"
                )
                report.error("G013", file, step.path, text)
            is_last = step is node.steps[-1]
            accept = step.message.accept
            constant = read_expression(accept).constant if accept else None
            if constant is not None:
                what = (
                    "always true, as without it" if constant else "always false, so that no answer of the step counts"
                )
                cure = "write a test of 'outputs', for example max(outputs.PROBS) >= 0.9"
                report.error("G013", file, f"{step.path}.accept", f"'accept' is {what}; {cure}")
            elif accept and is_last:
                text = (
                    "'accept' of the last step has no effect: there is no step to go on to, so its answer counts anyway"
                )
                report.warning("G018", file, f"{step.path}.accept", text)
            if not certain and not accept and not _may_pass(file, node, step):
                certain = step.name


def _may_pass(file: GraphFile, node: NodeDefinition, step: StepDefinition) -> bool:
    """Whether a cascade may go on behind a step that has no ``accept``."""
    message = step.message
    policies = (message.policy, node.message.policy, file.message.policy)
    around = policies if message.model_name else policies[:1]
    has_limit = any(policy.min_remaining_ms for policy in around)
    return bool(message.when) or message.dependency == pb.Step.SOFT or has_limit


def _accept_slots(scope: Scope, index: int, path: str, slots: Mapping[str, int]) -> dict[str, int]:
    condition = scope.names.conditions.get(path)
    references = condition.expression.references if condition else []
    read = {ref.name for ref in references if ref.space == "outputs" and ref.name not in slots}
    offered_names = scope.names.steps[index].outputs.values()
    return {name: scope.new_slot(name) for name in sorted(read) if name in offered_names}
