"""The process of one model instance: ``python -m weft.serving.backends.python.child SOCKET THEIRS OURS SETTINGS``.

The arguments are file descriptors and settings as JSON. The main thread runs the model. The process ends when the
service is gone.
"""

import contextlib
import ctypes
import itertools
import json
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from opentelemetry import trace
from typing_extensions import override

from weft.base.core import CallContext, InferCall, InferResult
from weft.base.errors import DeadlineExceededError, InternalError, WeftError
from weft.base.observing import logs, telemetry
from weft.base.observing.failures import Disclosure, caused_by, disclose
from weft.base.observing.settings import LOG
from weft.base.observing.work_span import WorkSpan
from weft.base.processes.forks import IN_COPY, is_copy
from weft.base.tensors import NUMPY_BY_DATATYPE, Array, WireTensor, decode
from weft.serving.backends.base import Batch, InstanceContext, ModelContext
from weft.serving.backends.python.child_end import Awaited, ChildEnd
from weft.serving.backends.python.loader import complete_config, describe
from weft.serving.backends.python.pipe import (
    MemoryFile,
    Message,
    Outgoing,
    Pipe,
    pack_call,
    pack_error,
    pack_outcome,
    plain,
    unpack_call,
    unpack_error,
    unpack_result,
)
from weft.serving.backends.python.responses import TritonModelException
from weft.serving.backends.python.runner import PythonModelRunner
from weft.serving.request.request import InferenceRequest, Outcome
from weft.serving.request.stream import SendWindow

_PR_SET_PDEATHSIG = 1

_log = logs.get_logger("weft.python")


class _Request(InferenceRequest):
    """A request in this process, which is unpacked as far as the model looks at it.

    Args:
        fields: Of ``pack_request``, behind the number.
        large: The contents of the block of its message.
    """

    end: ClassVar[ChildEnd]
    is_traced: ClassVar[bool] = False  # the service records spans

    def __init__(self, number: int, fields: tuple[Any, ...], large: Any) -> None:
        # Of 20 fields those that are read here: 1 us in place of 3, of some 20 us for an execution.
        self.number, self._fields, self._large = number, fields, large
        self.num_rows, self.stream, self.is_cancelled, self._on_cancel = fields[8], None, False, None

    @cached_property
    def call(self) -> InferCall:  # type: ignore[override]  # nothing sets it here
        return unpack_call(self._fields[:6], self._large)

    @cached_property
    def context(self) -> CallContext:  # type: ignore[override]
        return CallContext(self._fields[6], headers=self._fields[7] or {})

    @cached_property
    def span(self) -> WorkSpan | None:  # type: ignore[override]
        carrier = self._fields[7] if self.is_traced else None
        return WorkSpan(telemetry.span_of(carrier).get_span_context()) if carrier else None

    @property
    def is_withdrawn(self) -> bool:
        """As ever."""
        deadline_ns = self._fields[6]
        return self.is_cancelled or (deadline_ns is not None and time.monotonic_ns() >= deadline_ns)

    @override
    def arrays(self) -> list[tuple[str, Array]]:
        arrays = []
        for name, datatype, shape, data in self._fields[4]:
            content = self._large[data] if type(data) is int else data
            if datatype == "BYTES":
                array = decode(WireTensor(datatype, shape, content), name=name)
            else:  # which the service has checked; what comes through a block may be changed
                content = content if type(content) is memoryview else bytearray(content)
                array = np.ndarray(shape, NUMPY_BY_DATATYPE[datatype], content)
            arrays.append((name, array))
        return arrays

    @override
    def has_left(self) -> bool:
        if not self.is_cancelled:
            self.end.poll()
        return self.is_withdrawn


