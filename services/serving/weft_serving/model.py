"""One loaded model version: its queue, its instances, its statistics; lives on the event loop."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Iterable, Sequence

from weft_common import telemetry
from weft_common.core import CallContext, InferCall, InferResult
from weft_common.errors import RequestCancelledError, ResourceExhaustedError, UnavailableError, WeftError
from weft_common.logs import get_logger
from weft_common.statistics import ModelStatistics
from weft_common.tensors import num_elements
from weft_common.validation import scheduling_parameters, validate
from weft_serving import spans
from weft_serving.alarm import Alarm
from weft_serving.backends.base import Backend, InstanceContext, ModelContext
from weft_serving.instance import Execution, Instance
from weft_serving.recorder import Recorder
from weft_serving.request import InferenceRequest
from weft_serving.scheduler.batcher import batch_key, make_batcher, varying_inputs
from weft_serving.scheduler.ordering import ReorderBuffer
from weft_serving.scheduler.queue import PriorityQueue
from weft_serving.scheduler.settings import SchedulerSettings, num_to_hold

_LOG = get_logger("weft.serving")

#: Hint of a full queue before anything was measured.
_DEFAULT_RETRY_AFTER_MS = 100
#: Weight of the newest execution in the running mean of the time that a request takes.
_NEWEST_WEIGHT = 0.1
#: Least time that backends get to close.
_MIN_CLOSE_S = 5.0
#: Strings of one input that are still checked on the event loop; checking one costs 0.1 us.
_MANY_STRINGS = 16_384


class ServedModel:
    """Answers requests for one model version, in batches, by its instances.

    Every method is called on one event loop. Model code runs on the threads of the instances alone.

    Args:
        context: The model version.
        backend: The class that runs it.
        settings: Queue and batching.
        instances: Where to run it, at least one.

    Raises:
        InvalidArgumentError: The settings cannot be served.
    """

    def __init__(
        self,
        context: ModelContext,
        backend: type[Backend],
        settings: SchedulerSettings,
        instances: Sequence[InstanceContext],
    ) -> None:
        signature = context.signature
        settings.validate(signature.name)
        self.signature = signature
        self.statistics = ModelStatistics(signature.name, signature.version)
        self._recorder = Recorder(self.statistics)
        self._settings = settings
        self._queue = PriorityQueue(settings)
        self._batcher = make_batcher(settings, num_to_hold=num_to_hold())
        self._varying_inputs = varying_inputs(signature) if settings.is_batching else ()
        self._order: ReorderBuffer[InferenceRequest, tuple[InferResult | WeftError, Execution]] | None = (
            ReorderBuffer() if settings.preserve_ordering else None
        )
        self._instances = [Instance(context, backend, place, self._on_executed) for place in instances]
        self._idle: deque[Instance] = deque()
        self._running: dict[Instance, Sequence[InferenceRequest]] = {}
        self._is_accepting = False
        self._is_dispatch_due = False
        self._alarm: Alarm | None = None
        self._drained: asyncio.Event = asyncio.Event()
        self._request_ns = 0.0  # running mean of the time that one instance spends on one request

    async def start(self) -> None:
        """Every instance is loaded, one after another, and requests are accepted.

        Raises:
            WeftError: Why an instance cannot be loaded; those loaded before are closed again.
        """
        self._loop = asyncio.get_running_loop()
        self._alarm = Alarm(self._loop, self._dispatch)
        try:
            for instance in self._instances:
                await instance.load()
        except BaseException:
            await self._close(_MIN_CLOSE_S)
            raise
        self._idle.extend(self._instances)
        self._is_accepting = True

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        """The answer to one request, which is checked, queued and executed.

        Cancelling the awaiting task takes the request out of the queue at once; one that runs is flagged, and its
        answer dropped. Neither touches the other members of its batch.

        Raises:
            InvalidArgumentError: The request does not fit the model.
            ResourceExhaustedError: Its queue is full; carries ``retry_after_ms``.
            DeadlineExceededError: Its deadline or its queue timeout passed before it was executed.
            UnavailableError: The model is not ready, or is being stopped.
            InternalError: The model failed; the log has the cause under the same error id.
            WeftError: Any other error that the model answered with.
        """
        try:
            request, answer = self._admit(call, context, await self._num_rows(call))
        except WeftError as error:
            self._recorder.failed(error, context.arrival_ns, time.monotonic_ns())
            raise
        except asyncio.CancelledError:
            self._recorder.failed(_cancelled(), context.arrival_ns, time.monotonic_ns())
            raise
        try:
            outcome = await answer
        except asyncio.CancelledError:
            if answer.cancelled():  # else it was answered, and counted, in the same turn of the loop
                self._withdraw(request)
            raise
        if isinstance(outcome, WeftError):
            # A copy: this frame holds the answer, and an error that is raised holds its frames; the two together would
            # keep the request's tensors in memory until the garbage collector comes by.
            raise outcome.with_message(outcome.message)
        return outcome

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

    async def _num_rows(self, call: InferCall) -> int:
        """Batch size of a call that fits the model; many strings are checked on a thread, not on the event loop."""
        for tensor in call.inputs.values():
            if tensor.datatype == "BYTES" and num_elements(tensor.shape) > _MANY_STRINGS:
                return await asyncio.to_thread(validate, call, self.signature)
        return validate(call, self.signature)

    def _admit(
        self, call: InferCall, context: CallContext, num_rows: int
    ) -> tuple[InferenceRequest, "asyncio.Future[InferResult | WeftError]"]:
        """The request, in the queue, and its answer to come."""
        if not self._is_accepting:
            raise self._not_ready()
        priority, timeout_us = scheduling_parameters(call.parameters)
        request = InferenceRequest(call, context, num_rows, priority, timeout_us)
        answer = request.answer = self._loop.create_future()
        if self._varying_inputs:
            request.batch_key = batch_key(call.inputs, self._varying_inputs)
        now_ns = time.monotonic_ns()
        self._enqueue(request, now_ns)
        if self._order is not None:
            self._order.expect(request)
        self.statistics.pending_count = len(self._queue)
        if not self._idle:
            self._wake_at(self._queue.next_expiry_ns(), now_ns)
        elif not self._settings.is_batching:
            self._dispatch()
        elif not self._is_dispatch_due:
            # Requests that arrive in the same turn of the loop get the chance to share a batch.
            self._is_dispatch_due = True
            self._loop.call_soon(self._dispatch)
        return request, answer

    def _enqueue(self, request: InferenceRequest, now_ns: int) -> None:
        try:
            self._queue.add(request, now_ns)
        except ResourceExhaustedError as error:
            if self._is_dispatch_due:  # it may be full only of what a free instance is about to take
                self._dispatch()
                self._enqueue(request, now_ns)
            else:
                error.retry_after_ms = self._retry_after_ms()
                raise

    def _dispatch(self) -> None:
        """Expired requests are answered, free instances have what they may run now, the timer is set for the rest."""
        self._is_dispatch_due = False
        queue, now_ns = self._queue, time.monotonic_ns()
        for request, error in queue.expire(now_ns):
            self._give_up(request, error, now_ns)
        wake_ns = None
        while self._idle and queue:
            requests, wake_ns = self._batcher.next_batch(queue, now_ns, may_wait=self._is_accepting)
            if not requests:
                break
            queue.take(requests, now_ns)
            instance = self._idle.popleft()
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
        self._idle.append(instance)
        self._dispatch()
        requests, answers = execution.requests, execution.answers
        if not requests:
            return
        request_ns = (execution.end_ns - execution.start_ns) / len(requests)
        self._request_ns += (request_ns - self._request_ns) * (_NEWEST_WEIGHT if self._request_ns else 1.0)
        if any(isinstance(answer, InferResult) for answer in answers):
            self._recorder.executed(execution)
        now_ns = time.monotonic_ns()
        for request, answer in zip(requests, answers, strict=True):
            if self._order is None:
                self._answer(request, answer, execution, now_ns)
            else:
                self._release(self._order.release(request, (answer, execution)))
        if telemetry.is_enabled():
            spans.record_execution(self.signature.name, instance.name, execution)

    def _answer(
        self, request: InferenceRequest, outcome: InferResult | WeftError, execution: Execution, now_ns: int
    ) -> None:
        """The caller, if it still waits, has its answer, and the answer is counted."""
        answer = request.answer
        if answer is None or answer.done():
            return
        answer.set_result(outcome)
        if isinstance(outcome, WeftError):
            self._recorder.failed(outcome, request.context.arrival_ns, now_ns)
        else:
            self._recorder.succeeded(request, execution, now_ns)

    def _release(self, ready: Iterable[tuple[InferenceRequest, tuple[InferResult | WeftError, Execution]]]) -> None:
        now_ns = time.monotonic_ns()
        for request, (outcome, execution) in ready:
            self._answer(request, outcome, execution, now_ns)

    def _give_up(self, request: InferenceRequest, error: WeftError, now_ns: int) -> None:
        """A request that left the queue, or is no longer waited for, has ``error`` as its answer."""
        self._recorder.failed(error, request.context.arrival_ns, now_ns)
        if request.answer is not None and not request.answer.done():
            request.answer.set_result(error)
        if self._order is not None:
            self._release(self._order.withdraw(request))
        if request.start_ns == 0 and telemetry.is_enabled():
            spans.record_queue(self.signature.name, request, now_ns, error)

    def _withdraw(self, request: InferenceRequest) -> None:
        """A cancelled request is out of the queue, or flagged if it runs."""
        request.is_cancelled = True
        self._queue.remove(request)
        self.statistics.pending_count = len(self._queue)
        self._give_up(request, _cancelled(), time.monotonic_ns())

    def _abandon(self) -> None:
        """Whatever is still queued or running fails."""
        now_ns = time.monotonic_ns()
        running = [request for requests in self._running.values() for request in requests]
        for request in [*self._queue, *running]:
            self._queue.remove(request)
            request.is_cancelled = True
            if request.answer is not None and not request.answer.done():
                self._give_up(request, self._not_ready(), now_ns)
        self.statistics.pending_count = 0

    def _check_drained(self) -> None:
        if not self._is_accepting and not self._running and not self._queue:
            self._drained.set()

    async def _close(self, grace_s: float) -> None:
        """Every idle backend is closed that takes at most ``grace_s`` seconds; the others close when they return."""
        if self._alarm is not None:
            self._alarm.close()
            self._alarm = None
        closing = [(instance, instance.close()) for instance in self._instances]
        idle = [closed for instance, closed in closing if instance not in self._running and not instance.is_loading]
        if idle:
            await asyncio.wait(idle, timeout=grace_s)
        for instance, closed in closing:
            if not closed.done():
                _LOG.warning("instance %s still runs; it closes when its model returns", instance.name)

    def _not_ready(self) -> UnavailableError:
        return UnavailableError(
            f"model '{self.signature.name}' version {self.signature.version} is not at ready state: it is loading or "
            "being unloaded; try again later"
        )

    def _retry_after_ms(self) -> int:
        """When the requests that wait now will have been executed."""
        if not self._request_ns:
            return _DEFAULT_RETRY_AFTER_MS
        return max(1, math.ceil(len(self._queue) * self._request_ns / len(self._instances) / 1e6))


def _cancelled() -> RequestCancelledError:
    return RequestCancelledError("the request was cancelled")
