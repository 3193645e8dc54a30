"""What a policy of steps is: the field that it reads, its checks, what it says of one step, and how it acts.

A retry, a hedge and a cache are policies; each is one module of ``weft.router.policies``. ``PolicyKind`` is the half
that the compiler asks, ``PolicyPlan`` the half that a compiled step carries.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from weft.language.plan import Condition, PolicyPlan
from weft_protos import graph_pb2 as pb

if TYPE_CHECKING:
    from weft.language.syntax.parse import GraphFile
    from weft.language.syntax.report import GraphReport


class GivenPolicies(NamedTuple):
    """The messages that say something of one step.

    Attributes:
        own: Of the step.
        around: Of node and graph, the inner first.
        is_call: Whether the step calls a model; any other inherits nothing.
        is_shadow: Whether the step is a shadow.
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
        field: Its field in ``Policy`` of ``graph.proto``.
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
            file: Where it stands.
            policy: The message that has the field.
            path: Of the field, for positions.
            around: Those of node and graph, which ``policy`` overrides.
            report: Receives what is wrong.
        """

    def condition_path(self, path: str) -> str:
        """Path of the condition within the ``Policy`` at ``path``; "" where there is none."""
        return f"{path}.{self.field}.{self.condition_field}" if self.condition_field else ""

    def where_instead(self, *, is_root: bool) -> str:
        """Where it belongs, if it is not inherited and stands on a node: ``the steps``."""
        return "the steps"

    @abstractmethod
    def plan(self, given: GivenPolicies, condition: Condition | None) -> PolicyPlan | None:
        """What holds for one step; None where the policy says nothing of it.

        Args:
            given: What the file says.
            condition: Of ``condition_field``, compiled.
        """

    def plan_of_graph(self, message: pb.Graph, condition: Condition | None) -> PolicyPlan | None:
        """What holds for the answers of the whole graph; None for a policy of steps alone."""
        return None
