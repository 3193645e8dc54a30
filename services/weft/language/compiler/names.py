"""Names of a node: which tensors it, its steps and its conditions read and give, before types are known."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from weft.language.compiler.resolve import ModelTarget, NodeTarget, Target
from weft.language.pruning import reached
from weft.language.syntax.file import GraphFile, KindSyntax, NodeDefinition, StepDefinition
from weft.language.types.expression import Expression, read_expression
from weft_protos import graph_pb2 as pb

#: Nodes inside one another; what is deeper counts as unknown here, and is refused when it is compiled.
MAX_DEPTH = 32


class Wire(NamedTuple):
    """One input of a step's target.

    Attributes:
        producer: Index of the step that gives the tensor; None for an input of the node.
        is_needed: Whether the target requires it.
    """

    target_input: str
    tensor: str
    is_required: bool
    is_mapped: bool
    producer: int | None
    is_needed: bool = False


@dataclass(slots=True)
class TargetNames:
    """Inputs (name -> must be wired) and outputs of a target; ``is_open``: it may have unknown others.

    ``needed`` has the inputs that it requires; for a node, every tensor that something in it requires.
    """

    inputs: dict[str, bool] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    is_open: bool = False
    needed: set[str] = field(default_factory=set)


@dataclass(slots=True)
class StepNames:
    """Names of one step.

    Attributes:
        outputs: Target output -> tensor of the node; empty for a shadow.
        wires: Sources of the target's inputs.
        reads: Tensors of the node that the step, its conditions and its fallback read -> the step that gives each; None
            for an input of the node.
    """

    definition: StepDefinition
    target: Target
    outputs: dict[str, str]
    is_open: bool
    wires: list[Wire] = field(default_factory=list)
    reads: dict[str, int | None] = field(default_factory=dict)
    asks: set[int] = field(default_factory=set)
    follows: set[int] = field(default_factory=set)
    fallback: "StepNames | None" = None

    def chain(self) -> Iterator["StepNames"]:
        """The step and its fallbacks, like ``StepDefinition.chain``."""
        yield self
        if self.fallback is not None:
            yield from self.fallback.chain()

    @property
    def waits_for(self) -> set[int]:
        """Steps that must end before this one starts."""
        return self.asks.union(self.follows, (producer for producer in self.reads.values() if producer is not None))


class NodeCondition(NamedTuple):
    """A condition of a node; it sees the outputs of the first ``num_seen`` steps, and the node's inputs."""

    expression: Expression
    num_seen: int


