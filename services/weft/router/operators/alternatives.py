"""What kinds whose steps stand in for one another have in common: every step offers the node's outputs.

The steps see the node's inputs alone, and write into the same slots.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from weft.base.errors import InvalidArgumentError, RemoteError, WeftError
from weft.language.compiler.names import NodeNames, target_path
from weft.language.compiler.nodes import NodeBuilder, NodeKind
from weft.language.compiler.scope import Scope, owner_text
from weft.language.compiler.state import check_rows
from weft.language.path_form import StepOutcome
from weft.language.plan import Condition, Frame, NodePlan, StepPlan
from weft.language.syntax.file import NodeDefinition
from weft.language.types.signatures import TensorType, merged
from weft.router.reporting.path import StepRecord
from weft.router.steps import Node, NodeParts, Run
from weft.router.tensors import Rows


class BuiltAlternative(NamedTuple):
    """One step of such a node.

    Attributes:
        plan: None where an error was reported.
        used: Names of those that something reads.
    """

    plan: StepPlan | None
    offered: Mapping[str, TensorType]
    used: Sequence[str]


class AlternativesKind(NodeKind):
    """A kind whose steps are alternatives."""

    checks_outputs = True

    def outputs(self, node: NodeDefinition, names: NodeNames) -> Iterator[str]:
        """What all steps give; what only some give is noted as lacking."""
        closed = [
            (definition.name, set(step.outputs.values()))
            for definition, step in zip(node.steps, names.steps, strict=True)
            if not step.is_open
        ]
        for tensor in dict.fromkeys(tensor for step in names.steps for tensor in step.outputs.values()):
            lacking = [name for name, tensors in closed if tensor not in tensors]
            if lacking:
                names.lacking[tensor] = lacking
            else:
                yield tensor

    def per_row(self, node: NodeDefinition) -> bool:
        """Whether each row of a batch goes its own way."""
        return False

    def why_no_stream(self, node: NodeDefinition) -> str:
        """A stream is of no row: those of a batch that go different ways come together in one response."""
        if not self.per_row(node):
            return ""
        return (
            f"with 'per_row' the rows of a batch go different ways and come together in one response; leave 'per_row' "
            f"out of '{node.name}', or send one row to a request"
        )

    def build_step(self, builder: NodeBuilder, scope: Scope, index: int, slots: Mapping[str, int]) -> BuiltAlternative:
        """Compile one step; its outputs go to ``slots``."""
        built = builder.step(scope, index, slots)
        return BuiltAlternative(built.plan, built.outputs, list(slots))

    def own_fields(self, builder: NodeBuilder, scope: Scope) -> dict[str, Any]:
        """What the kind's plans have beside what all have; called when the steps are compiled."""
        return {}

    def build(
        self, builder: NodeBuilder, scope: Scope, declared: Mapping[str, TensorType]
    ) -> tuple[NodePlan | None, dict[str, TensorType]]:
        """As ``NodeKind.build``; what steps give is held against what the node declares, or against one another."""
        node, names = scope.node, scope.names
        slots = {name: scope.new_slot(name) for name in names.outputs if name in scope.call.wanted}
        scope.new_ok_slots({asked for step in names.steps for asked in step.asks})
        plans: list[StepPlan] = []
        offers: dict[str, list[TensorType]] = {}
        per_row = self.per_row(node)
        if per_row:
            _check_rows(builder, scope, scope.inputs)
            check_rows(scope, builder.names, builder.report, "with 'per_row' the rows of a request go different ways")
        for i in range(len(node.steps)):
            plan, offered, used = self.build_step(builder, scope, i, slots)
            _check_alternative(builder, scope, i, offered, declared, offers)
            if per_row:
                _check_rows(builder, scope, {name: offered[name] for name in used if name in offered})
            if plan is not None:
                plans.append(plan)
        if not names.outputs and not names.is_open:
            text = f"the steps of '{node.name}' have no output in common; rename outputs with 'output_map'"
            builder.report.error("G017", scope.file, node.kind_path, text)
        place = scope.file.place(node.kind_path)
        types = {
            name: merged(offers.get(name, []), f"output '{name}' of node '{node.name}' ({place})")
            for name in names.outputs
        }
        types |= {name: _left_out(scope, name, types[name], declared) for name in declared if name in types}
        if per_row:  # what has no batch dimension was reported
            types = {name: known if known.is_batched else known.forgotten() for name, known in types.items()}
        for name, slot in slots.items():
            scope.note(slot, name, types[name])
        own = self.own_fields(builder, scope)
        if len(plans) != len(node.steps):
            return None, types
        return replace(scope.node_plan(self.plan, plans, slots), **own), types


