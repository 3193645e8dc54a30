"""Requests of a decoupled model: each is executed like others and answered by a stream of responses."""

import asyncio
import time
from collections.abc import Callable
from functools import partial

from weft.base.core import InferResult
from weft.base.errors import DeadlineExceededError, InternalError, WeftError
from weft.base.observing import telemetry
from weft.base.observing.logs import get_logger
from weft.base.signature import ModelSignature
from weft.serving.request.request import InferenceRequest, InferenceResponse, Work
from weft.serving.request.stream import ResponseStream
from weft.serving.runtime import spans
from weft.serving.runtime.execution import BatchExecution
from weft.serving.runtime.outputs import OutputEncoder
from weft.serving.runtime.recorder import Recorder

_LOG = get_logger("weft.serving")


def _has_been_told() -> Work:
    """In place of what a backend says of a request whose span is written."""
    return Work("compute", {})


class DecoupledRequests:
    """Opens the streams of requests, and ends them; lives on the event loop.

    Args:
        signature: Of the model.
        recorder: Counts each request once, when it ends, and each response.
        withdraw: Ends a request with an error that is not the model's.
        on_end: Called with a request that has ended.
        checks_outputs: As of the backend.

    Attributes:
        unfinished: Requests that have not had their last response.
    """

    def __init__(
        self,
        signature: ModelSignature,
        recorder: Recorder,
        *,
        withdraw: Callable[[InferenceRequest, WeftError], None],
        on_end: Callable[[InferenceRequest], None],
        checks_outputs: bool = True,
    ) -> None:
        self._signature = signature
        self._encoder = OutputEncoder(signature, is_checked=checks_outputs)
        self._recorder = recorder
        self._withdraw = withdraw
        self._on_end = on_end
        self.unfinished: set[InferenceRequest] = set()

    def open(self, request: InferenceRequest) -> None:
        """Open the stream of a request; call before it can be executed."""
        request.stream = ResponseStream(
            asyncio.get_running_loop(),
            encode=partial(self._encode, request),
            null=partial(self._null, request),
            on_sent=partial(self._recorder.responded, request),
            on_end=partial(self._ended, request),
        )

    def add(self, request: InferenceRequest) -> None:
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

    def _encode(self, request: InferenceRequest, response: InferenceResponse) -> InferResult:
        """The result. Raises InternalError, which is logged, for a response that does not fit the configuration."""
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
        """Answer a request whose model has sent the last response; its ``execute`` may still run."""
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
            self._withdraw(request, DeadlineExceededError("the deadline passed before the last response"))

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
            spans.record_stream(self._signature.name, request, num_responses, failure)
        request.stream = None  # they refer to each other; reader and sender hold the stream
        if request.describe is not None:
            request.describe = _has_been_told  # it holds the request; that there was one still matters
        if stream is not None and isinstance(outcome, WeftError):
            if not stream.has_last:
                self._recorder.dropped(stream.num_sent, stream.last_ns, time.monotonic_ns())
            stream.fail(outcome)
        self._on_end(request)
