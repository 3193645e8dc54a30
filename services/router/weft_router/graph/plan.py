"""A compiled graph: immutable, made once at load, shared by every request.

A node runs in a *frame*, a list with one entry per tensor of that node (its *slots*); entry ``None`` means absent.
Slots are plain integers, so nothing is looked up by name while a request runs. A step that is itself a node (or a
nested graph, inlined at compile time) runs in a frame of its own, filled through the step's bindings.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from weft_common.signature import ModelSignature, TensorSpec
from weft_common.tensors import WireTensor
from weft_router.bandit_algorithms import BanditAlgorithm
from weft_router.combine import CombineMethod
from weft_router.scope import RequestScope

Frame = list[WireTensor | None]


class Binding(NamedTuple):
    """A tensor name of the step's target (or of the node) and the slot of the frame around it."""

    name: str
    slot: int


class Condition(Protocol):
    """A compiled expression.

    Attributes:
        source: The text in the file.
        tensors: Bindings of the tensors that it reads; only these are decoded. The slot of a ``steps.<name>.ok`` is
            among them, under that text.
    """

    source: str
    tensors: tuple[Binding, ...]

    def evaluate(self, frame: Frame, request: RequestScope) -> bool | str:
        """Value of the expression: true or false of a test (``when``, ``accept``, ``while``), text of any other.

        Raises:
            InvalidArgumentError: It cannot be evaluated.
        """

    def evaluate_rows(
        self, frame: Frame, request: RequestScope, num_rows: int, numbers: Sequence[int] | None = None
    ) -> Sequence[bool | str]:
        """Value for each row, as if each were a request of its own; tensors are decoded once for all rows.

        Args:
            frame: Its tensors have ``num_rows`` rows.
            request: The request that runs.
            num_rows: How many.
            numbers: Of the rows, for messages; None: from 0.

        Raises:
            InvalidArgumentError: It cannot be evaluated for a row; the message names the row.
        """


class NodeKind(Enum):
    """How the steps of a node are wired."""

    SEQUENCE = "sequence"
    SWITCH = "switch"
    SPLITTER = "splitter"
    ENSEMBLE = "ensemble"
    CASCADE = "cascade"


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
class RetryPlan:
    """Further attempts after a failure.

    Attributes:
        attempts: The first included; 2 or more.
        backoff_ms: Pause before the second attempt; doubles with each further one. 0: none.
        codes: gRPC status names that are worth another attempt.
        budget_percent: Retries in work at once, in relation to all requests of the router in work.
    """

    attempts: int
    backoff_ms: int
    codes: frozenset[str]
    budget_percent: float


@dataclass(frozen=True, slots=True)
class HedgePlan:
    """Up to ``max_extra`` further calls, each ``after_ms`` after the one before, while no answer has come."""

    after_ms: int
    max_extra: int


@dataclass(frozen=True, slots=True)
class CachePlan:
    """Answers are kept.

    Attributes:
        ttl_ms: How long; 0 means until evicted.
        max_bytes: Keys and answers together; the least recently used go first.
        key: What tells requests apart beside target, version, inputs and outputs.
        stale_if_error_ms: How long after that an answer stands in for an UNAVAILABLE call; 0: not at all.
    """

    ttl_ms: int
    max_bytes: int
    key: Condition | None = None
    stale_if_error_ms: int = 0


@dataclass(frozen=True, slots=True)
class ShadowPlan:
    """``percent`` (0..100) of the requests are copied to the step; at most ``max_inflight`` (0: no limit) at once."""

    percent: float
    max_inflight: int


@dataclass(frozen=True, slots=True)
class BanditPlan:
    """A splitter that learns from feedback.

    Attributes:
        algorithm: How the next step is chosen.
        epsilon: Share of requests that explore, of an algorithm that takes it.
        min_pulls: Requests that each step gets first.
    """

    algorithm: BanditAlgorithm
    epsilon: float
    min_pulls: int


