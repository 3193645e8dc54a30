"""The call of a decoupled model: any number of responses, the first of which is the step's answer."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any

from opentelemetry.trace import INVALID_SPAN, Span, get_current_span

from weft.base.cancellation import cancel_and_wait
from weft.base.core import CallContext, InferResult
from weft.base.errors import WeftError
from weft.language.plan import CallPlan, Frame, NodePlan, StepPlan
from weft.router.reporting.path import StepRecord
from weft.router.steps.base import ErrorContext
from weft.router.steps.call import CallAction
from weft.router.steps.run import Run
from weft.router.steps.step_stream import StepStream, StreamParts
from weft.router.target import Target


class StreamAction(CallAction):
    """Opens a stream and reads its first response, which policies see; the request's ``stream`` has the rest.

    So the step is tried again only before its first response, and its latency is the time to the first response. The
    step's timeout is that of the whole stream. For a request that is collected, the one response to a unary call is the
    stream.

    Args:
        plan, call, target, error_context, node: As of ``CallAction``.
        parts: Of its streams.
    """

    def __init__(
        self,
        plan: StepPlan,
        call: CallPlan,
        target: Target,
        error_context: ErrorContext,
        node: NodePlan,
        parts: StreamParts,
    ) -> None:
        super().__init__(plan, call, target, error_context, node)
        self._parts = parts

    async def act(self, run: Run, record: StepRecord) -> None:
        """As ``Action.act``; unless this raises, close the stream. It may have no response at all."""
        frame, request = run.frame, run.request
        captured = () if request.captures is None else request.captures.get(self._path, ())
        try:
            call, _, is_fitted = self._call(frame, request.scope, captured)
        except WeftError as error:
            raise self._error_context.wrap(error, self.where) from error
        context = CallContext(
            run.deadline_ns,
            request.headers,
            trace_context=run.context,
            arrival_ns=record.start_ns,
            tried=record.tried,
            priority=request.scope.priority,
        )
        if request.is_collected:
            results = _only(self._target_object.infer(call, context))
        else:
            results = self._target_object.stream_infer(call, context)
        span = get_current_span(run.context) if request.is_traced else INVALID_SPAN
        await _ModelStream(self, self._parts, results, record, captured, span, is_fitted=is_fitted).open(run)

    def accept(self, stream: "_ModelStream", result: InferResult, frame: Frame) -> None:
        """Write a response into ``frame``, its parameters into ``stream``. Raises WeftError for a bad one.

        It may have any number of rows: a decoupled model answers when it likes, not row by row.
        """
        restored = self._store(result.outputs, frame, -1, is_fitted=stream.is_fitted)
        self._capture(stream.captured, result.outputs, restored, stream.outputs, -1)
        stream.parameters = dict(result.parameters)

    def placed(self, error: WeftError) -> WeftError:
        """The error as the client sees it."""
        return self._error_context.wrap(error, self.where)


class _ModelStream(StepStream):
    """The further responses of a decoupled model.

    While a response is on its way to the client one is read ahead: models often tell the end after their last response.

    Attributes:
        is_fitted: Whether the batch dimension of an input had to be added or taken away.
        captured: Names of the outputs that the client requested by the step's path.
    """

    def __init__(
        self,
        action: StreamAction,
        parts: StreamParts,
        results: AsyncGenerator[InferResult, None],
        record: StepRecord,
        captured: Sequence[str],
        span: Span,
        *,
        is_fitted: bool,
    ) -> None:
        super().__init__(parts, record)
        self.is_fitted = is_fitted
        self.captured = captured
        self._action = action
        self._results = results
        self._span = span
        self._is_final = False
        self._ahead: asyncio.Task[InferResult | None] | None = None

    async def settle(self, timeout_s: float) -> None:
        """Read ahead until ``has_ended`` is settled for the latest response, for at most so many seconds."""
        if not (self._is_final or self._is_over):
            await asyncio.wait((self._reading(),), timeout=timeout_s)

    @property
    def _is_known_last(self) -> bool:
        if self._is_final:
            return True
        ahead = self._ahead
        if ahead is None or not ahead.done() or ahead.cancelled() or ahead.exception() is not None:
            return False
        result = ahead.result()
        return result is None or result.is_null

    async def _read(self, run: Run) -> bool:
        record = self.record
        try:
            while (result := await self._next()) is not None:
                self._is_final = result.is_final
                if not result.is_null:
                    self._action.accept(self, result, run.frame)
                    if result.model_version:
                        record.version = result.model_version
                    if self._span is not INVALID_SPAN:
                        self._span.add_event("response", {"weft.response": self.num_responses + 1})
                    return True
        except WeftError as error:
            raise self._action.placed(error) from error
        return False

    async def _close(self) -> None:
        try:
            if self._ahead is not None:
                await cancel_and_wait((self._ahead,))
                self._ahead = None
        finally:
            await self._results.aclose()

    async def _next(self) -> InferResult | None:
        """The next response as it came; None after the last."""
        if not self.num_responses:  # nobody else asks yet
            return await anext(self._results, None)
        try:
            return await self._reading()
        finally:
            self._ahead = None

    def _reading(self) -> "asyncio.Task[InferResult | None]":
        if self._ahead is None:
            self._ahead = asyncio.create_task(_next_of(self._results))
        return self._ahead


async def _next_of(results: AsyncGenerator[InferResult, None]) -> InferResult | None:
    return await anext(results, None)


async def _only(answer: Coroutine[Any, Any, InferResult]) -> AsyncGenerator[InferResult, None]:
    """A stream of one response."""
    yield await answer