class AlternativesNode(Node):
    """A node whose steps are alternatives."""

    def __init__(self, plan: NodePlan, parts: NodeParts) -> None:
        super().__init__(plan)
        self._steps = parts.steps
        self._error_context = parts.error_context
        self._runtime = parts.runtime

    def _placed(self, error: WeftError, detail: str = "") -> WeftError:
        return self._error_context.wrap(error, f"{self.plan.path}: {detail}" if detail else self.plan.path)

    def _holds(self, test: Condition, run: Run) -> bool:
        return self._error_context.holds(test, run, self.plan.path)

    def _row_values(self, condition: Condition, view: Frame, run: Run, rows: Rows) -> Sequence[bool | str]:
        """The condition's value for each of a view's rows; it is evaluated once where it reads no tensor."""
        scope = run.request.scope
        try:
            if not condition.tensors:
                return [condition.evaluate(view, scope)] * len(rows)
            return condition.evaluate_rows(view, scope, len(rows), rows)
        except InvalidArgumentError as error:
            raise self._error_context.failed(error, self.plan.path) from error

    def _failure(self, record: StepRecord) -> WeftError | None:
        return RemoteError(record.status, record.error) if record.is_missing else None


def only_branch(steps: Sequence[StepOutcome]) -> str:
    """The step that ran, where one did."""
    return steps[0].name if len(steps) == 1 else ""


def _check_rows(builder: NodeBuilder, scope: Scope, types: Mapping[str, TensorType]) -> None:
    file, node = scope.file, scope.node
    path = f"{node.kind_path}.per_row"
    if not file.is_batched:
        text = f"'per_row' needs a batch dimension, graph '{file.name}' has none; give it a 'max_batch_size'"
        builder.report.error("G023", file, path, text, is_name=True)
        return
    for name, known in types.items():
        if known.is_known and not known.is_batched:
            text = (
                f"'per_row' needs a batch dimension in every tensor of '{node.name}'; '{name}' is {known} and has "
                f"none, it comes from {known.origin}"
            )
            builder.report.error("G023", file, path, text, is_name=True)


def _may_lack(scope: Scope, name: str, declared: Mapping[str, TensorType]) -> bool:
    is_given = any(name in step.outputs.values() for step in scope.names.steps)
    return is_given and name in declared and declared[name].is_optional


def _left_out(scope: Scope, name: str, known: TensorType, declared: Mapping[str, TensorType]) -> TensorType:
    """The type of an output that some steps do not give."""
    steps = zip(scope.node.steps, scope.names.steps, strict=True)
    lacking = [repr(step.name) for step, own in steps if not own.is_open and name not in own.outputs.values()]
    if not lacking or not _may_lack(scope, name, declared):
        return known
    absence = f"step {' and '.join(lacking)} of node '{scope.node.name}' gives none: give the step that runs the node "
    return replace(known, is_optional=True, absence=f"{absence}a 'default' for '{name}'")


def _check_alternative(
    builder: NodeBuilder,
    scope: Scope,
    index: int,
    offered: Mapping[str, TensorType],
    declared: Mapping[str, TensorType],
    offers: dict[str, list[TensorType]],
) -> None:
    file, step = scope.file, scope.node.steps[index]
    path = target_path(step)
    for name in scope.names.outputs:
        value = offered.get(name)
        what = f"output '{name}' of {owner_text(file, scope.node)}"
        if value is None:
            if not scope.names.steps[index].is_open and not _may_lack(scope, name, declared):
                builder.missing_output(file, path, f"step '{step.name}' gives no {what}", name, offered)
            continue
        before = offers.setdefault(name, [])
        if name in declared:
            used = declared[name]
            builder.check_use(file, path, value, used, is_required=False, what=what, declared=used)
        elif not all(builder.agree(file, path, what, value, other, "alternatives") for other in before):
            continue
        before.append(value)
