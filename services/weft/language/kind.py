"""What a kind of node is to the compiler: the fields it takes, its checks, the names it brings, how its plan is built.

The other half of a kind is the class of its plans, ``NodePlan``: how a node runs, and how it is shown. Both stand in
one module of ``weft.router.operators``, and no other module asks which kind a node is.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from weft.language.plan import NodePlan
from weft_protos import graph_pb2 as pb

if TYPE_CHECKING:
    from weft.language.compiler.names import NodeNames, Wire
    from weft.language.compiler.nodes import NodeBuilder
    from weft.language.compiler.scope import Scope
    from weft.language.syntax.parse import GraphFile, NodeDefinition
    from weft.language.syntax.report import GraphReport
    from weft.language.types.signatures import TensorType


class NodeKind(ABC):
    """One kind of node; it keeps nothing of a graph.

    Attributes:
        plan: Class of its plans; their ``kind`` is the name of the kind's field in ``graph.proto``.
        step_fields: Fields of ``Step`` without an effect in other kinds: of ``case``, ``otherwise``, ``weight``,
            ``accept``, ``after``.
        chooses_by_when: ``when`` chooses among the steps, so that a false one makes no output absent.
        sees_answers: Conditions of a step see ``steps.<name>.ok`` of the steps before it.
        checks_outputs: ``build`` checks what steps give against the outputs that the node declares.
        custom_words: What one of its custom steps is, for messages.
    """

    plan: ClassVar[type[NodePlan]]
    step_fields: ClassVar[frozenset[str]] = frozenset()
    chooses_by_when: ClassVar[bool] = False
    sees_answers: ClassVar[bool] = False
    checks_outputs: ClassVar[bool] = False
    custom_words: ClassVar[str] = "a custom step"

    @property
    def name(self) -> str:
        """Its field in the ``oneof kind`` of ``Node``, and the word for it in messages."""
        return self.plan.kind

    def custom_steps(self, message: pb.Node, path: str) -> Iterator[tuple[int, str, pb.Step]]:
        """Steps that the node runs beside its ``step``: (key, path, message); none here.

        Args:
            message: The node.
            path: Of the kind's message.
        """
        yield from ()

    def conditions(self, message: pb.Node) -> Iterable[tuple[str, str]]:
        """Conditions of the node itself: (path within the kind's message, text or ""); none here."""
        return ()

    def check(self, file: "GraphFile", node: "NodeDefinition", report: "GraphReport") -> None:  # noqa: B027  # may be none
        """Report what is wrong with a node, whatever the models are."""

    def check_fields(self, file: "GraphFile", node: "NodeDefinition", report: "GraphReport") -> None:  # noqa: B027
        """Report fields without effect (G018) and values out of range (G025); not called for an ensemble's file."""

    def why_no_default(self, step: pb.Step) -> str:
        """Why a ``default`` of the step has no effect; "" where it has one."""
        if step.dependency == pb.Step.SOFT or step.when:
            return ""
        return "on a HARD step without 'when', which always gives its outputs; make it 'dependency: SOFT'"

    def why_no_stream(self, node: "NodeDefinition") -> str:
        """Why no step may give several responses to one request, and what to do; "" where any may."""
        return f"a {self.name} gives one response; use a step that does, too"

    def tensors_read(self, node: "NodeDefinition", names: "NodeNames") -> set[str]:
        """Tensors that the node itself reads beside its steps and conditions; none here."""
        return set()

    def inputs_read(self, node: "NodeDefinition") -> set[str]:
        """Inputs of the node that it reads itself; none here."""
        return set()

    def tensors_needed(self, node: "NodeDefinition", needed: set[str]) -> set[str]:
        """Tensors that the node itself cannot do without, beside those ``needed`` by its steps; none here."""
        return set()

    def custom_wires(self, node: "NodeDefinition", key: int, wires: Sequence["Wire"]) -> list["Wire"]:
        """The wires of a custom step that start at inputs of the node; here all of them."""
        return list(wires)

    @abstractmethod
    def outputs(self, node: "NodeDefinition", names: "NodeNames") -> Iterator[str]:
        """Outputs of a node that declares none."""

    def has_known_outputs(self, node: "NodeDefinition") -> bool:
        """Whether the file says which outputs there are; where it does not, that was reported."""
        return True

    def output_cure(self, name: str, given: Sequence[str]) -> str:
        """How to make the output ``name``, which nothing gives, of what there is; "" where there is no such way."""
        return ""

    @abstractmethod
    def build(
        self, builder: "NodeBuilder", scope: "Scope", promised: Mapping[str, "TensorType"]
    ) -> tuple[NodePlan | None, dict[str, "TensorType"]]:
        """Compile a node: its plan, None where an error was reported, and types of what it gives.

        Args:
            builder: Compiles steps and conditions.
            scope: The node, its inputs filled in.
            promised: Outputs that it declares.
        """
