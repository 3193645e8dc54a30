"""``ServedModel``: one loaded model version; checks requests, queues them and awaits their answers."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace

from typing_extensions import override

from weft.base.core import CallContext, InferCall, InferResult
from weft.base.errors import (
    InternalError,
    RequestCancelledError,
    ResourceExhaustedError,
    UnavailableError,
    UnsupportedError,
    WeftError,
)
from weft.base.observing.logs import get_logger
from weft.base.signature import ModelSignature
from weft.base.statistics import ModelStatistics
from weft.base.tensors import num_elements, reshaped
from weft.base.validation import scheduling_parameters, validate
from weft.serving.backends.base import Backend, InstanceContext, ModelContext
from weft.serving.queues.sequence import SequenceQueue
from weft.serving.queues.settings import LengthBuckets, SchedulerSettings, num_to_hold
from weft.serving.request.request import InferenceRequest, SplitRequest, split_call
from weft.serving.runtime.dispatcher import Dispatcher
from weft.serving.runtime.execution import BackgroundThread, BatchExecution
from weft.serving.runtime.instance import Instance, Lane
from weft.serving.scheduler.admission import CALL_PATH_HEADER, check_self_call, make_batch_key
from weft.serving.scheduler.batcher import Batcher, make_sequence_batcher
from weft.serving.scheduler.rate_limiter import RateLimiter

#: Strings of one input that are checked on the event loop; checking one takes 0.1 us.
_MANY_STRINGS = 16_384

_LOG = get_logger("weft.serving")
#: A call that fits its model, with the shapes that the model takes; its batch size; and its parts, calls of at most
#: ``max_batch_size`` rows, none where it is executed as it is.
_CheckedCall = tuple[InferCall, int, Sequence[InferCall]]
#: The answer to come.
_Answer = asyncio.Future[InferResult | WeftError]


def call_reshaper(signature: ModelSignature) -> Callable[[InferCall], InferCall] | None:
    """Return a function that applies ``reshape`` to a call, without copying bytes; None: no input has it."""
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


class ServedModel(Dispatcher):
    """Answers requests for one model version, in batches, by its instances, of which there is at least one.

    Validates requests, splits those that are too large, queues them, and removes those whose caller has left;
    ``Dispatcher`` does the rest. Every method is called on one event loop. ``statistics`` continue those of earlier
    loads of this version. Raises InvalidArgumentError if the settings cannot be served.
    """

    def __init__(
        self,
        context: ModelContext,
        backend: type[Backend],
        settings: SchedulerSettings,
        instances: Sequence[InstanceContext],
        statistics: ModelStatistics | None = None,
        limiter: RateLimiter | None = None,
    ) -> None:
        signature = context.signature
        settings.validate(signature.name)
        counters = statistics or ModelStatistics(signature.name, signature.version)
        super().__init__(context, backend, settings, instances, counters, limiter)
        # Those of stateful sequences are checked at once, however long that takes: the next one would overtake.
        has_strings = any(spec.datatype == "BYTES" for spec in signature.inputs)
        self._may_have_many_strings = has_strings and settings.sequences is None
        self._reshape = call_reshaper(signature)
        self._knows_priority = settings.priority_levels > 0
        self._origins = frozenset(place.origin(signature) for place in instances)
        is_keyed = settings.is_batching and not self.num_slots
        self._batch_key = make_batch_key(signature.for_backend(), context.layout.buckets) if is_keyed else None

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        """Validate, queue and execute one request; return its answer, for a decoupled model all responses as one.

        Cancelling the awaiting task takes the request out of the queue at once; if it runs, it is flagged and its
        answer dropped. Neither affects the other members of its batch.

        Raises:
            InvalidArgumentError: The request does not fit the model.
            ResourceExhaustedError: Its queue is full; carries ``retry_after_ms``.
            DeadlineExceededError: Its deadline or its queue timeout passed before it was executed, or it cannot be met.
            UnavailableError: The model is not ready, or is being stopped.
            InternalError: The model failed; the log has the cause under the same error id.
        """
        if self.signature.is_decoupled:
            return await self._collected(call, context)
        if self._may_have_many_strings and _has_many_strings(call):
            request, answer = await self._accepted(call, context)
        else:
            try:
                request, answer = self._admit(self._check(call), context)
            except WeftError as error:
                self.recorder.failed(error, context.arrival_ns, time.monotonic_ns())
                raise
        try:
            outcome = await answer
        except asyncio.CancelledError:
            if answer.cancelled():  # else it was answered, and counted, in the same turn of the loop
                self.answers.withdraw(request, _cancelled())
            raise
        if isinstance(outcome, WeftError):
            # A copy: this frame holds the answer, and an error that is raised holds its frames; the two together would
            # keep the request's tensors in memory until the garbage collector comes by.
            raise outcome.with_message(outcome.message)
        return outcome

    async def stream(
        self, call: InferCall, context: CallContext, *, is_collected: bool = False
    ) -> AsyncGenerator[InferResult, None]:
        """Yield the responses of a decoupled model as it sends them, the last with ``is_final``.

        The model waits while ``weft.serving.request.stream.MAX_WAITING`` of them are unread. Closing the generator, or
        cancelling the task that awaits it, withdraws the request as in ``infer``; later responses are dropped.
        ``is_collected``: collect all responses into one, for a model that ``can_collect``. Raises like ``infer``, also
        after some responses.
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
                self.answers.withdraw(request, _cancelled())
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
        """Validate and queue the request; returns it and its pending answer. A rejected request counts as failed."""
        try:
            if self._may_have_many_strings and _has_many_strings(call):
                checked = await asyncio.to_thread(self._check, call)
            else:
                checked = self._check(call)
            return self._admit(checked, context, is_collected=is_collected)
        except WeftError as error:
            self.recorder.failed(error, context.arrival_ns, time.monotonic_ns())
            raise
        except asyncio.CancelledError:
            self.recorder.failed(_cancelled(), context.arrival_ns, time.monotonic_ns())
            raise

    def _check(self, call: InferCall) -> _CheckedCall:
        num_rows = validate(call, self.signature, can_split=self._settings.can_split)
        if self._reshape is not None:
            call = self._reshape(call)
        max_rows = self._settings.max_batch_size
        if not self._settings.can_split or num_rows <= max_rows:
            return call, num_rows, ()
        return call, num_rows, split_call(call, num_rows, max_rows)

    def _admit(
        self, checked: _CheckedCall, context: CallContext, *, is_collected: bool = False
    ) -> tuple[InferenceRequest, _Answer]:
        call, num_rows, parts = checked
        if not self.is_open:
            raise self._not_ready().refused()
        if self.crashed.includes_all:
            raise self.crashed.error().refused()
        priority, timeout_us = scheduling_parameters(call.parameters) if call.parameters else (0, 0)
        if priority and not self._knows_priority:
            self._log_unknown_priority(priority)
        request = InferenceRequest(call, context, num_rows, priority, timeout_us, is_collected=is_collected)
        if CALL_PATH_HEADER in context.headers:
            check_self_call(self.signature.name, self._origins, request, self.queue)
            self._idle.check_call(request)
        answer = request.answer = self.loop.create_future()
        if self.signature.is_decoupled:
            self.answers.open(request)
        now_ns = time.monotonic_ns()
        if parts:
            self._enqueue_parts(SplitRequest(request, parts, self._settings.max_batch_size), now_ns)
        else:
            self._enqueue(request, now_ns)
        if request.stream is not None:
            self.answers.follow(request)
        self._request_added(now_ns)
        return request, answer

    def _log_unknown_priority(self, priority: int) -> None:
        """Log once that requests name an undefined priority level; as in Triton they are served."""
        self._knows_priority = True
        _LOG.info(
            f"a request for model '{self.signature.name}' has priority {priority}, but its configuration has no "
            f"priority_levels: it is served in order of arrival; declare dynamic_batching {{ priority_levels }}"
        )

    def _enqueue(self, request: InferenceRequest, now_ns: int) -> None:
        if self._batch_key is not None:
            request.batch_key = self._batch_key(request.call.inputs)
        if request.context.deadline_ns is not None and not self.num_slots:  # how long a stream takes is unknown
            self.times.check(request, self.queue, now_ns)
        try:
            self.queue.add(request, now_ns)
        except ResourceExhaustedError as error:
            if self.is_due:  # it may be full only of what a free instance is about to take
                self.dispatch()
                self._enqueue(request, now_ns)
                return
            error.retry_after_ms = self.times.retry_after_ms(self.queue.num_waiting)
            raise
        if self._settings.preserve_ordering:
            self.answers.expect(request)

    def _enqueue_parts(self, split: SplitRequest, now_ns: int) -> None:
        """Queue all parts, or none: raises the error of the first that cannot be queued."""
        whole = split.whole
        limit = self.queue.limit_for(whole)
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
            self.answers.forget(split)
            if whole.answer is not None:
                whole.answer.cancel()  # nobody awaits the answer of a part that runs already
            raise


