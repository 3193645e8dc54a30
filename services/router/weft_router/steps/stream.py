"""The call of a decoupled model: any number of responses, the first of which is the step's answer."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any

from opentelemetry.trace import INVALID_SPAN, Span, get_current_span

from weft_common.cancellation import cancel_and_wait
from weft_common.core import CallContext, InferResult, ParameterValue
from weft_common.errors import RequestCancelledError, WeftError
from weft_common.tensors import WireTensor
from weft_router.admission import InflightLimit
from weft_router.graph.plan import CallPlan, Frame, NodePlan, StepPlan
from weft_router.reporting.path import StepRecord
from weft_router.reporting.step_counters import StepCounters
from weft_router.steps.base import ErrorContext
from weft_router.steps.call import CallAction
from weft_router.steps.run import GraphRequest, Run
from weft_router.target import Target


class StreamAction(CallAction):
    """Opens a stream and reads its first response, which policies see; the request's ``stream`` has the rest.

    So the step is tried again only before its first response, and its latency is the time to the first response. The
    step's timeout is that of the whole stream. For a request that is collected, the one response to a unary call is the
    stream.

    Args:
        plan, call, target, error_context, node: As of ``CallAction``.
        clock_ns: What deadlines are measured on.
        counters: Of the step.
        admission: Counts streams that are open; None where ``max_inflight`` is 0.
    """

    def __init__(
        self,
        plan: StepPlan,
        call: CallPlan,
        target: Target,
        error_context: ErrorContext,
        node: NodePlan,
        clock_ns: Callable[[], int],
        counters: StepCounters,
        admission: InflightLimit | None,
    ) -> None:
        super().__init__(plan, call, target, error_context, node)
        self._is_soft = plan.is_soft
        self._clock_ns = clock_ns
        self._counters = counters
        self._admission = admission

    async def act(self, run: Run, record: StepRecord) -> None:
        """As ``Action.act``; unless this raises, close the stream. It may have no response at all."""
        frame, request = run.frame, run.request
        captured = () if request.captures is None else request.captures.get(self._path, ())
        try:
            call, _, is_fitted = self._call(frame, request.scope, captured)
            if self._admission is not None:
                self._admission.enter()
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
        stream = OpenStream(self, results, record, captured, span, is_fitted=is_fitted)
        try:
            await stream.read(frame)
        except BaseException:
            await stream.close()
            raise
        request.stream = stream

    def accept(self, stream: "OpenStream", result: InferResult, frame: Frame) -> None:
        """Write a response into ``frame``, its parameters into ``stream``. Raises WeftError for a bad one.

        It may have any number of rows: a decoupled model answers when it likes, not row by row.
        """
        restored = self._store(result.outputs, frame, -1, is_fitted=stream.is_fitted)
        self._capture(stream.captured, result.outputs, restored, stream.outputs, -1)
        stream.parameters = dict(result.parameters)

    def placed(self, error: WeftError, record: StepRecord) -> WeftError:
        """The error as the client sees it; after the first response, which no policy sees, it is counted here."""
        if record.responses:
            record.status = error.code
            self._counters.count_failure(error.code)
        return self._error_context.wrap(error, self.where)

    def may_end_early(self, error: WeftError, request: GraphRequest) -> bool:
        """Whether a failure after the first response ends the stream as if it were complete."""
        deadline_ns = request.scope.deadline_ns
        is_out_of_time = deadline_ns is not None and self._clock_ns() >= deadline_ns
        return self._is_soft and not (error.code == "DEADLINE_EXCEEDED" and is_out_of_time)

    def ended(self, record: StepRecord) -> None:
        """Record the end of the stream."""
        record.end_ns = self._clock_ns()
        if self._admission is not None:
            self._admission.leave(record.end_ns - record.start_ns)


class OpenStream:
    """The further responses of a decoupled model.

    While a response is on its way to the client one is read ahead: models often tell the end after their last response.

    Attributes:
        record: Of the step.
        on_end: Called once, the latest first, when the stream has ended, with the error that ended it, if one did: the
            spans around the call end then.
        is_fitted: Whether the batch dimension of an input had to be added or taken away.
        captured: Names of the outputs that the client requested by the step's path.
        outputs: Those of the latest response, by path and name.
        parameters: Of the latest response.
    """

    def __init__(
        self,
        action: StreamAction,
        results: AsyncGenerator[InferResult, None],
        record: StepRecord,
        captured: Sequence[str],
        span: Span,
        *,
        is_fitted: bool,
    ) -> None:
        self.record = record
        self.on_end: list[Callable[[BaseException | None], None]] = []
        self.is_fitted = is_fitted
        self.captured = captured
        self.outputs: dict[str, WireTensor] = {}
        self.parameters: dict[str, ParameterValue] = {}
        self._action: StreamAction | None = action
        self._results = results
        self._span = span
        self._failure: WeftError | None = None
        self._is_final = False
        self._ahead: asyncio.Task[InferResult | None] | None = None

    @property
    def has_response(self) -> bool:
        """Whether there was one at all."""
        return self.record.responses > 0

    @property
    def num_responses(self) -> int:
        """Responses so far."""
        return self.record.responses

    @property
    def has_ended(self) -> bool:
        """Whether it is known that no response follows the latest."""
        if self._is_final or self._action is None:
            return True
        ahead = self._ahead
        if ahead is None or not ahead.done() or ahead.cancelled() or ahead.exception() is not None:
            return False
        result = ahead.result()
        return result is None or result.is_null

    async def settle(self, timeout_s: float) -> None:
        """Read ahead until ``has_ended`` is settled for the latest response, for at most so many seconds."""
        if not (self._is_final or self._action is None):
            await asyncio.wait((self._reading(),), timeout=timeout_s)

    async def read(self, frame: Frame) -> bool:
        """Read the next response into ``frame``, in place of the one before; False: there are no more.

        Raises:
            WeftError: The model failed, or its response is not as it declares; the message says where.

        Cancelling the awaiting task cancels the call.
        """
        action, record = self._action, self.record
        if action is None:
            return False
        try:
            while (result := await self._next()) is not None:
                if not result.is_null:
                    action.accept(self, result, frame)
                    record.responses += 1
                    if result.model_version:
                        record.version = result.model_version
                    self._is_final = result.is_final
                    if self._span is not INVALID_SPAN:
                        self._span.add_event("response", {"weft.response": record.responses})
                    return True
        except WeftError as error:
            self._failure = action.placed(error, record)
            raise self._failure from error
        self._end()
        self._tell_end(None)
        return False

    async def read_on(self, run: Run) -> bool:
        """As ``read``, for a response after the first: a failure of a soft step only ends the stream."""
        action = self._action
        try:
            return await self.read(run.frame)
        except WeftError as error:
            if action is None or not action.may_end_early(error, run.request):
                raise
            self.record.error = error.message
            return False

    async def close(self) -> None:
        """End the call; cancel it if it still runs."""
        if self._action is not None:
            is_complete = self.has_ended
            if self.record.status == "OK" and not is_complete:
                self.record.status = "CANCELLED"
            self._end()
            try:
                if self._ahead is not None:
                    await cancel_and_wait((self._ahead,))
                    self._ahead = None
                await self._results.aclose()
            finally:
                cancelled = None if is_complete else RequestCancelledError("the stream was closed before its end")
                self._tell_end(self._failure or cancelled)

    async def _next(self) -> InferResult | None:
        """The next response as it came; None after the last."""
        if not self.has_response:  # nobody else asks yet
            return await anext(self._results, None)
        try:
            return await self._reading()
        finally:
            self._ahead = None

    def _reading(self) -> "asyncio.Task[InferResult | None]":
        if self._ahead is None:
            self._ahead = asyncio.create_task(_next_of(self._results))
        return self._ahead

    def _end(self) -> None:
        if self._action is not None:
            self._action.ended(self.record)
            self._action = None

    def _tell_end(self, failure: WeftError | None) -> None:
        self._failure = None
        while self.on_end:
            self.on_end.pop()(failure)


async def _next_of(results: AsyncGenerator[InferResult, None]) -> InferResult | None:
    return await anext(results, None)


async def _only(answer: Coroutine[Any, Any, InferResult]) -> AsyncGenerator[InferResult, None]:
    """A stream of one response."""
    yield await answer
