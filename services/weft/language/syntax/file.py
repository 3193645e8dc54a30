"""A parsed graph file: message, source positions, nodes by name, and the report that collects its errors.

``KindSyntax`` and ``PolicyKind`` are the interfaces by which node kinds and step policies appear in files.
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
        name: Name of the graph; "": use the name in the file.
    """

    text: str | bytes
    file: str
    name: str = ""
    version: str = "1"


class ModelCatalog(Protocol):
    """The models that targets serve."""

    def find(self, model_name: str, version: str) -> tuple[str, ModelSignature] | None:
        """The target that serves the model, and its signature; version "" means the default one."""

    def names(self) -> list[str]:
        """Every model name, to suggest one for a misspelt name."""


@runtime_checkable
class ModelFaults(Protocol):
    """Optional interface of a catalog: why models that exist are not served."""

    def fault(self, model_name: str) -> str:
        """Why a model that ``find`` does not return is not served; "" if unknown."""


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
    """A node kind in files: its fields and checks; keeps no state of a graph.

    Attributes:
        plan: Class of its plans; their ``kind`` is the name of the kind's field in ``graph.proto``.
        step_fields: Which of the ``Step`` fields ``case``, ``otherwise``, ``weight``, ``accept``, ``after`` it uses.
        chooses_by_when: ``when`` chooses among the steps, so that a false one makes no output absent.
        sees_answers: Conditions of a step see ``steps.<name>.ok`` of the steps before it.
        custom_words: Name of one of its custom steps in messages.
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
        """Steps that the node runs besides its ``step``: (key, path, message); by default none."""
        yield from ()

    def conditions(self, message: pb.Node) -> Iterable[tuple[str, str]]:
        """Conditions of the node itself: (path within the kind's message, text or ""); by default none."""
        return ()

    def check(self, file: "GraphFile", node: "NodeDefinition", report: "GraphReport") -> None:  # noqa: B027  # may be none
        """Report errors of a node that do not depend on models."""

    def check_fields(self, file: "GraphFile", node: "NodeDefinition", report: "GraphReport") -> None:  # noqa: B027
        """Report fields without effect (G018) and values out of range (G025)."""

    def why_no_default(self, step: pb.Step) -> str:
        """Why a ``default`` of the step has no effect; "" if it has one."""
        if step.dependency == pb.Step.SOFT or step.when:
            return ""
        return "on a HARD step without 'when', which always gives its outputs; make it 'dependency: SOFT'"

    def why_no_stream(self, node: "NodeDefinition") -> str:
        """Why no step may give several responses to one request, and the cure; "" if any may."""
        return f"a {self.name} gives one response; use a step that does, too"


class GivenPolicies(NamedTuple):
    """The policy messages that apply to one step.

    Attributes:
        is_call: Whether the step calls a model; other steps inherit nothing.
    """

    own: pb.Policy
    around: Sequence[pb.Policy]
    is_call: bool
    is_shadow: bool = False

    @property
    def inherited(self) -> Sequence[pb.Policy]:
        """Messages that apply to the step, the inner first."""
        return (self.own, *self.around) if self.is_call else (self.own,)

    def inner(self, field: str) -> pb.Policy | None:
        """The innermost message that has the field. A shadow has only its own."""
        given = (self.own,) if self.is_shadow else self.inherited
        return next((policy for policy in given if has_field(policy, field)), None)


def has_field(policy: pb.Policy, field: str) -> bool:
    """Whether the message has the field."""
    return any(descriptor.name == field for descriptor, _ in policy.ListFields())


class PolicyKind(ABC):
    """One policy in graph files; keeps no state of a graph.

    Attributes:
        is_inherited: On a graph or node, it is a default for the steps in it that call a model; else it is rejected on
            a node.
        why_no_stream: Why a step with a decoupled model cannot have it; "": it can.
        condition_field: Field of its message that is a condition; "" if it has none.
        counters: Its counters for each step: (name of the metric after ``weft_graph_step_``, help).
    """

    field: ClassVar[str]
    is_inherited: ClassVar[bool] = False
    why_no_stream: ClassVar[str] = ""
    condition_field: ClassVar[str] = ""
    counters: ClassVar[Sequence[tuple[str, str]]] = ()

    def check(  # noqa: B027  # there may be nothing to check
        self, file: "GraphFile", policy: pb.Policy, path: str, around: Sequence[pb.Policy], report: "GraphReport"
    ) -> None:
        """Report values that are certainly mistakes (G025, G018).

        Args:
            around: Those of node and graph, which ``policy`` overrides.
        """

    def condition_path(self, path: str) -> str:
        """Path of the condition within the ``Policy`` at ``path``; "" if there is none."""
        return f"{path}.{self.field}.{self.condition_field}" if self.condition_field else ""

    def where_instead(self, *, is_root: bool) -> str:
        """For messages: where to set the policy instead of on a node, if steps do not inherit it."""
        return "the steps"

    @abstractmethod
    def plan(self, given: GivenPolicies, condition: Condition | None) -> PolicyPlan | None:
        """The compiled policy of one step; None if it does not apply."""

    def plan_of_graph(self, message: pb.Graph, condition: Condition | None) -> PolicyPlan | None:
        """The compiled policy of the whole graph's answers; None if it applies only to steps."""
        return None


@dataclass(frozen=True, slots=True)
class StepDefinition:
    """One step of a file.

    Attributes:
        name: Given, or derived from its case or target; unique within the node unless the file repeats it.
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
        steps: In declared order; with shadows only if the kind runs these itself.
        shadows: Shadow steps of any other node.
        customs: Steps that the kind runs besides these, by a key of its own.
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
        foreign: Paths of fields that its dialect does not have, removed from ``message``.
        kinds: Node kinds, by their field in ``graph.proto``.
        policies: Step policies, by their field in ``Policy``, the outermost first.
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

    def place(self, path: str, at: int | None = None) -> str:
        """``file:line:column`` of a field, or of character ``at`` of a string value, for messages."""
        line, column = self.positions.locate(path, at)
        return f"{self.source.file}:{line}:{column}"


class GraphReport:
    """Diagnostics of one compilation, without duplicates.

    Args:
        file: Name of the compiled file; its diagnostics come first.
    """

    def __init__(self, file: str) -> None:
        self._file = file
        self._found: dict[Diagnostic, None] = {}

    def error(
        self, code: str, file: GraphFile, path: str, message: str, *, at: int | None = None, is_name: bool = False
    ) -> None:
        """Add an error at the value of the field ``path``, at character ``at`` of a string value, or at its name."""
        where = file.positions.find_name(path) if is_name else file.positions.locate(path, at)
        self._add(code, file, where, message, "error")

    def info(self, code: str, file: GraphFile, path: str, message: str) -> None:
        """Add a note on the value of the field ``path``; nothing is wrong."""
        self._add(code, file, file.positions.find(path), message, "info")

    def warning(self, code: str, file: GraphFile, path: str, message: str, *, at: int | None = None) -> None:
        """Add a warning at the value of the field ``path``, or at character ``at`` of a string value."""
        self._add(code, file, file.positions.locate(path, at), message, "warning")

    def refuse(self, file: GraphFile, path: str, fields: Iterable[tuple[str, bool]], why: str) -> None:
        """Report the given ones of ``fields`` (name, is given) of the message at ``path`` as without effect (G018)."""
        for name, is_given in fields:
            if is_given:
                where = f"{path}.{name}" if path else name
                self.error("G018", file, where, f"'{name}' has no effect {why}", is_name=True)

    def extend(self, diagnostics: list[Diagnostic]) -> None:
        """Add diagnostics made elsewhere."""
        self._found.update(dict.fromkeys(diagnostics))

    @property
    def has_errors(self) -> bool:
        """Whether the graph cannot run."""
        return any(found.severity == "error" for found in self._found)

    def diagnostics(self) -> list[Diagnostic]:
        """All diagnostics, by file in the order first mentioned, then by position."""
        files = list(dict.fromkeys([self._file, *(found.file for found in self._found)]))
        return sorted(self._found, key=lambda found: (files.index(found.file), found.line, found.column))

    def _add(self, code: str, file: GraphFile, where: tuple[int, int], message: str, severity: str) -> None:
        source_line = file.positions.source_line(where[0])
        self._found[Diagnostic(file.source.file, *where, message, code, severity, source_line)] = None
