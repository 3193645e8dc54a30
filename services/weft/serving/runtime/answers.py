"""Delivers and counts the answer of each request once, in order of arrival if configured, or as a stream."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from weft.base.core import InferResult
from weft.base.errors import DeadlineExceededError, InternalError, WeftError
from weft.base.observing import telemetry
from weft.base.observing.logs import get_logger
from weft.base.signature import ModelSignature
from weft.serving.request.request import InferenceRequest, Response, SplitRequest, Work
from weft.serving.request.stream import ResponseStream
from weft.serving.runtime.execution import BatchExecution, OutputEncoder
from weft.serving.runtime.recorder import Recorder, record_queue, record_stream

_Ready = tuple[InferResult | WeftError | None, BatchExecution]
_LOG = get_logger("weft.serving")


class Answers:
    """Delivers the outcomes of executions, and errors of requests that end without one, to their callers.

    Every answer counts once, also that of a split request. If ``is_ordered``, answers leave in the order in which
    ``expect`` was called. Those of a decoupled model go through streams; ``unfinished`` has the requests that still
    wait for their last response. ``drop`` takes a request out of the queue, or flags it if it runs, and ``on_end`` is
    called with a request of a decoupled model that has ended. Lives on the event loop.
    """

    def __init__(
        self,
        signature: ModelSignature,
        recorder: Recorder,
        *,
        is_ordered: bool,
        drop: Callable[[InferenceRequest], None],
        on_end: Callable[[InferenceRequest], None],
        checks_outputs: bool = True,
    ) -> None:
        self._signature = signature
        self._recorder = recorder
        self._drop = drop
        self._on_end = on_end
        self._encoder = OutputEncoder(signature, is_checked=checks_outputs)
        #: Requests that are expected, in order, and what those that are ready leave with.
        self._order: OrderedDict[InferenceRequest, _Ready | None] | None = OrderedDict() if is_ordered else None
        self.unfinished: set[InferenceRequest] = set()

    def expect(self, request: InferenceRequest) -> None:
        """Reserve the request's place in the order of answers; only if answers are ordered."""
        if self._order is not None:
            self._order[request] = None

    def deliver(self, execution: BatchExecution) -> None:
        """Answer the members of a batch, except those that have ended or must wait for earlier answers."""
        if self._order is not None:
            for request, outcome in zip(execution.requests, execution.answers, strict=True):
                if request in self._order:
                    self._order[request] = outcome, execution
                self._release(self._order)
            return
        now_ns = time.monotonic_ns()
        answered = []
        for request, outcome in zip(execution.requests, execution.answers, strict=True):
            answer = request.answer
            if request.split is not None or request.stream is not None or not isinstance(outcome, InferResult):
                self._answer(request, outcome, execution, now_ns)
            elif answer is not None and not answer.done():
                answer.set_result(outcome)
                answered.append(request)
        if answered:
            self._recorder.succeeded(answered, execution, now_ns)

    def withdraw(self, request: InferenceRequest, error: WeftError) -> None:
        """Drop the request and answer it with ``error``."""
        self._drop(request)
        self.fail(request, error, time.monotonic_ns())

    def fail(self, request: InferenceRequest, error: WeftError, now_ns: int) -> None:
        """Answer a request that has left the queue with ``error``."""
        split = request.split
        if split is not None:
            if not split.parts:
                return
            error = split.error_of(request, error)
        self._recorder.failed(error, request.context.arrival_ns, now_ns)
        if request.answer is not None and not request.answer.done():
            request.answer.set_result(error)
        if self._order is not None:
            self._order.pop(request, None)
            self._release(self._order)
        if split is not None:
            self.forget(split)
        if request.start_ns == 0 and telemetry.is_enabled():
            record_queue(self._signature.name, request, now_ns, error)

    def forget(self, split: SplitRequest) -> None:
        """Drop the parts of a request that was answered or refused as a whole."""
        parts = split.parts
        split.close()
        for part in parts:
            self._drop(part)
            if self._order is not None:
                self._order.pop(part, None)
                self._release(self._order)

    def _answer(
        self, request: InferenceRequest, outcome: InferResult | WeftError | None, execution: BatchExecution, now_ns: int
    ) -> None:
        answer = request.answer
        if outcome is None or answer is None or answer.done():
            return
        if request.stream is not None and isinstance(outcome, InferResult):
            return  # its last response answers it
        if request.split is not None:
            split, joined = request.split, request.split.add(request, outcome)
            if joined is None:
                return
            self.forget(split)
            request, outcome = split.whole, joined
        answer.set_result(outcome)
        if isinstance(outcome, WeftError):
            self._recorder.failed(outcome, request.context.arrival_ns, now_ns)
        else:
            self._recorder.succeeded([request], execution, now_ns)

    def _release(self, order: OrderedDict[InferenceRequest, _Ready | None]) -> None:
        """Answer every ready request that no earlier answer must precede."""
        ready: list[tuple[InferenceRequest, _Ready]] = []
        while order:
            request, answer = next(iter(order.items()))
            if answer is None:
                break
            del order[request]
            ready.append((request, answer))
        now_ns = time.monotonic_ns()
        for request, (outcome, execution) in ready:
            self._answer(request, outcome, execution, now_ns)

    def open(self, request: InferenceRequest) -> None:
        """Open the stream of a request; call before it can be executed."""
        request.stream = ResponseStream(
            asyncio.get_running_loop(),
            encode=partial(self._encode, request),
            null=partial(self._null, request),
            on_sent=partial(self._recorder.responded, request),
            on_end=partial(self._ended, request),
        )

    def follow(self, request: InferenceRequest) -> None:
        """Follow an admitted request until it is answered, and end it at its deadline."""
        answer = request.answer
        if answer is None:
            return
        self.unfinished.add(request)
        timer = None
        if request.context.deadline_ns is not None:
            left_s = (request.context.deadline_ns - time.monotonic_ns()) / 1e9
            timer = asyncio.get_running_loop().call_later(max(left_s, 0.0), self._expire, request)
        answer.add_done_callback(partial(self._answered, request, timer))

    def _encode(self, request: InferenceRequest, response: Response) -> InferResult:
        try:
            return self._encoder.encode(request, response)
        except InternalError as error:
            self._log(error, None)
            raise
        except Exception as cause:
            failure = InternalError(f"an output of model '{self._signature.name}' cannot be encoded")
            self._log(failure, cause)
            raise failure from cause

    def _log(self, error: InternalError, cause: Exception | None) -> None:
        _LOG.error(error.message, exc_info=cause, extra={"error_id": error.error_id, "model": self._signature.name})

    def _null(self, request: InferenceRequest) -> InferResult:
        return InferResult(self._signature.name, self._signature.version, request.call.request_id, is_null=True)

    def _ended(self, request: InferenceRequest, error: WeftError | None) -> None:
        if request.answer is None or request.answer.done():
            return
        now_ns = time.monotonic_ns()
        if error is None:
            # The model computed until its last response, which may be long after its ``execute`` returned.
            start_ns = request.start_ns
            execution = BatchExecution([request], [], request.num_rows, start_ns, start_ns, now_ns, now_ns)
            self._recorder.succeeded([request], execution, now_ns)
        else:
            self._recorder.failed(error, request.context.arrival_ns, now_ns)
        request.answer.set_result(error or self._null(request))

    def _expire(self, request: InferenceRequest) -> None:
        if request.answer is not None and not request.answer.done():
            self.withdraw(request, DeadlineExceededError("the deadline passed before the last response"))

    def _answered(
        self,
        request: InferenceRequest,
        timer: asyncio.TimerHandle | None,
        answer: "asyncio.Future[InferResult | WeftError]",
    ) -> None:
        self.unfinished.discard(request)
        if timer is not None:
            timer.cancel()
        outcome, stream = answer.result(), request.stream
        if telemetry.is_enabled():
            failure = outcome if isinstance(outcome, WeftError) else None
            num_responses = 0 if stream is None else stream.num_sent
            record_stream(self._signature.name, request, num_responses, failure)
        request.stream = None  # they refer to each other; reader and sender hold the stream
        if request.describe is not None:
            request.describe = _described  # it holds the request; that there was one still matters
        if stream is not None and isinstance(outcome, WeftError):
            if not stream.has_last:
                self._recorder.dropped(stream.num_sent, stream.last_ns, time.monotonic_ns())
            stream.fail(outcome)
        self._on_end(request)


def _described() -> Work:
    """In place of the description by the backend, once the span is written."""
    return Work("compute", {})