class _Stream:
    """Sends the responses to one request; the ``request.stream`` of this process."""

    def __init__(self, process: "_Child", number: int) -> None:
        self._process = process
        self._number = number
        self.window = SendWindow()

    def send(self, response: Outcome | None, *, is_final: bool) -> None:
        outgoing = Outgoing()
        sent = None if response is None else pack_outcome(response, outgoing)
        if self._enter(outgoing.num_bytes):
            notes = self._process.notes_of(self._number) if is_final and _Request.is_traced else ()
            self._process.end.send("response", self._number, sent, is_final, notes, outgoing=outgoing)
            if is_final:
                self._process.forget(self._number)
        elif is_final:
            self.drop()

    def _enter(self, num_bytes: int) -> bool:
        if is_copy():
            raise TritonModelException(IN_COPY)
        if not self.window.has_room(num_bytes):
            self._process.end.poll()
            if not self.window.has_room(num_bytes):
                self._process.end.read_aside()
        return self.window.enter(num_bytes)

    def lose(self, error: WeftError) -> None:
        self._process.forget(self._number)
        self._process.end.post("lost", self._number, pack_error(error))

    def drop(self) -> None:
        self._process.forget(self._number)
        self._process.end.post("ended", self._number)


class _Service:
    """What the service does for this process: its ``ModelCaller``, ``MetricSink`` and ``RepositoryControl``."""

    def __init__(self, process: "_Child") -> None:
        self._process = process
        self._numbers = itertools.count()
        self._waiting: dict[int, Awaited] = {}

    def infer(self, call: InferCall, parents: Sequence[InferenceRequest], origin: str) -> "Future[InferResult]":
        number, outgoing = next(self._numbers), Outgoing()
        return self._expect(number, "call", *self._packed(call, parents, origin, outgoing), False, outgoing=outgoing)

    def stream(self, call: InferCall, parents: Sequence[InferenceRequest], origin: str) -> "_Responses":
        number, outgoing = next(self._numbers), Outgoing()
        packed = self._packed(call, parents, origin, outgoing)
        self._process.end.send("call", number, *packed, True, outgoing=outgoing)
        return _Responses(self, number)

    def next(self, number: int) -> "Future[Any]":
        return self._expect(number, "next", outgoing=Outgoing())

    def drop(self, number: int) -> None:
        self._process.end.post("drop", number)

    def add_family(self, owner: str, name: str, description: str, kind: str) -> None:
        self._ask("metrics", "add_family", owner, name, description, kind).result()

    def add_metric(self, owner: str, name: str, labels: Mapping[str, str], bounds: Sequence[float] | None) -> Any:
        return self._ask("metrics", "add_metric", owner, name, labels, bounds).result()

    def record(self, name: str, labels: Any, action: str, number: float) -> None:
        self._process.end.send("ask", None, "metrics", "record", (name, labels, action, number), {})

    def value(self, name: str, labels: Any) -> Any:
        return self._ask("metrics", "value", name, labels).result()

    def release(self, owner: str) -> None:
        pass  # the service releases the metrics when the process has ended

    def load(self, asker: str, name: str, parameters: Mapping[str, Any]) -> "Future[None]":
        return self._ask("control", "load", asker, name, parameters)

    def unload(self, asker: str, name: str, *, unload_dependents: bool) -> "Future[None]":
        return self._ask("control", "unload", asker, name, unload_dependents=unload_dependents)

    def is_ready(self, name: str, version: str) -> "Future[bool]":
        return self._ask("control", "is_ready", name, version)

    def answered(self, large: Any, number: int, result: Any, error: Any) -> None:
        """Take the answer of a call; on the thread that reads."""
        future = self._waiting.pop(number, None)
        if future is None or not future.set_running_or_notify_cancel():
            return
        if error is not None:
            future.set_exception(unpack_error(error))
        else:
            future.set_result(unpack_result(result, large) if future.is_call else result)

    def _ask(self, of: str, action: str, *arguments: Any, **options: Any) -> "Future[Any]":
        return self._expect(next(self._numbers), "ask", of, action, _plain(arguments), _plain(options))

    def _packed(
        self, call: InferCall, parents: Sequence[InferenceRequest], origin: str, outgoing: Outgoing
    ) -> tuple[Any, ...]:
        carrier = telemetry.carrier_of(trace.get_current_span()) if _Request.is_traced else None
        return _plain(pack_call(call, outgoing)), self._process.numbers_of(parents), origin, carrier

    def _expect(self, number: int, kind: str, *arguments: Any, outgoing: Outgoing | None = None) -> Awaited:
        """Send a message that has an answer; cancelling that withdraws what was asked. A call has ``outgoing``."""
        future = Awaited(self._process.end, lambda: self.drop(number), is_call=outgoing is not None)
        self._waiting[number] = future
        try:
            self._process.end.send(kind, number, *arguments, outgoing=outgoing)
        except TritonModelException:
            del self._waiting[number]
            raise
        return future


