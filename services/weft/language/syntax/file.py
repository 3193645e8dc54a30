"""A graph file as the compiler sees it: the message, where everything stands, its nodes by name, what is wrong with it.

A kind of node, or a policy of steps, is known by the interface that it has in a file: ``KindSyntax``, ``PolicyKind``.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

from weft.base.errors import InvalidArgumentError
from weft.base.signature import ModelSignature
from weft.base.text.pbtxt import Diagnostic, Positions, render
from weft.language.dialects import Dialect
from weft.language.plan import Condition, NodePlan, PolicyPlan
from weft_protos import graph_pb2 as pb


@dataclass(frozen=True, slots=True)
class GraphSource:
    """One graph file.

    Attributes:
        text: Content of ``graph.pbtxt`` or of an ensemble's ``config.pbtxt``; bytes are UTF-8.
        name: Name of the graph; "" takes the name that the file gives.
    """

    text: str | bytes
    file: str
    name: str = ""
    version: str = "1"


class ModelCatalog(Protocol):
    """The models that targets serve now."""

    def find(self, model_name: str, version: str) -> tuple[str, ModelSignature] | None:
        """Name of the target that serves the model, and its signature; version "" means the default one."""

    def names(self) -> list[str]:
        """Every model name, to suggest one for a misspelt name."""


@runtime_checkable
class ModelFaults(Protocol):
    """What a catalog may offer beside: why models that are there are not served."""

    def fault(self, model_name: str) -> str:
        """Why a model that ``find`` does not have is not served; "" where it is not there, or nothing is known."""


class GraphLookup(Protocol):
    """The other graphs of the repository."""

    def find(self, name: str, version: str) -> GraphSource | None:
        """The graph's file; version "" means the latest."""

    def names(self) -> list[str]:
        """Every graph name, to suggest one for a misspelt name."""


class GraphError(InvalidArgumentError):
    """A graph cannot be loaded. INVALID_ARGUMENT; the message shows every error with its place."""

    def __init__(self, diagnostics: list[Diagnostic]) -> None:
        self.diagnostics = diagnostics
        super().__init__(render(found for found in diagnostics if found.severity == "error"))


class KindSyntax(ABC):
    """What a kind of node is in a file: its fields and its checks; it keeps nothing of a graph.

    Attributes:
        plan: Class of its plans; their ``kind`` is the name of the kind's field in ``graph.proto``.
        step_fields: Fields of ``Step`` without an effect in other kinds: of ``case``, ``otherwise``, ``weight``,
            ``accept``, ``after``.
        chooses_by_when: ``when`` chooses among the steps, so that a false one makes no output absent.
        sees_answers: Conditions of a step see ``steps.<name>.ok`` of the steps before it.
        custom_words: What one of its custom steps is, for messages.
    """

    plan: ClassVar[type[NodePlan]]
    step_fields: ClassVar[frozenset[str]] = frozenset()
    chooses_by_when: ClassVar[bool] = False
    sees_answers: ClassVar[bool] = False
    custom_words: ClassVar[str] = "a custom step"

    @property
    def name(self) -> str:
        """Its field in the ``oneof kind`` of ``Node``, and the word for it in messages."""
        return self.plan.kind

    def custom_steps(self, message: pb.Node, path: str) -> Iterator[tuple[int, str, pb.Step]]:
        """Steps that the node runs beside its ``step``: (key, path, message); none here."""
        yield from ()

    def conditions(self, message: pb.Node) -> Iterable[tuple[str, str]]:
        """Conditions of the node itself: (path within the kind's message, text or ""); none here."""
        return ()

    def check(self, file: "GraphFile", node: "NodeDefinition", report: "GraphReport") -> None:  # noqa: B027  # may be none
        """Report what is wrong with a node, whatever the models are."""

    def check_fields(self, file: "GraphFile", node: "NodeDefinition", report: "GraphReport") -> None:  # noqa: B027
        """Report fields without effect (G018) and values out of range (G025)."""

    def why_no_default(self, step: pb.Step) -> str:
        """Why a ``default`` of the step has no effect; "" where it has one."""
        if step.dependency == pb.Step.SOFT or step.when:
            return ""
        return "on a HARD step without 'when', which always gives its outputs; make it 'dependency: SOFT'"

    def why_no_stream(self, node: "NodeDefinition") -> str:
        """Why no step may give several responses to one request, and what to do; "" where any may."""
        return f"a {self.name} gives one response; use a step that does, too"


