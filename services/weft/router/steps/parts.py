"""What a node, or a policy, is made of beside its plan."""

from typing import NamedTuple

from weft.language.plan import StepPlan
from weft.router.reporting.step_counters import StepCounters
from weft.router.runtime import Runtime
from weft.router.steps.base import ErrorContext
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
