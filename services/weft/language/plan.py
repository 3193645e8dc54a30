"""A compiled graph: immutable, made once at load, shared by every request.

A node runs in a *frame*, a list with one entry per tensor of that node (its *slots*); entry ``None`` means absent.
Slots are plain integers, so nothing is looked up by name while a request runs. A step that is itself a node (or a
nested graph, inlined at compile time) runs in a frame of its own, filled through the step's bindings.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol

from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import WireTensor
from weft.language.bandit_algorithms import BanditPlan
from weft.language.dialects import GRAPH, Dialect
from weft.language.path_form import PathForm
from weft.language.request_scope import RequestScope
from weft.language.rollouts import RolloutPlan

Frame = list[WireTensor | None]


class Binding(NamedTuple):
    """Connects a tensor name of the step's target (or of the node) to a slot of the frame around it."""

    name: str
    slot: int


class Condition(Protocol):
    """A compiled expression.

    Attributes:
        tensors: Bindings of the tensors that it reads; only these are decoded. The slot of a ``steps.<name>.ok`` is
            among them, under that text.
    """

    source: str
    tensors: tuple[Binding, ...]
    is_test: bool

    def evaluate(self, frame: Frame, request: RequestScope) -> bool | str:
        """Evaluate: true or false for a test (``when``, ``accept``, ``while``), text for any other.

        Raises:
            InvalidArgumentError: It cannot be evaluated.
        """

    def evaluate_rows(
        self, frame: Frame, request: RequestScope, num_rows: int, numbers: Sequence[int] | None = None
    ) -> Sequence[bool | str]:
        """Evaluate for each row, as if each were a request of its own; tensors are decoded once for all rows.

        Args:
            frame: Its tensors have ``num_rows`` rows.
            numbers: Of the rows, for messages; None: from 0.

        Raises:
            InvalidArgumentError: It cannot be evaluated for a row; the message names the row.
        """


@dataclass(frozen=True, slots=True)
class PolicyPlan(ABC):
    """The compiled policy of one step, or of a whole graph's answers.

    Attributes:
        repeats_failures: The action may run again after it has failed.
        condition_words: The word for ``condition``: ``cache key``.
        allows_streams: It treats the first response of a decoupled model as the answer; other policies are skipped
            there.
    """

    field: ClassVar[str]
    condition_words: ClassVar[str] = ""
    repeats_failures: ClassVar[bool] = False
    allows_streams: ClassVar[bool] = False

    @property
    def num_calls(self) -> int:
        """Most calls that it makes of one, when models fail or are late."""
        return 1

    def calls_text(self, path: str) -> str:
        """Explains a ``num_calls`` above one: ``3 attempts of root/clf``."""
        return ""

    @property
    def condition(self) -> Condition | None:
        """The condition that it evaluates for each request."""
        return None

    @abstractmethod
    def text(self) -> str:
        """Description for drawings and explanations: ``hedge after 40 ms, 1 extra call``."""


@dataclass(frozen=True, slots=True)
class CallPlan:
    """A call of a model on a target; version "" means its default. ``signature`` is as declared at compile time."""

    target: str
    model_name: str
    model_version: str
    signature: ModelSignature

    @property
    def streams(self) -> bool:
        """Whether it may give any number of responses."""
        return self.signature.is_decoupled


@dataclass(frozen=True, slots=True)
class ShadowPlan:
    """Copies ``percent`` (0..100) of the requests to the step; at most ``max_inflight`` (0: no limit) at once.

    The outputs ``compared`` are compared with the node's, as ``MirrorCompare`` says.
    """

    percent: float
    max_inflight: int
    compared: tuple[str, ...] = ()
    rtol: float = 0.0
    atol: float = 0.0
    top_1: bool = False

    def text(self) -> str:
        """For example ``shadow of 5 % of requests, at most 4 at once``."""
        limit = f", at most {self.max_inflight} at once" if self.max_inflight else ""
        compared = f", compares {', '.join(self.compared)}" if self.compared else ""
        return f"shadow of {self.percent:g} % of requests{limit}{compared}"


