"""One attempt among several: it has a number and a span of its own."""

from weft_router.reporting.path import StepRecord
from weft_router.reporting.spans import step_attributes, step_span
from weft_router.steps.base import Action, PolicyAction
from weft_router.steps.run import Run


class Attempt(PolicyAction):
    """Counts the attempt in the step's record, and records a span for it.

    Args:
        action: What is attempted.
        name, path: Of the step.
    """

    def __init__(self, action: Action, name: str, path: str) -> None:
        super().__init__(action)
        self._path = path
        self._attributes = step_attributes(name, path) | action.span_attributes

    async def act(self, run: Run, record: StepRecord) -> None:
        """As ``Action.act``."""
        record.attempts += 1
        if record.tried is None:
            record.tried = []
        if not run.request.is_traced:
            await self._action.act(run, record)
            return
        attributes = self._attributes | {"weft.attempt": record.attempts}
        with step_span(f"{self._path} attempt", self._action.kind, attributes, run.context) as (_, inner):
            await self._action.act(run.under(inner), record)