def _noted(span: WorkSpan | None) -> list[Any]:
    """What the model has added to the span, without what cannot be sent."""
    notes = []
    for call in () if span is None else span.calls:
        with contextlib.suppress(TypeError, RecursionError):
            notes.append(plain(call))
    return notes


def _plain(value: Any) -> Any:
    try:
        return plain(value)
    except TypeError as error:
        raise TritonModelException(str(error)) from None


class _Responses(NamedTuple):
    """The ``NestedStream`` of one call of this process."""

    service: _Service
    number: int

    def next(self) -> "Future[InferResult | None]":
        return self.service.next(self.number)

    def cancel(self) -> None:
        self.service.drop(self.number)


class _Child:
    """The process."""

    def __init__(self, pipe: Pipe) -> None:
        self.end = _Request.end = ChildEnd(pipe, self._take, self._work)
        self._service = _Service(self)
        self._requests: dict[int, _Request] = {}

    def run(self) -> None:
        self.end.send("hello", f"{sys.version_info.major}.{sys.version_info.minor}")
        kind, *rest = self.end.next()
        if kind == "complete":
            self.end.send("completed", *_completed(*rest))
            return
        model, instance = pickle.loads(rest[0])  # noqa: S301  # of the service, which is this code
        service = self._service
        context = ModelContext(**model, caller=service, metrics=service, control=service)
        runner = self._loaded(context, instance)
        if runner is None:
            return
        self._name = context.signature.name
        del service, context
        while True:
            message = self.end.next()
            if message[0] == "close":
                self.end.is_read = False
                runner.close()
                return
            number, batch = message[0], Batch(message[1])
            del message  # it has a request's tensors
            if runner.can_overlap:
                runner.start(batch, partial(self._answer_beside, number, batch))
            elif self._is_unwanted(batch):
                late = DeadlineExceededError("deadline passed before execution, behind others of its process")
                self._answer(number, batch, [late] * len(batch.requests))
            else:
                self._answer(number, batch, self._outcomes(runner.execute, batch))
            del batch

    def _is_unwanted(self, batch: Batch) -> bool:
        """Whether nobody waits for any answer; a batch that has waited here asks for what came meanwhile."""
        if self.end.had_work:
            self.end.poll()
        return all(request.stream is None and request.is_withdrawn for request in batch.requests)

    def forget(self, number: int) -> None:
        """Remove an answered request."""
        self._requests.pop(number, None)

    def notes_of(self, number: int) -> list[Any]:
        """What the model has added to the span of an unanswered request."""
        request = self._requests.get(number)
        return [] if request is None else _noted(request.span)

    def numbers_of(self, requests: Sequence[InferenceRequest]) -> list[int]:
        """Numbers of the requests that are not answered."""
        return [number for number, request in list(self._requests.items()) if request in requests]

    def _loaded(self, model: ModelContext, instance: InstanceContext) -> PythonModelRunner | None:
        runner = PythonModelRunner(model, instance)
        try:
            runner.load()
        except WeftError as error:
            self.end.send("failed", pack_error(error))
            return None
        except BaseException as cause:  # an exit too: the service gets the reason
            where = f"model '{model.signature.name}' failed to load on instance {instance.name}"
            failure = InternalError(f"{where}: {describe(cause, model.directory.parent)}")
            self.end.send("failed", pack_error(caused_by(failure, cause)))
            return None
        self.end.send("loaded", runner.can_overlap)
        self.end.is_read = runner.can_overlap
        return runner

    def _work(self, message: Message, large: Any) -> Message:
        """What the main thread is to do; requests are known from now on, so that they can be cancelled."""
        if message[0] != "execute":
            return message
        _, number, entries = message
        requests = [_Request(fields[0], fields[1:], large) for fields in entries]
        for request, fields in zip(requests, entries, strict=True):
            if (earlier := self._requests.get(request.number)) is not None:  # it is executed again
                request.stream, request.is_cancelled = earlier.stream, earlier.is_cancelled
            elif fields[-1]:
                request.stream = _Stream(self, request.number)  # type: ignore[assignment]  # nobody reads it here
            self._requests[request.number] = request
        return number, requests

    def _answer_beside(
        self, number: int, batch: Batch, outcomes: list[Outcome] | None, error: BaseException | None
    ) -> None:
        def execute(_: Batch) -> list[Outcome]:
            if error is not None:
                raise error
            return outcomes or []

        self._answer(number, batch, self._outcomes(execute, batch))

    def _answer(self, number: int, batch: Batch, outcomes: list[Outcome]) -> None:
        outgoing, sent = Outgoing(), []
        notes = [_noted(request.span) for request in batch.requests] if _Request.is_traced else ()
        for request, outcome in zip(batch.requests, outcomes, strict=True):
            if isinstance(request, _Request) and (request.stream is None or isinstance(outcome, WeftError)):
                self.forget(request.number)
            sent.append(pack_outcome(outcome, outgoing))
        times_ns = batch.infer_start_ns, batch.infer_end_ns
        batch.requests = ()  # so that the blocks of their tensors go back with this message
        outcomes.clear()
        del request, outcome
        try:
            self.end.send("executed", number, *times_ns, sent, notes, outgoing=outgoing)
        except TritonModelException as error:
            failure = pack_error(InternalError(f"model '{self._name}' gave what cannot be sent: {error}"))
            self.end.send("executed", number, *times_ns, [failure] * len(sent), ())

    def _outcomes(self, execute: Callable[[Batch], list[Outcome]], batch: Batch) -> list[Outcome]:
        error: WeftError
        try:
            return execute(batch)
        except InternalError as raised:
            error = raised
            _log.error(error.message, extra={"error_id": raised.error_id, "model": self._name})
        except WeftError as raised:
            error = raised
        except BaseException as cause:
            error = failure = InternalError(f"model '{self._name}' failed to execute the request")
            _log.error(error.message, exc_info=cause, extra={"error_id": failure.error_id, "model": self._name})
            disclose(failure, cause)
        return [error for _ in batch.requests]

    def _take(self, message: Message, large: Any) -> None:
        kind, number, *rest = message
        if kind == "answer":
            self._service.answered(large, number, *rest)
        elif kind == "forget":
            self.forget(number)
        elif kind == "log":
            LOG.update(number)
        elif (request := self._requests.get(number)) is not None:
            if kind == "cancel":
                request.cancel()
            if isinstance(request.stream, _Stream):
                if kind == "taken":
                    request.stream.window.leave()
                else:
                    request.stream.window.close()


def _completed(config: dict[str, Any], path: str) -> tuple[Any, dict[str, Any] | None]:
    try:
        return None, _plain(complete_config(config, Path(path)))
    except WeftError as error:
        return pack_error(error), None
    except BaseException as cause:  # an exit too
        failure = InternalError(f"auto_complete_config failed: {describe(cause, Path(path).parent.parent)}")
        return pack_error(caused_by(failure, cause)), None


def main(argv: Sequence[str]) -> None:
    """Run the process to its end."""
    _, *descriptors, given = argv
    settings = json.loads(given)
    Disclosure.is_on, _Request.is_traced = settings.pop("is_dev"), settings.pop("is_traced")
    logs.configure(**settings)
    if _Request.is_traced:
        telemetry.offer(f"weft.{settings['service']}")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the service decides when this process ends
    if sys.platform == "linux":  # also when a model holds the interpreter for ever
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    connection, theirs, ours = map(int, descriptors)
    _Child(Pipe(socket.socket(fileno=connection), MemoryFile(ours), MemoryFile(theirs))).run()
    telemetry.shutdown()
    logs.flush()
    os._exit(0)  # threads that the model has left behind do not hold the process up


if __name__ == "__main__":
    main(sys.argv)
