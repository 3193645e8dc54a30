"""Calls of models: one answer, or a stream of responses."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from typing import Any

from opentelemetry.trace import INVALID_SPAN, Span, get_current_span
from typing_extensions import override

from weft.base.cancellation import cancel_and_wait
from weft.base.core import TIMES, TIMES_HEADER, CallContext, InferCall, InferResult, RequestedOutput
from weft.base.errors import InternalError, InvalidArgumentError, WeftError
from weft.base.observing import telemetry
from weft.base.signature import OPTIONAL_OUTPUTS_PARAMETER, TensorSpec
from weft.base.tensors import WireTensor
from weft.language.plan import CallPlan, Frame, NodePlan, StepPlan
from weft.router.reporting.path import StepRecord
from weft.router.reporting.spans import call_attributes
from weft.router.steps.action import Action, Defaults, ErrorContext, repeated
from weft.router.steps.responses import StepStream, StreamParts
from weft.router.steps.run import Run
from weft.router.target import Target
from weft.router.tensors import broken_promise, fitted_input, full_rank, misfit, restored_outputs


class CallAction(Action):
    """Calls a model; tensors are passed on without copies."""

    kind = telemetry.CLIENT

    def __init__(
        self,
        plan: StepPlan,
        call: CallPlan,
        target: Target,
        error_context: ErrorContext,
        node: NodePlan,
        parts: StreamParts,
    ) -> None:
        self._parts = parts
        self._target_object = target
        self._signature = signature = call.signature
        shown_version = call.model_version or signature.version
        super().__init__(
            f"{plan.path} -> {call.model_name}@{shown_version}",
            target.name,
            call.model_name,
            shown_version,
            call_attributes(call.model_name, shown_version, target, is_stream=signature.is_decoupled),
        )
        self._step_name = plan.name
        self._path = plan.path
        self._sent_version = call.model_version
        self._error_context = error_context
        is_batching = signature.max_batch_size > 0
        ranks = {spec.name: full_rank(spec, is_batching=is_batching) for spec in signature.inputs}
        self._needed = frozenset(spec.name for spec in signature.inputs if not spec.is_optional)
        self._inputs = [(name, slot, ranks.get(name)) for name, slot in plan.inputs]
        self._constants = plan.constants
        self._declared = declared = {spec.name: spec for spec in signature.outputs}
        self._outputs = [(name, slot, declared[name]) for name, slot in plan.outputs]
        self._optional_outputs = plan.optional_outputs.union(
            name for name, spec in declared.items() if spec.is_optional
        )
        self._defaults = Defaults(plan, node) if plan.defaults else None
        self._around = node
        self._requested = tuple(RequestedOutput(binding.name, {}) for binding in plan.outputs)
        self._is_batching = is_batching
        self._keeps_rows = plan.keeps_rows
        self._restores = is_batching != error_context.is_batching

    @override
    async def act(self, run: Run, record: StepRecord) -> None:
        frame, request = run.frame, run.request
        captured = () if request.captures is None else request.captures.get(self._path, ())
        try:
            call, context, num_rows, is_fitted = self._call(run, record, captured)
            result = await self._target_object.infer(call, context)
            if not self._keeps_rows:
                num_rows = -1
            restored = self._store(result.outputs, frame, num_rows, is_fitted=is_fitted)
            if captured:
                self._capture(captured, result.outputs, restored, request.captured, num_rows)
        except WeftError as error:
            raise self._error_context.wrap(self._explained(error, frame), self.where) from error
        if context.trailing_metadata:
            record.counts = times_of(dict(context.trailing_metadata)) or record.counts
        if result.model_version:
            record.version = result.model_version
        if result.parameters:
            request.response_parameters.update(result.parameters)

    def _call(self, run: Run, record: StepRecord, captured: Sequence[str]) -> tuple[InferCall, CallContext, int, bool]:
        """The call, its rows (-1: none), and whether the batch dimension of an input was added or removed."""
        frame, request = run.frame, run.request
        scope = request.scope
        inputs: dict[str, WireTensor] = {}
        is_fitted = False
        num_rows = -1
        for name, slot, rank in self._inputs:
            tensor = frame[slot]
            if tensor is None:
                continue
            if rank is not None and len(tensor.shape) != rank:
                tensor = fitted_input(tensor, rank, self._signature, name)
                is_fitted = True
            inputs[name] = tensor
            if self._is_batching and num_rows < 0 and tensor.shape:
                num_rows = tensor.shape[0]
        if self._constants:
            if not inputs:  # then constants are the only row
                is_fitted = self._restores
                num_rows = 1 if self._is_batching else -1
            for name, tensor, is_batched in self._constants:
                inputs[name] = repeated(tensor, num_rows if is_batched else 1)
        requested = self._requested_with(captured) if captured else self._requested
        count = num_rows if num_rows > 0 else 1
        call = InferCall(self.model, self._sent_version, scope.request_id, scope.parameters, inputs, requested, count)
        context = CallContext(
            run.deadline_ns,
            request.headers,
            trace_context=run.context,
            arrival_ns=record.start_ns,
            tried=record.tried,
            priority=scope.priority,
            root=request.root,
        )
        return call, context, num_rows, is_fitted

    def _explained(self, error: WeftError, frame: Frame) -> WeftError:
        absent = [(name, slot) for name, slot, _ in self._inputs if frame[slot] is None and name in self._needed]
        if error.code != InvalidArgumentError.code or not absent:
            return error
        sources = {slot: step.name for step in self._around.steps for _, slot in step.outputs}
        specs = self._around.specs
        reasons = [
            f"'{name}' takes '{specs[slot].name if slot in specs else name}', which "
            + (f"step '{sources[slot]}' did not give" if slot in sources else "is not there")
            for name, slot in absent
        ]
        return error.with_message(f"{error.message} Input {', input '.join(reasons)}")

    def _requested_with(self, captured: Sequence[str]) -> tuple[RequestedOutput, ...]:
        known = {output.name for output in self._requested}
        return (*self._requested, *(RequestedOutput(name, {}) for name in captured if name not in known))

    def _store(
        self, outputs: dict[str, WireTensor], frame: Frame, num_rows: int, *, is_fitted: bool
    ) -> dict[str, WireTensor]:
        """Check the response against the model's signature, and write it into the frame."""
        restored = restored_outputs(outputs, self._signature) if is_fitted and self._restores else outputs
        for name, slot, spec in self._outputs:
            tensor = outputs.get(name)
            if tensor is None or misfit(tensor, spec, has_batch=self._is_batching, num_rows=num_rows):
                if tensor is not None or name not in self._optional_outputs:
                    raise self._fault(spec, tensor, outputs, num_rows)
                frame[slot] = None
                continue
            frame[slot] = restored[name]
        if self._defaults is not None:
            self._defaults.complete(frame)
        return restored

    def _capture(
        self,
        names: Sequence[str],
        outputs: Mapping[str, WireTensor],
        restored: Mapping[str, WireTensor],
        captured: dict[str, WireTensor],
        num_rows: int,
    ) -> None:
        for name in names:
            spec, tensor = self._declared[name], outputs.get(name)
            if tensor is None:
                continue
            if misfit(tensor, spec, has_batch=self._is_batching, num_rows=num_rows):
                raise self._fault(spec, tensor, outputs, num_rows)
            captured[f"{self._path}/{name}"] = restored[name]

    def _fault(
        self, spec: TensorSpec, tensor: WireTensor | None, outputs: Mapping[str, WireTensor], num_rows: int
    ) -> InternalError:
        if tensor is None:
            return InternalError(
                f"output '{spec.name}' of step '{self._step_name}' is missing in the answer, which has "
                f"{', '.join(outputs) or 'no output'}; model '{self.model}' declares it. A model that may leave it out "
                f'says so in its configuration: parameters {{ key: "{OPTIONAL_OUTPUTS_PARAMETER}" value {{ '
                f'string_value: "{spec.name}" }} }}'
            )
        fault = misfit(tensor, spec, has_batch=self._is_batching, num_rows=num_rows)
        return broken_promise(self.model, spec, fault)


