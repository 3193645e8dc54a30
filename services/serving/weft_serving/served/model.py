"""One loaded model version: its queue, its instances, its statistics; lives on the event loop."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from weft_common.core import CallContext, InferCall, InferResult
from weft_common.errors import (
    InternalError,
    RequestCancelledError,
    ResourceExhaustedError,
    UnavailableError,
    UnsupportedError,
    WeftError,
)
from weft_common.observing import telemetry
from weft_common.observing.logs import get_logger
from weft_common.statistics import ModelStatistics
from weft_common.validation import scheduling_parameters
from weft_serving.backends.base import Backend, InstanceContext, ModelContext
from weft_serving.request.call_path import CALL_PATH_HEADER, SelfCalls
from weft_serving.request.request import InferenceRequest
from weft_serving.request.split import SplitRequest
from weft_serving.scheduler.admission import DeadlineAdmission
from weft_serving.scheduler.batcher import Batcher, make_batcher
from weft_serving.scheduler.grouping import make_batch_key
from weft_serving.scheduler.queue import PriorityQueue
from weft_serving.scheduler.rate_limiter import RateLimiter
from weft_serving.scheduler.retry_after import RetryAfter
from weft_serving.scheduler.seats import SeatBatcher
from weft_serving.scheduler.sequence import SequenceQueue
from weft_serving.scheduler.settings import SchedulerSettings, num_to_hold
from weft_serving.served import spans
from weft_serving.served.alarm import Alarm
from weft_serving.served.answers import Answers
from weft_serving.served.call_validation import CallValidation, CheckedCall
from weft_serving.served.decoupled import DecoupledRequests
from weft_serving.served.instance import Execution, Instance
from weft_serving.served.outages import Outages
from weft_serving.served.rate_limited import idle_instances
from weft_serving.served.recorder import Recorder

_LOG = get_logger("weft.serving")

#: Least time that backends get to close.
_MIN_CLOSE_S = 5.0


class ServedModel:
    """Answers requests for one model version, in batches, by its instances.

    Every method is called on one event loop. Model code runs on the threads of the instances alone.

    Args:
        context: The model version.
        backend: The class that runs it.
        settings: Queue and batching.
        instances: Where to run it, at least one.
        statistics: Of this version when it was loaded before; None: it begins.
        limiter: Of what instances share; None: nothing is limited.

    Raises:
        InvalidArgumentError: The settings cannot be served.
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
        self.signature = signature = context.signature
        settings.validate(signature.name)
        self.statistics = statistics or ModelStatistics(signature.name, signature.version)
        self._recorder = Recorder(self.statistics)
        self._settings = settings
        self._queue: PriorityQueue | SequenceQueue = PriorityQueue(settings)
        self.statistics.count_pending_by_level = self._queue.num_by_level
        buckets = context.layout.buckets
        self._batcher: Batcher = make_batcher(settings, buckets, num_to_hold=num_to_hold())
        self._num_seats = backend.num_seats(context)
        is_keyed = settings.is_batching and not self._num_seats
        self._batch_key = make_batch_key(signature.for_backend(), buckets) if is_keyed else None
        self._intake = CallValidation(signature, settings)
        self._admission = DeadlineAdmission(settings, len(instances))
        self._answers = Answers(signature.name, self._recorder, is_ordered=settings.preserve_ordering, drop=self._drop)
        self._decoupled = DecoupledRequests(
            signature, self._recorder, withdraw=self._withdraw, on_end=self._on_stream_end
        )
        self._self_calls = SelfCalls(signature.name, [place.origin(signature) for place in instances])
        self.outages = Outages(signature.name, len(instances))
        limit_s = settings.execution_timeout_us / 1e6
        self._instances = [
            Instance(context, backend, place, self._on_executed, self._on_outage, limit_s) for place in instances
        ]
        self._idle = idle_instances(limiter, self._instances, instances, lambda: self._queue, self._dispatch)
        self._seats: SeatBatcher | None = None
        if self._num_seats:
            self._seats = SeatBatcher(settings, self._num_seats, self._idle, num_to_hold=num_to_hold())
            self._batcher = self._seats
        self._running: dict[Instance, Sequence[InferenceRequest]] = {}
        self.statistics.occupancy = self._occupancy
        self._is_accepting = False
        self._is_dispatch_due = False
        self._alarm: Alarm | None = None
        self._drained: asyncio.Event = asyncio.Event()
        num_at_once = len(instances) * max(self._num_seats, 1)
        self._retry_after = RetryAfter(num_at_once, has_sequences=settings.sequences is not None)

    async def start(self) -> None:
        """Every instance is loaded, one after another, and requests are accepted.

        Raises:
            WeftError: Why an instance cannot be loaded; those loaded before are closed again.
        """
        self._loop = asyncio.get_running_loop()
        self._alarm = Alarm(self._loop, self._dispatch)
        try:
            self._idle.open()
            for instance in self._instances:
                await instance.load()
        except BaseException:
            await self._close(_MIN_CLOSE_S)
            raise
        self._idle.extend(self._instances)
        self._is_accepting = True

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        """The answer to one request, which is checked, queued and executed; all that a decoupled model says, as one.

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
        request, answer = await self._accepted(call, context)
        try:
            outcome = await answer
        except asyncio.CancelledError:
            if answer.cancelled():  # else it was answered, and counted, in the same turn of the loop
                self._withdraw(request, _cancelled())
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

        The model waits when ``weft_serving.request.stream.MAX_WAITING`` of them were not asked for yet. Closing the
        generator, or cancelling the task that awaits it, withdraws the request as in ``infer``; what is still sent is
        dropped.

        Args:
            call: The request.
            context: Of the call.
            is_collected: One response with everything is wanted, of a model that ``can_collect``.

        Raises:
            WeftError: As ``infer``, also after some responses.
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
                self._withdraw(request, _cancelled())
            stream.close()

    async def stop(self, *, grace_s: float) -> None:
        """No request is accepted any longer, those accepted before are answered, and the backends are closed.

        Args:
            grace_s: Time in seconds for queued and running requests; those not answered by then fail with
                UnavailableError. Batches are formed without delay meanwhile.
        """
        self._is_accepting = False
        end_s = time.monotonic() + grace_s
        self._dispatch()
        if not self._drained.is_set():
            try:
                await asyncio.wait_for(self._drained.wait(), grace_s)
            except TimeoutError:
                self._abandon()
        await self._close(max(end_s - time.monotonic(), _MIN_CLOSE_S))

    async def _collected(self, call: InferCall, context: CallContext) -> InferResult:
        """The one response of a decoupled model to a request that is collected."""
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
    ) -> tuple[InferenceRequest, "asyncio.Future[InferResult | WeftError]"]:
        """The request, checked and in the queue, and its answer to come; one that is refused is counted."""
        try:
            return self._admit(await self._intake.checked(call), context, is_collected=is_collected)
        except WeftError as error:
            self._recorder.failed(error, context.arrival_ns, time.monotonic_ns())
            raise
        except asyncio.CancelledError:
            self._recorder.failed(_cancelled(), context.arrival_ns, time.monotonic_ns())
            raise

    def _admit(
        self, checked: CheckedCall, context: CallContext, *, is_collected: bool
    ) -> tuple[InferenceRequest, "asyncio.Future[InferResult | WeftError]"]:
        """The request, in the queue, and its answer to come."""
        call, num_rows, parts = checked
        if not self._is_accepting:
            raise self._not_ready().refused()
        if self.outages.is_total:
            raise self.outages.error().refused()
        priority, timeout_us = scheduling_parameters(call.parameters)
        request = InferenceRequest(call, context, num_rows, priority, timeout_us, is_collected=is_collected)
        if CALL_PATH_HEADER in context.headers:
            self._self_calls.check(request, self._queue)
            self._idle.check_call(request)
        answer = request.answer = self._loop.create_future()
        if self.signature.is_decoupled:
            self._decoupled.open(request)
        now_ns = time.monotonic_ns()
        if parts:
            self._enqueue_parts(SplitRequest(request, parts, self._settings.max_batch_size), now_ns)
        else:
            self._enqueue(request, now_ns)
        if request.stream is not None:
            self._decoupled.add(request)
        self.statistics.pending_count = len(self._queue)
        if not self._idle:
            self._wake_at(self._queue.next_expiry_ns(), now_ns)
        elif not self._settings.is_batching:
            self._dispatch()
        else:
            self._dispatch_soon()  # requests that arrive in the same turn of the loop may share a batch
        return request, answer

    def _enqueue(self, request: InferenceRequest, now_ns: int) -> None:
        if self._batch_key is not None:
            request.batch_key = self._batch_key(request.call.inputs)
        if request.context.deadline_ns is not None and self._seats is None:  # what a stream takes is not known
            self._admission.check(request, self._queue, now_ns)
        try:
            self._queue.add(request, now_ns)
        except ResourceExhaustedError as error:
            if self._is_dispatch_due:  # it may be full only of what a free instance is about to take
                self._dispatch()
                self._enqueue(request, now_ns)
                return
            error.retry_after_ms = self._retry_after.hint_ms(len(self._queue))
            raise
        if self._settings.preserve_ordering:
            self._answers.expect(request)

    def _enqueue_parts(self, split: SplitRequest, now_ns: int) -> None:
        """Every part waits; or none, and the error of the first that cannot is raised."""
        whole = split.whole
        limit = self._settings.policy_of(self._settings.level_of(whole.priority)).max_queue_size
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
            self._answers.forget(split)
            if whole.answer is not None:
                whole.answer.cancel()  # a part that runs already has nobody to answer
            raise

    def _dispatch_soon(self) -> None:
        """``_dispatch`` is called once when the loop has done what is due now."""
        if not self._is_dispatch_due:
            self._is_dispatch_due = True
            self._loop.call_soon(self._dispatch)

    def _dispatch(self) -> None:
        """Expired requests are answered, free instances have what they may run now, the timer is set for the rest."""
        self._is_dispatch_due = False
        queue, now_ns = self._queue, time.monotonic_ns()
        for request, error in queue.expire(now_ns):
            self._answers.give_up(request, error, now_ns)
        wake_ns = None
        while self._idle and queue:
            requests, wake_ns, wanted = self._batcher.next_batch(queue, now_ns, may_wait=self._is_accepting)
            if not requests:
                break
            queue.take(requests, now_ns)
            instance = self._idle.take(wanted)
            if self._seats is not None:
                self._seats.seat(requests, instance)
            self._running[instance] = requests
            instance.execute(requests)
        self.statistics.pending_count = len(queue)
        self._wake_at(wake_ns, now_ns)
        self._wake_at(queue.next_expiry_ns(), now_ns)
        self._check_drained()

    def _wake_at(self, at_ns: int | None, now_ns: int) -> None:
        if at_ns is not None and self._alarm is not None:
            self._alarm.set(at_ns, now_ns)

    def _on_executed(self, instance: Instance, execution: Execution) -> None:
        """A batch has run: the instance gets the next one first, then the members get their answers."""
        del self._running[instance]
        self._idle.give_back(instance, is_lost=instance in self.outages)
        self._dispatch()
        requests = execution.requests
        if not requests:
            return
        duration_ns = execution.end_ns - execution.start_ns
        if self._seats is None:  # else the requests are at work yet
            self._retry_after.measured(len(requests), duration_ns)
        if not all(isinstance(answer, WeftError) for answer in execution.answers):
            self._recorder.executed(execution)
            self._admission.measured(execution.num_rows, duration_ns, execution.end_ns)
        self._answers.deliver(execution)
        if telemetry.is_enabled():
            spans.record_execution(self.signature.name, instance.name, execution)

    def _on_stream_end(self, request: InferenceRequest) -> None:
        """A request of a decoupled model has ended, and has left its seat if it had one."""
        if self._seats is not None and self._seats.leave(request):
            self._retry_after.measured(1, time.monotonic_ns() - request.start_ns)
            self._dispatch_soon()
        self._check_drained()

    def _on_outage(self, instance: Instance, reason: str) -> None:
        """The instance takes no batches, or does so again; requests that no instance is left for fail."""
        if not reason:
            self.outages.end(instance)
            self.statistics.restart_count += not instance.is_hung  # else it has come back by itself
            if instance not in self._running:
                self._idle.append(instance)
            self._dispatch()
            return
        self.outages.begin(instance, reason, is_hung=instance.is_hung)
        self._idle.discard(instance)
        if self.outages.is_total:
            for request in list(self._queue):
                self._withdraw(request, self.outages.error())
            self._check_drained()

    def _drop(self, request: InferenceRequest) -> None:
        """A request that nobody waits for any longer is out of the queue, or flagged if it runs."""
        request.cancel()
        self._queue.remove(request)
        self.statistics.pending_count = len(self._queue)

    def _withdraw(self, request: InferenceRequest, error: WeftError) -> None:
        """The request is dropped, and answered with ``error``."""
        self._drop(request)
        self._answers.give_up(request, error, time.monotonic_ns())

    def _abandon(self) -> None:
        """Whatever is still queued or running fails."""
        now_ns = time.monotonic_ns()
        running = [request for requests in self._running.values() for request in requests]
        for request in [*self._queue, *running, *self._decoupled.unfinished]:
            self._drop(request)
            if request.answer is not None and not request.answer.done():
                self._answers.give_up(request, self._not_ready(), now_ns)

    def _check_drained(self) -> None:
        if not (self._is_accepting or self._running or self._queue or self._decoupled.unfinished):
            self._drained.set()

    async def _close(self, grace_s: float) -> None:
        """Every idle backend is closed that takes at most ``grace_s`` seconds; the others close when they return."""
        if self._alarm is not None:
            self._alarm.close()
            self._alarm = None
        self._idle.close()
        closing = [(instance, instance.close()) for instance in self._instances]
        idle = [closed for instance, closed in closing if instance not in self._running and not instance.is_loading]
        if idle:
            await asyncio.wait(idle, timeout=grace_s)
        for instance, closed in closing:
            if not closed.done():
                _LOG.warning("instance %s still runs; it closes when its model returns", instance.name)
                instance.abort()

    def _occupancy(self) -> float:
        """As ``ModelStatistics.occupancy``."""
        num_instances = len(self._instances)
        if self._seats is not None:
            return (len(self._seats) + len(self._queue)) / (num_instances * self._num_seats)
        num_rows = num_instances * max(self._settings.max_batch_size, 1)
        return len(self._running) / num_instances + len(self._queue) / num_rows

    def _not_ready(self) -> UnavailableError:
        return UnavailableError(
            f"model '{self.signature.name}' version {self.signature.version} is not at ready state: it is loading or "
            "being unloaded; try again later"
        )


def _cancelled() -> RequestCancelledError:
    return RequestCancelledError("the request was cancelled")
