"""One attempt among several: it has a number and a span of its own."""

from functools import partial

from typing_extensions import override

from weft.base.observing import telemetry
from weft.router.reporting.path import StepRecord
from weft.router.reporting.spans import end_span, start_step_span, step_attributes
from weft.router.steps.base import Action, PolicyAction
from weft.router.steps.run import Run
from weft.router.steps.step_stream import StepStream


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

    @override
    async def act(self, run: Run, record: StepRecord) -> None:
        record.attempts += 1
        if record.tried is None:
            record.tried = []
        if not run.request.is_traced:
            await self._action.act(run, record)
            return
        attributes = self._attributes | {"weft.attempt": record.attempts}
        span = start_step_span(f"{self._path} attempt", self._action.kind, attributes, run.context)
        try:
            await self._action.act(run.under(telemetry.context_of(span, run.context)), record)
        except BaseException as error:
            end_span(span, error)
            raise
        stream = run.request.stream
        if isinstance(stream, StepStream) and stream.record is record:
            stream.when_over(partial(end_span, span))
        else:
            end_span(span)
