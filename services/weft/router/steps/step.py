"""One step of a running graph."""

import asyncio
from collections.abc import Callable
from functools import partial

from opentelemetry.trace import Span

from weft.base.errors import WeftError
from weft.base.observing import telemetry
from weft.language.plan import Frame, StepPlan
from weft.router.reporting.path import StepRecord
from weft.router.reporting.spans import end_step_span, start_step_span, step_attributes
from weft.router.reporting.step_counters import StepCounters
from weft.router.steps.base import Action, ErrorContext
from weft.router.steps.defaults import Defaults
from weft.router.steps.run import Run
from weft.router.steps.step_stream import StepStream


class Step:
    """A step that can run: here one without ``when``, fallback, limits and softness.

    Args:
        plan: What it is made of.
        action: What it does, policies included.
        error_context: The graph, for messages.
        clock_ns: What deadlines are measured on.
        counters: Every run is counted there.
        defaults: Of its outputs.
    """

    def __init__(
        self,
        plan: StepPlan,
        action: Action,
        error_context: ErrorContext,
        clock_ns: Callable[[], int],
        counters: StepCounters,
        defaults: Defaults,
    ) -> None:
        self.plan = plan
        self.error_context = error_context
        self.action = action
        self.defaults = defaults
        self._name = plan.name
        self._path = plan.path
        self._target = action.target
        self._model = action.model
        self._version = action.version
        self._timeout_ns = plan.timeout_ms * 1_000_000
        self._clock_ns = clock_ns
        self._counters = counters
        self._span_attributes = step_attributes(plan.name, plan.path) | action.span_attributes

    async def run(self, run: Run) -> bool:
        """Run the step, or skip it.

        Args:
            run: Of the node around the step.

        Returns:
            True: its outputs, or those of its fallback, are in the frame. False: ``when`` does not hold, or the step
            failed and is soft; its outputs are absent, or have their defaults.

        Raises:
            WeftError: It failed and is not soft; the message says where.

        No task is left when it returns, raises or is cancelled.
        """
        record = StepRecord(self._name, self._path, self._clock_ns(), self._target, self._model, self._version)
        run.record.steps.append(record)
        if self._timeout_ns:
            run = run.until(record.start_ns + self._timeout_ns)
        span = None
        if run.request.is_traced:
            span, run = self._traced(run)
        failure: BaseException | None = None
        try:
            await self.action.act(run, record)
            record.end_ns, record.status = self._clock_ns(), "OK"
            self._counters.latency.observe((record.end_ns - record.start_ns) / 1e9)
        except BaseException as error:
            failure = error
            self._failed(record, error)
            raise
        finally:
            if span is not None:
                stream = run.request.stream
                if isinstance(stream, StepStream) and stream.record is record and failure is None:
                    stream.when_over(partial(end_step_span, span, record))
                else:
                    end_step_span(span, record, failure)
            del failure  # it holds this frame
        return True

    def fill_defaults(self, frame: Frame) -> None:
        """The outputs are as if the step had not run: absent, or their defaults."""
        self.defaults.fill(frame)

    def _traced(self, run: Run) -> tuple[Span, Run]:
        """A span for the step, and the run under it."""
        span = start_step_span(self._path, self.action.kind, self._span_attributes, run.context)
        return span, run.under(telemetry.context_of(span, run.context))

    def _failed(self, record: StepRecord, error: BaseException) -> None:
        record.end_ns = self._clock_ns()
        if isinstance(error, WeftError):
            record.status = error.code
        elif not isinstance(error, asyncio.CancelledError):
            record.status = "INTERNAL"
        self._counters.count_failure(record.status)