@dataclass(slots=True)
class NodeNames(TargetNames):
    """Names of one node.

    Attributes:
        customs: Like ``NodeDefinition.customs``; only wires from the node's inputs.
        producers: In a pipeline: tensor -> the steps that give it, ascending; several only in an ordered sequence.
        overwritten: In a pipeline: tensors that are both inputs of the node and outputs of a step. Steps declared
            behind that one see its output; the others, itself included, see the input.
        lacking: Of alternatives: tensor that some give -> names of the steps that do not.
    """

    steps: list[StepNames] = field(default_factory=list)
    shadows: list[StepNames] = field(default_factory=list)
    customs: dict[int, StepNames] = field(default_factory=dict)
    indexes: dict[str, int] = field(default_factory=dict)
    producers: dict[str, list[int]] = field(default_factory=dict)
    overwritten: set[str] = field(default_factory=set)
    conditions: dict[str, NodeCondition] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    lacking: dict[str, list[str]] = field(default_factory=dict)

    def every_call(self) -> list[StepNames]:
        """Steps, shadows and custom steps."""
        return [*self.steps, *self.shadows, *self.customs.values()]

    def is_used(self, tensor: str) -> bool:
        """Whether something in the node reads the tensor, or it is an output of the node."""
        return tensor in self.read or tensor in self.outputs

    def indexes_of(self, node: NodeDefinition, steps: Iterable[str]) -> set[int]:
        """Indexes of the named steps, without shadows, which nothing waits for."""
        known = (self.indexes[name] for name in steps if name in self.indexes)
        return {index for index in known if not node.steps[index].is_shadow}

    def seen(self, tensor: str, index: int) -> int | None:
        """The step that gives ``tensor`` to a reader that sees the outputs of the steps before ``index``."""
        return max((producer for producer in self.producers.get(tensor, ()) if producer < index), default=None)

    def mapped(self, tensor: str, index: int) -> int | None:
        """The step that gives the ``tensor`` named in an ``input_map`` of step ``index``, wherever it stands."""
        producer = self.seen(tensor, index)
        return self.last(tensor) if producer is None and tensor not in self.overwritten else producer

    def last(self, tensor: str) -> int | None:
        """The step whose ``tensor`` a loop and the node's callers see; None: an input, or nothing."""
        return self.producers[tensor][-1] if tensor in self.producers else None

    def read_in_rings(self, node: NodeDefinition) -> set[str]:
        """Tensors that a step reads from one that waits for it: if the node infers its inputs, these are inputs."""
        is_ordered = node.message.sequence.ordered
        before = [step.waits_for.union([i - 1] if i and is_ordered else ()) for i, step in enumerate(self.steps)]
        found: set[str] = set()
        for i, step in enumerate(self.steps):
            for tensor, producer in step.reads.items():
                if producer is not None and producer >= i and i in reached([producer], before.__getitem__):
                    found.add(tensor)
        return found

    def reads_input(self, tensor: str) -> bool:
        """Whether something in the node reads the node's input of that name."""
        if tensor not in self.overwritten:
            return tensor in self.read
        seen = {number for expression, number in self.conditions.values() if tensor in expression.inputs}
        readers = (step.reads.get(tensor, 0) for step in self.steps)
        return None in readers or any(self.seen(tensor, number) is None for number in seen)


class KindNames(KindSyntax):
    """A node kind's view of tensor names: which ones the node itself reads and gives."""

    def tensors_read(self, node: NodeDefinition, names: NodeNames) -> set[str]:
        """Tensors that the node itself reads, besides its steps and conditions; by default none."""
        return set()

    def inputs_read(self, node: NodeDefinition) -> set[str]:
        """Inputs that the node itself reads; by default none."""
        return set()

    def tensors_needed(self, node: NodeDefinition, needed: set[str]) -> set[str]:
        """Tensors that the node itself requires, besides those ``needed`` by its steps; by default none."""
        return set()

    def custom_wires(self, node: NodeDefinition, key: int, wires: Sequence[Wire]) -> list[Wire]:
        """The wires of a custom step that start at inputs of the node; by default all."""
        return list(wires)

    @abstractmethod
    def outputs(self, node: NodeDefinition, names: NodeNames) -> Iterator[str]:
        """Outputs of a node that declares none."""


def describe(target: Target) -> str:
    """The target in messages: ``model 'x'``, ``node 'x'``, ``graph 'x/1'``."""
    if isinstance(target, ModelTarget):
        return f"model '{target.signature.name}'"
    if isinstance(target, NodeTarget):
        return f"graph '{target.file.label}'" if target.is_graph else f"node '{target.node.name}'"
    return "the target"


def conditions_of(file: GraphFile, node: NodeDefinition) -> Iterator[tuple[str, str, int]]:
    """(path, text, index of the step whose tensors it sees) of every condition."""
    own = node.kind.conditions(node.message) if node.kind is not None else ()
    of_node = [(f"{node.kind_path}.{field}", text) for field, text in own]
    if node.name == file.root:
        of_node += _policy_conditions(file, file.message.policy, "policy")
    yield from ((where, text, 0) for where, text in of_node if text)
    for i, step in [*enumerate(node.steps), *((0, shadow) for shadow in node.shadows)]:
        for one in step.chain():
            yield from ((where, text, i) for where, text in step_conditions(file, one) if text)


