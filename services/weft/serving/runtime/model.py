"""One loaded model version, and its admitting half: checks requests, queues them, and awaits their answers."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import ClassVar

from weft.base.core import CallContext, InferCall, InferResult
from weft.base.errors import InternalError, RequestCancelledError, ResourceExhaustedError, UnsupportedError, WeftError
from weft.base.observing.logs import get_logger
from weft.base.reshape import reshaped
from weft.base.signature import ModelSignature
from weft.base.statistics import ModelStatistics
from weft.base.tensors import num_elements
from weft.base.validation import scheduling_parameters, validate
from weft.serving.backends.base import Backend, InstanceContext, ModelContext
from weft.serving.queues.settings import SchedulerSettings
from weft.serving.request.request import InferenceRequest, SplitRequest, split_call
from weft.serving.runtime.dispatcher import Dispatcher
from weft.serving.scheduler.admission import CALL_PATH_HEADER, DeadlineAdmission, check_self_call, make_batch_key
from weft.serving.scheduler.rate_limiter import RateLimiter

#: Strings of one input that are checked on the event loop; checking one takes 0.1 us.
_MANY_STRINGS = 16_384


#: A call that fits its model, with the shapes that the model takes; its batch size; and its parts, calls of at most
#: ``max_batch_size`` rows, none where it is executed as it is.
CheckedCall = tuple[InferCall, int, Sequence[InferCall]]
_LOG = get_logger("weft.serving")
#: The answer to come.
_Answer = asyncio.Future[InferResult | WeftError]


class CallValidation:
    """Validates the calls of one model; reshapes and splits them. ``checks_strings``: it may take long."""

    def __init__(self, signature: ModelSignature, settings: SchedulerSettings) -> None:
        self._signature = signature
        self._max_rows = settings.max_batch_size
        self._can_split = settings.can_split
        has_strings = any(spec.datatype == "BYTES" for spec in signature.inputs)
        self.checks_strings = has_strings and settings.sequences is None
        self._reshape = call_reshaper(signature)

    def has_many_strings(self, call: InferCall) -> bool:
        """Whether ``check`` takes so long that it should run on a thread."""
        return any(
            tensor.datatype == "BYTES" and num_elements(tensor.shape) > _MANY_STRINGS for tensor in call.inputs.values()
        )

    def check(self, call: InferCall) -> CheckedCall:
        """The checked call. Raises InvalidArgumentError for one that does not fit the model."""
        num_rows = validate(call, self._signature, can_split=self._can_split)
        if self._reshape is not None:
            call = self._reshape(call)
        if not self._can_split or num_rows <= self._max_rows:
            return call, num_rows, ()
        return call, num_rows, split_call(call, num_rows, self._max_rows)


def call_reshaper(signature: ModelSignature) -> Callable[[InferCall], InferCall] | None:
    """Gives a call the shapes that the model takes, without a copy of its bytes; None: no input has ``reshape``."""
    specs = [(spec, spec.reshape) for spec in signature.inputs if spec.reshape is not None]
    if not specs:
        return None

    def reshape(call: InferCall) -> InferCall:
        inputs = dict(call.inputs)
        for spec, target in specs:
            if (tensor := inputs.get(spec.name)) is not None:
                inputs[spec.name] = tensor._replace(shape=reshaped(tensor.shape, spec.dims, target))
        return replace(call, inputs=inputs)

    return reshape


class ServedModel:
    """Answers requests for one model version, in batches, by its instances, of which there is at least one.

    Admits requests: validates them, splits those that are too large, queues them, and takes out of the queue those
    whose caller has left. ``Dispatcher`` does the rest. Every method is called on one event loop. ``statistics`` are
    those of this version when it was loaded before. Raises InvalidArgumentError if the settings cannot be served.
    """

    dispatcher_class: ClassVar[type[Dispatcher]] = Dispatcher

    def __init__(
        self,
        context: ModelContext,
        backend: type[Backend],
        settings: SchedulerSettings,
        instances: Sequence[InstanceContext],
        statistics: ModelStatistics | None = None,
        limiter: RateLimiter | None = None,
    ) -> None:
        self.signature = signature = context.signature
        settings.validate(signature.name)
        self.statistics = statistics or ModelStatistics(signature.name, signature.version)
        self._settings = settings
        dispatcher = self.dispatcher_class(context, backend, settings, instances, self.statistics, limiter)
        self._dispatcher = dispatcher
        self.crashed = dispatcher.crashed
        self._queue = dispatcher.queue
        self._validation = CallValidation(signature, settings)
        self._deadlines = DeadlineAdmission(settings, len(instances), dispatcher.times)
        self._knows_priority = settings.priority_levels > 0
        self._origins = frozenset(place.origin(signature) for place in instances)
        is_keyed = settings.is_batching and not dispatcher.num_slots
        self._batch_key = make_batch_key(signature.for_backend(), context.layout.buckets) if is_keyed else None

    async def start(self) -> None:
        """Load every instance, one after another, and accept requests. Raises as ``Dispatcher.start``."""
        await self._dispatcher.start()

    async def stop(self, *, grace_s: float) -> None:
        """Accept no more requests, answer those accepted before, and close the backends.

        Requests that are not answered after ``grace_s`` fail with UnavailableError. Batches are formed without delay
        meanwhile.
        """
        await self._dispatcher.stop(grace_s=grace_s)

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        """Validate, queue and execute one request; returns its answer, of a decoupled model all responses as one.

        Cancelling the awaiting task takes the request out of the queue at once; one that runs is flagged, and its
        answer dropped. Neither touches the other members of its batch.

        Raises:
            InvalidArgumentError: The request does not fit the model.
            ResourceExhaustedError: Its queue is full; carries ``retry_after_ms``.
            DeadlineExceededError: Its deadline or its queue timeout passed before it was executed, or it cannot be met.
            UnavailableError: The model is not ready, or is being stopped.
            InternalError: The model failed; the log has the cause under the same error id.
            WeftError: Any other error that the model answered with.
        """
        if self.signature.is_decoupled:
            return await self._collected(call, context)
        validation = self._validation
        if validation.checks_strings and validation.has_many_strings(call):
            request, answer = await self._accepted(call, context)
        else:
            try:
                request, answer = self._admit(validation.check(call), context)
            except WeftError as error:
                self._dispatcher.recorder.failed(error, context.arrival_ns, time.monotonic_ns())
                raise
        try:
            outcome = await answer
        except asyncio.CancelledError:
            if answer.cancelled():  # else it was answered, and counted, in the same turn of the loop
                self._dispatcher.answers.withdraw(request, _cancelled())
            raise
        if isinstance(outcome, WeftError):
            # A copy: this frame holds the answer, and an error that is raised holds its frames; the two together would
            # keep the request's tensors in memory until the garbage collector comes by.
            raise outcome.with_message(outcome.message)
        return outcome

    async def stream(
        self, call: InferCall, context: CallContext, *, is_collected: bool = False
    ) -> AsyncGenerator[InferResult, None]:
        """The responses of a decoupled model as it sends them, the last with ``is_final``.

        The model waits while ``weft.serving.request.stream.MAX_WAITING`` of them have not been read. Closing the
        generator, or cancelling the task that awaits it, withdraws the request as in ``infer``; later responses are
        dropped. ``is_collected``: one response with everything is wanted, of a model that ``can_collect``. Raises as
        ``infer``, also after some responses.
        """
        request, answer = await self._accepted(call, context, is_collected=is_collected)
        stream = request.stream
        if stream is None:
            raise UnsupportedError(f"model '{self.signature.name}' is not decoupled")
        try:
            async for result in stream:
                yield result
        finally:
            if not (stream.is_over or answer.done()):
                self._dispatcher.answers.withdraw(request, _cancelled())
            stream.close()

    async def _collected(self, call: InferCall, context: CallContext) -> InferResult:
        async with aclosing(self.stream(call, context, is_collected=True)) as responses:
            async for response in responses:
                if response.error is not None:
                    raise response.error
                if not response.is_null:
                    response.is_final = True
                    return response
        raise InternalError(f"model '{self.signature.name}' sent no response")

    async def _accepted(
        self, call: InferCall, context: CallContext, *, is_collected: bool = False
    ) -> tuple[InferenceRequest, _Answer]:
        """The request, validated and queued, and its answer to come; one that is refused counts as failed."""
        validation = self._validation
        try:
            if validation.checks_strings and validation.has_many_strings(call):
                checked = await asyncio.to_thread(validation.check, call)
            else:
                checked = validation.check(call)
            return self._admit(checked, context, is_collected=is_collected)
        except WeftError as error:
            self._dispatcher.recorder.failed(error, context.arrival_ns, time.monotonic_ns())
            raise
        except asyncio.CancelledError:
            self._dispatcher.recorder.failed(_cancelled(), context.arrival_ns, time.monotonic_ns())
            raise

    def _admit(
        self, checked: CheckedCall, context: CallContext, *, is_collected: bool = False
    ) -> tuple[InferenceRequest, _Answer]:
        call, num_rows, parts = checked
        dispatcher = self._dispatcher
        if not dispatcher.is_open:
            raise dispatcher.not_ready().refused()
        if self.crashed.includes_all:
            raise self.crashed.error().refused()
        priority, timeout_us = scheduling_parameters(call.parameters) if call.parameters else (0, 0)
        if priority and not self._knows_priority:
            self._log_unknown_priority(priority)
        request = InferenceRequest(call, context, num_rows, priority, timeout_us, is_collected=is_collected)
        if CALL_PATH_HEADER in context.headers:
            check_self_call(self.signature.name, self._origins, request, self._queue)
            dispatcher.check_call(request)
        answer = request.answer = dispatcher.loop.create_future()
        if self.signature.is_decoupled:
            dispatcher.decoupled.open(request)
        now_ns = time.monotonic_ns()
        if parts:
            self._enqueue_parts(SplitRequest(request, parts, self._settings.max_batch_size), now_ns)
        else:
            self._enqueue(request, now_ns)
        if request.stream is not None:
            dispatcher.decoupled.add(request)
        dispatcher.request_added(now_ns)
        return request, answer

    def _log_unknown_priority(self, priority: int) -> None:
        """Log once that requests ask for an order that the model does not know; as with Triton they are served."""
        self._knows_priority = True
        _LOG.info(
            f"a request for model '{self.signature.name}' has priority {priority}, but its configuration has no "
            f"priority_levels: it is served in order of arrival; declare dynamic_batching {{ priority_levels }}"
        )

    def _enqueue(self, request: InferenceRequest, now_ns: int) -> None:
        dispatcher = self._dispatcher
        if self._batch_key is not None:
            request.batch_key = self._batch_key(request.call.inputs)
        if request.context.deadline_ns is not None and not dispatcher.num_slots:  # how long a stream takes is unknown
            self._deadlines.check(request, self._queue, now_ns)
        try:
            self._queue.add(request, now_ns)
        except ResourceExhaustedError as error:
            if dispatcher.is_due:  # it may be full only of what a free instance is about to take
                dispatcher.dispatch()
                self._enqueue(request, now_ns)
                return
            error.retry_after_ms = dispatcher.retry_after.hint_ms(self._queue.num_waiting)
            raise
        if self._settings.preserve_ordering:
            dispatcher.answers.expect(request)

    def _enqueue_parts(self, split: SplitRequest, now_ns: int) -> None:
        """Queue every part; or none, and raise the error of the first that cannot be."""
        whole = split.whole
        limit = self._queue.limit_for(whole)
        if 0 < limit < len(split.parts):
            raise ResourceExhaustedError(
                f"Exceeds maximum queue size: {whole.num_rows} rows are {len(split.parts)} requests of at most "
                f"{self._settings.max_batch_size} rows, {limit} may wait; send fewer rows in one request"
            )
        try:
            for part in split.parts:
                self._enqueue(part, now_ns)
                whole.priority, whole.enqueue_ns = part.priority, now_ns
        except WeftError:
            self._dispatcher.answers.forget(split)
            if whole.answer is not None:
                whole.answer.cancel()  # nobody awaits the answer of a part that runs already
            raise


def _cancelled() -> RequestCancelledError:
    return RequestCancelledError("the request was cancelled")