class DefaultPlan(NamedTuple):
    """Value of an output of a step that was skipped or failed softly.

    If ``is_batched``, ``tensor`` is of one row, its leading dimension 1, repeated for every row.
    """

    slot: int
    tensor: WireTensor
    is_batched: bool


class ConstantPlan(NamedTuple):
    """Value of an input of a step's target; if ``is_batched``, as that of ``DefaultPlan``."""

    name: str
    tensor: WireTensor
    is_batched: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step.

    A failure is handled in this order: ``policies``, ``fallback``, then ``is_soft`` with ``defaults``, then the error.

    Attributes:
        action: A call, or the node that the step runs.
        inputs: Target input <- slot of the node's frame; an absent slot is left out of the call.
        constants: Values of further inputs.
        outputs: Target output -> slot of the node's frame; these outputs are requested. The slots are absent, or have
            their default, if the step was skipped or failed softly, or the answer lacks them.
        when: Runs the step only if true; if the node watches it, the node decides what that means.
        accept: Whether the answer counts. Reads the step's own output slots; None: always.
        weight: Share, or weight of its answer; 1 if not given.
        optional_outputs: Target outputs that nothing requires, or that have a default: an answer may lack them,
            whatever the model declares.
        keeps_rows: Its answer has as many rows as its inputs; in an ensemble's file a step may give any number.
        timeout_ms: 0 means none. One deadline for all attempts; the fallback has its own.
        is_soft: A failure leaves the outputs absent, or with their default, and the request goes on.
        defaults: Of outputs; empty for a step that always gives its outputs.
        fallback: Runs after the step has failed, in the same frame, and gives the same output slots. Its own
            ``fallback`` comes after it.
        policies: Around the action, the outermost first; those of graph and node are included.
        shadow: The step is a copy: its answer is dropped, it has no outputs and nothing waits for it.
        max_inflight: Concurrent runs of this step; the next fails with RESOURCE_EXHAUSTED. 0: no limit.
        min_remaining_ms: With less time left the step fails with DEADLINE_EXCEEDED without a call, unless the node
            watches it. 0: none.
        ok_slot: Slot that holds ``OK`` if the step, or its fallback, answered, else is absent; -1 if nothing reads it.
        consumers: In a pipeline: indexes of the steps that wait for this one: they read one of its outputs or its ok
            slot, or are after it.
        num_dependencies: In a pipeline: number of steps that must finish before this one may start.
        after: In a pipeline: indexes of the steps that must have ended before this one starts, even if it does not read
            from them; they run whenever it does.
        is_awaited: In a pipeline: the node answers after the step has ended, whatever outputs are requested.
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
    optional_outputs: frozenset[str] = frozenset()
    keeps_rows: bool = True
    timeout_ms: int = 0
    is_soft: bool = False
    defaults: tuple[DefaultPlan, ...] = ()
    fallback: "StepPlan | None" = None
    policies: tuple[PolicyPlan, ...] = ()
    shadow: ShadowPlan | None = None
    max_inflight: int = 0
    min_remaining_ms: int = 0
    ok_slot: int = -1
    consumers: tuple[int, ...] = ()
    num_dependencies: int = 0
    after: tuple[int, ...] = ()
    is_awaited: bool = False
    constants: tuple[ConstantPlan, ...] = ()

    def chain(self) -> Iterator["StepPlan"]:
        """The step, its fallback, the fallback of that, and so on."""
        yield self
        if self.fallback is not None:
            yield from self.fallback.chain()

    @property
    def streams(self) -> bool:
        """Whether it, or its fallback, may give any number of responses."""
        return self.shadow is None and any(step.action.streams for step in self.chain())


