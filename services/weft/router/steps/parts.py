"""Plans that can run, and what a node or a policy is made of beside its plan."""

from abc import abstractmethod
from typing import NamedTuple

from weft.language.plan import NodePlan, PolicyPlan, StepPlan
from weft.router.reporting.step_counters import StepCounters
from weft.router.runtime import Runtime
from weft.router.steps.base import Action, ErrorContext, Node
from weft.router.steps.step import Step


class NodeParts(NamedTuple):
    """What a node is made of, beside its plan.

    Attributes:
        steps: Those of the plan, in its order.
        customs: The same of its custom steps.
        error_context: The graph, for messages.
        runtime: Clock and chance.
    """

    steps: tuple[Step, ...]
    customs: tuple[Step, ...]
    error_context: ErrorContext
    runtime: Runtime


class PolicyParts(NamedTuple):
    """What the action of a policy is made of, beside the policy's plan.

    Attributes:
        step: The step that acts.
        error_context: The graph, for messages.
        runtime: Clock, chance and budgets.
        counters: Of the step.
    """

    step: StepPlan
    error_context: ErrorContext
    runtime: Runtime
    counters: StepCounters


class OperatorPlan(NodePlan):
    """A node of a kind of ``weft.router.operators``."""

    __slots__ = ()

    @abstractmethod
    def node(self, parts: NodeParts) -> Node:
        """The node, ready to run."""


class StepPolicyPlan(PolicyPlan):
    """What a policy of ``weft.router.policies`` says of one step."""

    __slots__ = ()

    @abstractmethod
    def wrap(self, action: Action, parts: PolicyParts) -> Action:
        """The action with this policy around it; made once, when the graph is loaded."""
