"""``Scope``: the state of one node during compilation: inputs, outputs of its steps, slots."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TypeVar

from weft.base.signature import TensorSpec, datatype_name
from weft.base.tensors import reshape_fault
from weft.language.compiler.names import NodeNames
from weft.language.plan import Binding, NodePlan, StepPlan
from weft.language.syntax.file import GraphFile, NodeDefinition, StepDefinition
from weft.language.types.signatures import TensorType
from weft_protos import graph_pb2 as pb
from weft_protos.model_config_pb2 import ModelInput

AnyPlan = TypeVar("AnyPlan", bound=NodePlan)


class ResponseCount(IntEnum):
    """Number of responses to one request; of several parts the greatest counts."""

    ONE = 0
    #: Any number; each decoupled model in it answers a unary call with everything at once.
    COLLECTABLE = 1
    #: Any number.
    MANY = 2


@dataclass(slots=True)
class NodeUse:
    """One step's use of a node.

    Attributes:
        visible: Type of every tensor that the step could have wired, to suggest names.
        required: Inputs that must be present, because something requires them.
        path: Of the node, for errors and spans.
        trail: Nodes around this one, outermost first: (graph label, node name).
    """

    given: Mapping[str, TensorType]
    visible: Mapping[str, TensorType]
    wanted: frozenset[str]
    path: str
    trail: tuple[tuple[str, str], ...] = ()
    required: frozenset[str] = frozenset()


@dataclass(slots=True)
class Scope:
    """One node during compilation.

    Attributes:
        produced: Type of each output of a step of a pipeline, once the step is compiled.
        answered: The same, given that the step has answered.
        streaming: Indexes of the steps that may give several responses, with how many.
        max_batch_size: Rows that the steps get at once; 0: their tensors have no batch dimension.
        around: The node as its ``when`` conditions see it, if that differs from what the targets of its steps see.
    """

    file: GraphFile
    node: NodeDefinition
    names: NodeNames
    call: NodeUse
    inputs: dict[str, TensorType]
    produced: dict[str, TensorType] = field(default_factory=dict)
    answered: dict[str, TensorType] = field(default_factory=dict)
    slots: dict[str, int] = field(default_factory=dict)
    given_slots: dict[str, int] = field(default_factory=dict)
    ok_slots: dict[int, int] = field(default_factory=dict)
    specs: dict[int, TensorSpec] = field(default_factory=dict)
    num_slots: int = 0
    streaming: dict[int, ResponseCount] = field(default_factory=dict)
    max_batch_size: int = -1
    around: "Scope | None" = None

    def __post_init__(self) -> None:
        if self.max_batch_size < 0:
            self.max_batch_size = self.file.message.max_batch_size

    @property
    def is_batched(self) -> bool:
        """Whether the inputs of steps have a batch dimension."""
        return self.max_batch_size > 0

    @property
    def responses(self) -> ResponseCount:
        """How many responses the node gives."""
        return max(self.streaming.values(), default=ResponseCount.ONE)

    def is_needed(self, tensor: str) -> bool:
        """Whether something requires the tensor."""
        return tensor in self.call.required or (self.file.dialect.proves_presence and tensor in self.names.needed)

    def new_slot(self, name: str, known: TensorType | None = None) -> int:
        """Allocate a slot; the type of its tensor may be set later, by ``note``."""
        slot = self.num_slots
        self.num_slots += 1
        if known is not None:
            self.note(slot, name, known)
        return slot

    def slot_of(self, tensor: str, producer: int | None) -> int:
        """Slot of an output of step ``producer``, or (None) of an input of the node; -1: none."""
        return (self.slots if producer is None else self.given_slots).get(tensor, -1)

    def note(self, slot: int, name: str, known: TensorType) -> None:
        """Set name and type of the tensor in a slot."""
        self.specs[slot] = TensorSpec(name, known.datatype, known.dims, known.is_optional)

    def new_ok_slots(self, indexes: Iterable[int]) -> None:
        """Allocate slots for ``steps.<name>.ok`` of those steps."""
        for i in sorted(indexes):
            name = f"steps.{self.node.steps[i].name}.ok"
            self.ok_slots[i] = self.new_slot(name, TensorType("BOOL", (1,), False, True, name))

    def step_path(self, step: StepDefinition) -> str:
        """Path of a step, as errors and spans show it."""
        if self.node.kind is not None and self.node.kind.plan.is_pipeline:
            return f"{self.call.path}/{step.name}"
        return f"{self.call.path}[{step.name}]"

    def node_plan(self, plan: type[AnyPlan], steps: Sequence[StepPlan], slots: Mapping[str, int]) -> AnyPlan:
        """Make the node's plan with the fields common to all kinds; its outputs are in ``slots``."""
        wanted = [name for name in self.names.outputs if name in self.call.wanted and name in slots]
        return plan(
            name=self.node.name,
            path=self.call.path,
            num_slots=self.num_slots,
            inputs=tuple(Binding(name, slot) for slot, name in enumerate(self.inputs)),
            outputs=tuple(Binding(name, slots[name]) for name in wanted),
            steps=tuple(steps),
            specs=self.specs,
            is_batched=self.file.is_batched,
        )


