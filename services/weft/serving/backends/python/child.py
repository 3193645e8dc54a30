"""The process of one model instance: ``python -m weft.serving.backends.python.child FD LOG_LEVEL``.

The main thread runs the model. Another one reads messages, and ends the process when the service is gone.
"""

import ctypes
import itertools
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from weft.base.core import CallContext, InferCall, InferResult
from weft.base.errors import InternalError, WeftError
from weft.base.observing import logs
from weft.base.processes.forks import end_copies
from weft.base.tensors import WireTensor, datatype_of, encode
from weft.serving.backends.base import Batch, InstanceContext, ModelContext
from weft.serving.backends.python.channel import MessageChannel, packed, unpacked
from weft.serving.backends.python.loader import complete_config, describe
from weft.serving.backends.python.runner import PythonModelRunner
from weft.serving.request.request import RESCHEDULED, InferenceRequest, Outcome
from weft.serving.request.stream import SendWindow

_PR_SET_PDEATHSIG = 1

_log = logs.get_logger("weft.python")


class _Stream:
    """Sends the responses to one request; the ``request.stream`` of this process."""

    def __init__(self, process: "_Child", number: int) -> None:
        self._process = process
        self._number = number
        self.window = SendWindow()

    def send(self, response: Outcome | None, *, is_final: bool) -> None:
        sent = response if response is None else wire_outcome(response)
        num_bytes = sum(memoryview(t.data).nbytes for t in sent[0].values()) if sent and sent[0] is not None else 0
        is_wanted = self.window.enter(num_bytes)
        if is_wanted:
            self._process.channel.send(("response", self._number, sent, is_final))
            if is_final:
                self._process.forget(self._number)
        elif is_final:
            self.drop()

    def lose(self, error: WeftError) -> None:
        self._process.forget(self._number)
        self._process.post(("lost", self._number, packed(error)))

    def drop(self) -> None:
        self._process.forget(self._number)
        self._process.post(("ended", self._number))


class _Metrics:
    """The ``MetricSink`` of this process: the service keeps the metrics."""

    def __init__(self, calls: "_Calls") -> None:
        self._calls = calls

    def add_family(self, owner: str, name: str, description: str, kind: str) -> None:
        self._calls.ask("add_family", owner, name, description, kind)

    def add_metric(self, owner: str, name: str, labels: Mapping[str, str], bounds: Sequence[float] | None) -> Any:
        return self._calls.ask("add_metric", owner, name, dict(labels), bounds)

    def record(self, name: str, labels: Any, action: str, number: float) -> None:
        self._calls.tell("record", name, labels, action, number)

    def value(self, name: str, labels: Any) -> float:
        number: float = self._calls.ask("value", name, labels)
        return number

    def release(self, owner: str) -> None:
        pass  # the service releases the metrics when the process has ended


class _Control:
    """The ``RepositoryControl`` of this process: the service loads and unloads."""

    def __init__(self, calls: "_Calls") -> None:
        self._calls = calls

    def load(self, asker: str, name: str, parameters: Mapping[str, Any]) -> "Future[None]":
        return self._calls.control("load", (asker, name, dict(parameters)), {})

    def unload(self, asker: str, name: str, *, unload_dependents: bool) -> "Future[None]":
        return self._calls.control("unload", (asker, name), {"unload_dependents": unload_dependents})

    def is_ready(self, name: str, version: str) -> "Future[bool]":
        return self._calls.control("is_ready", (name, version), {})


