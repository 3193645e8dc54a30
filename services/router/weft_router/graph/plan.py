"""A compiled graph: immutable, made once at load, shared by every request.

A node runs in a *frame*, a list with one entry per tensor of that node (its *slots*); entry ``None`` means absent.
Slots are plain integers, so nothing is looked up by name while a request runs. A step that is itself a node (or a
nested graph, inlined at compile time) runs in a frame of its own, filled through the step's bindings.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from weft_common.core import ParameterValue
from weft_common.signature import ModelSignature, TensorSpec
from weft_common.tensors import WireTensor

Frame = list[WireTensor | None]


class Binding(NamedTuple):
    """A tensor name of the step's target (or of the node) and the slot of the frame around it."""

    name: str
    slot: int


@dataclass(slots=True)
class RequestScope:
    """What a condition may know of the request beside tensors.

    Attributes:
        parameters: Request parameters.
        headers: ASCII metadata, lower-case keys.
        request_id: May be "".
        priority: 0 where none was given.
        deadline_ns: On ``time.monotonic_ns``; None without deadline.
    """

    parameters: Mapping[str, ParameterValue]
    headers: Mapping[str, str]
    request_id: str = ""
    priority: int = 0
    deadline_ns: int | None = None


class Condition(Protocol):
    """A compiled expression.

    Attributes:
        source: The text in the file.
        tensors: Bindings of the tensors that it reads; only these are decoded.
    """

    source: str
    tensors: tuple[Binding, ...]

    def evaluate(self, frame: Frame, request: RequestScope) -> object:
        """Value of the expression. Raises InvalidArgumentError when it cannot be evaluated."""


class NodeKind(Enum):
    """How the steps of a node are wired."""

    SEQUENCE = "sequence"
    SWITCH = "switch"
    SPLITTER = "splitter"
    ENSEMBLE = "ensemble"


class CombineMethod(Enum):
    """How one answer is made of an ensemble's."""

    KEYED = "KEYED"
    VOTE = "VOTE"
    AVERAGE = "AVERAGE"
    CONCAT = "CONCAT"
    FIRST = "FIRST"


@dataclass(frozen=True, slots=True)
class CallPlan:
    """A call of a model on a target.

    Attributes:
        target: Name of the target that serves the model, as given to the router.
        model_name, model_version: As sent; version "" means the target's default.
        signature: What the target declared when the graph was compiled.
    """

    target: str
    model_name: str
    model_version: str
    signature: ModelSignature


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step.

    Attributes:
        name: Unique within the node.
        path: For errors and spans, for example ``root/clf``.
        action: A call, or the node that runs in this step's place.
        inputs: Target input <- slot of the node's frame; an absent slot is left out of the call.
        outputs: Target output -> slot of the node's frame; these outputs are requested.
        when: Switch only: test of this branch.
        cases: Switch with ``on``: values that choose this branch.
        is_otherwise: Switch only: taken when nothing else matches.
        weight: Splitter share or vote weight; 1 where none was given.
        timeout_ms: 0 means none.
        consumers: Sequence only: indexes of the steps that read an output of this one.
        num_dependencies: Sequence only: how many steps must finish before this one may start.
    """

    name: str
    path: str
    action: "CallPlan | NodePlan"
    inputs: tuple[Binding, ...]
    outputs: tuple[Binding, ...]
    when: Condition | None = None
    cases: tuple[str, ...] = ()
    is_otherwise: bool = False
    weight: float = 1.0
    timeout_ms: int = 0
    consumers: tuple[int, ...] = ()
    num_dependencies: int = 0


@dataclass(frozen=True, slots=True)
class CombinePlan:
    """One output of an ensemble.

    Attributes:
        output: Slot of the node's frame that receives it.
        method: How.
        sources: Per step that offers the tensor: (index of the step, slot with its value).
        is_weighted: Whether step weights count.
        axis: CONCAT only: axis of the whole tensor, batch dimension counted; negative counts from the end.
    """

    output: int
    method: CombineMethod
    sources: tuple[tuple[int, int], ...]
    is_weighted: bool = False
    axis: int = 0


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One node; the root node is the graph.

    Attributes:
        name: As in the file.
        path: From the root, names of steps and nodes.
        kind: How the steps are wired.
        num_slots: Length of the frame.
        inputs: Node input -> slot. Slots of inputs come first, in this order.
        outputs: Node output <- slot.
        steps: In declared order.
        timeout_ms: 0 means none.
        on: Switch only.
        sticky_by, salt: Splitter only.
        combines: Ensemble only.
        graph: "name/version" where the node is the root of a nested graph, else "".
    """

    name: str
    path: str
    kind: NodeKind
    num_slots: int
    inputs: tuple[Binding, ...]
    outputs: tuple[Binding, ...]
    steps: tuple[StepPlan, ...]
    timeout_ms: int = 0
    on: Condition | None = None
    sticky_by: Condition | None = None
    salt: str = ""
    combines: tuple[CombinePlan, ...] = ()
    graph: str = ""


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """A graph that can run.

    Attributes:
        signature: The graph as a model: what clients see.
        root: The node that answers.
        is_ensemble: ``platform: "ensemble"``, Triton's rules and texts.
        timeout_ms: 0 means none.
        max_inflight: Requests of this graph at once; 0 means no limit.
        dependencies: (target, model) pairs that the graph needs.
        specs: For each slot of the root frame, what is known of the tensor (for intermediate outputs and drawing).
    """

    signature: ModelSignature
    root: NodePlan
    is_ensemble: bool = False
    timeout_ms: int = 0
    max_inflight: int = 0
    dependencies: frozenset[tuple[str, str]] = frozenset()
    specs: Mapping[int, TensorSpec] = field(default_factory=dict)
