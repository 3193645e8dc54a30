"""What a node is made of, beside its plan."""

from typing import NamedTuple

from weft_router.runtime import Runtime
from weft_router.steps.base import ErrorContext
from weft_router.steps.step import Step


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
