"""Answers each request once, in the order of arrival where configured, and counts the answer."""

import time
from collections.abc import Callable, Iterable

from weft.base.core import InferResult
from weft.base.errors import WeftError
from weft.base.observing import telemetry
from weft.serving.request.request import InferenceRequest, SplitRequest
from weft.serving.runtime import spans
from weft.serving.runtime.execution import BatchExecution
from weft.serving.runtime.recorder import Recorder
from weft.serving.scheduler.ordering import ReorderBuffer

_Ready = Iterable[tuple[InferenceRequest, tuple[InferResult | WeftError | None, BatchExecution]]]


class Answers:
    """Delivers the outcomes of executions, and errors of requests that end without one, to their callers.

    Args:
        model: Name, for spans.
        recorder: Counts every answer once; a request that was split counts once too.
        is_ordered: Answers leave in the order in which the requests were expected.
        drop: Takes a request out of the queue, or flags it if it runs.
    """

    def __init__(
        self, model: str, recorder: Recorder, *, is_ordered: bool, drop: Callable[[InferenceRequest], None]
    ) -> None:
        self._model = model
        self._recorder = recorder
        self._drop = drop
        self._order: ReorderBuffer[InferenceRequest, tuple[InferResult | WeftError | None, BatchExecution]] | None = (
            ReorderBuffer() if is_ordered else None
        )

    def expect(self, request: InferenceRequest) -> None:
        """Have the request answered after those expected before; only where answers are ordered."""
        if self._order is not None:
            self._order.expect(request)

    def deliver(self, execution: BatchExecution) -> None:
        """Answer the members of a batch, except those that have ended or must wait for earlier answers."""
        if self._order is not None:
            for request, outcome in zip(execution.requests, execution.answers, strict=True):
                self._release(self._order.release(request, (outcome, execution)))
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
            self._release(self._order.withdraw(request))
        if split is not None:
            self.forget(split)
        if request.start_ns == 0 and telemetry.is_enabled():
            spans.record_queue(self._model, request, now_ns, error)

    def forget(self, split: SplitRequest) -> None:
        """Drop the parts of a request whose whole is answered, or refused."""
        parts = split.parts
        split.close()
        for part in parts:
            self._drop(part)
            if self._order is not None:
                self._release(self._order.withdraw(part))

    def _answer(
        self, request: InferenceRequest, outcome: InferResult | WeftError | None, execution: BatchExecution, now_ns: int
    ) -> None:
        """Answer one request, if it has not ended, and count the answer."""
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

    def _release(self, ready: _Ready) -> None:
        now_ns = time.monotonic_ns()
        for request, (outcome, execution) in ready:
            self._answer(request, outcome, execution, now_ns)
