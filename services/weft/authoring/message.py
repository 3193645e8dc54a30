"""Writes a traced graph as ``pb.Graph``, and notes which line of Python each of its fields came from."""

from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from weft.authoring.expressions import Expression, TensorExpression, named
from weft.authoring.faults import Place, fault
from weft.authoring.fields import POLICY_FIELDS, fill, fill_with_policy
from weft.authoring.steps import Draft, Step, Target
from weft.authoring.tensors import TensorType
from weft.authoring.tracing import Answer, Scope, Symbol
from weft.base.signature import TensorSpec
from weft_protos import graph_pb2 as pb

#: Text fields that are conditions, in which a tensor is ``inputs.X`` and not its bare name.
_CONDITIONS = {"Step.when", "Step.accept", "Switch.on", "Splitter.sticky_by", "Loop.while", "Cache.key"}


class GraphWriter:
    """Writes the nodes of a trace into a message.

    Attributes:
        lines: Path of a field, or of a message around it -> the line that wrote it.
    """

    def __init__(self, message: pb.Graph) -> None:
        self.lines: dict[str, Place] = {}
        self._message = message
        self._written: set[Scope] = set()

    def write(self, root: Scope, outputs: Mapping[str, TensorType] | None, fields: Mapping[str, Any]) -> None:
        """Write the graph: its fields and those of its policy, the root and every node that it leads to."""
        message = self._message
        root.assign_names({})
        writer = NodeWriter(root, self.lines, maps_all=fields.get("platform") == "ensemble")
        fill_with_policy(message, fields, "", writer)
        for name, given in root.declared.items():
            self._declare(message.input, "input", name, given, root.place)
        for name, given in (writer.outputs_to_declare() if outputs is None else outputs).items():
            self._declare(message.output, "output", name, given, root.place)
        if message.platform != "ensemble":
            self._node(root)
            return
        path = "ensemble_scheduling"
        self._check_plain(root)
        fill(message.ensemble_scheduling, root.fields, path, writer)
        for i, step in enumerate(root.steps):
            writer.step(message.ensemble_scheduling.step.add(), step, f"{path}.step[{i}]")

    def _declare(self, tensors: Any, path: str, name: str, given: TensorType, place: Place) -> None:
        self.lines[f"{path}[{len(tensors)}]"] = place
        fill(tensors.add(), given.declared(name), path, Draft())

    def _check_plain(self, root: Scope) -> None:
        nested = next((step for step in root.steps if step._target.field == "node"), None)
        if nested is not None or not root.is_sequence:
            place = root.place if nested is None else nested._place
            raise fault("G026", "an ensemble has no nodes; leave out platform='ensemble', and it is a graph", place)

    def _node(self, scope: Scope) -> None:
        if scope in self._written:
            return
        self._written.add(scope)
        path = f"node[{len(self._message.node)}]"
        self.lines[path] = scope.place
        message = self._message.node.add(name=scope.name)
        writer = NodeWriter(scope, self.lines)
        bodies = [step._target.scope for step in scope.every_step() if step._target.scope is not None]
        for body in bodies:
            if body not in self._written:
                body.assign_names(scope.names if body.parent is not None else {})
        if scope.name != (self._message.root or "root"):
            for name, given in scope.declared.items():
                self._declare(message.input, f"{path}.input", name, given, scope.place)
            for name, given in writer.outputs_to_declare().items():
                self._declare(message.output, f"{path}.output", name, given, scope.place)
        fill_with_policy(message, scope.node_fields, path, writer)
        kind = getattr(message, scope.kind)
        kind.SetInParent()
        for i, step in enumerate(scope.steps):
            writer.step(kind.step.add(), step, f"{path}.{scope.kind}.step[{i}]")
        fill(kind, scope.fields, f"{path}.{scope.kind}", writer)
        for body in bodies:
            self._node(body)