def step_conditions(file: GraphFile, step: StepDefinition) -> list[tuple[str, str]]:
    """(path, text or "") of the possible conditions of a step or fallback."""
    own = [(f"{step.path}.when", step.message.when), (f"{step.path}.accept", step.message.accept)]
    return own + _policy_conditions(file, step.message.policy, f"{step.path}.policy")


def _policy_conditions(file: GraphFile, policy: pb.Policy, path: str) -> list[tuple[str, str]]:
    return [
        (kind.condition_path(path), getattr(getattr(policy, kind.field), kind.condition_field))
        for kind in file.policies.values()
        if kind.condition_field
    ]


def narrowed(step: StepDefinition) -> set[str]:
    """Inputs of the node that are present whenever the step runs."""
    return read_expression(step.message.when).narrowed if step.message.when else set()


def tensors_read(node: NodeDefinition, kind: KindNames | None, names: NodeNames) -> set[str]:
    """Tensors that steps, conditions or the node itself read."""
    read = {tensor for step in names.every_call() for tensor in step.reads}
    if kind is None:
        return read
    spaces = ("inputs", "outputs") if kind.plan.is_pipeline else ("inputs",)
    for expression, _ in names.conditions.values():
        read.update(ref.name for ref in expression.references if ref.space in spaces)
    return read | kind.tensors_read(node, names) | kind.inputs_read(node)


def tensors_needed(file: GraphFile, node: NodeDefinition, kind: KindNames | None, names: NodeNames) -> set[str]:
    """Tensors that a step, a condition or the node itself reads without testing that they are present."""
    needed: set[str] = set()
    tested: dict[str, set[str]] = {}
    for step in names.every_call():
        if step.definition.is_shadow:
            continue
        sure = narrowed(step.definition)
        for one in step.chain():
            needed |= {wire.tensor for wire in one.wires if wire.is_needed and wire.tensor not in sure}
            tested.update((path, sure) for path, _ in step_conditions(file, one.definition))
    is_pipeline = kind is not None and kind.plan.is_pipeline
    for path, condition in names.conditions.items():
        for space, name, _ in condition.expression.unproved:
            if (space == "inputs" and name not in tested.get(path, ())) or (space == "outputs" and is_pipeline):
                needed.add(name)
    return needed if kind is None else needed | kind.tensors_needed(node, needed)


def inputs_needed(node: NodeDefinition, kind: KindNames | None, names: NodeNames) -> dict[str, bool]:
    """Infer the inputs of a node that declares none: names in its conditions, and inputs of steps from outside."""
    needs: dict[str, bool] = {}

    def need(tensor: str, *, is_required: bool) -> None:
        needs[tensor] = needs.get(tensor, False) or is_required

    for expression, _ in names.conditions.values():
        for reference in expression.references:
            if reference.space == "inputs" and reference.name not in names.producers:
                need(reference.name, is_required=reference in expression.unproved)
    for tensor in sorted(kind.inputs_read(node)) if kind is not None else ():
        need(tensor, is_required=True)
    for step in names.every_call():
        sure = narrowed(step.definition)
        for wire in (wire for one in step.chain() for wire in one.wires if wire.producer is None):
            need(wire.tensor, is_required=wire.is_required and wire.tensor not in sure)
    return needs


def output_path(file: GraphFile, step: StepDefinition, tensor: str) -> str:
    """Path of the field by which a step gives ``tensor``."""
    for name, mapped in sorted(step.message.output_map.items()):
        if mapped == tensor:
            return f"{step.path}.output_map[{name}]"
    return target_path(step)


def target_path(step: StepDefinition) -> str:
    """Path of the field that names a step's target."""
    field = next((name for name in ("model_name", "node", "graph") if getattr(step.message, name)), "model_name")
    return f"{step.path}.{field}"


def wire_path(step: StepDefinition, wire: Wire) -> str:
    """Path of the field that wires an input of a step's target."""
    return f"{step.path}.input_map[{wire.target_input}]" if wire.is_mapped else target_path(step)
