"""The service's side of a model instance in its own process; it lives on the event loop."""

import asyncio
import contextlib
import itertools
import os
import pickle
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any

from opentelemetry.context import attach, detach

from weft.base.core import InferResult
from weft.base.errors import InternalError, RequestCancelledError, UnavailableError, WeftError
from weft.base.observing import telemetry
from weft.base.observing.logs import get_logger
from weft.base.observing.settings import LOG, LogValue
from weft.base.processes.process import describe_exit
from weft.serving.backends.base import Batch, InstanceContext, ModelContext, NestedStream
from weft.serving.backends.python.pipe import (
    Message,
    Outgoing,
    OutOfStepError,
    pack_error,
    pack_request,
    pack_result,
    unpack_call,
    unpack_error,
    unpack_outcome,
)
from weft.serving.backends.python.service_end import VERSION, Interpreter, ServiceEnd, start_process
from weft.serving.request.request import RESCHEDULED, STREAMED, InferenceRequest, Outcome, Response
from weft.serving.request.stream import ResponseStream

#: Time for ``finalize`` of a process that should end, in seconds; then it is killed.
CLOSE_WAIT_S = 10.0
#: A process that a signal has stopped for so long is killed, in seconds; Ctrl-Z and ``fg`` go on before.
STOP_GRACE_S = 1.0
#: Pause between two looks whether a process has ended that has closed its end, in seconds, and until it is killed.
_REAP_S, REAP_LIMIT_S = 0.002, 1.0

#: Where no service runs the model.
_NOBODY = {
    "metrics": "metrics are for a model.py: no service runs this model",
    "control": "models are loaded and unloaded by a model that a service runs",
}
_Ended = Callable[[list[Outcome] | None], None]

_log = get_logger("weft.python")


