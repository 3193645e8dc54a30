"""From a switch, splitter or cascade to its plan: every step offers the node's outputs, in the same slots."""

import re
from collections.abc import Mapping
from dataclasses import replace

from weft_protos import graph_pb2 as pb
from weft_router.bandit_algorithms import ALGORITHMS
from weft_router.graph.checks.branches import decides_all
from weft_router.graph.compiler.names import target_path
from weft_router.graph.compiler.scope import BuiltStep, Scope, owner_text
from weft_router.graph.compiler.sequences import outputs_sight
from weft_router.graph.compiler.steps import StepBuilder
from weft_router.graph.plan import BanditPlan, NodeKind, NodePlan, StepPlan
from weft_router.graph.types.conditions import CelCondition, Purpose
from weft_router.graph.types.signatures import TensorType, merged

_INTEGER = re.compile(r"0|-?[1-9][0-9]*")
_DEFAULT_EPSILON = 0.1


class AlternativeBuilder(StepBuilder):
    """Compiles nodes whose steps stand in for one another."""

    def alternatives(
        self, scope: Scope, promised: Mapping[str, TensorType]
    ) -> tuple[NodePlan | None, dict[str, TensorType]]:
        """Plan of a switch, splitter or cascade, and types of its outputs.

        Args:
            scope: The node.
            promised: Outputs that it declares.
        """
        node, names = scope.node, scope.names
        slots = {name: scope.new_slot(name) for name in names.outputs if name in scope.call.wanted}
        scope.new_ok_slots({asked for step in names.steps for asked in step.asks})
        plans: list[StepPlan] = []
        offers: dict[str, list[TensorType]] = {}
        per_row = node.message.switch.per_row or node.message.cascade.per_row
        if per_row:
            self._check_rows(scope, scope.inputs)
        for i in range(len(node.steps)):
            judged = self._judged_slots(scope, i, slots)
            own = slots | judged
            built = self.step(scope, i, own)
            for name, slot in judged.items():
                scope.note(slot, name, built.answered[name])
            is_tried = node.kind is NodeKind.CASCADE  # what fails or is skipped there is passed over
            offered = built.answered if is_tried else built.outputs
            self._check_alternative(scope, i, offered, promised, offers)
            accept = self._accept(scope, i, built, own) if is_tried else None
            if per_row:
                self._check_rows(scope, {name: built.answered[name] for name in own if name in built.answered})
            if built.plan is not None:
                plans.append(replace(built.plan, accept=accept))
        if not names.outputs and not names.is_open:
            text = f"the steps of '{node.name}' have no output in common; rename outputs with 'output_map'"
            self.report.error("G017", scope.file, node.kind_path, text)
        place = scope.file.place(node.kind_path)
        types = {
            name: merged(offers.get(name, []), f"output '{name}' of node '{node.name}' ({place})")
            for name in names.outputs
        }
        if per_row:  # what has no batch dimension was reported
            types = {name: known if known.is_batched else known.forgotten() for name, known in types.items()}
        for name, slot in slots.items():
            scope.note(slot, name, types[name])
        on = self.condition(scope, f"{node.kind_path}.on", Purpose.ON)
        if on is not None and on.type_name in ("bool", "int"):
            self._check_cases(scope, on.type_name)
        sticky_by = self.condition(scope, f"{node.kind_path}.sticky_by", Purpose.STICKY_BY)
        if len(plans) != len(node.steps):
            return None, types
        splitter = node.message.splitter
        plan = replace(
            scope.node_plan(plans, slots),
            on=on,
            per_row=per_row,
            sticky_by=sticky_by,
            salt=splitter.salt,
            bandit=_bandit(splitter.bandit) if splitter.HasField("bandit") else None,
        )
        return plan, types

    def _judged_slots(self, scope: Scope, index: int, slots: Mapping[str, int]) -> dict[str, int]:
        """Slots of what only the ``accept`` of a step reads."""
        condition = scope.names.conditions.get(f"{scope.node.steps[index].path}.accept")
        references = condition.expression.references if condition else []
        read = {ref.name for ref in references if ref.space == "outputs" and ref.name not in slots}
        given = scope.names.steps[index].outputs.values()
        return {name: scope.new_slot(name) for name in sorted(read) if name in given}

    def _accept(self, scope: Scope, index: int, built: BuiltStep, slots: Mapping[str, int]) -> CelCondition | None:
        step = scope.node.steps[index]
        path = f"{step.path}.accept"
        sight = outputs_sight(scope, path, built.answered, slots)
        return self.condition(scope, path, Purpose.ACCEPT, self.narrowing(scope, step), outputs=sight)

    def _check_cases(self, scope: Scope, type_name: str) -> None:
        """Cases that the value of ``on`` can never be."""
        for step in scope.node.steps:
            for i, case in enumerate(step.message.case):
                is_integer = _INTEGER.fullmatch(case) is not None
                if case not in ("true", "false") if type_name == "bool" else not is_integer:
                    text = f"case '{case}' is never chosen: 'on' is {type_name}"
                    self.report.error("G013", scope.file, f"{step.path}.case[{i}]", text)
            if step.message.otherwise and type_name == "bool" and decides_all(scope.node):
                text = f"step '{step.name}' is never chosen: 'on' is bool, and both its values have a 'case'"
                self.report.error("G013", scope.file, f"{step.path}.otherwise", text, is_name=True)

    def _check_rows(self, scope: Scope, types: Mapping[str, TensorType]) -> None:
        """Report what keeps rows from going their own ways: tensors without a batch dimension."""
        file, node = scope.file, scope.node
        path = f"{node.kind_path}.per_row"
        if not file.is_batched:
            text = f"'per_row' needs a batch dimension, graph '{file.name}' has none; give it a 'max_batch_size'"
            self.report.error("G023", file, path, text, is_name=True)
            return
        for name, known in types.items():
            if known.is_known and not known.is_batched:
                text = (
                    f"'per_row' needs a batch dimension in every tensor of '{node.name}'; '{name}' is {known} and has "
                    f"none, it comes from {known.origin}"
                )
                self.report.error("G023", file, path, text, is_name=True)

    def _check_alternative(
        self,
        scope: Scope,
        index: int,
        offered: Mapping[str, TensorType],
        promised: Mapping[str, TensorType],
        offers: dict[str, list[TensorType]],
    ) -> None:
        """One alternative against what the node declares, or against the alternatives before it."""
        file, step = scope.file, scope.node.steps[index]
        path = target_path(step)
        for name in scope.names.outputs:
            value = offered.get(name)
            what = f"output '{name}' of {owner_text(file, scope.node)}"
            if value is None:
                if not scope.names.steps[index].is_open:
                    self.missing_output(file, path, f"step '{step.name}' gives no {what}", name, offered)
                continue
            before = offers.setdefault(name, [])
            if name in promised:
                used = promised[name]
                self.check_use(file, path, value, used, is_required=False, what=what, declared=used)
            elif not all(self.agree(file, path, what, value, other, "alternatives") for other in before):
                continue
            before.append(value)


def _bandit(message: pb.Bandit) -> BanditPlan:
    algorithm = ALGORITHMS[pb.Bandit.Algorithm.Name(message.algorithm)]
    return BanditPlan(algorithm, message.epsilon or _DEFAULT_EPSILON, message.min_pulls)