@dataclass(slots=True)
class BuiltStep:
    """A compiled step.

    Attributes:
        outputs: Type of each tensor that it gives to the node; may be absent after a soft failure or a false ``when``.
        answered: The same, given that the step has answered.
    """

    plan: StepPlan | None
    outputs: dict[str, TensorType]
    answered: dict[str, TensorType]
    responses: ResponseCount = ResponseCount.ONE


@dataclass(slots=True)
class BuiltNode:
    """A compiled node; ``outputs`` is name -> type. ``plan`` is None after a reported error."""

    plan: NodePlan | None
    outputs: dict[str, TensorType]
    responses: ResponseCount = ResponseCount.ONE


def declared_types(
    file: GraphFile, node: NodeDefinition, tensors: Iterable[ModelInput | pb.Output]
) -> dict[str, TensorType]:
    """Types of the inputs or outputs that a node declares; for the root, that the graph declares."""
    prefix = "" if node.name == file.root else f"{node.path}."
    types: dict[str, TensorType] = {}
    for i, tensor in enumerate(tensors):
        word = "input" if isinstance(tensor, ModelInput) else "output"
        origin = f"{word} '{tensor.name}' of {owner_text(file, node)} ({file.place(f'{prefix}{word}[{i}]')})"
        spec = spec_of(tensor)
        is_wrong = spec.datatype == "INVALID" or not spec.dims or any(dim < 1 and dim != -1 for dim in spec.dims)
        if is_wrong:  # reported already
            types[tensor.name] = replace(TensorType.unknown(origin), is_optional=spec.is_optional)
        else:
            types[tensor.name] = TensorType.of(spec, is_batched=file.is_batched, origin=origin)
    return types


def inner_types(
    file: GraphFile, node: NodeDefinition, types: Mapping[str, TensorType], tensors: Iterable[ModelInput | pb.Output]
) -> dict[str, TensorType]:
    """Types of declared tensors inside the node: for the graph's own, ``reshape`` replaces the dims."""
    inner = dict(types)
    for tensor in tensors if node.name == file.root else ():
        known = types[tensor.name]
        has_reshape = known.is_known and tensor.HasField("reshape")
        if has_reshape and not reshape_fault(known.dims, tensor.reshape.shape, has_batch=file.is_batched):
            inner[tensor.name] = replace(known, dims=tuple(tensor.reshape.shape))
    return inner


def owner_text(file: GraphFile, node: NodeDefinition) -> str:
    """The node in messages, or the graph if the node is its root."""
    if node.name != file.root:
        return f"node '{node.name}'"
    return file.title


def spec_of(tensor: ModelInput | pb.Output) -> TensorSpec:
    """A declared tensor as a TensorSpec."""
    return TensorSpec(tensor.name, datatype_name(tensor.data_type), tuple(tensor.dims), tensor.optional)


def declaring(file: GraphFile, node: NodeDefinition) -> pb.Graph | pb.Node:
    """The message that declares the node's inputs and outputs: the node's, or for the root the graph's."""
    return file.message if node.name == file.root else node.message