def _cancelled() -> RequestCancelledError:
    return RequestCancelledError("the request was cancelled")


def _has_many_strings(call: InferCall) -> bool:
    """Whether checking the call is so slow that it should run on a thread."""
    return any(
        tensor.datatype == "BYTES" and num_elements(tensor.shape) > _MANY_STRINGS for tensor in call.inputs.values()
    )


class SequenceModel(ServedModel):
    """Answers the requests of stateful sequences, one after another on one instance.

    A sequence ends when one of its requests is withdrawn, waiting or running, and when its instance is lost; its other
    requests then fail, and the client must start it again.
    """

    sequences: SequenceQueue
    _on_free: Callable[[], None]

    @property
    def has_sequences(self) -> bool:
        """Whether a sequence has started and not ended, even if it has no request now."""
        return self.sequences.num_sequences > 0

    def continues(self, call: InferCall) -> bool:
        """Whether the call continues a sequence that has started here."""
        parameters, sequences = call.parameters, self._settings.sequences
        return (
            self.is_open
            and not (sequences is not None and sequences.is_iterative)
            and parameters.get("sequence_id") in self.sequences
            and not parameters.get("sequence_start")
        )

    def expect_no_more(self) -> None:
        """Let ``stop`` not wait for started sequences, since nobody can send requests any more."""
        self._all_over.set()

    def when_free(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` whenever the last sequence has ended."""
        self._on_free = callback

    @override
    def _make_queue(self) -> SequenceQueue:
        self._all_over = asyncio.Event()  # the model is closed and its last sequence has ended, or is not waited for
        self._on_free = lambda: None
        self._had_sequences = False
        self.sequences = SequenceQueue(self._settings, self.signature.name, self._instances)
        return self.sequences

    @override
    def _make_batcher(self, buckets: LengthBuckets | None) -> Batcher:
        return make_sequence_batcher(self.sequences, self._settings, self._idle, num_to_hold=num_to_hold())

    @override
    async def stop(self, *, grace_s: float) -> None:
        """Stop the model; started sequences continue within the grace, and no other starts."""
        end_s = time.monotonic() + grace_s
        self.sequences.is_closing = True
        if self.is_open and self.sequences.num_sequences:
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._all_over.wait()
        await super().stop(grace_s=max(end_s - time.monotonic(), 0.0))

    @override
    def dispatch(self) -> None:
        super().dispatch()
        if self.sequences.num_sequences:
            self._had_sequences = True
            return
        if self.sequences.is_closing:
            self._all_over.set()
        if self._had_sequences:
            self._had_sequences = False
            self._on_free()

    @override
    def _drop(self, request: InferenceRequest) -> None:
        super()._drop(request)
        self._dispatch_soon()  # others of its sequence are to be answered, and its slot is free

    @override
    def _on_executed(self, instance: Lane | BackgroundThread, execution: BatchExecution) -> None:
        again = {
            request
            for request, answer in zip(execution.requests, execution.answers, strict=True)
            if answer is None and request.answer is not None and not request.answer.done()
        }
        self.sequences.executed(self._running[instance], time.monotonic_ns(), again)
        super()._on_executed(instance, execution)

    @override
    def _on_crash(self, instance: Instance, reason: str) -> None:
        if not reason:
            self.sequences.regain(instance)
            super()._on_crash(instance, reason)
            return
        self.sequences.lose(instance)
        for request in self._running.get(instance, ()):
            # The state is lost too, so that another try would begin in the middle of the sequence.
            if request.answer is not None and not request.answer.done():
                self.answers.withdraw(request, UnavailableError(f"instance {instance.name} is lost: {reason}"))
        super()._on_crash(instance, reason)
        self.dispatch()
