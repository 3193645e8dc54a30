"""From steps to step plans: the target's inputs are bound to slots, and types are checked where tensors are used."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import replace

from weft_common.pbtxt import suggestion
from weft_router.graph.conditions import CelCondition, ConditionError, Purpose, compile_condition
from weft_router.graph.names import MAX_DEPTH, NameTable, StepNames, Wire, describe, narrowed, target_path
from weft_router.graph.parse import GraphFile, NodeDefinition, StepDefinition
from weft_router.graph.plan import Binding, CallPlan, NodePlan, StepPlan
from weft_router.graph.report import Report
from weft_router.graph.resolve import ModelTarget, NodeTarget
from weft_router.graph.scope import BuiltNode, BuiltStep, Call, Scope, declared_types, declaring, owner_text
from weft_router.graph.types import TensorType, fits, loses_batch

#: Nodes of one plan: a node counts once for each step that runs it.
MAX_NODES = 1000


class StepBuilder(ABC):
    """Compiles steps, and checks a tensor where it is used.

    Args:
        names: Names of every node.
        report: Receives what is wrong.
    """

    def __init__(self, names: NameTable, report: Report) -> None:
        self.names = names
        self.report = report
        self.dependencies: set[tuple[str, str]] = set()
        self.num_nodes = 0

    @abstractmethod
    def build_node(self, file: GraphFile, node: NodeDefinition, call: Call) -> BuiltNode:
        """Compile a node for one use."""

    def step(self, scope: Scope, index: int, wanted: frozenset[str]) -> BuiltStep:
        """Compile step ``index`` of a node.

        Args:
            scope: The node. Bindings of outputs are left to the caller.
            index: In declared order.
            wanted: Outputs of the target that are read.
        """
        step, names = scope.node.steps[index], scope.names.steps[index]
        given, bindings = self._inputs(scope, step, names)
        where = f"step '{step.name}' ({scope.file.place(step.path)})"
        action: CallPlan | NodePlan | None = None
        outputs: dict[str, TensorType] = {}
        target = names.target
        if isinstance(target, ModelTarget):
            action = self._call(scope, step, target)
            is_batched = target.signature.max_batch_size > 0
            for spec in target.signature.outputs:
                origin = f"output '{spec.name}' of {describe(target)} in {where}"
                outputs[spec.name] = TensorType.of(spec, is_batched=is_batched, origin=origin)
        elif isinstance(target, NodeTarget) and self._may_enter(scope, step, target):
            visible = {**scope.inputs, **scope.produced} if not target.is_graph else {}
            path = f"{scope.step_path(step)}/{target.node.name}"
            call = Call(given, visible, wanted, path, (*scope.call.trail, target.key))
            built = self.build_node(target.file, target.node, call)
            action, outputs = built.plan, built.outputs
            if action is not None and target.is_graph:
                limits_ms = [ms for ms in (action.timeout_ms, target.file.message.policy.timeout_ms) if ms]
                action = replace(action, graph=target.file.label, timeout_ms=min(limits_ms, default=0))
        for name in names.outputs:
            outputs.setdefault(name, TensorType.unknown(where))
        if action is None:
            return BuiltStep(None, outputs)
        message = step.message
        plan = StepPlan(
            name=step.name,
            path=scope.step_path(step),
            action=action,
            inputs=tuple(bindings),
            outputs=(),
            cases=tuple(message.case),
            is_otherwise=message.otherwise,
            weight=message.weight or 1.0,
            timeout_ms=message.policy.timeout_ms,
        )
        return BuiltStep(plan, outputs)

    def check_use(
        self, file: GraphFile, path: str, produced: TensorType, used: TensorType, *, is_required: bool, what: str
    ) -> None:
        """Report a tensor that does not fit where it is used, naming both ends."""
        report = self.report
        origin = f"it comes from {produced.origin}"
        if produced.is_known and used.is_known and produced.datatype != used.datatype:
            text = f"inconsistent data type: {what} is {used.datatype}, got {produced.datatype}; {origin}"
            report.error("G007", file, path, text)
        elif not fits(produced, used):
            text = f"inconsistent shape: {what} is {used}, got {produced}; {origin}"
            report.error("G008", file, path, text)
        elif file.is_batched and produced.is_batched and loses_batch(produced, used):
            text = f"{what} has no batch dimension; only requests of one row can pass"
            report.warning("G008", file, path, text)
        if produced.is_optional and is_required:
            text = f"{what} is required, but the tensor may be absent; {origin}"
            (report.warning if file.is_ensemble else report.error)("G010", file, path, text)

    def condition(self, scope: Scope, path: str, purpose: Purpose) -> CelCondition | None:
        """Compile a condition of the node; None where an error was reported, or there is none at ``path``."""
        expression = scope.names.conditions.get(path)
        if expression is None:
            return None
        named = {reference.name for reference in expression.references}
        others = {name: known for name, known in scope.call.visible.items() if name not in named}
        for name, at in expression.references:
            if name in scope.inputs and scope.inputs[name].is_optional and name not in expression.tested:
                text = f"'{name}' may be absent; test it first: has(inputs.{name}) && ..."
                self.report.error_at("G010", scope.file, path, at, text)
        try:
            return compile_condition(
                expression, purpose, types={**others, **scope.inputs}, slots=scope.slots, node=scope.node.name
            )
        except ConditionError as error:
            for fault in error.faults:
                self.report.error_at("G011", scope.file, path, fault.at, fault.message)
            return None

    def _inputs(
        self, scope: Scope, step: StepDefinition, names: StepNames
    ) -> tuple[dict[str, TensorType], list[Binding]]:
        """Types that the step gives its target, and the bindings; missing and unfit ones are reported."""
        given: dict[str, TensorType] = {}
        bindings: list[Binding] = []
        uses = _uses(names)
        sure = narrowed(step)
        for wire in names.wires:
            source = scope.inputs if wire.producer is None else scope.produced
            value = source.get(wire.tensor)
            path = f"{step.path}.input_map[{wire.target_input}]" if wire.is_mapped else target_path(step)
            if value is None:
                if any(other.is_open for other in scope.names.steps):
                    given[wire.target_input] = TensorType.unknown(f"step '{step.name}'")
                elif wire.is_required:
                    self._missing(scope, step, names, wire, path)
                continue
            if wire.tensor in sure:
                value = value.present()
            if used := uses.get(wire.target_input):
                what = f"input '{wire.target_input}' of {describe(names.target)}"
                self.check_use(scope.file, path, value, used, is_required=not used.is_optional, what=what)
            given[wire.target_input] = value
            if wire.tensor in scope.slots:
                bindings.append(Binding(wire.target_input, scope.slots[wire.tensor]))
        return given, bindings

    def _missing(self, scope: Scope, step: StepDefinition, names: StepNames, wire: Wire, path: str) -> None:
        """Report a tensor that a step needs and nothing gives."""
        tensor, node = wire.tensor, scope.node
        later = [s.name for s, n in zip(node.steps, scope.names.steps, strict=True) if tensor in n.outputs.values()]
        lacking = [
            f"{describe(other.target)} gives it, but not its step {' or '.join(map(repr, nested.lacking[tensor]))}"
            for other in scope.names.steps
            if isinstance(other.target, NodeTarget)
            and tensor in (nested := self.names.of(other.target.file, other.target.node)).lacking
        ]
        if step.name in later:
            hint = "; it gives one itself"
        elif later:
            hint = f"; step '{later[0]}' stands later: move it up, or name the tensor in 'input_map'"
        elif lacking:
            hint = f"; {lacking[0]}"
        else:
            hint = suggestion(tensor, {**scope.inputs, **scope.produced, **scope.call.visible})
        owner = owner_text(scope.file, node)
        needs = f"input '{wire.target_input}' of {describe(names.target)} has no source"
        self.report.error("G006", scope.file, path, f"{needs}: {owner} has no tensor '{tensor}'{hint}")

    def _call(self, scope: Scope, step: StepDefinition, target: ModelTarget) -> CallPlan:
        file, signature, path = scope.file, target.signature, target_path(step)
        limit, own = signature.max_batch_size, file.message.max_batch_size
        if 0 < limit < own:
            text = _too_small(file, own, f"model {signature.name}", limit)
            self.report.error("G009", file, path, text)
        if signature.is_decoupled:
            text = f"model '{signature.name}' is decoupled, which is not supported by this version of Weft"
            self.report.error("G024", file, path, text)
        self.dependencies.add((target.target, signature.name))
        return CallPlan(target.target, signature.name, target.version, signature)

    def _may_enter(self, scope: Scope, step: StepDefinition, target: NodeTarget) -> bool:
        """Whether a node can be compiled in place of the step: no cycle, not too much, the same batching."""
        file, path, trail = scope.file, target_path(step), scope.call.trail
        if target.key in trail:
            cycle = (*trail[trail.index(target.key) :], target.key)
            is_local = len({label for label, _ in cycle}) == 1
            shown = [name for _, name in cycle] if is_local else _without_repeats(label for label, _ in cycle)
            self.report.error("G003", file, path, f"cycle: {' -> '.join(shown)}")
            return False
        if len(trail) >= MAX_DEPTH or self.num_nodes >= MAX_NODES:
            text = f"nodes are nested deeper than {MAX_DEPTH}, or the graph expands to more than {MAX_NODES} of them"
            self.report.error("G024", file, path, text)
            return False
        inner, outer = target.file.message.max_batch_size, file.message.max_batch_size
        if (inner > 0) != (outer > 0):
            text = (
                f"graph '{file.name}' has max_batch_size {outer} and graph '{target.file.name}' has {inner}; one with "
                "a batch dimension and one without are not supported together by this version of Weft"
            )
            self.report.error("G024", file, path, text)
        elif inner < outer:
            text = _too_small(file, outer, f"graph {target.file.name}", inner)
            self.report.error("G009", file, path, text)
        if target.is_graph and target.file.message.policy.max_inflight:
            text = f"'max_inflight' of graph '{target.file.name}' has no effect where it is a step of another graph"
            self.report.warning("G018", file, path, text)
        return True


def _uses(names: StepNames) -> dict[str, TensorType]:
    """Type that the step's target declares for each input; empty for a node that declares none."""
    target = names.target
    if isinstance(target, ModelTarget):
        is_batched = target.signature.max_batch_size > 0
        origin = describe(target)
        return {s.name: TensorType.of(s, is_batched=is_batched, origin=origin) for s in target.signature.inputs}
    if isinstance(target, NodeTarget):
        return declared_types(target.file, target.node, declaring(target.file, target.node).input)
    return {}


def _too_small(file: GraphFile, own: int, what: str, limit: int) -> str:
    return (
        f"{'ensemble' if file.is_ensemble else 'graph'} {file.name} allows maximum batch size {own}, but it contains "
        f"{what} which only allows maximum batch size to be {limit}"
    )


def _without_repeats(names: Iterable[str]) -> list[str]:
    shown: list[str] = []
    for name in names:
        if not shown or shown[-1] != name:
            shown.append(name)
    return shown
