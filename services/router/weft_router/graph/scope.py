"""A node while it is compiled: what it gets, what its steps give, and which slot holds what."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from weft_common.signature import TensorSpec, datatype_name
from weft_protos import graph_pb2 as pb
from weft_protos.model_config_pb2 import ModelInput, ModelOutput
from weft_router.graph.names import NodeNames
from weft_router.graph.parse import GraphFile, NodeDefinition, StepDefinition
from weft_router.graph.plan import NodeKind, NodePlan, StepPlan
from weft_router.graph.types import TensorType


@dataclass(slots=True)
class Call:
    """One step's use of a node.

    Attributes:
        given: Type of each input that the step gives.
        visible: Type of every tensor that the step could have given, to suggest names.
        wanted: Outputs that are read.
        path: Of the node, for errors and spans.
        trail: Nodes around this one, outermost first: (graph label, node name).
    """

    given: Mapping[str, TensorType]
    visible: Mapping[str, TensorType]
    wanted: frozenset[str]
    path: str
    trail: tuple[tuple[str, str], ...] = ()


@dataclass(slots=True)
class Scope:
    """A node while it is compiled.

    Attributes:
        inputs: Type of each input of the node.
        produced: Type of each output of a step of a sequence, once the step is compiled.
        slots: Slot of each tensor that the frame holds.
        specs: What is known of the tensor in each slot.
    """

    file: GraphFile
    node: NodeDefinition
    names: NodeNames
    call: Call
    inputs: dict[str, TensorType]
    produced: dict[str, TensorType] = field(default_factory=dict)
    slots: dict[str, int] = field(default_factory=dict)
    specs: dict[int, TensorSpec] = field(default_factory=dict)

    def note(self, slot: int, name: str, known: TensorType) -> None:
        """Remember what is in a slot."""
        self.specs[slot] = TensorSpec(name, known.datatype, known.dims, known.is_optional)

    def step_path(self, step: StepDefinition) -> str:
        """Path of a step, as errors and spans show it."""
        if self.node.kind is NodeKind.SEQUENCE:
            return f"{self.call.path}/{step.name}"
        return f"{self.call.path}[{step.name}]"


@dataclass(slots=True)
class BuiltStep:
    """A compiled step; ``outputs`` is target output -> type. ``plan`` is None where an error was reported."""

    plan: StepPlan | None
    outputs: dict[str, TensorType]


@dataclass(slots=True)
class BuiltNode:
    """A compiled node; ``outputs`` is name -> type. ``plan`` is None where an error was reported."""

    plan: NodePlan | None
    outputs: dict[str, TensorType]
    specs: dict[int, TensorSpec]


def declared_types(
    file: GraphFile, node: NodeDefinition, tensors: Iterable[ModelInput | ModelOutput]
) -> dict[str, TensorType]:
    """Types of the inputs or outputs that a node, or for the root the graph, declares."""
    prefix = "" if node.name == file.root else f"{node.path}."
    types: dict[str, TensorType] = {}
    for i, tensor in enumerate(tensors):
        word = "input" if isinstance(tensor, ModelInput) else "output"
        origin = f"{word} '{tensor.name}' of {owner_text(file, node)} ({file.place(f'{prefix}{word}[{i}]')})"
        spec = spec_of(tensor)
        if spec.datatype == "INVALID" or not spec.dims:  # reported already
            types[tensor.name] = replace(TensorType.unknown(origin), is_optional=spec.is_optional)
        else:
            types[tensor.name] = TensorType.of(spec, is_batched=file.is_batched, origin=origin)
    return types


def owner_text(file: GraphFile, node: NodeDefinition) -> str:
    """The node in messages, or the graph if the node is its root."""
    if node.name != file.root:
        return f"node '{node.name}'"
    return f"{'ensemble' if file.is_ensemble else 'graph'} '{file.name}'"


def spec_of(tensor: ModelInput | ModelOutput) -> TensorSpec:
    """A declared tensor, without protobuf."""
    is_optional = isinstance(tensor, ModelInput) and tensor.optional
    return TensorSpec(tensor.name, datatype_name(tensor.data_type), tuple(tensor.dims), is_optional)


def declaring(file: GraphFile, node: NodeDefinition) -> pb.Graph | pb.Node:
    """The message with the node's inputs and outputs: for the root, the graph's."""
    return file.message if node.name == file.root else node.message