class StreamAction(CallAction):
    """Opens a stream and reads its first response, which policies see; the rest stays in the request's ``stream``.

    So a step is retried only before its first response, and its latency is the time to it. The step's timeout covers
    the whole stream. For a request that is collected, a unary call gives all responses as one.
    """

    @override
    async def act(self, run: Run, record: StepRecord) -> None:
        request = run.request
        captured = () if request.captures is None else request.captures.get(self._path, ())
        try:
            call, context, _, is_fitted = self._call(run, record, captured)
        except WeftError as error:
            raise self.placed(error) from error
        if request.is_collected:
            results = _only(self._target_object.infer(call, context), context)
        else:
            results = self._target_object.stream_infer(call, context)
        span = get_current_span(run.context) if request.is_traced else INVALID_SPAN
        await _ModelStream(self, self._parts, results, record, captured, span, is_fitted=is_fitted).open(run)

    def accept(self, stream: "_ModelStream", result: InferResult, frame: Frame) -> None:
        """Write a response to ``frame``, its parameters to ``stream``. Raises WeftError for an invalid one.

        It may have any number of rows, because a decoupled model need not answer row by row.
        """
        restored = self._store(result.outputs, frame, -1, is_fitted=stream.is_fitted)
        self._capture(stream.captured, result.outputs, restored, stream.outputs, -1)
        stream.parameters = dict(result.parameters)
        if TIMES_HEADER in stream.parameters:
            stream.record.counts = times_of(stream.parameters)

    def placed(self, error: WeftError) -> WeftError:
        """The error as the client sees it."""
        return self._error_context.wrap(error, self.where)


class _ModelStream(StepStream):
    """The further responses of a decoupled model.

    Reads one response ahead while one is being sent: models often signal the end after their last response.

    Attributes:
        is_fitted: Whether the batch dimension of an input was added or removed.
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

    @override
    async def settle(self, timeout_s: float) -> None:
        """Read ahead, for at most that many seconds, until it is known whether the latest response is the last."""
        if not (self._is_final or self._is_over):
            await asyncio.wait((self._reading(),), timeout=timeout_s)

    @property
    @override
    def _is_known_last(self) -> bool:
        if self._is_final:
            return True
        ahead = self._ahead
        if ahead is None or not ahead.done() or ahead.cancelled() or ahead.exception() is not None:
            return False
        result = ahead.result()
        return result is None or result.is_null

    @override
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

    @override
    async def _close(self) -> None:
        try:
            if self._ahead is not None:
                await cancel_and_wait((self._ahead,))
                self._ahead = None
        finally:
            await self._results.aclose()

    async def _next(self) -> InferResult | None:
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


async def _only(answer: Coroutine[Any, Any, InferResult], context: CallContext) -> AsyncGenerator[InferResult, None]:
    result = await answer
    times = {name: text for name, text in context.trailing_metadata if name == TIMES_HEADER}
    result.parameters = {**result.parameters, **times}
    yield result


def times_of(told: dict[str, Any]) -> dict[str, float]:
    """Take from what came with an answer the times of its call; empty if there are none."""
    with contextlib.suppress(ValueError):  # of a server of another kind
        return dict(zip(TIMES, map(float, str(told.pop(TIMES_HEADER, "")).split(",")), strict=False))
    return {}