class _Calls:
    """The ``ModelCaller`` of this process: the service makes the calls."""

    def __init__(self, process: "_Child") -> None:
        self._process = process
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[Any]] = {}

    def infer(self, call: InferCall, parents: Sequence[InferenceRequest], origin: str) -> "Future[InferResult]":
        return self._begin(call, parents, origin, is_stream=False)[1]

    def stream(self, call: InferCall, parents: Sequence[InferenceRequest], origin: str) -> "_Responses":
        return _Responses(self, self._begin(call, parents, origin, is_stream=True)[0])

    def ask(self, action: str, *arguments: Any) -> Any:
        number = next(self._numbers)
        return self._expect(number, ("metric", number, action, arguments)).result()

    def control(self, action: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> "Future[Any]":
        number = next(self._numbers)
        return self._expect(number, ("control", number, action, arguments, options))

    def tell(self, action: str, *arguments: Any) -> None:
        """Call a method of the service's metrics without waiting for the result."""
        self._process.channel.send(("metric", None, action, arguments))

    def next(self, number: int) -> "Future[Any]":
        return self._expect(number, ("next", number))

    def drop(self, number: int) -> None:
        self._process.post(("drop", number))

    def answered(self, number: int, result: InferResult | None, error: Any) -> None:
        """Take the answer of a call; on the reading thread."""
        future = self._waiting.pop(number, None)
        if future is None or not future.set_running_or_notify_cancel():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(unpacked(error))

    def _begin(
        self, call: InferCall, parents: Sequence[InferenceRequest], origin: str, *, is_stream: bool
    ) -> "tuple[int, Future[Any]]":
        number = next(self._numbers)
        message = ("call", number, call, self._process.numbers_of(parents), origin, is_stream)
        if is_stream:
            self._process.channel.send(message)
            return number, Future()
        return number, self._expect(number, message)

    def _expect(self, number: int, message: object) -> "Future[Any]":
        future: Future[Any] = Future()
        self._waiting[number] = future
        future.add_done_callback(lambda done: self.drop(number) if done.cancelled() else None)
        self._process.channel.send(message)
        return future


class _Responses:
    """The ``NestedStream`` of one call of this process."""

    def __init__(self, calls: _Calls, number: int) -> None:
        self._calls = calls
        self._number = number

    def next(self) -> "Future[InferResult | None]":
        return self._calls.next(self._number)

    def cancel(self) -> None:
        self._calls.drop(self._number)


class _Child:
    """The process."""

    def __init__(self, channel: MessageChannel) -> None:
        self.channel = channel
        self._calls = _Calls(self)
        self._inbox: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
        self._outbox: SimpleQueue[object] = SimpleQueue()
        self._requests: dict[int, InferenceRequest] = {}

    def run(self) -> None:
        for target in (self._read, self._write):
            threading.Thread(target=target, name=target.__name__, daemon=True).start()
        kind, *rest = self._inbox.get()
        if kind == "complete":
            self.channel.send(_completed(*rest))
            return
        model, instance = rest
        runner = self._loaded(
            ModelContext(**model, caller=self._calls, metrics=_Metrics(self._calls), control=_Control(self._calls)),
            instance,
        )
        if runner is None:
            return
        self._name = model["signature"].name
        while True:
            message = self._inbox.get()
            if message[0] == "close":
                runner.close()
                return
            self._execute(runner, message[1])

    def post(self, message: object) -> None:
        """Send without waiting, from any thread; later messages may overtake."""
        self._outbox.put(message)

    def forget(self, number: int) -> None:
        """Remove an answered request."""
        self._requests.pop(number, None)

    def numbers_of(self, requests: Sequence[InferenceRequest]) -> list[int]:
        """Numbers of the requests that are not answered."""
        return [number for number, request in list(self._requests.items()) if request in requests]

    def _loaded(self, model: ModelContext, instance: InstanceContext) -> PythonModelRunner | None:
        runner = PythonModelRunner(model, instance)
        try:
            runner.load()
        except WeftError as error:
            self.channel.send(("failed", packed(error)))
            return None
        except BaseException as cause:  # an exit too: the service gets the reason
            where = f"model '{model.signature.name}' failed to load on instance {instance.name}"
            failure = InternalError(f"{where}: {type(cause).__name__}: {cause}")
            _log.error(failure.message, exc_info=cause, extra={"error_id": failure.error_id})
            self.channel.send(("failed", packed(failure)))
            return None
        self.channel.send(("loaded",))
        return runner

    def _execute(self, runner: PythonModelRunner, entries: list[tuple[Any, ...]]) -> None:
        requests = []
        for number, call, deadline_ns, headers, num_rows, has_stream in entries:
            request = InferenceRequest(call, CallContext(deadline_ns, headers), num_rows)
            earlier = self._requests.get(number)
            if earlier is not None:  # it is executed again
                request.stream = earlier.stream
            elif has_stream:
                request.stream = _Stream(self, number)  # type: ignore[assignment]  # it sends; nobody reads it here
            self._requests[number] = request
            if earlier is not None and earlier.is_cancelled:  # only now: a cancel may come at any time
                request.is_cancelled = True
            requests.append(request)
        batch = Batch(requests)
        outcomes = self._outcomes(runner, batch)
        for (number, *_, has_stream), outcome in zip(entries, outcomes, strict=True):
            if not has_stream or isinstance(outcome, WeftError):
                self.forget(number)
        sent = [wire_outcome(outcome) for outcome in outcomes]
        self.channel.send(("executed", batch.infer_start_ns, batch.infer_end_ns, sent))

    def _outcomes(self, runner: PythonModelRunner, batch: Batch) -> list[Outcome]:
        error: WeftError
        try:
            return runner.execute(batch)
        except InternalError as raised:
            error = raised
            _log.error(error.message, extra={"error_id": raised.error_id, "model": self._name})
        except WeftError as raised:
            error = raised
        except BaseException as cause:
            error = failure = InternalError(f"model '{self._name}' failed to execute the request")
            _log.error(error.message, exc_info=cause, extra={"error_id": failure.error_id, "model": self._name})
        return [error for _ in batch.requests]

    def _read(self) -> None:
        while True:
            try:
                message = self.channel.receive()
            except (EOFError, OSError):
                os._exit(0)  # the service is gone, and with it every caller
            self._take(message)
            del message  # it may have a request's tensors

    def _take(self, message: tuple[Any, ...]) -> None:
        kind = message[0]
        if kind in ("cancel", "over", "taken"):
            self._note(kind, self._requests.get(message[1]))
        elif kind == "forget":
            self.forget(message[1])
        elif kind == "answer":
            self._calls.answered(*message[1:])
        elif kind in ("load", "complete", "execute", "close"):
            self._inbox.put(message)

    def _note(self, kind: str, request: InferenceRequest | None) -> None:
        if request is None:
            return
        if kind == "cancel":
            request.cancel()
        if not isinstance(request.stream, _Stream):
            return
        if kind == "taken":
            request.stream.window.leave()
        else:
            request.stream.window.close()

    def _write(self) -> None:
        while True:
            self.channel.send(self._outbox.get())


def _completed(config: dict[str, Any], path: Path) -> tuple[Any, dict[str, Any] | None]:
    try:
        return None, complete_config(config, path)
    except WeftError as error:
        return packed(error), None
    except BaseException as cause:  # an exit too
        failure = InternalError(f"auto_complete_config failed: {describe(cause, path.parent.parent)}")
        _log.error(failure.message, exc_info=cause, extra={"error_id": failure.error_id})
        return packed(failure), None


def wire_outcome(outcome: Outcome) -> tuple[dict[str, WireTensor] | None, Any]:
    """An outcome as a message: outputs and parameters, or an error; neither for RESCHEDULED."""
    if outcome is RESCHEDULED:
        return None, None
    if isinstance(outcome, WeftError):
        return None, packed(outcome)
    try:
        return {name: _wire(array) for name, array in outcome.outputs.items()}, outcome.parameters
    except WeftError as error:
        return None, packed(error)


def _wire(array: Any) -> WireTensor:
    """As ``encode``, but numbers are not copied."""
    if datatype_of(array) == "BYTES":
        return encode(array)
    data = np.ascontiguousarray(array)
    return WireTensor(datatype_of(array), array.shape, data.reshape(-1).view(np.uint8).data)  # type: ignore[arg-type]


def main(argv: Sequence[str]) -> None:
    """Run the process to its end."""
    descriptor, log_level = argv
    logs.configure(log_level)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the service decides when this process ends
    if sys.platform == "linux":  # also when a model holds the interpreter for ever
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    channel = MessageChannel(socket.socket(fileno=int(descriptor)))
    end_copies(channel.leave)
    _Child(channel).run()
    logs.flush()
    os._exit(0)  # threads that the model has left behind do not hold the process up


if __name__ == "__main__":
    main(sys.argv[1:])