class GivenPolicies(NamedTuple):
    """The messages that say something of one step.

    Attributes:
        is_call: Whether the step calls a model; any other inherits nothing.
    """

    own: pb.Policy
    around: Sequence[pb.Policy]
    is_call: bool
    is_shadow: bool = False

    @property
    def inherited(self) -> Sequence[pb.Policy]:
        """Those that hold for the step, the inner first."""
        return (self.own, *self.around) if self.is_call else (self.own,)

    def inner(self, field: str) -> pb.Policy | None:
        """The innermost that has the field. A shadow has its own alone."""
        given = (self.own,) if self.is_shadow else self.inherited
        return next((policy for policy in given if has_field(policy, field)), None)


def has_field(policy: pb.Policy, field: str) -> bool:
    """Whether the message has the field."""
    return any(descriptor.name == field for descriptor, _ in policy.ListFields())


class PolicyKind(ABC):
    """One policy in graph files; it keeps nothing of a graph.

    Attributes:
        is_inherited: That of a graph or a node is a default of the steps in it that call a model; else it is refused
            on a node.
        why_no_stream: Why a step whose model is decoupled cannot have it; "": it can.
        condition_field: Field of its message that is a condition; "" where it has none.
        counters: What it counts of each step: (name of the metric after ``weft_graph_step_``, help).
    """

    field: ClassVar[str]
    is_inherited: ClassVar[bool] = False
    why_no_stream: ClassVar[str] = ""
    condition_field: ClassVar[str] = ""
    counters: ClassVar[Sequence[tuple[str, str]]] = ()

    def check(  # noqa: B027  # there may be nothing to check
        self, file: "GraphFile", policy: pb.Policy, path: str, around: Sequence[pb.Policy], report: "GraphReport"
    ) -> None:
        """Report values that can only be a mistake (G025, G018).

        Args:
            around: Those of node and graph, which ``policy`` overrides.
        """

    def condition_path(self, path: str) -> str:
        """Path of the condition within the ``Policy`` at ``path``; "" where there is none."""
        return f"{path}.{self.field}.{self.condition_field}" if self.condition_field else ""

    def where_instead(self, *, is_root: bool) -> str:
        """Where it belongs, if it is not inherited and stands on a node: ``the steps``."""
        return "the steps"

    @abstractmethod
    def plan(self, given: GivenPolicies, condition: Condition | None) -> PolicyPlan | None:
        """What holds for one step; None where the policy says nothing of it."""

    def plan_of_graph(self, message: pb.Graph, condition: Condition | None) -> PolicyPlan | None:
        """What holds for the answers of the whole graph; None for a policy of steps alone."""
        return None


@dataclass(frozen=True, slots=True)
class StepDefinition:
    """One step of a file.

    Attributes:
        name: Given, or made from its case or target; unique within the node unless the file repeats it.
        fallback: Its name need not be unique.
    """

    name: str
    path: str
    message: pb.Step
    fallback: "StepDefinition | None" = None
    is_shadow: bool = False

    def chain(self) -> Iterator["StepDefinition"]:
        """The step, its fallback, the fallback of that, and so on."""
        yield self
        if self.fallback is not None:
            yield from self.fallback.chain()


@dataclass(frozen=True, slots=True)
class NodeDefinition:
    """One node of a file.

    Attributes:
        steps: In declared order; shadows are among them only where the kind runs these itself.
        shadows: Shadow steps of any other node.
        customs: Steps that the kind runs beside these, by a key of its own.
    """

    name: str
    path: str
    message: pb.Node
    kind: KindSyntax | None
    kind_path: str
    steps: tuple[StepDefinition, ...]
    shadows: tuple[StepDefinition, ...] = ()
    customs: Mapping[int, StepDefinition] = field(default_factory=dict)

    def every_step(self) -> Iterator[StepDefinition]:
        """Steps, shadows and the fallbacks of all of them."""
        for step in (*self.steps, *self.shadows):
            yield from step.chain()


