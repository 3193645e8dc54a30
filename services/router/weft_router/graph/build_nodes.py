"""From nodes to node plans: types flow from the graph's inputs to its outputs, and every tensor gets a slot.

A node is compiled once for each step that runs it, because its types depend on what that step gives it.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from weft_router.graph.build_ensembles import CombineBuilder
from weft_router.graph.conditions import Purpose
from weft_router.graph.names import StepNames, target_path
from weft_router.graph.parse import GraphFile, NodeDefinition
from weft_router.graph.plan import Binding, NodeKind, NodePlan, StepPlan
from weft_router.graph.scope import BuiltNode, BuiltStep, Call, Scope, declared_types, declaring, owner_text
from weft_router.graph.types import TensorType, fits, merged

_INTEGER = re.compile(r"0|-?[1-9][0-9]*")


class NodeBuilder(CombineBuilder):
    """Compiles nodes of every kind."""

    def build_node(self, file: GraphFile, node: NodeDefinition, call: Call) -> BuiltNode:
        """Compile a node for one use: report what is wrong, give every tensor a slot."""
        self.num_nodes += 1
        names = self.names.of(file, node)
        owner = declaring(file, node)
        declared = declared_types(file, node, owner.input)
        inputs = {
            name: replace(
                known, is_optional=known.is_optional and (name not in call.given or call.given[name].is_optional)
            )
            for name, known in declared.items()
        } or {name: call.given[name] for name in names.inputs if name in call.given}
        scope = Scope(file, node, names, call, inputs)
        for slot, (name, known) in enumerate(inputs.items()):
            scope.slots[name] = slot
            scope.note(slot, name, known)
        promised = declared_types(file, node, owner.output)
        match node.kind:
            case NodeKind.SEQUENCE:
                plan, produced = self._sequence(scope)
            case NodeKind.SWITCH | NodeKind.SPLITTER:
                plan, produced = self._alternatives(scope, promised)
            case NodeKind.ENSEMBLE:
                plan, produced = self.ensemble(scope)
            case None:
                plan, produced = None, {}
        if plan is not None and node.message.policy.timeout_ms:
            plan = replace(plan, timeout_ms=node.message.policy.timeout_ms)
        return BuiltNode(plan, self._outputs(scope, promised, produced), scope.specs)

    def _outputs(
        self, scope: Scope, promised: Mapping[str, TensorType], produced: Mapping[str, TensorType]
    ) -> dict[str, TensorType]:
        """Types of the node's outputs, those that it declares checked."""
        file, node, names = scope.file, scope.node, scope.names
        prefix = "" if node.name == file.root else f"{node.path}."
        is_checked = node.kind in (NodeKind.SWITCH, NodeKind.SPLITTER)  # each alternative was
        for i, name in enumerate(promised if not is_checked else ()):
            path, value = f"{prefix}output[{i}].name", produced.get(name)
            if value is not None:
                what = f"output '{name}' of {owner_text(file, node)}"
                self.check_use(file, path, value, promised[name], is_required=False, what=what)
            elif node.kind is not None and not any(step.is_open for step in names.steps):
                given = [*scope.inputs, *scope.produced] if node.kind is NodeKind.SEQUENCE else list(produced)
                self.missing_output(
                    file, path, f"nothing in {owner_text(file, node)} gives output '{name}'", name, given
                )
        if promised:
            return {name: replace(known, is_optional=False) for name, known in promised.items()}
        return {name: produced.get(name, TensorType.unknown(f"node '{node.name}'")) for name in names.outputs}

    def _sequence(self, scope: Scope) -> tuple[NodePlan | None, dict[str, TensorType]]:
        names = scope.names.steps
        order = self._order(scope)
        if order is None:
            return None, {name: TensorType.unknown("a cycle") for name in scope.names.outputs}
        read = set(scope.call.wanted)
        live: set[int] = set()
        for i in reversed(order):
            if read.intersection(names[i].outputs.values()):
                live.add(i)
                read.update(wire.tensor for wire in names[i].wires if wire.producer is not None)
        for i in sorted(live):
            for tensor in names[i].outputs.values():
                if tensor in read:
                    scope.slots.setdefault(tensor, len(scope.slots))
        built: dict[int, BuiltStep] = {}
        for i in order:
            wanted = frozenset(name for name, tensor in names[i].outputs.items() if tensor in read)
            built[i] = self.step(scope, i, wanted)
            for name, tensor in names[i].outputs.items():
                scope.produced.setdefault(tensor, built[i].outputs[name])
                if tensor in scope.slots:
                    scope.note(scope.slots[tensor], tensor, built[i].outputs[name])
        self._check_unread(scope)
        kept = sorted(live)
        plans = [plan for i in kept if (plan := built[i].plan)]
        outputs = {
            name: known for name, known in {**scope.inputs, **scope.produced}.items() if name in scope.names.outputs
        }
        if len(plans) != len(kept):
            return None, outputs
        producers = {i: {wire.producer for wire in names[i].wires if wire.producer is not None} for i in kept}
        consumers: dict[int, list[int]] = {i: [] for i in kept}
        for position, i in enumerate(kept):
            for producer in producers[i]:
                consumers[producer].append(position)
        for position, i in enumerate(kept):
            plans[position] = replace(
                plans[position],
                outputs=_bound(names[i], scope.slots, read),
                consumers=tuple(consumers[i]),
                num_dependencies=len(producers[i]),
            )
        return _node_plan(scope, plans, scope.slots, len(scope.slots)), outputs

    def _order(self, scope: Scope) -> list[int] | None:
        """Steps, each after those that it reads from, else as declared; None, and a report, if they wait in a ring."""
        names = scope.names.steps
        waits = {i: {wire.producer for wire in step.wires if wire.producer is not None} for i, step in enumerate(names)}
        done: dict[int, None] = {}
        while waits:
            ready = next((i for i, producers in waits.items() if producers <= done.keys()), None)
            if ready is None:
                self._report_ring(scope, waits)
                return None
            done[ready] = None
            del waits[ready]
        return list(done)

    def _report_ring(self, scope: Scope, waits: Mapping[int, set[int]]) -> None:
        trail = [min(waits)]
        while trail.count(trail[-1]) == 1:
            trail.append(min(producer for producer in waits[trail[-1]] if producer in waits))
        circle = trail[trail.index(trail[-1]) :][::-1]
        steps = scope.node.steps
        shown = " -> ".join(steps[i].name for i in circle)
        text = f"cycle: {shown}; each step waits for an output of the one before it"
        self.report.error("G003", scope.file, target_path(steps[circle[0]]), text)

    def _check_unread(self, scope: Scope) -> None:
        """Tensors that nothing reads are an error in an ensemble; elsewhere a step with no others is warned of."""
        file, node, names = scope.file, scope.node, scope.names
        if any(step.is_open for step in names.steps):
            return
        read = {*names.outputs, *(wire.tensor for step in names.steps for wire in step.wires)}
        for step, step_names in zip(node.steps, names.steps, strict=True):
            unread = [(name, tensor) for name, tensor in step_names.outputs.items() if tensor not in read]
            if file.is_ensemble:
                for name, tensor in unread:
                    text = f"ensemble tensor '{tensor}' is unused in ensemble '{file.name}'"
                    self.report.error("G026", file, f"{step.path}.output_map[{name}]", text)
            elif unread and len(unread) == len(step_names.outputs) and not self.report.has_errors:
                text = f"step '{step.name}' never runs: nothing reads its outputs"
                self.report.warning("G026", file, target_path(step), text)

    def _alternatives(
        self, scope: Scope, promised: Mapping[str, TensorType]
    ) -> tuple[NodePlan | None, dict[str, TensorType]]:
        node, names, call = scope.node, scope.names, scope.call
        wanted_outputs = [name for name in names.outputs if name in call.wanted]
        slots = {name: len(scope.inputs) + k for k, name in enumerate(wanted_outputs)}
        plans: list[StepPlan] = []
        offers: dict[str, list[TensorType]] = {}
        for i, step in enumerate(node.steps):
            wanted = frozenset(name for name, tensor in names.steps[i].outputs.items() if tensor in slots)
            built = self.step(scope, i, wanted)
            offered = {tensor: built.outputs[name] for name, tensor in names.steps[i].outputs.items()}
            self._check_alternative(scope, i, offered, promised, offers)
            when = self.condition(scope, f"{step.path}.when", Purpose.WHEN)
            if built.plan is not None:
                outputs = _bound(names.steps[i], slots, slots)
                plans.append(replace(built.plan, outputs=outputs, when=when))
        if not names.outputs and not names.is_open:
            text = f"the steps of '{node.name}' have no output in common; rename outputs with 'output_map'"
            self.report.error("G017", scope.file, node.kind_path, text)
        types = {name: merged(offers.get(name, []), f"output '{name}' of node '{node.name}'") for name in names.outputs}
        for name, slot in slots.items():
            scope.note(slot, name, types[name])
        on = self.condition(scope, f"{node.kind_path}.on", Purpose.ON)
        if on is not None and on.type_name in ("bool", "int"):
            self._check_cases(scope, on.type_name)
        sticky_by = self.condition(scope, f"{node.kind_path}.sticky_by", Purpose.STICKY_BY)
        if len(plans) != len(node.steps):
            return None, types
        plan = _node_plan(scope, plans, slots, len(scope.inputs) + len(slots))
        return replace(plan, on=on, sticky_by=sticky_by, salt=node.message.splitter.salt), types

    def _check_cases(self, scope: Scope, type_name: str) -> None:
        """Cases that the value of ``on`` can never be."""
        for step in scope.node.steps:
            for i, case in enumerate(step.message.case):
                is_integer = _INTEGER.fullmatch(case) is not None
                if case not in ("true", "false") if type_name == "bool" else not is_integer:
                    text = f"case '{case}' is never chosen: 'on' is {type_name}"
                    self.report.error("G013", scope.file, f"{step.path}.case[{i}]", text)

    def _check_alternative(
        self,
        scope: Scope,
        index: int,
        offered: Mapping[str, TensorType],
        promised: Mapping[str, TensorType],
        offers: dict[str, list[TensorType]],
    ) -> None:
        """One alternative against what the node declares, or against the alternatives before it."""
        file, node, step = scope.file, scope.node, scope.node.steps[index]
        for name in scope.names.outputs:
            value = offered.get(name)
            what = f"output '{name}' of {owner_text(file, node)}"
            if value is None:
                if not scope.names.steps[index].is_open:
                    self.missing_output(file, target_path(step), f"step '{step.name}' gives no {what}", name, offered)
                continue
            before = offers.setdefault(name, [])
            others = [other for other in before if other.is_known and value.is_known]
            clash = next((o for o in others if o.datatype != value.datatype or not fits(value, o)), None)
            if name not in promised and clash is not None:
                code = "G007" if clash.datatype != value.datatype else "G008"
                text = (
                    f"{what} is {value} from {value.origin}, but {clash} from {clash.origin}; alternatives must agree"
                )
                self.report.error(code, file, target_path(step), text)
                continue
            before.append(value)
            if name in promised:
                self.check_use(file, target_path(step), value, promised[name], is_required=False, what=what)


def _bound(names: StepNames, slots: Mapping[str, int], read: Iterable[str]) -> tuple[Binding, ...]:
    """Outputs of a step that are read, each with its slot."""
    return tuple(Binding(name, slots[tensor]) for name, tensor in names.outputs.items() if tensor in read)


def _node_plan(scope: Scope, steps: Sequence[StepPlan], slots: Mapping[str, int], num_slots: int) -> NodePlan:
    """Plan of a node whose outputs are in ``slots``."""
    return NodePlan(
        name=scope.node.name,
        path=scope.call.path,
        kind=scope.node.kind or NodeKind.SEQUENCE,
        num_slots=num_slots,
        inputs=tuple(Binding(name, slot) for slot, name in enumerate(scope.inputs)),
        outputs=tuple(Binding(n, slots[n]) for n in scope.names.outputs if n in scope.call.wanted and n in slots),
        steps=tuple(steps),
    )