class ModelProcess:
    """One process; every method is called on the event loop.

    Args:
        interpreter: As of ``starting.interpreter_of``.
        on_lost: Called when the process ends unexpectedly after its load, before its batches fail.

    Attributes:
        exit_text: How it ended; "" while it runs.
        can_overlap: It may execute several batches at once. Known once it is loaded.
    """

    def __init__(
        self, model: ModelContext, instance: InstanceContext, interpreter: Interpreter, on_lost: Callable[[], None]
    ) -> None:
        self._model = model
        self._instance = instance
        self._on_lost = on_lost
        self._where = f"the process of instance {instance.name} of model '{model.signature.name}'"
        self.exit_text = self._why_killed = ""
        self._is_closing = self.can_overlap = False
        self._numbers = itertools.count()
        self._requests: dict[int, tuple[InferenceRequest, ResponseStream[Response] | None, Any]] = {}
        self._again: dict[InferenceRequest, int] = {}  # decoupled, and to be executed again
        self._free_ns = 0  # when the latest execution ended
        self._batches: dict[int, tuple[Batch, list[int], _Ended]] = {}
        self._later: deque[tuple[int, list[Any], Outgoing]] = deque()  # batches that are not sent
        self._calls: dict[int, Future[Any] | NestedStream] = {}
        loop = self._loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[Message | None] = loop.create_future()  # None: it has ended
        self._ended: asyncio.Future[None] = loop.create_future()
        # On this thread, which lives as long as the service: the process is killed when the thread ends that made it.
        self._process, pipe = start_process(interpreter)
        self._end = ServiceEnd(pipe, self._take, self._on_end)
        self._seen_state = 0
        self._look_timer = loop.call_later(STOP_GRACE_S, self._look)
        LOG.followers.add(self)

    async def load(self) -> None:
        """Load the model. Raises a WeftError; the process has then ended."""
        model = self._model
        fields = {
            "signature": model.signature, "directory": model.directory,
            "config": dict(model.config), "parameters": dict(model.parameters),
        }  # fmt: skip
        self.follow_log(LOG.given)
        self._end.send("load", pickle.dumps((fields, self._instance)))
        try:
            reply = await asyncio.shield(self._loaded)
        except asyncio.CancelledError:
            self.kill()
            raise
        if reply is None:
            raise UnavailableError(f"{self.exit_text} while the model was loaded")
        if reply[0] == "failed":
            self._is_closing = True
            await self._ended
            raise unpack_error(reply[1])
        self.can_overlap = reply[1]

    def follow_log(self, changes: Mapping[str, LogValue | None]) -> None:
        """Pass changed log settings on to the process."""
        if not self.exit_text:
            self._end.send("log", dict(changes))

    def start(self, batch: Batch, on_end: _Ended) -> None:
        """Execute a batch; ``on_end`` gets its outcomes, never within this call."""
        outgoing = Outgoing()
        numbers = [self._register(request) for request in batch.requests]
        entries = [pack_request(*pair, outgoing) for pair in zip(numbers, batch.requests, strict=True)]
        number = next(self._numbers)
        self._batches[number] = batch, numbers, on_end
        self._end.gathers = len(self._batches) > 1  # else the process waits
        self._later.append((number, entries, outgoing))
        self._send_batches()

    def _send_batches(self) -> None:
        """Send the batches whose turn it is.

        Large tensors wait until nothing else executes: with 8 batches of 600 kB on their way the memory of none is in
        the processor's caches any more, and each takes 0.9 ms of CPU of both ends in place of 0.27.
        """
        while self._later:
            number, entries, outgoing = self._later[0]
            if outgoing.large and not self.can_overlap and len(self._batches) > len(self._later):
                return
            self._later.popleft()
            try:
                self._end.send("execute", number, entries, outgoing=outgoing)
            except ValueError as error:
                failure = InternalError(f"the request cannot be sent: {error}")
                self._loop.call_soon(self._fail_batch, number, failure)
            batch, numbers, _ = self._batches[number]
            for request_number, request in zip(numbers, batch.requests, strict=True):
                if request.is_cancelled:  # before the process knew of it
                    self._end.send("cancel", request_number)

    async def close(self) -> None:
        """End the process; kill it if it does not end by itself."""
        self._is_closing = True
        self._end.send("close")
        done, _ = await asyncio.wait([self._ended], timeout=CLOSE_WAIT_S)
        if not done:
            _log.warning("%s does not end and is killed", self._where, extra={"model": self._model.signature.name})
            self.kill()
            await self._ended

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()

    def _look(self) -> None:
        """Look how the process does; what it was asked would never be answered where it is so at two looks.

        A signal has stopped it, as SIGSTOP does: it is killed. Or it has ended, and a copy of it holds its end open.
        """
        self._look_timer = self._loop.call_later(STOP_GRACE_S, self._look)
        options = os.WEXITED | os.WSTOPPED | os.WNOWAIT | os.WNOHANG
        try:
            change = os.waitid(os.P_PID, self._process.pid, options)
        except ChildProcessError:  # ``kill`` has seen that it had ended
            self._on_end(None)
            return
        state = 0 if change is None else change.si_code
        if change is not None and state == self._seen_state == os.CLD_STOPPED:
            self._why_killed = f"was stopped by {signal.Signals(change.si_status).name} and killed"
            self.kill()
        elif state and state == self._seen_state:
            self._on_end(None)
        self._seen_state = state

    def _register(self, request: InferenceRequest) -> int:
        if (waiting := self._again.pop(request, None)) is not None:
            return waiting
        number = next(self._numbers)
        on_cancel = partial(self._end.send, "cancel", number)
        stream = request.stream
        self._requests[number] = (request, stream, on_cancel)
        request.when_cancelled(on_cancel)
        if stream is not None:
            stream.on_taken = partial(self._end.send, "taken", number)
            stream.on_over = partial(self._over, request, number)
        return number

    def _over(self, request: InferenceRequest, number: int) -> None:
        if self._again.pop(request, None) is not None:
            self._forget(number)
            self._end.send("forget", number)
        elif number in self._requests:
            self._end.send("over", number)

    def _forget(self, number: int) -> ResponseStream[Response] | None:
        request, stream, on_cancel = self._requests.pop(number, (None, None, None))
        if request is not None and on_cancel is not None:
            request.forget(on_cancel)
        return stream

    def _take(self, message: Message, large: Any) -> None:
        kind = message[0]
        if kind == "executed":
            self._executed(large, *message[1:])
        elif kind == "response":
            _, number, sent, is_final, notes = message
            entry = self._requests.get(number)
            stream = None if entry is None else entry[1]
            if notes and entry is not None and entry[0].span is not None:
                entry[0].span.calls = notes
            if is_final:
                self._forget(number)
            if stream is not None:
                stream.deliver(None if sent is None else unpack_outcome(sent, large), is_final=is_final)
        elif kind == "lost":
            if (stream := self._forget(message[1])) is not None:
                stream.lose(unpack_error(message[2]))
        elif kind == "ended":
            self._forget(message[1])
        elif kind == "ask":
            self._ask(*message[1:])
        elif kind == "call":
            self._call(large, *message[1:])
        elif kind == "next":
            call = self._calls.get(message[1])
            if call is not None and not isinstance(call, Future):
                self._answer_with(message[1], call.next())
        elif kind == "drop":
            if (call := self._calls.pop(message[1], None)) is not None:
                call.cancel()
            error = RequestCancelledError("the call was cancelled")
            self._end.send("answer", message[1], None, pack_error(error))  # whoever waits for it reads on
        elif kind == "hello" and message[1] != VERSION:
            fault = f"its Python is {message[1]}, that of the service {VERSION}: they must be the same"
            self._loaded.set_result(("failed", pack_error(UnavailableError(f"{self._where}: {fault}"))))
            self.kill()
        elif kind == "hello":
            pass
        elif kind in ("loaded", "failed") and not self._loaded.done():
            self._loaded.set_result(message)
        else:
            raise OutOfStepError

    def _executed(
        self, large: Any, number: int, infer_start_ns: int, infer_end_ns: int, sent: list[Any], notes: Sequence[Any]
    ) -> None:
        batch, numbers, on_end = self._batches.pop(number)
        if len(sent) != len(numbers):
            raise OutOfStepError
        self._send_batches()
        if not self.can_overlap:  # it may have waited for the one before
            batch.start_ns, self._free_ns = max(batch.start_ns, self._free_ns), infer_end_ns
        batch.infer_start_ns, batch.infer_end_ns = infer_start_ns, infer_end_ns
        outcomes = [unpack_outcome(packed, large) for packed in sent]
        for request, noted in zip(batch.requests, notes, strict=False):
            if noted and request.span is not None:
                request.span.calls = noted
        is_decoupled = self._model.signature.is_decoupled
        for i, (request_number, request, outcome) in enumerate(zip(numbers, batch.requests, outcomes, strict=True)):
            stream = request.stream  # None: nobody reads, or no longer
            if is_decoupled and outcome is RESCHEDULED:
                self._again[request] = request_number
                if stream is None or stream.is_over:
                    self._over(request, request_number)
            elif stream is None or isinstance(outcome, WeftError):
                self._forget(request_number)
            if is_decoupled and not (outcome is RESCHEDULED or isinstance(outcome, WeftError)):
                outcomes[i] = STREAMED
        on_end(outcomes)

    def _fail_batch(self, number: int, error: WeftError | None) -> None:
        """End a batch with an error; None: it was not begun."""
        batch, numbers, on_end = self._batches.pop(number)
        for request in numbers:
            self._forget(request)
        self._send_batches()
        on_end(None if error is None else [error.with_message(error.message) for _ in batch.requests])

    def _ask(
        self, number: int | None, of: str, action: str, arguments: Sequence[Any], options: Mapping[str, Any]
    ) -> None:
        done: Future[Any] = Future()
        try:
            sink = {"metrics": self._model.metrics, "control": self._model.control}[of]
            if sink is None:
                raise UnavailableError(_NOBODY[of])
            result = getattr(sink, action)(*arguments, **options)
            if number is not None and isinstance(result, Future):
                self._calls[number] = result
                self._answer_with(number, result, is_last=True)
                return
            done.set_result(result)
        except Exception as error:
            done.set_exception(error)
        if number is not None:
            self._answer(number, done)

    def _call(
        self,
        large: Any,
        number: int,
        packed: tuple[Any, ...],
        parents: Sequence[int],
        origin: str,
        carrier: Mapping[str, str] | None,
        is_stream: bool,
    ) -> None:
        caller = self._model.caller
        if caller is None:
            error = UnavailableError("this model cannot call other models")
            self._end.send("answer", number, None, pack_error(error))
            return
        call = unpack_call(packed, large)
        requests = [self._requests[parent][0] for parent in parents if parent in self._requests]
        token = attach(telemetry.context_of(telemetry.span_of(carrier))) if carrier else None  # the call inherits it
        if is_stream:
            self._calls[number] = caller.stream(call, requests, origin)
        else:
            future = self._calls[number] = caller.infer(call, requests, origin)
            self._answer_with(number, future, is_last=True)
        if token is not None:
            detach(token)

    def _answer_with(self, number: int, future: "Future[Any]", *, is_last: bool = False) -> None:
        def answered() -> None:
            if is_last:
                self._calls.pop(number, None)
            self._answer(number, future)

        def done(_: "Future[Any]") -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(answered)

        future.add_done_callback(done)

    def _answer(self, number: int, done: "Future[Any]") -> None:
        outgoing, result, error = Outgoing(), None, None
        try:
            result = done.result()
            if isinstance(result, InferResult):
                result = pack_result(result, outgoing)
        except WeftError as raised:
            error = pack_error(raised)
        except CancelledError:
            error = pack_error(RequestCancelledError("the call was cancelled"))
        except Exception:
            error = pack_error(InternalError("the call of the model failed"))
        self._end.send("answer", number, result, error, outgoing=outgoing)

    def _on_end(self, error: BaseException | None) -> None:
        """The other end is closed, or has sent nonsense: see the process end."""
        if error is not None:
            _log.error("%s is out of step and is killed", self._where, exc_info=error)
            self._why_killed = "sent something that is no message, and was killed"
            self.kill()
        self._end.close()
        self._look_timer.cancel()
        self._reap(self._loop.time() + REAP_LIMIT_S)

    def _reap(self, limit_s: float) -> None:
        status = self._process.poll()
        if status is None:
            if self._loop.time() >= limit_s:
                self.kill()
            self._loop.call_later(_REAP_S, self._reap, limit_s)
            return
        self.exit_text = f"{self._where} {self._why_killed or describe_exit(status)}"
        if self._model.metrics is not None:
            self._model.metrics.release(self._instance.origin(self._model.signature))
        for call in list(self._calls.values()):
            call.cancel()
        self._calls.clear()
        if not self._ended.done():
            self._ended.set_result(None)
        was_loaded = self._loaded.done()
        if not was_loaded:
            self._loaded.set_result(None)
        if was_loaded and not self._is_closing:
            self._on_lost()
        lost = UnavailableError(f"{self.exit_text} before it had answered; it is started again")
        for i, number in enumerate(list(self._batches)):
            was_begun = i == 0 or self.can_overlap or self._is_closing or not was_loaded
            self._fail_batch(number, lost if was_begun else None)
        for number in list(self._requests):
            if (stream := self._forget(number)) is not None and not self._is_closing:
                stream.lose(lost.with_message(lost.message))