class NodeWriter:
    """Writes steps and fields of one node.

    Args:
        maps_all: Every edge is written, also between equal names, as files of ensembles have it.
    """

    def __init__(self, scope: Scope, lines: dict[str, Place], *, maps_all: bool = False) -> None:
        self._scope, self._lines, self._maps_all = scope, lines, maps_all
        self._inputs = {
            name: symbol for symbol, name in scope.names.items() if symbol.scope is not scope or symbol.step is None
        }
        self._index: int | None = None

    def text(self, value: Any, field: FieldDescriptor) -> Any:
        """Value of a text field."""
        if isinstance(value, Step):
            return self._scope.name_of(value)
        if isinstance(value, TensorExpression) and field.full_name.removeprefix("weft.graph.") not in _CONDITIONS:
            return self._name(value)
        if isinstance(value, Expression):
            return value.written(self._in_condition)
        return value

    def step(self, message: pb.Step, value: Any, path: str) -> None:
        """Write a step of the node, or one inside it."""
        if isinstance(value, Target):
            setattr(message, value.field, value.name)
            return
        step, holder = value, self._index
        is_own = step in self._scope.steps
        if is_own:
            self._index = self._scope.steps.index(step)
        self._lines[path] = step._place
        for name, place in step._places.items():
            self._lines[f"{path}.{'policy.' * (name in POLICY_FIELDS)}{name}"] = place
        target = step._target
        setattr(message, target.field, target.name)
        self._write_inputs(message, step, is_custom=not is_own and holder is None)
        for name, given in self._given_names(step).items():
            if given != name or name in step._renamed() or (self._maps_all and self._is_used(step._symbol(name))):
                message.output_map[name] = given
        fields = {name: one for name, one in step._fields.items() if name not in ("outputs", "output_map")}
        fill_with_policy(message, fields, path, self)
        self._index = holder

    def outputs_to_declare(self) -> dict[str, TensorType]:
        """Outputs of a sequence that are not those that the compiler would infer."""
        scope = self._scope
        results = scope.results
        if not scope.is_sequence or "output" in scope.node_fields:
            return {}
        read = {*scope.reads()}
        inferred = {scope.names[symbol] for step in scope.steps for symbol in step._all_symbols() if symbol not in read}
        if inferred == set(results):
            return {}
        untyped = next((name for name, symbol in results.items() if symbol.spec is None), "")
        if untyped:
            cure = f"write -> weft.Outputs({untyped}=Tensor[...])"
            raise fault("G006", f"the type of output '{untyped}' of '{scope.name}' is not known; {cure}", scope.place)
        return {name: _type_of(symbol.spec, symbol) for name, symbol in results.items() if symbol.spec is not None}

    def _is_used(self, symbol: Symbol) -> bool:
        return symbol in {*self._scope.reads(), *self._scope.results.values()}

    def _name(self, tensor: Any) -> str:
        return self._scope.names[tensor.symbol if isinstance(tensor, Answer) else tensor]

    def _in_condition(self, part: Any) -> str:
        if isinstance(part, Step):
            return named("steps", self._scope.name_of(part))
        return named("outputs" if isinstance(part, Answer) else "inputs", self._name(part))

    def _write_inputs(self, message: pb.Step, step: Step, *, is_custom: bool) -> None:
        target, body = step._target, step._target.scope
        read = None if body is None or body.declared else {*body.reads()}
        for name, value in step._inputs.items():
            if not isinstance(value, Symbol):
                message.constant.add(input=name, **value)
            elif read is None or body is None or body.parameters[name] in read:
                spec = target.inputs.get(name) if target.inputs is not None else None
                self._wire(message, step, name, value, spec)
        if body is not None and body.parent is not None:
            for symbol in body.imports():
                self._wire(message, step, body.names[symbol], symbol, None)
        given = {
            *step._inputs,
            *step._fields.get("input_map", ()),
            *(one["input"] for one in _dicts(step._fields.get("constant"))),
        }
        for name, spec in (target.inputs or {}).items() if not is_custom else ():
            is_read = read is None or body is None or body.parameters[name] in read
            if name not in given and is_read and not (spec is not None and spec.is_optional):
                text = f"{target} needs '{name}', and the call does not give it; write {name}=tensor"
                raise fault("G006", text, step._place)
        for name in step._left_out() if not is_custom and not self._maps_all else ():
            if self._seen(name) is not None:
                cure = f"give {name}=, or another name to the tensor: outputs={{'{name}': ...}} where it is made"
                text = f"{target} leaves out '{name}', and would take the tensor of that name; {cure}"
                raise fault("G032", text, step._place)

    def _wire(self, message: pb.Step, step: Step, name: str, symbol: Symbol, spec: TensorSpec | None) -> None:
        given = self._name(symbol)
        seen = self._seen(given)
        if seen is not symbol:
            text = (
                f"{step} would get another tensor of the name '{given}'; rename one of them where it is made: outputs="
            )
            raise fault("G005", text, step._place)
        is_made_here = symbol.step is not None and symbol.scope is self._scope and symbol.output == given
        is_surprising = spec is not None and spec.is_optional and is_made_here
        if name != given or is_surprising or self._maps_all:
            message.input_map[name] = given

    def _seen(self, name: str) -> Symbol | None:
        """The tensor of that name that the step at ``_index`` sees."""
        before = self._scope.steps[: self._index] if self._scope.is_sequence and self._index is not None else []
        made = [symbol for step in reversed(before) for symbol in step._all_symbols() if self._name(symbol) == name]
        return made[0] if made else self._inputs.get(name)

    def _given_names(self, step: Step) -> dict[str, str]:
        """Output of a step's target -> its name in the node; a fallback's are those of the step that it stands for."""
        if step._is_shadow():
            return step._renamed()
        if step in self._scope.steps:
            names = {symbol.output: self._name(symbol) for symbol in step._all_symbols()}
            return names
        holder = self._scope.steps[self._index] if self._index is not None else None
        outputs = step._target.outputs
        of_holder = self._given_names(holder) if holder is not None else {}
        common = {name: given for name, given in of_holder.items() if outputs is None or name in outputs}
        return {**common, **step._renamed()}


def _type_of(spec: TensorSpec, symbol: Symbol) -> TensorType:
    fields = symbol.step._fields if symbol.step is not None else {}
    defaults = {one["output"].symbol for one in _dicts(fields.get("default")) if isinstance(one["output"], Answer)}
    may_fail = (fields.get("dependency") == "SOFT" or "when" in fields) and symbol not in defaults
    return TensorType(spec.datatype, spec.dims, {"optional": True} if spec.is_optional or may_fail else {})


def _dicts(value: Any) -> list[Any]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