#: In the slot of ``steps.<name>.ok`` of a step that gave an answer.
OK = WireTensor("BOOL", (1,), b"\x01")


class Reshaping(NamedTuple):
    """A ``reshape`` at a graph's edge: ``slot`` has dims ``source`` on one side and ``target`` on the other."""

    slot: int
    source: tuple[int, ...]
    target: tuple[int, ...]


#: Note of a flow along which nothing passes: its target waits for the end of its source.
THEN = "then"


class TensorUse(NamedTuple):
    """A tensor on an edge, with the names at both ends, "" if no step gives or takes it.

    If only a condition of the step reads it, ``condition`` has its name there, and which condition it is.
    """

    slot: int
    given_as: str = ""
    taken_as: str = ""
    condition: str = ""


class Flow(NamedTuple):
    """An edge between two places in a node.

    Attributes:
        source: Index in ``Description.steps``; None: the node's entry.
        target: Index in ``Description.steps``; None: the node's exit.
        notes: When it is taken: ``when inputs.X > 1``, ``60 %``.
        gives: Whether the tensors are outputs of the source, and so may be missing if that is soft.
        is_back: From the exit back to the entry, for another round; ``source`` and ``target`` are None.
    """

    source: int | None
    target: int | None
    notes: tuple[str, ...] = ()
    tensors: tuple[TensorUse, ...] = ()
    gives: bool = False
    is_back: bool = False


class End(NamedTuple):
    """Entry or exit of a node.

    Attributes:
        title: How it chooses or combines: ``first that holds``.
        is_plain: It only passes tensors on.
    """

    title: str
    notes: tuple[str, ...] = ()
    is_plain: bool = False


@dataclass(frozen=True, slots=True)
class Description:
    """A node in words and edges.

    Attributes:
        steps: The steps of the plan, its shadows, and its custom steps.
        flows: Edges between these; acyclic without those that are ``is_back``.
        step_notes: Index of a step -> the kind's notes on it, besides its policies.
        names: Slot -> name of its tensor, if it differs from the one of ``NodePlan.specs``.
        maybe_absent: Slots that may be absent, besides those whose spec is optional.
        each: If the data decides how often the steps run: what they run for, ``chunk of CROPS``.
    """

    kind: str
    steps: tuple[StepPlan, ...]
    entry: End
    exit: End
    flows: tuple[Flow, ...]
    notes: tuple[str, ...] = ()
    step_notes: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    names: Mapping[int, str] = field(default_factory=dict)
    maybe_absent: frozenset[int] = frozenset()
    each: str = ""

    def waits_of(self, index: int) -> list[str]:
        """Describe what a step waits for besides its tensors, and whether the node's answer waits for it."""
        waits = [(flow.source, flow.target) for flow in self.flows if THEN in flow.notes]
        before = [self.steps[source].name for source, target in waits if target == index and source is not None]
        told = [f"after {', '.join(before)}"] if before else []
        return told + ["the answer waits for it"] * ((index, None) in waits)

    def notes_to(self, index: int) -> list[str]:
        """The notes on edges to a step: when it runs, and how often."""
        return [note for flow in self.flows if flow.target == index for note in flow.notes]


