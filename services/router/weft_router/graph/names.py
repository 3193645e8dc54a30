"""Which tensor goes where, by name: what each node takes and gives, before any type is known.

The rule of a graph: input X of a target is ``input_map[X]``; else the nearest earlier output named X; else the node's
input X. The rule of an ensemble of Triton Inference Server: ``input_map[X]`` and nothing else.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from weft_common.pbtxt import suggestion
from weft_protos import graph_pb2 as pb
from weft_router.graph.expression import Expression, read_expression
from weft_router.graph.parse import GraphFile, NodeDefinition, StepDefinition
from weft_router.graph.plan import NodeKind
from weft_router.graph.report import Report
from weft_router.graph.resolve import ModelTarget, NodeTarget, Resolver, Target

#: Nodes inside one another; what is deeper counts as unknown here, and is refused when it is compiled.
MAX_DEPTH = 32
#: Outputs of one node; a KEYED ensemble of ensembles multiplies them.
MAX_OUTPUTS = 1000


class Wire(NamedTuple):
    """One input of a step's target.

    Attributes:
        target_input: Name that the target uses.
        tensor: Name in the node.
        is_required: Whether the tensor must exist.
        is_mapped: Whether ``input_map`` says so.
        producer: Index of the step that gives the tensor; None for an input of the node.
    """

    target_input: str
    tensor: str
    is_required: bool
    is_mapped: bool
    producer: int | None


@dataclass(slots=True)
class TargetNames:
    """Inputs (name -> must be wired) and outputs of a target; ``is_open``: it may have more that nobody knows of."""

    inputs: dict[str, bool] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    is_open: bool = False


@dataclass(slots=True)
class StepNames:
    """One step: its target, where its inputs come from, target output -> tensor of the node."""

    target: Target
    wires: list[Wire]
    outputs: dict[str, str]
    is_open: bool


@dataclass(slots=True)
class NodeNames(TargetNames):
    """One node.

    Attributes:
        steps: In declared order.
        conditions: Path -> expression, for every condition of the node.
        lacking: Of alternatives: tensor that some offer -> names of the steps that do not.
    """

    steps: list[StepNames] = field(default_factory=list)
    conditions: dict[str, Expression] = field(default_factory=dict)
    lacking: dict[str, list[str]] = field(default_factory=dict)


class NameTable:
    """Names of every node, each worked out once.

    Args:
        resolver: Finds targets.
        report: Receives unknown names in maps (G006) and tensors with two producers (G005).
    """

    def __init__(self, resolver: Resolver, report: Report) -> None:
        self._resolver = resolver
        self._report = report
        self._known: dict[tuple[str, str], NodeNames] = {}
        self._depth = 0

    def of(self, file: GraphFile, node: NodeDefinition) -> NodeNames:
        """Names of a node; open while they are being worked out, which happens in cycles only."""
        key = (file.label, node.name)
        if key not in self._known:
            self._known[key] = NodeNames(is_open=True)
            if self._depth < MAX_DEPTH:
                self._depth += 1
                self._known[key] = self._node(file, node)
                self._depth -= 1
        return self._known[key]

    def of_target(self, target: Target) -> TargetNames:
        """Names of what a step calls."""
        if isinstance(target, ModelTarget):
            signature = target.signature
            inputs = {spec.name: not spec.is_optional for spec in signature.inputs}
            return TargetNames(inputs, tuple(spec.name for spec in signature.outputs))
        if isinstance(target, NodeTarget):
            return self.of(target.file, target.node)
        return TargetNames(is_open=True)

    def _node(self, file: GraphFile, node: NodeDefinition) -> NodeNames:
        is_root = node.name == file.root
        owner: pb.Graph | pb.Node = file.message if is_root else node.message
        names = NodeNames(steps=[self._outputs(file, step) for step in node.steps], is_open=node.kind is None)
        is_pipeline = node.kind is NodeKind.SEQUENCE
        producers = self._producers(file, node, names.steps) if is_pipeline else {}
        names.conditions = {path: read_expression(text) for path, text in _conditions(node)}
        for i, step in enumerate(node.steps):
            names.steps[i].wires = list(self._wires(file, step, names.steps[i], producers, i))
        if is_root or owner.input:
            names.inputs = {spec.name: not spec.optional for spec in owner.input}
        else:
            names.inputs = _needs(node, names)
        for tensor, index in producers.items():
            if tensor in names.inputs:
                step = node.steps[index]
                text = f"tensor '{tensor}' is an input of the node and an output of step '{step.name}'; {_RENAME}"
                self._report.error("G005", file, _output_path(file, step, tensor), text)
        if any(step.is_open for step in names.steps) and not owner.output:
            names.is_open = True
        names.outputs = tuple(spec.name for spec in owner.output) or tuple(
            islice(_offers(node, names), MAX_OUTPUTS + 1)
        )
        if len(names.outputs) > MAX_OUTPUTS:
            names.outputs = names.outputs[:MAX_OUTPUTS]
            text = f"node '{node.name}' has more than {MAX_OUTPUTS} outputs; declare those that are read with 'output'"
            self._report.error("G024", file, node.kind_path, text)
        return names

    def _outputs(self, file: GraphFile, step: StepDefinition) -> StepNames:
        target = self._resolver.resolve(file, step)
        given, mapped = self.of_target(target), step.message.output_map
        outputs = {name: mapped.get(name, name) for name in given.outputs if name in mapped or not file.is_ensemble}
        for name in sorted(mapped):
            if name not in given.outputs:
                outputs[name] = mapped[name]
                if not given.is_open:
                    text = f"{describe(target)} has no output '{name}'{suggestion(name, given.outputs)}"
                    self._report.error("G006", file, f"{step.path}.output_map[{name}].key", text)
        for tensor, count in Counter(outputs.values()).items():
            if count > 1:
                text = f"two outputs of step '{step.name}' are named '{tensor}'; {_RENAME}"
                self._report.error("G005", file, _output_path(file, step, tensor), text)
        return StepNames(target, [], outputs, given.is_open and not file.is_ensemble)

    def _producers(self, file: GraphFile, node: NodeDefinition, steps: list[StepNames]) -> dict[str, int]:
        """Index of the step that gives each tensor; a second one is reported."""
        producers: dict[str, int] = {}
        for i, names in enumerate(steps):
            for tensor in names.outputs.values():
                if producers.get(tensor, i) != i:
                    first, second = node.steps[producers[tensor]], node.steps[i]
                    if file.is_ensemble:
                        text = f"ensemble tensor '{tensor}' can appear in an output map only once"
                    else:
                        text = (
                            f"tensor '{tensor}' is an output of step '{first.name}' and of '{second.name}'; {_RENAME}"
                        )
                    self._report.error("G005", file, _output_path(file, second, tensor), text)
                producers.setdefault(tensor, i)
        return producers

    def _wires(
        self, file: GraphFile, step: StepDefinition, names: StepNames, producers: dict[str, int], index: int
    ) -> Iterator[Wire]:
        target, mapped = self.of_target(names.target), step.message.input_map
        for name, is_required in target.inputs.items():
            if name in mapped:
                tensor = mapped[name]
                yield Wire(name, tensor, is_required=True, is_mapped=True, producer=producers.get(tensor))
            elif not file.is_ensemble:
                earlier = producers.get(name, index)
                yield Wire(name, name, is_required, is_mapped=False, producer=earlier if earlier < index else None)
            elif is_required:
                text = (
                    f"in ensemble {file.name}, input {name} in model {step.message.model_name} is not mapped to any "
                    "ensemble tensors"
                )
                self._report.error("G006", file, f"{step.path}.input_map", text)
        for name in sorted(mapped):
            if name not in target.inputs:
                if target.is_open:
                    tensor = mapped[name]
                    yield Wire(name, tensor, is_required=True, is_mapped=True, producer=producers.get(tensor))
                else:
                    text = f"{describe(names.target)} has no input '{name}'{suggestion(name, target.inputs)}"
                    self._report.error("G006", file, f"{step.path}.input_map[{name}].key", text)


_RENAME = "rename one with 'output_map'"


def describe(target: Target) -> str:
    """The target in messages: ``model 'x'``, ``node 'x'``, ``graph 'x/1'``."""
    if isinstance(target, ModelTarget):
        return f"model '{target.signature.name}'"
    if isinstance(target, NodeTarget):
        return f"graph '{target.file.label}'" if target.is_graph else f"node '{target.node.name}'"
    return "the target"


def keyed_outputs(node: NodeDefinition, names: NodeNames, only: str) -> Iterator[tuple[str, int, str]]:
    """(output name, index of the step, its tensor) of a KEYED combine; ``only`` one tensor, or "" for all."""
    for i, step in enumerate(names.steps):
        for tensor in step.outputs.values():
            if only in ("", tensor):
                yield f"{node.steps[i].name}.{tensor}", i, tensor


def combines_of(node: NodeDefinition) -> Iterable[pb.Combine]:
    """Combines of an ensemble, KEYED where there is none; what lacks its 'output' is left out."""
    given = node.message.ensemble.combine
    if not given:
        return [pb.Combine(method=pb.Combine.KEYED)]
    return [combine for combine in given if combine.output or combine.method == pb.Combine.KEYED]


def _conditions(node: NodeDefinition) -> Iterator[tuple[str, str]]:
    if node.message.switch.on:
        yield f"{node.kind_path}.on", node.message.switch.on
    if node.message.splitter.sticky_by:
        yield f"{node.kind_path}.sticky_by", node.message.splitter.sticky_by
    if node.kind is NodeKind.SWITCH:
        yield from ((f"{step.path}.when", step.message.when) for step in node.steps if step.message.when)


def narrowed(step: StepDefinition) -> set[str]:
    """Inputs of the node that are there whenever the step runs."""
    return read_expression(step.message.when).narrowed if step.message.when else set()


def _needs(node: NodeDefinition, names: NodeNames) -> dict[str, bool]:
    """Inputs of a node that declares none: what its conditions name, and what its steps take from outside."""
    needs: dict[str, bool] = {}
    for expression in names.conditions.values():
        for reference in expression.references:
            needs[reference.name] = needs.get(reference.name, False) or reference.name not in expression.tested
    for definition, step in zip(node.steps, names.steps, strict=True):
        sure = narrowed(definition)
        for wire in step.wires:
            if wire.producer is None:
                is_required = wire.is_required and wire.tensor not in sure
                needs[wire.tensor] = needs.get(wire.tensor, False) or is_required
    return needs


def _offers(node: NodeDefinition, names: NodeNames) -> Iterator[str]:
    """Outputs of a node that declares none."""
    if node.kind is NodeKind.SEQUENCE:
        read = {wire.tensor for step in names.steps for wire in step.wires if wire.producer is not None}
        yield from (tensor for step in names.steps for tensor in step.outputs.values() if tensor not in read)
    elif node.kind is NodeKind.ENSEMBLE:
        for combine in combines_of(node):
            if combine.method == pb.Combine.KEYED:
                yield from (name for name, _, _ in keyed_outputs(node, names, getattr(combine, "from")))
            else:
                yield combine.output
    elif node.kind is not None:
        closed = [
            (d.name, set(s.outputs.values())) for d, s in zip(node.steps, names.steps, strict=True) if not s.is_open
        ]
        for tensor in dict.fromkeys(tensor for step in names.steps for tensor in step.outputs.values()):
            lacking = [name for name, tensors in closed if tensor not in tensors]
            if lacking:
                names.lacking[tensor] = lacking
            else:
                yield tensor


def _output_path(file: GraphFile, step: StepDefinition, tensor: str) -> str:
    """Where a step says that it gives ``tensor``."""
    for name, mapped in sorted(step.message.output_map.items()):
        if mapped == tensor:
            return f"{step.path}.output_map[{name}]"
    return target_path(step)


def target_path(step: StepDefinition) -> str:
    """Where a step names its target."""
    field = next((name for name in ("model_name", "node", "graph") if getattr(step.message, name)), "model_name")
    return f"{step.path}.{field}"
