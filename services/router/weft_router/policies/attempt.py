"""One attempt among several: it has a number and a span of its own."""

from typing import TYPE_CHECKING

from weft_router.graph.plan import Frame
from weft_router.reporting.path import StepRun
from weft_router.reporting.spans import step_attributes, step_span
from weft_router.steps.base import Action, GraphRequest, StepPolicy

if TYPE_CHECKING:
    from opentelemetry.context import Context


class Attempt(StepPolicy):
    """Counts the attempt in the step's record, and records a span for it.

    Args:
        action: What is attempted.
        name, path: Of the step.
    """

    def __init__(self, action: Action, name: str, path: str) -> None:
        super().__init__(action)
        self._path = path
        self._attributes = step_attributes(name, path) | action.span_attributes

    async def act(
        self, frame: Frame, request: GraphRequest, deadline_ns: int | None, context: "Context | None", record: StepRun
    ) -> None:
        """As ``Action.act``."""
        record.attempts += 1
        if record.tried is None:
            record.tried = []
        if not request.is_traced:
            await self._action.act(frame, request, deadline_ns, context, record)
            return
        attributes = self._attributes | {"weft.attempt": record.attempts}
        with step_span(f"{self._path} attempt", self._action.kind, attributes, context) as (_, inner):
            await self._action.act(frame, request, deadline_ns, inner, record)
