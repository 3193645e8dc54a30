"""Binds uses of tensors to slots, in conditions and inputs of steps, and reports type errors."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from weft.base.text.pbtxt import suggestion
from weft.language.compiler.name_table import NameTable
from weft.language.compiler.names import StepNames, Wire, describe, wire_path
from weft.language.compiler.resolve import ModelTarget, NodeTarget, Target
from weft.language.compiler.scope import Scope, declared_types, declaring, owner_text
from weft.language.plan import Binding
from weft.language.syntax.file import GraphFile, GraphReport, StepDefinition
from weft.language.types.compile_condition import ConditionError, VisibleBindings, compile_condition
from weft.language.types.conditions import CelCondition, Purpose
from weft.language.types.signatures import TensorType, dims_fit, fits, loses_batch


def visible_outputs(
    scope: Scope, path: str, types: Mapping[str, TensorType], slots: Mapping[str, int]
) -> VisibleBindings:
    """The ``outputs`` visible to the condition at ``path``; for unknown models any tensor name is allowed."""
    condition = scope.names.conditions.get(path)
    names = [ref.name for ref in condition.expression.references] if condition else []
    unknown = dict.fromkeys(names, TensorType.unknown("a step")) if any(s.is_open for s in scope.names.steps) else {}
    return VisibleBindings({**unknown, **types}, {name: slots.get(name, -1) for name in names})


def _visible_inputs(
    scope: Scope, index: int, named: Collection[str], certain: Mapping[str, TensorType], *, sees_outputs: bool
) -> VisibleBindings:
    types = {name: known for name, known in scope.call.visible.items() if name not in named} | scope.inputs
    hidden: dict[str, str] = {}
    for tensor, producers in scope.names.producers.items():
        if (producer := scope.names.seen(tensor, index)) is not None:
            types[tensor] = scope.produced.get(tensor) or TensorType.unknown(f"step '{producer}'")
        elif tensor not in types:
            hint = f"write outputs.{tensor}" if sees_outputs else "only outputs of earlier steps are seen"
            hidden[tensor] = f"is an output of step '{scope.node.steps[producers[0]].name}'; {hint}"
    is_open = any(step.is_open for step in scope.names.steps[:index])
    for name in named:
        is_reported = scope.names.inputs.get(name, False)  # at the step that runs the node
        if (is_open or is_reported) and name not in types and name not in hidden:
            types[name] = TensorType.unknown("an earlier step")
    slots = {name: scope.slot_of(name, scope.names.seen(name, index)) for name in named}
    return VisibleBindings({**types, **certain}, slots, hidden)


def _visible_steps(scope: Scope, index: int, named: Collection[str]) -> VisibleBindings:
    types = dict.fromkeys((step.name for step in scope.node.steps[:index]), TensorType.unknown("a step"))
    indexes = {name: scope.names.indexes[name] for name in named if name in scope.names.indexes}
    hidden = {
        name: f"{'is this one' if i == index else 'stands later'}; only earlier steps are seen"
        for name, i in indexes.items()
        if i >= index
    }
    shadows = (name for name, i in indexes.items() if scope.node.steps[i].is_shadow and name not in hidden)
    hidden |= dict.fromkeys(shadows, "is a shadow, whose answer is dropped")
    return VisibleBindings(types, {name: scope.ok_slots.get(i, -1) for name, i in indexes.items()}, hidden)


def seen_by(file: GraphFile) -> dict[str, str]:
    """Which conditions see a step's outputs, and other steps' answers; for messages."""
    accepting = " or ".join(f"a {kind.name}" for kind in file.kinds.values() if "accept" in kind.step_fields)
    asking = " or ".join(f"a {kind.name}" for kind in file.kinds.values() if kind.sees_answers)
    outputs = f"'accept' in {accepting} and 'while' of a loop do; a step sees what earlier steps gave as 'inputs'"
    return {"outputs": outputs, "steps": f"'when', 'accept' and 'key' of a step in {asking} do"}


class UseBuilder:
    """Compiles conditions, wires inputs, and checks tensors where they are used."""

    def __init__(self, names: NameTable, report: GraphReport) -> None:
        self.names = names
        self.report = report

    def check_use(
        self,
        file: GraphFile,
        path: str,
        produced: TensorType,
        used: TensorType,
        *,
        is_required: bool,
        what: str,
        tensor: str = "",
        declared: TensorType | None = None,
    ) -> None:
        """Report a tensor that does not fit its use, naming both ends.

        Args:
            tensor: Its name, if a ``when`` could prevent the use; else "".
            declared: Which of ``produced`` and ``used`` the graph's file declares.
        """
        report = self.report
        origin = f"it comes from {produced.origin}"
        if produced.is_known and used.is_known and produced.datatype != used.datatype:
            text = f"inconsistent data type: {what} is {used.datatype}, got {produced.datatype}; {origin}"
            report.error("G007", file, path, text)
        elif not fits(produced, used):
            text = f"inconsistent shape: {what} is {used}, got {produced}; {origin}"
            other = used if declared is produced else produced
            if declared is not None and declared.is_batched and dims_fit(declared.dims, (-1, *other.dims)):
                text += "; 'dims' do not count the batch dimension: leave out the first -1"
            report.error("G008", file, path, text)
        elif file.is_batched and produced.is_batched and loses_batch(produced, used):
            text = f"{what} has no batch dimension; only requests of one row can pass"
            report.warning("G008", file, path, text)
        if produced.is_optional and is_required:
            text = f"{what} is required, but the tensor may be absent; {origin}"
            if not file.dialect.proves_presence:
                report.warning("G010", file, path, text)
                return
            here = f"let the step run only when: 'has(inputs.{tensor})'" if tensor.isidentifier() else ""
            cures = ", or ".join(filter(None, (produced.absence or "declare it without 'optional: true'", here)))
            report.error("G010", file, path, "; ".join(filter(None, (text, cures))))

    def agree(self, file: GraphFile, path: str, what: str, value: TensorType, other: TensorType, who: str) -> bool:
        """Whether two interchangeable tensors have the same datatype and shape; reported if not."""
        if not (value.is_known and other.is_known) or (value.datatype == other.datatype and fits(value, other)):
            return True
        code = "G007" if value.datatype != other.datatype else "G008"
        text = f"{what} is {value} from {value.origin}, but {other} from {other.origin}; {who} must agree"
        self.report.error(code, file, path, text)
        return False

    def missing_output(self, file: GraphFile, path: str, text: str, name: str, given: Iterable[str]) -> None:
        """Report a missing output, suggesting the name that was probably meant."""
        hint = suggestion(name, given)
        if hint.startswith("; use one of"):
            cure = f'to rename one, write output_map {{ key: ... value: "{name}" }}'
            hint = f"{hint.replace('use one of', 'it gives')}; {cure}"
        self.report.error("G017", file, path, text + hint)

    def narrowing(self, scope: Scope, step: StepDefinition) -> dict[str, TensorType]:
        """Types of the tensors about which the step's ``when`` proves more."""
        condition = scope.names.conditions.get(f"{step.path}.when")
        if condition is None:
            return {}
        expression, index = condition
        certain: dict[str, TensorType] = {}
        for names in scope.names.steps[:index]:
            if names.definition.name in expression.answered:
                certain |= {name: known for name in names.outputs.values() if (known := scope.answered.get(name))}
        for name in expression.narrowed:
            known = (scope.inputs if scope.names.seen(name, index) is None else scope.produced).get(name)
            if known is not None:
                certain[name] = known.present()
        return certain

    def condition(
        self,
        scope: Scope,
        path: str,
        purpose: Purpose,
        certain: Mapping[str, TensorType] | None = None,
        *,
        outputs: VisibleBindings | None = None,
    ) -> CelCondition | None:
        """Compile a condition of the node.

        Returns:
            None after a reported error, or if there is none at ``path``.
        """
        if path not in scope.names.conditions:
            return None
        expression, index = scope.names.conditions[path]
        named = {ref.name for ref in expression.references if ref.space == "inputs"}
        asked = {ref.name for ref in expression.references if ref.space == "steps"}
        visible = {"inputs": _visible_inputs(scope, index, named, certain or {}, sees_outputs=outputs is not None)}
        if outputs is not None:
            visible["outputs"] = outputs
        is_of_step = any(path.startswith(f"{step.path}.") for step in scope.node.steps[index : index + 1])
        if is_of_step and scope.node.kind is not None and scope.node.kind.sees_answers:
            visible["steps"] = _visible_steps(scope, index, asked)
        for reference in expression.references:
            space, name, at = reference
            known = visible[space].types.get(name) if space in visible else None
            if known is not None and known.is_optional and reference in expression.unproved:
                cure = f"test it first: has({space}.{name}) && ..."
                text = f"'{name}' may be absent; it comes from {known.origin}; {cure}"
                self.report.error("G010", scope.file, path, text, at=at)
        try:
            compiled = compile_condition(
                expression, purpose, visible, node=scope.node.name, seen_by=seen_by(scope.file)
            )
        except ConditionError as error:
            for fault in error.faults:
                self.report.error("G011", scope.file, path, fault.message, at=fault.at)
            return None
        for space, key, at in expression.entries:
            if (space, key) not in self.names.asked(scope.file):
                default = f'get({space}, "{key}", ...)'
                text = f"a request without '{key}' in its {space} fails here; to give a default, write {default}"
                self.report.warning("G010", scope.file, path, text, at=at)
        return compiled

    def bound_inputs(
        self, scope: Scope, names: StepNames, certain: Mapping[str, TensorType]
    ) -> tuple[dict[str, TensorType], tuple[Binding, ...]]:
        """Types and bindings of the inputs that the step passes to its target; reports missing and unfit ones."""
        step = names.definition
        given: dict[str, TensorType] = {}
        bindings: list[Binding] = []
        uses = declared_uses(names, is_batched=scope.is_batched)
        for wire in names.wires:
            source = scope.inputs if wire.producer is None else scope.produced
            value = certain.get(wire.tensor) or source.get(wire.tensor)
            path = wire_path(step, wire)
            if value is None:
                if any(other.is_open for other in scope.names.steps):
                    given[wire.target_input] = TensorType.unknown(f"step '{step.name}'")
                elif wire.is_required and not scope.names.inputs.get(wire.tensor):  # else the node's step was reported
                    self._missing(scope, names, wire, path)
                continue
            if used := uses.get(wire.target_input):
                what = f"input '{wire.target_input}' of {describe(names.target)}"
                tested = "" if step.message.case or step.message.otherwise else wire.tensor
                self.check_use(
                    scope.file,
                    path,
                    value,
                    used,
                    is_required=not used.is_optional,
                    what=what,
                    tensor=tested,
                    declared=value if wire.producer is None else None,
                )
            if wire.producer is not None and not wire.is_mapped:
                self._check_name_alone(scope, names.target, wire, path)
            given[wire.target_input] = value
            if (slot := scope.slot_of(wire.tensor, wire.producer)) >= 0:
                bindings.append(Binding(wire.target_input, slot))
        return given, tuple(bindings)

    def _missing(self, scope: Scope, names: StepNames, wire: Wire, path: str) -> None:
        """Report a required tensor that nothing gives, unless its map was reported."""
        if not wire.tensor:
            return
        tensor, node = wire.tensor, scope.node
        later = [s.name for s, n in zip(node.steps, scope.names.steps, strict=True) if tensor in n.outputs.values()]
        lacking = [
            f"{describe(other.target)} gives it, but not its step {' or '.join(map(repr, nested.lacking[tensor]))}"
            for other in scope.names.steps
            if isinstance(other.target, NodeTarget)
            and tensor in (nested := self.names.of(other.target.file, other.target.node)).lacking
        ]
        if names.definition.name in later:
            hint = "; it gives one itself"
        elif later:
            hint = f"; step '{later[0]}' stands later: move it up, or name the tensor in 'input_map'"
        elif lacking:
            hint = f"; {lacking[0]}"
        elif shadow := self.shadow_of(scope, tensor):
            hint = shadow
        elif tensor in scope.call.visible:
            hint = "; there is one outside: add it to the inputs that the node declares"
        else:
            hint = suggestion(tensor, {**scope.inputs, **scope.produced, **scope.call.visible})
        owner = owner_text(scope.file, node)
        place = self._place_of_need(names.target, wire.target_input)
        where = f", read at {place}," if place else ""
        needs = f"input '{wire.target_input}' of {describe(names.target)}{where} has no source"
        if not wire.is_mapped and not place and hint.startswith("; use"):
            hint = f'; to give it another, write input_map {{ key: "{wire.target_input}" value: ... }}{hint}'
        self.report.error("G006", scope.file, path, f"{needs}: {owner} has no tensor '{tensor}'{hint}")

    def _check_name_alone(self, scope: Scope, target: Target, wire: Wire, path: str) -> None:
        """Warn if a step's output feeds an optional input of a model only because the names are equal."""
        name, giver = wire.target_input, scope.names.steps[wire.producer or 0]
        is_renamed = giver.outputs.get(name) != name  # by 'output_map', which says that the name is meant
        if is_renamed or not (model := self._optional_reader(target, name)):
            return
        text = f"optional input '{name}' of {model} takes '{wire.tensor}' of {describe(giver.target)} by its name alone"
        cure = f'if that is meant, write input_map {{ key: "{name}" value: "{wire.tensor}" }}'
        self.report.warning("G032", scope.file, path, f"{text}; {cure}; if not, rename it with 'output_map'")

    def _optional_reader(self, target: Target, tensor: str) -> str:
        """The model that reads an input of the step's target as optional, by name only; "" if none."""
        if isinstance(target, ModelTarget):
            is_optional = any(spec.name == tensor and spec.is_optional for spec in target.signature.inputs)
            return describe(target) if is_optional else ""
        if not isinstance(target, NodeTarget) or declaring(target.file, target.node).input:
            return ""
        steps = self.names.of(target.file, target.node).steps
        readers = (
            self._optional_reader(step.target, tensor)
            for step in steps
            for wire in step.wires
            if wire.tensor == tensor and wire.producer is None and not wire.is_mapped
        )
        return next(filter(None, readers), "")

    def shadow_of(self, scope: Scope, tensor: str) -> str:
        """Hint at a shadow of a pipeline that would give the tensor if it were a normal step; "" without one."""
        shadows = (one for one in scope.names.steps if one.definition.is_shadow)
        givers = (one.definition for one in shadows if tensor in self.names.of_target(one.target).outputs)
        return next((f"; step '{s.name}' gives it, but it is a shadow, whose answer is dropped" for s in givers), "")

    def _place_of_need(self, target: Target, tensor: str) -> str:
        """Place where a node without declared inputs reads ``tensor``; "" for other targets."""
        if not isinstance(target, NodeTarget) or declaring(target.file, target.node).input:
            return ""
        file, node = target.file, target.node
        names = self.names.of(file, node)
        for own in (one for step in names.every_call() for one in step.chain()):
            for wire in own.wires:
                if wire.producer is None and wire.tensor == tensor:
                    inner = self._place_of_need(own.target, wire.target_input)
                    return inner or file.place(wire_path(own.definition, wire))
        for path, condition in names.conditions.items():
            for space, name, at in condition.expression.references:
                if (space, name) == ("inputs", tensor):
                    return file.place(path, at)
        return ""


def declared_uses(names: StepNames, *, is_batched: bool) -> dict[str, TensorType]:
    """Declared type of each input of the step's target; empty for a node that declares none.

    Args:
        is_batched: Whether the inputs of the step have a batch dimension; those of a graph have it where that says so.
    """
    target = names.target
    if isinstance(target, ModelTarget):
        has_batch, origin = target.signature.max_batch_size > 0, describe(target)
        return {s.name: TensorType.of(s, is_batched=has_batch, origin=origin) for s in target.signature.inputs}
    if isinstance(target, NodeTarget):
        types = declared_types(target.file, target.node, declaring(target.file, target.node).input)
        has_batch = is_batched or (target.is_graph and target.file.is_batched)
        return {name: replace(known, is_batched=has_batch and known.is_known) for name, known in types.items()}
    return {}