@dataclass(frozen=True, slots=True)
class GraphFile:
    """One parsed file.

    Attributes:
        foreign: Paths of the fields that its dialect does not have, which ``message`` is without.
        kinds: Those that a node may be, by their field in ``graph.proto``.
        policies: Those that a step may have, by their field in ``Policy``, the outermost first.
        nodes: By name; of two nodes of one name the first.
    """

    source: GraphSource
    name: str
    message: pb.Graph
    positions: Positions
    dialect: Dialect
    foreign: Sequence[str]
    root: str
    kinds: Mapping[str, KindSyntax] = field(repr=False)
    policies: Mapping[str, PolicyKind] = field(repr=False)
    nodes: Mapping[str, NodeDefinition] = field(repr=False)
    all_nodes: Sequence[NodeDefinition] = field(repr=False)

    @property
    def label(self) -> str:
        """``name/version``."""
        return f"{self.name}/{self.source.version}"

    @property
    def title(self) -> str:
        """``graph 'name'``, for messages."""
        return f"{self.dialect.platform} '{self.name}'"

    @property
    def is_batched(self) -> bool:
        """Whether tensors have a batch dimension."""
        return self.message.max_batch_size > 0

    def place(self, path: str) -> str:
        """``file:line:column`` of a field, for messages."""
        line, column = self.positions.find(path)
        return f"{self.source.file}:{line}:{column}"

    def place_in(self, path: str, index: int) -> str:
        """``file:line:column`` of a character of a string value, for messages."""
        line, column = self.positions.locate(path, index)
        return f"{self.source.file}:{line}:{column}"


class GraphReport:
    """Diagnostics of one compilation; what is said twice is kept once.

    Args:
        file: Name of the file that is compiled; what is said of it comes first.
    """

    def __init__(self, file: str) -> None:
        self._file = file
        self._found: dict[Diagnostic, None] = {}

    def error(self, code: str, file: GraphFile, path: str, message: str, *, is_name: bool = False) -> None:
        """An error at the value of the field ``path``, or at its name."""
        where = file.positions.find_name(path) if is_name else file.positions.find(path)
        self._add(code, file, where, message, "error")

    def error_at(self, code: str, file: GraphFile, path: str, index: int, message: str) -> None:
        """An error at character ``index`` of a string value."""
        self._add(code, file, file.positions.locate(path, index), message, "error")

    def info(self, code: str, file: GraphFile, path: str, message: str) -> None:
        """Something to know about the value of the field ``path``; nothing is wrong."""
        self._add(code, file, file.positions.find(path), message, "info")

    def warning(self, code: str, file: GraphFile, path: str, message: str) -> None:
        """A warning at the value of the field ``path``."""
        self._add(code, file, file.positions.find(path), message, "warning")

    def warning_at(self, code: str, file: GraphFile, path: str, index: int, message: str) -> None:
        """A warning at character ``index`` of a string value."""
        self._add(code, file, file.positions.locate(path, index), message, "warning")

    def refuse(self, file: GraphFile, path: str, fields: Iterable[tuple[str, bool]], why: str) -> None:
        """Report fields without effect (G018): those (name, is given) of the message at ``path`` that are given."""
        for name, is_given in fields:
            if is_given:
                where = f"{path}.{name}" if path else name
                self.error("G018", file, where, f"'{name}' has no effect {why}", is_name=True)

    def extend(self, diagnostics: list[Diagnostic]) -> None:
        """Diagnostics made elsewhere."""
        self._found.update(dict.fromkeys(diagnostics))

    @property
    def has_errors(self) -> bool:
        """Whether the graph cannot run."""
        return any(found.severity == "error" for found in self._found)

    def diagnostics(self) -> list[Diagnostic]:
        """Everything found, by file in the order first mentioned, then by position."""
        files = list(dict.fromkeys([self._file, *(found.file for found in self._found)]))
        return sorted(self._found, key=lambda found: (files.index(found.file), found.line, found.column))

    def _add(self, code: str, file: GraphFile, where: tuple[int, int], message: str, severity: str) -> None:
        source_line = file.positions.source_line(where[0])
        self._found[Diagnostic(file.source.file, *where, message, code, severity, source_line)] = None
