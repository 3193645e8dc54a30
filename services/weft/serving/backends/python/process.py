"""The service's side of a model instance in its own process."""

import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from weft.base.core import InferCall, InferResult
from weft.base.errors import InternalError, RequestCancelledError, UnavailableError, WeftError
from weft.base.observing.logs import get_logger
from weft.base.tensors import decode
from weft.serving.backends.base import Batch, InstanceContext, ModelContext, NestedStream
from weft.serving.backends.python.channel import MessageChannel, packed, unpacked
from weft.serving.request.request import RESCHEDULED, STREAMED, InferenceRequest, InferenceResponse, Outcome
from weft.serving.request.stream import ResponseStream

#: Time for ``finalize`` of a process that should end, in seconds; then it is killed.
CLOSE_WAIT_S = 10.0
#: A process that a signal has stopped for so long is killed, in seconds; Ctrl-Z and ``fg`` go on before.
STOP_GRACE_S = 1.0
#: Time for ``auto_complete_config``, in seconds; more than the load waits for it.
COMPLETE_LIMIT_S = 200.0

_STDERR = 2  # standard output belongs to the service
_EXITED = ("exited",)

_log = get_logger("weft.python")


class ModelProcess:
    """One process; used by the instance's thread. ``on_exit`` is called on another when it ends unexpectedly."""

    def __init__(self, model: ModelContext, instance: InstanceContext, on_exit: Callable[[], None]) -> None:
        self._model = model
        self._instance = instance
        self._on_exit = on_exit
        self._where = f"the process of instance {instance.name} of model '{model.signature.name}'"
        self.exit_text = self._why_killed = ""
        self._is_closing = False
        self._numbers = itertools.count()
        self._requests: dict[
            int, tuple[InferenceRequest, ResponseStream[InferenceResponse] | None, Callable[[], None]]
        ] = {}
        self._again: dict[InferenceRequest, int] = {}  # decoupled, and to be executed again
        self._calls: dict[int, Future[Any] | NestedStream] = {}
        self._replies: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
        self._outbox: SimpleQueue[object] = SimpleQueue()
        self._process, self._channel = _start_process()
        for target in (self._read, self._write, self._kill_stopped):
            threading.Thread(target=target, name=f"{instance.name}{target.__name__}", daemon=True).start()

    def load(self) -> None:
        """Start the process and load the model. Raises a WeftError; the process has then ended."""
        model = self._model
        fields = {
            "signature": model.signature, "directory": model.directory,
            "config": dict(model.config), "parameters": dict(model.parameters),
        }  # fmt: skip
        self._send(("load", fields, self._instance))
        reply = self._replies.get()
        if reply[0] == "failed":
            self._is_closing = True
            self._process.wait()
            raise unpacked(reply[1])
        if reply is _EXITED:
            raise UnavailableError(f"{self.exit_text} while the model was loaded")

    def execute(self, batch: Batch) -> list[Outcome]:
        """Run a batch and return its outcomes. Raises UnavailableError if the process has ended."""
        entries = [(self._register(request), request) for request in batch.requests]
        self._send(
            (
                "execute",
                [
                    (n, r.call, r.context.deadline_ns, dict(r.context.headers), r.num_rows, r.stream is not None)
                    for n, r in entries
                ],
            )
        )
        for number, request in entries:
            if request.is_cancelled:  # maybe before the process knew of it
                self._outbox.put(("cancel", number))
        reply = self._replies.get()
        is_decoupled = self._model.signature.is_decoupled
        for number, request in entries:
            if reply is _EXITED or request.stream is None:
                self._forget(number)
        if reply is _EXITED:
            raise UnavailableError(f"{self.exit_text} before it had answered; it is started again")
        _, batch.infer_start_ns, batch.infer_end_ns, sent = reply
        outcomes = [_unpack_outcome(*pair) for pair in sent]
        if not is_decoupled:
            return outcomes
        for (number, request), outcome in zip(entries, outcomes, strict=True):
            if isinstance(outcome, WeftError):
                self._forget(number)
            elif outcome is RESCHEDULED:
                stream = request.stream
                self._again[request] = number
                if stream is None or stream.is_over:
                    self._over(request, number)
        return [o if o is RESCHEDULED or isinstance(o, WeftError) else STREAMED for o in outcomes]

    def close(self) -> None:
        """End the process; kill it if it does not end by itself."""
        self._is_closing = True
        self._send(("close",))
        try:
            self._process.wait(CLOSE_WAIT_S)
        except subprocess.TimeoutExpired:
            _log.warning("%s does not end and is killed", self._where, extra={"model": self._model.signature.name})
            self._process.kill()
            self._process.wait()

    def kill(self) -> None:
        """Kill the process; from any thread."""
        self._process.kill()

    def _kill_stopped(self) -> None:
        """Kill the process when a signal has stopped it, as SIGSTOP does: what it was asked would never be answered."""
        pid, changes = self._process.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT
        with contextlib.suppress(ChildProcessError):  # it has ended, and that was noted
            while (change := os.waitid(os.P_PID, pid, changes)) is not None and change.si_code == os.CLD_STOPPED:
                time.sleep(STOP_GRACE_S)
                change = os.waitid(os.P_PID, pid, changes | os.WNOHANG)
                if change is not None and change.si_code == os.CLD_STOPPED:
                    self._why_killed = f"was stopped by {signal.Signals(change.si_status).name} and killed"
                    self._process.kill()
                    return

    def _register(self, request: InferenceRequest) -> int:
        if (waiting := self._again.pop(request, None)) is not None:
            return waiting
        number = next(self._numbers)
        on_cancel = partial(self._outbox.put, ("cancel", number))
        stream = request.stream
        self._requests[number] = (request, stream, on_cancel)
        request.when_cancelled(on_cancel)
        if stream is not None:
            stream.on_taken = partial(self._outbox.put, ("taken", number))
            stream.on_over = partial(self._over, request, number)
        return number

    def _over(self, request: InferenceRequest, number: int) -> None:
        if self._again.pop(request, None) is not None:
            self._forget(number)
            self._outbox.put(("forget", number))
        elif number in self._requests:
            self._outbox.put(("over", number))

    def _forget(self, number: int) -> ResponseStream[InferenceResponse] | None:
        request, stream, on_cancel = self._requests.pop(number, (None, None, None))
        if request is not None and on_cancel is not None:
            request.forget(on_cancel)
        return stream

    def _send(self, message: object) -> None:
        with contextlib.suppress(OSError):  # the process is gone, which the reading thread notices
            self._channel.send(message)

    def _write(self) -> None:
        """Send the messages of the event loop, which must not wait for the process."""
        while (message := self._outbox.get()) is not None:
            self._send(message)

    def _read(self) -> None:
        try:
            while True:
                self._take(self._channel.receive())
        except (EOFError, OSError):
            self._end()
        except BaseException:  # the process sent something that cannot be read
            _log.exception("%s is out of step and is killed", self._where)
            self._process.kill()
            self._end()

    def _take(self, message: tuple[Any, ...]) -> None:
        kind = message[0]
        if kind == "response":
            _, number, sent, is_final = message
            entry = self._requests.get(number)
            stream = None if entry is None else entry[1]
            if is_final:
                self._forget(number)
            if stream is not None:
                stream.deliver(None if sent is None else _unpack_outcome(*sent), is_final=is_final)
        elif kind == "lost":
            if (stream := self._forget(message[1])) is not None:
                stream.lose(unpacked(message[2]))
        elif kind == "ended":
            self._forget(message[1])
        elif kind == "metric":
            self._record(*message[1:])
        elif kind == "control":
            self._control(*message[1:])
        elif kind == "call":
            self._call(*message[1:])
        elif kind == "next":
            call = self._calls.get(message[1])
            if call is not None and not isinstance(call, Future):
                self._answer_with(message[1], call.next())
        elif kind == "drop":
            if (call := self._calls.pop(message[1], None)) is not None:
                call.cancel()
        else:
            self._replies.put(message)

    def _record(self, number: int | None, action: str, arguments: tuple[Any, ...]) -> None:
        done: Future[Any] = Future()
        try:
            if self._model.metrics is None:
                raise UnavailableError("metrics are for a model.py: no service runs this model")
            done.set_result(getattr(self._model.metrics, action)(*arguments))
        except Exception as error:
            done.set_exception(error)
        if number is not None:
            self._outbox.put(("answer", number, *_pack_answer(done)))

    def _control(self, number: int, action: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        if self._model.control is None:
            error = UnavailableError("models are loaded and unloaded by a model that a service runs")
            self._outbox.put(("answer", number, None, packed(error)))
            return
        future = self._calls[number] = getattr(self._model.control, action)(*arguments, **options)
        self._answer_with(number, future, is_last=True)

    def _call(self, number: int, call: InferCall, parents: Sequence[int], origin: str, is_stream: bool) -> None:
        caller = self._model.caller
        if caller is None:
            self._outbox.put(("answer", number, None, packed(UnavailableError("this model cannot call other models"))))
            return
        # gRPC takes nothing but bytes.
        call.inputs = {name: tensor._replace(data=bytes(tensor.data)) for name, tensor in call.inputs.items()}
        requests = [self._requests[parent][0] for parent in parents if parent in self._requests]
        if is_stream:
            self._calls[number] = caller.stream(call, requests, origin)
        else:
            future = self._calls[number] = caller.infer(call, requests, origin)
            self._answer_with(number, future, is_last=True)

    def _answer_with(self, number: int, future: "Future[Any]", *, is_last: bool = False) -> None:
        def answered(done: "Future[Any]") -> None:
            if is_last:
                self._calls.pop(number, None)
            self._outbox.put(("answer", number, *_pack_answer(done)))

        future.add_done_callback(answered)

    def _end(self) -> None:
        self._channel.close()
        how = _describe_exit(self._process.wait())
        self.exit_text = f"{self._where} {self._why_killed or how}"
        if self._model.metrics is not None:
            self._model.metrics.release(self._instance.origin(self._model.signature))
        self._outbox.put(None)
        for call in list(self._calls.values()):
            call.cancel()
        self._calls.clear()
        self._replies.put(_EXITED)
        if self._is_closing:
            return
        for number in list(self._requests):
            if (stream := self._forget(number)) is not None:
                stream.lose(UnavailableError(f"{self.exit_text} before it had answered; it is started again"))
        self._on_exit()


def complete_in_process(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """As ``complete_config``, in a process of its own. Raises UnavailableError, too, if that ends or takes too long."""
    process, channel = _start_process()
    limit = threading.Timer(COMPLETE_LIMIT_S, process.kill)
    limit.daemon = True
    limit.start()
    try:
        channel.send(("complete", config, path))
        error, completed = channel.receive()
    except (EOFError, OSError):
        how = _describe_exit(process.wait())
        name = config.get("name", "")
        raise UnavailableError(f"the process that ran auto_complete_config of model '{name}' {how}") from None
    finally:
        limit.cancel()
        channel.close()
        process.kill()
        process.wait()
    if error is not None:
        raise unpacked(error)
    return completed  # type: ignore[no-any-return]  # what the child has sent


def _start_process() -> "tuple[subprocess.Popen[bytes], MessageChannel]":
    mine, its = socket.socketpair()
    with its:
        level = logging.getLevelName(logging.getLogger().getEffectiveLevel()).lower()
        command = [sys.executable, "-P", "-m", "weft.serving.backends.python.child", str(its.fileno()), level]
        process = subprocess.Popen(  # noqa: S603  # our own module
            command, stdin=subprocess.DEVNULL, stdout=_STDERR, pass_fds=[its.fileno()]
        )
    return process, MessageChannel(mine)


def _describe_exit(status: int) -> str:
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"


def _unpack_outcome(outputs: Any, rest: Any) -> Outcome:
    if outputs is None:
        return RESCHEDULED if rest is None else unpacked(rest)
    return InferenceResponse({name: decode(tensor, name=name) for name, tensor in outputs.items()}, rest)


def _pack_answer(done: "Future[Any]") -> tuple[InferResult | None, Any]:
    try:
        return done.result(), None
    except WeftError as error:
        return None, packed(error)
    except CancelledError:
        return None, packed(RequestCancelledError("the call was cancelled"))
    except Exception:
        return None, packed(InternalError("the call of the model failed"))