@dataclass(frozen=True, slots=True)
class NodePlan(ABC):
    """One node; the root node is the graph. Each kind has a subclass with fields of its own.

    Attributes:
        is_pipeline: Its steps see one another's outputs; in other kinds they see only the node's inputs.
        runs_shadows: Shadows are among its steps, and the node starts them; in other kinds they start with the node.
        can_be_pinned: A request may choose the step, with the header ``x-graph-route``.
        watches: Which of ``when`` and ``min_remaining_ms`` the node itself checks before it runs a step.
        inputs: Node input -> slot. Slots of inputs come first, in this order.
        outputs: Node output <- slot.
        steps: In declared order, without shadows, unless it ``runs_shadows``; then these are marked by ``shadow``.
        shadows: Shadow steps of a node that does not run them; they read node inputs and start with the node.
        max_inflight: Concurrent runs of this node; the next fails with RESOURCE_EXHAUSTED. 0: no limit.
        specs: For each slot, the known type of the tensor; its ``dims`` are without the batch dimension.
        graph: "name/version" if the node is the root of a nested graph, else "".
        is_batched: Whether its tensors have a batch dimension; None: as in the graph.
        reshaped_inputs: Inputs that have other dims inside.
    """

    kind: ClassVar[str]
    path_form: ClassVar[PathForm]
    is_pipeline: ClassVar[bool] = False
    runs_shadows: ClassVar[bool] = False
    can_be_pinned: ClassVar[bool] = False
    watches: ClassVar[frozenset[str]] = frozenset()

    name: str
    path: str
    num_slots: int
    inputs: tuple[Binding, ...]
    outputs: tuple[Binding, ...]
    steps: tuple[StepPlan, ...]
    shadows: tuple[StepPlan, ...] = ()
    timeout_ms: int = 0
    max_inflight: int = 0
    specs: Mapping[int, TensorSpec] = field(default_factory=dict)
    graph: str = ""
    is_batched: bool | None = None
    reshaped_inputs: tuple[Reshaping, ...] = ()
    reshaped_outputs: tuple[Reshaping, ...] = ()

    @property
    def batches_steps(self) -> bool | None:
        """Like ``is_batched``, for the inputs of its steps."""
        return self.is_batched

    @property
    def streams(self) -> bool:
        """Whether it may give any number of responses, because one of its steps does."""
        return any(step.streams for step in self.steps)

    @property
    def counting_slots(self) -> tuple[int, ...]:
        """Slots whose batch dimension is the number of rows of its steps."""
        return tuple(slot for _, slot in self.inputs)

    @property
    def customs(self) -> tuple[StepPlan, ...]:
        """Steps that the node runs besides ``steps``."""
        return ()

    @property
    def bandit(self) -> BanditPlan | None:
        """The bandit that chooses its step, if any."""
        return None

    @property
    def rollout(self) -> RolloutPlan | None:
        """The rollout of one of its steps, if any."""
        return None

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """Conditions of the node itself, not of its steps."""
        return ()

    @property
    def slots_read(self) -> tuple[int, ...]:
        """Slots that the node itself reads after its steps, besides its outputs."""
        return ()

    @property
    def counts_read(self) -> tuple[int, ...]:
        """Slots of inputs that determine the number of runs; if unknown, the maximum is assumed."""
        return ()

    def followers(self) -> Sequence[Sequence[int]]:
        """For each step, the indexes of those that start after it has ended; by default none."""
        return [()] * len(self.steps)

    def first_lost(self, lost: Sequence[int]) -> int | None:
        """The first of the steps ``lost``, which cannot run, without which some request cannot be answered."""
        return next(iter(lost), None)

    @abstractmethod
    def describe(self) -> Description:
        """Describe the node in words and edges."""


def steps_of(node: NodePlan) -> Iterator[tuple[NodePlan, StepPlan]]:
    """Every step under a node with its own node, including nested nodes, fallbacks, custom steps and shadows."""
    for step in (*node.steps, *node.customs, *node.shadows):
        for one in step.chain():
            yield node, one
            if isinstance(one.action, NodePlan):
                yield from steps_of(one.action)


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """A compiled graph.

    Attributes:
        dependencies: (target, model) pairs that the graph needs.
    """

    signature: ModelSignature
    root: NodePlan
    dialect: Dialect = GRAPH
    timeout_ms: int = 0
    max_inflight: int = 0
    cache: PolicyPlan | None = None
    dependencies: frozenset[tuple[str, str]] = frozenset()

    @property
    def error_prefix(self) -> str:
        """Prefix of its error messages, for example ``sentiment/1: ``."""
        return self.dialect.error_prefix(self.signature.name, self.signature.version)