class DefaultPlan(NamedTuple):
    """Value of an output of a step that was skipped or failed softly.

    Attributes:
        slot: Of the node's frame.
        tensor: The value. Where ``is_batched``: of one row, its leading dimension 1, repeated for every row.
        is_batched: Whether the tensor has a batch dimension.
    """

    slot: int
    tensor: WireTensor
    is_batched: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step.

    Whatever may go wrong is answered in this order: attempts (``hedge`` within ``retry``), ``fallback``, then
    ``is_soft`` with ``defaults``, then the error.

    Attributes:
        name: Unique within the node.
        path: For errors and spans, for example ``root/clf``.
        action: A call, or the node that runs in this step's place.
        inputs: Target input <- slot of the node's frame; an absent slot is left out of the call.
        outputs: Target output -> slot of the node's frame; these outputs are requested. The slots are absent, or have
            their default, when the step was skipped or failed softly.
        when: Switch: test of this branch. Elsewhere the step runs only if it holds.
        accept: Cascade only: whether the answer counts. It reads the step's own output slots; None: it always does.
        cases: Switch with ``on``: values that choose this branch.
        is_otherwise: Switch only: taken when nothing else matches.
        weight: Splitter share or vote weight; 1 where none was given.
        timeout_ms: 0 means none. One deadline for all attempts; the fallback has its own.
        is_soft: A failure leaves the outputs absent, or with their default, and the request goes on.
        defaults: Of outputs; empty for a step that always gives its outputs.
        fallback: Runs after the step has failed, in the same frame, and gives the same output slots. Its own
            ``fallback`` comes after it.
        retry, hedge, cache: None where there is none; what graph and node say is worked in.
        shadow: The step is a copy: its answer is dropped, it has no outputs and nobody waits for it.
        max_inflight: Runs of this step at once; the next fails with RESOURCE_EXHAUSTED. 0: no limit.
        min_remaining_ms: With less time left a cascade passes the step over; elsewhere it fails with DEADLINE_EXCEEDED
            without a call. 0: none.
        ok_slot: Slot that holds ``OK`` if the step gave an answer of its own (or of its fallback), else is absent; -1
            where nothing reads it.
        consumers: Sequence only: indexes of the steps that read an output (or the ok slot) of this one.
        num_dependencies: Sequence only: how many steps must finish before this one may start.
    """

    name: str
    path: str
    action: "CallPlan | NodePlan"
    inputs: tuple[Binding, ...]
    outputs: tuple[Binding, ...]
    when: Condition | None = None
    accept: Condition | None = None
    cases: tuple[str, ...] = ()
    is_otherwise: bool = False
    weight: float = 1.0
    timeout_ms: int = 0
    is_soft: bool = False
    defaults: tuple[DefaultPlan, ...] = ()
    fallback: "StepPlan | None" = None
    retry: RetryPlan | None = None
    hedge: HedgePlan | None = None
    cache: CachePlan | None = None
    shadow: ShadowPlan | None = None
    max_inflight: int = 0
    min_remaining_ms: int = 0
    ok_slot: int = -1
    consumers: tuple[int, ...] = ()
    num_dependencies: int = 0


#: In the slot of ``steps.<name>.ok`` of a step that gave an answer.
OK = WireTensor("BOOL", (1,), b"\x01")


@dataclass(frozen=True, slots=True)
class CombinePlan:
    """One output of an ensemble.

    Attributes:
        output: Slot of the node's frame that receives it.
        method: How.
        sources: Per step that offers the tensor: (index of the step, slot with its value).
        is_weighted, axis: As of ``CombineSettings``.
        custom: The call that combines, of a method that calls a model. Two of its input slots are ``stack`` and
            ``mask``, which the node fills; the others are node inputs. Its one output slot is ``output``.
        stack: With ``custom``: slot of all sources stacked along a new axis behind the batch dimension (or in front,
            without one), absent ones as zeros or empty strings; -1 elsewhere.
        mask: With ``custom``: slot of a BOOL tensor, shape [rows, sources] (or [sources]), false where a source is
            absent.
    """

    output: int
    method: CombineMethod
    sources: tuple[tuple[int, int], ...]
    is_weighted: bool = False
    axis: int = 0
    custom: StepPlan | None = None
    stack: int = -1
    mask: int = -1


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """A sequence that runs again while a condition holds.

    Attributes:
        again: The ``while``: reads inputs and outputs of the round that is over; true means once more.
        max_iterations: Rounds at most; after the last the outputs are what that round gave.
        carry: (slot of an output, slot of an input): what the next round gets in place of its input.
    """

    again: Condition
    max_iterations: int
    carry: tuple[tuple[int, int], ...]


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
        steps: In declared order, without shadows; those of a sequence are among them, marked by ``shadow``.
        shadows: Shadow steps of every kind but a sequence; they read node inputs and start with the node.
        timeout_ms: 0 means none.
        max_inflight: Runs of this node at once; the next fails with RESOURCE_EXHAUSTED. 0: no limit.
        on: Switch only.
        per_row: Switch and cascade: each row of the batch goes its own way. Every tensor of the node has a batch
            dimension.
        sticky_by, salt: Splitter only.
        bandit: Splitter only: feedback moves the shares.
        quorum: Ensemble only: answers that are needed. 0 means every HARD step, and at least one step.
        straggler_ms: Ensemble only: from the quorum-th answer, how long SOFT steps are still waited for; 0: until they
            end.
        combines: Ensemble only.
        loop: Sequence only.
        specs: For each slot, what is known of the tensor; its ``dims`` are without the batch dimension.
        graph: "name/version" where the node is the root of a nested graph, else "".
    """

    name: str
    path: str
    kind: NodeKind
    num_slots: int
    inputs: tuple[Binding, ...]
    outputs: tuple[Binding, ...]
    steps: tuple[StepPlan, ...]
    shadows: tuple[StepPlan, ...] = ()
    timeout_ms: int = 0
    max_inflight: int = 0
    on: Condition | None = None
    per_row: bool = False
    sticky_by: Condition | None = None
    salt: str = ""
    bandit: BanditPlan | None = None
    quorum: int = 0
    straggler_ms: int = 0
    combines: tuple[CombinePlan, ...] = ()
    loop: LoopPlan | None = None
    specs: Mapping[int, TensorSpec] = field(default_factory=dict)
    graph: str = ""

    @property
    def is_race(self) -> bool:
        """Whether it is an ensemble of which the first answer counts and the other steps are cancelled."""
        return bool(self.combines) and self.quorum <= 1 and all(one.method.is_first for one in self.combines)


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """A graph that can run.

    Attributes:
        signature: The graph as a model: what clients see.
        root: The node that answers.
        is_ensemble: ``platform: "ensemble"``, the rules and texts of Triton Inference Server.
        timeout_ms: 0 means none.
        max_inflight: Requests of this graph at once; 0 means no limit.
        max_inflight_responses: Of a decoupled graph: responses of a decoupled step that are in work at once; the step's
            stream is not read further before one of them is done. 0: one.
        cache: Whole answers of the graph are kept.
        dependencies: (target, model) pairs that the graph needs.
    """

    signature: ModelSignature
    root: NodePlan
    is_ensemble: bool = False
    timeout_ms: int = 0
    max_inflight: int = 0
    max_inflight_responses: int = 0
    cache: CachePlan | None = None
    dependencies: frozenset[tuple[str, str]] = frozenset()
