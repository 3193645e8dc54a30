"""Wires tensors by name.

In a graph, input X of a target is ``input_map[X]``; else the nearest earlier output named X; else the node's input X.
In an ensemble of Triton Inference Server, it is ``input_map[X]`` and nothing else.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

from weft.base.text.pbtxt import suggestion
from weft.language.compiler.names import (
    MAX_DEPTH,
    KindNames,
    NodeCondition,
    NodeNames,
    StepNames,
    TargetNames,
    Wire,
    conditions_of,
    describe,
    inputs_needed,
    output_path,
    step_conditions,
    tensors_needed,
    tensors_read,
)
from weft.language.compiler.resolve import ModelTarget, NodeTarget, Resolver, Target
from weft.language.syntax.file import GraphFile, GraphReport, NodeDefinition, StepDefinition
from weft.language.types.expression import read_expression
from weft_protos import graph_pb2 as pb
from weft_protos.model_config_pb2 import ModelInput

#: Outputs of one node; a KEYED ensemble of ensembles multiplies them.
MAX_OUTPUTS = 1000
_RENAME = "rename one with 'output_map'"


class NameTable:
    """Names of every node, each computed once.

    Args:
        report: Receives unknown names in maps (G006) and tensors with two producers (G005).
    """

    def __init__(self, resolver: Resolver, kinds: Mapping[str, KindNames], report: GraphReport) -> None:
        self._resolver = resolver
        self._kinds = kinds
        self._report = report
        self._known: dict[tuple[str, str], NodeNames] = {}
        self._asked: dict[str, set[tuple[str, str]]] = {}
        self._depth = 0

    def of(self, file: GraphFile, node: NodeDefinition) -> NodeNames:
        """Names of a node; incomplete (``is_open``) while they are computed, which is visible only in cycles."""
        key = (file.label, node.name)
        if key not in self._known:
            self._known[key] = NodeNames(is_open=True)
            if self._depth < MAX_DEPTH:
                self._depth += 1
                self._known[key] = self._node(file, node)
                self._depth -= 1
        return self._known[key]

    def asked(self, file: GraphFile) -> set[tuple[str, str]]:
        """(map, key) of every parameter and header whose presence a condition of the file tests."""
        if file.label not in self._asked:
            texts = [text for node in file.all_nodes for _, text, _ in conditions_of(file, node)]
            self._asked[file.label] = set[tuple[str, str]]().union(*(read_expression(text).asked for text in texts))
        return self._asked[file.label]

    def of_target(self, target: Target) -> TargetNames:
        """Inputs and outputs of a step's target."""
        if isinstance(target, ModelTarget):
            signature = target.signature
            inputs = {spec.name: not spec.is_optional for spec in signature.inputs}
            needed = {name for name, is_needed in inputs.items() if is_needed}
            return TargetNames(inputs, tuple(spec.name for spec in signature.outputs), needed=needed)
        if isinstance(target, NodeTarget):
            return self.of(target.file, target.node)
        return TargetNames(is_open=True)

    def _node(self, file: GraphFile, node: NodeDefinition) -> NodeNames:
        is_root = node.name == file.root
        owner: pb.Graph | pb.Node = file.message if is_root else node.message
        kind = self._kinds[node.kind.name] if node.kind is not None else None
        names = NodeNames(
            steps=[self._outputs(file, step) for step in node.steps],
            shadows=[self._outputs(file, step) for step in node.shadows],
            is_open=kind is None,
            indexes={step.name: i for i, step in reversed([*enumerate(node.steps)])},
        )
        if kind is not None and kind.plan.is_pipeline:
            names.producers = self._producers(file, names.steps, is_ordered=node.message.sequence.ordered)
        names.conditions = {
            path: NodeCondition(read_expression(text), i) for path, text, i in conditions_of(file, node)
        }
        declares = is_root or bool(owner.input)
        names.overwritten = self._overwritten(file, names, owner.input if declares else None)
        while True:
            for i, own in enumerate(names.steps):
                self._note_reads(file, node, names, own, i)
            found = set() if declares else names.read_in_rings(node) - names.overwritten
            if not found:
                break
            names.overwritten |= found
        for own in names.shadows:
            self._note_reads(file, node, names, own, 0)
        if kind is not None:
            names.customs = {key: self._custom(file, kind, node, key) for key in node.customs}
        names.read = tensors_read(node, kind, names)
        names.needed = tensors_needed(file, node, kind, names)
        if declares:
            names.inputs = {spec.name: not spec.optional for spec in owner.input}
            names.needed.update(spec.name for spec in owner.input if not spec.optional)
        else:
            names.inputs = inputs_needed(node, kind, names)
        for tensor, (index, *_) in names.producers.items():
            if tensor in names.inputs and tensor not in names.overwritten:
                step = node.steps[index]
                text = f"tensor '{tensor}' is an input of the node and an output of step '{step.name}'; {_RENAME}"
                self._report.error("G005", file, output_path(file, step, tensor), text)
        if any(own.is_open for own in names.steps) and not owner.output:
            names.is_open = True
        names.outputs = tuple(spec.name for spec in owner.output)
        if not names.outputs and kind is not None:
            names.outputs = tuple(islice(kind.outputs(node, names), MAX_OUTPUTS + 1))
        if len(names.outputs) > MAX_OUTPUTS:
            names.outputs = names.outputs[:MAX_OUTPUTS]
            text = f"node '{node.name}' has more than {MAX_OUTPUTS} outputs; declare those that are read with 'output'"
            self._report.error("G024", file, node.kind_path, text)
        return names

    def _outputs(self, file: GraphFile, step: StepDefinition) -> StepNames:
        target, dialect = self._resolver.resolve(file, step), file.dialect
        given, mapped = self.of_target(target), step.message.output_map
        outputs = {n: mapped.get(n) or n for n in given.outputs if n in mapped or dialect.wires_by_name}
        for name in sorted(mapped):
            if name not in given.outputs:
                outputs[name] = mapped[name]
                if name and not given.is_open:
                    text = dialect.unknown_output(file.name, step.message, describe(target), name)
                    path = f"{step.path}.output_map[{name}].key"
                    self._report.error("G006", file, path, text + suggestion(name, given.outputs))
        known = [tensor for name, tensor in outputs.items() if given.is_open or name in given.outputs]
        for tensor, count in Counter(known).items():
            if count > 1:
                text = f"two outputs of step '{step.name}' are named '{tensor}'; {_RENAME}"
                self._report.error("G005", file, output_path(file, step, tensor), text)
        if step.is_shadow:
            return StepNames(step, target, {}, is_open=False)
        names = StepNames(step, target, outputs, given.is_open and dialect.wires_by_name)
        if step.fallback is not None:
            names.fallback = self._outputs(file, step.fallback)
        return names

    def _note_reads(self, file: GraphFile, node: NodeDefinition, names: NodeNames, own: StepNames, index: int) -> None:
        own.wires = list(self._wires(file, own, names, index))
        own.reads = {wire.tensor: wire.producer for wire in own.wires}
        own.follows = names.indexes_of(node, own.definition.message.after)
        for path, _ in step_conditions(file, own.definition):
            for space, name, _ in names.conditions[path].expression.references if path in names.conditions else ():
                if space == "inputs":
                    own.reads.setdefault(name, names.seen(name, index))
                elif space == "steps" and (asked := names.indexes.get(name, index)) < index:
                    own.asks.add(asked)
        if own.fallback is not None:
            self._note_reads(file, node, names, own.fallback, index)
            own.reads |= own.fallback.reads
            own.asks |= own.fallback.asks

    def _custom(self, file: GraphFile, kind: KindNames, node: NodeDefinition, key: int) -> StepNames:
        """Names of a custom step; it may read what its kind defines besides the node's inputs."""
        names = self._outputs(file, node.customs[key])
        names.wires = kind.custom_wires(node, key, list(self._wires(file, names, NodeNames(), 0)))
        names.reads = dict.fromkeys(wire.tensor for wire in names.wires)
        return names

    def _producers(self, file: GraphFile, steps: list[StepNames], *, is_ordered: bool) -> dict[str, list[int]]:
        """Indexes of the steps that give each tensor; reports duplicates, except in an ordered sequence."""
        producers: dict[str, list[int]] = {}
        for i, names in enumerate(steps):
            for tensor in dict.fromkeys(names.outputs.values()):
                if tensor in producers and not is_ordered:
                    first, second = steps[producers[tensor][0]].definition, names.definition
                    text = file.dialect.second_producer(file.name, tensor, first.name, second.name, i)
                    self._report.error("G005", file, output_path(file, second, tensor), text)
                producers.setdefault(tensor, []).append(i)
        return producers

    def _overwritten(self, file: GraphFile, names: NodeNames, declared: Iterable[ModelInput] | None) -> set[str]:
        """As ``NodeNames.overwritten``; of a node without declared inputs, what its steps read before it is given."""
        if not file.dialect.wires_by_name:
            return set()
        if declared is not None:
            return {spec.name for spec in declared if spec.name in names.producers}
        found: set[str] = set()
        for i, step in enumerate(names.steps):
            for one in step.chain():
                mapped = one.definition.message.input_map
                unmapped = [name for name in self.of_target(one.target).inputs if name not in mapped]
                found.update(name for name in unmapped if name in names.producers and names.seen(name, i) is None)
        return found

    def _wires(self, file: GraphFile, names: StepNames, within: NodeNames, index: int) -> Iterator[Wire]:
        step, target = names.definition, self.of_target(names.target)
        mapped = step.message.input_map
        constant = {one.input for one in step.message.constant if one.input not in mapped}
        for name, is_required in target.inputs.items():
            if name in constant:
                continue
            if name in mapped:
                tensor = mapped[name]
                producer, is_needed = within.mapped(tensor, index), name in target.needed
                yield Wire(name, tensor, is_required=True, is_mapped=True, producer=producer, is_needed=is_needed)
            elif file.dialect.wires_by_name:
                producer, is_needed = within.seen(name, index), name in target.needed
                yield Wire(name, name, is_required, is_mapped=False, producer=producer, is_needed=is_needed)
            elif is_required and mapped:  # a step without a map was reported
                text = (
                    f"in ensemble {file.name}, input {name} in model {step.message.model_name} is not mapped to any "
                    "ensemble tensors"
                )
                self._report.error("G006", file, f"{step.path}.input_map", text)
        for name in sorted(mapped):
            if name not in target.inputs:
                if target.is_open:
                    tensor = mapped[name]
                    yield Wire(name, tensor, is_required=True, is_mapped=True, producer=within.mapped(tensor, index))
                elif name:
                    text = file.dialect.unknown_input(file.name, step.message, describe(names.target), name)
                    path = f"{step.path}.input_map[{name}].key"
                    self._report.error("G006", file, path, text + suggestion(name, target.inputs))
