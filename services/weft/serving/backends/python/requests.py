"""Requests that a model gets, and requests that it makes to call other models."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextvars import ContextVar
from functools import cached_property
from typing import Any, ClassVar

from weft.base.core import InferCall, InferResult, ParameterValue, RequestedOutput
from weft.base.errors import InternalError, InvalidArgumentError, RequestCancelledError, WeftError
from weft.base.observing.logs import request_fields
from weft.base.observing.telemetry import carrier_of
from weft.base.tensors import decode, encode
from weft.serving.backends.base import ModelCaller, NestedStream
from weft.serving.backends.python.responses import (
    InferenceResponse,
    InferenceResponseSender,
    OutputStream,
    Reply,
    Tensor,
    TritonError,
    TritonModelException,
    check_parameters,
    writable,
)
from weft.serving.request.request import InferenceRequest as ServedRequest


class ResponseIterator(Iterator[InferenceResponse], AsyncIterator[InferenceResponse]):
    """The responses to one call, as they come; an error is the last of them.

    The last one is empty where the called model signalled the end after its last outputs. It waits for its reader.
    """

    def __init__(self, stream: NestedStream) -> None:
        self._stream: NestedStream | None = stream
        self._awaited: Future[InferResult | None] | None = None
        self._is_withdrawn = False
        self._first: Future[InferResult | None] | None = None

    async def begin(self) -> None:
        """Wait until the first response is there, or the error; cancelling the awaiting task withdraws the call."""
        self._first = self._next()
        if self._first is not None:
            await _wait(self._first)

    def __next__(self) -> InferenceResponse:
        future = self._next()
        response = None if future is None else self._take(future)
        if response is None:
            raise StopIteration
        return response

    async def __anext__(self) -> InferenceResponse:
        future = self._next()
        if future is not None:
            await _wait(future)
        response = None if future is None else self._take(future)
        if response is None:
            raise StopAsyncIteration
        return response

    def cancel(self) -> None:
        """Withdraw the call; any thread. An iteration that goes on gets an error, CANCELLED, and ends."""
        stream, self._stream = self._stream, None
        if stream is None:
            return
        self._is_withdrawn, self._first = True, None
        stream.cancel()
        if self._awaited is not None:
            self._awaited.cancel()

    def __del__(self) -> None:
        self.cancel()

    def _next(self) -> "Future[InferResult | None] | None":
        if self._first is not None:
            future, self._first = self._first, None
            return future
        if self._stream is not None:
            self._awaited = self._stream.next()
        elif self._is_withdrawn:
            self._awaited = Future()
            self._awaited.cancel()
        else:
            return None
        return self._awaited

    def _take(self, future: "Future[InferResult | None]") -> InferenceResponse | None:
        response = _response_of(future)
        if response is None or response.has_error():
            self._stream, self._is_withdrawn = None, False
        return response


async def _wait(future: "Future[Any]") -> None:
    wrapped = asyncio.wrap_future(future)
    try:
        await asyncio.wait([wrapped])
    except asyncio.CancelledError:
        wrapped.cancel()
        raise
    if not wrapped.cancelled():
        wrapped.exception()  # retrieved: it is read from the other future


def _response_of(future: "Future[InferResult] | Future[InferResult | None]") -> InferenceResponse | None:
    try:
        result = future.result()
    except WeftError as error:
        return InferenceResponse(error=TritonError.of(error))
    except CancelledError:
        return InferenceResponse(error=TritonError.of(RequestCancelledError("the call was cancelled")))
    except Exception:
        return InferenceResponse(error=TritonError.of(InternalError("the call of the model failed")))
    if result is None:
        return None
    tensors = [Tensor(name, writable(decode(tensor, name=name))) for name, tensor in result.outputs.items()]
    return InferenceResponse(tensors, parameters=result.parameters)


TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2

# Request parameters that have methods of their own, or none: C++ clients send the last with every request.
_SERVER_PARAMETERS = frozenset(
    {
        "priority", "timeout", "sequence_id", "sequence_start", "sequence_end", "triton_enable_empty_final_response",
    }
)  # fmt: skip

#: Requests of one batch whose ids a line of the log has.
_MAX_LOGGED_IDS = 16
#: The requests that ``execute`` runs, in its thread or coroutine.
in_work: ContextVar[Sequence[ServedRequest]] = ContextVar("in_work", default=())


def _log_fields() -> Mapping[str, str]:
    ids = [request.call.request_id for request in in_work.get()[:_MAX_LOGGED_IDS]]
    return {"request_id": ",".join(filter(None, ids))} if any(ids) else {}


request_fields.append(_log_fields)


class InferenceTrace:
    """The request on whose behalf another model is called: ``InferenceRequest(..., trace=request.trace())``."""

    def __init__(self, served: ServedRequest) -> None:
        self._served = served

    def get_context(self) -> str | None:
        """W3C trace context of the span of this execution, as JSON with ``traceparent`` and maybe ``tracestate``.

        Without traces of the service, that which the request came with; None if there is neither.
        """
        carrier = carrier_of(self._served.span, self._served.context.headers)
        return json.dumps(carrier) if carrier else None


class InferenceRequest:
    """One request: as ``execute`` gets it, or as a model makes it to call another model.

    A call is made on behalf of the request of ``trace``, or of those that ``execute`` runs: it has their deadline, is
    withdrawn when their clients have left, and is a part of their trace. On a thread of the model's own, ``trace`` is
    needed for that. ``correlation_id`` is sent along as ``sequence_id``, unless it is 0 or ""; ``timeout`` is the
    longest time in the queue of the called model in microseconds, 0 its default; ``priority`` 0 is that of the request
    on whose behalf it is made; ``preferred_memory`` has no effect. Raises TritonModelException for an argument of a
    wrong type.
    """

    _served: ServedRequest | None = None
    _outlet: OutputStream | None = None
    _can_reschedule = False
    is_rescheduled = False
    reply: Reply | None = None
    _tensors: list[Tensor] | None = None
    _all_outputs: Sequence[str] = ()
    _trace: InferenceTrace | None = None
    _caller: ClassVar[ModelCaller | None] = None
    _origin: ClassVar[str] = ""

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] = (),
        requested_output_names: Sequence[str] = (),
        model_name: str = "",
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: object = None,
        trace: InferenceTrace | None = None,
        parameters: Mapping[str, ParameterValue] | None = None,
        *,
        priority: int = 0,
    ) -> None:
        model_name, request_id, names = _text(model_name), _text(request_id), list(map(_text, requested_output_names))
        if not model_name:
            raise TritonModelException("model_name must not be empty: it says which model is called")
        if any(not isinstance(tensor, Tensor) for tensor in inputs):
            raise TritonModelException(f"inputs must be pb_utils.Tensor objects, got {list(map(type, inputs))}")
        sent: dict[str, ParameterValue] = dict(parameters or {})
        check_parameters(sent, "request")
        if correlation_id:
            sent["sequence_id"] = _text(correlation_id)
        if flags & TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
            sent["sequence_start"] = True
        if flags & TRITONSERVER_REQUEST_FLAG_SEQUENCE_END:
            sent["sequence_end"] = True
        if timeout:
            sent["timeout"] = timeout
        if priority:
            sent["priority"] = priority
        self._tensors = list(inputs)
        self._trace = trace
        self._call = InferCall(
            model_name,
            str(model_version) if model_version > 0 else "",
            request_id,
            sent,
            {},
            tuple(RequestedOutput(name, {}) for name in names),
        )

    @classmethod
    def wrap(
        cls,
        served: ServedRequest,
        outlet: OutputStream | None = None,
        *,
        can_reschedule: bool = False,
        all_outputs: Sequence[str] = (),
    ) -> "InferenceRequest":
        """The view of a request for a model, which returns its response where there is no ``outlet``."""
        request = cls.__new__(cls)
        request._served = served
        request._all_outputs = all_outputs
        request._outlet = outlet
        request._can_reschedule = can_reschedule
        return request

    @cached_property
    def _call(self) -> InferCall:
        return self._received().call

    def inputs(self) -> list[Tensor]:
        """Inputs in the order sent. The arrays are writable and belong to the model."""
        if self._tensors is None:
            self._tensors = [Tensor(*named) for named in self._received().arrays()]
        return self._tensors

    def request_id(self) -> str:
        """The client's id, or ""."""
        return self._call.request_id

    def correlation_id(self) -> ParameterValue:
        """Request parameter ``sequence_id``, or 0."""
        return self._call.parameters.get("sequence_id", 0)

    def flags(self) -> int:
        """Sequence flags, from the request parameters ``sequence_start`` and ``sequence_end``."""
        parameters = self._call.parameters
        start = TRITONSERVER_REQUEST_FLAG_SEQUENCE_START if parameters.get("sequence_start") else 0
        return start | (TRITONSERVER_REQUEST_FLAG_SEQUENCE_END if parameters.get("sequence_end") else 0)

    def set_flags(self, flags: int) -> None:
        """Set the sequence flags of a request that the model makes."""
        if self._served is not None:
            raise TritonModelException("the flags of a request that execute received are the client's")
        self._call.parameters = {
            **self._call.parameters,
            "sequence_start": bool(flags & TRITONSERVER_REQUEST_FLAG_SEQUENCE_START),
            "sequence_end": bool(flags & TRITONSERVER_REQUEST_FLAG_SEQUENCE_END),
        }

    def requested_output_names(self) -> list[str]:
        """Outputs that the client asked for, in its order; all outputs of the model where it named none."""
        return [output.name for output in self._call.outputs] or list(self._all_outputs)

    def model_name(self) -> str:
        """The model."""
        return self._call.model_name

    def model_version(self) -> int:
        """The version that the client asked for; -1 is the newest."""
        return int(self._call.model_version or -1)

    def parameters(self) -> str:
        """Request parameters as a JSON object, without those that the server itself reads."""
        parameters = self._call.parameters
        return json.dumps({key: value for key, value in parameters.items() if key not in _SERVER_PARAMETERS})

    def timeout(self) -> ParameterValue:
        """Request parameter ``timeout`` in microseconds; 0 means none."""
        return self._call.parameters.get("timeout", 0)

    def priority(self) -> ParameterValue:
        """Request parameter ``priority``; 0 means that of the model."""
        return self._call.parameters.get("priority", 0)

    def trace(self) -> InferenceTrace:
        """The argument ``trace`` of nested calls on behalf of this request."""
        return InferenceTrace(self._received())

    def is_cancelled(self) -> bool:
        """Whether the client has left, or the deadline has passed; a model may then stop early."""
        return self._received().has_left()

    def set_release_flags(self, flags: int) -> None:
        """``TRITONSERVER_REQUEST_RELEASE_RESCHEDULE``: ``execute`` gets the request again, and gives None for it now.

        Call it before ``execute`` returns. Raises TritonModelException for a model without iterative sequences.
        """
        if flags not in (TRITONSERVER_REQUEST_RELEASE_ALL, TRITONSERVER_REQUEST_RELEASE_RESCHEDULE):
            raise TritonModelException(
                f"Unable to set release flags. Unsupported flag provided: {flags}; use "
                "TRITONSERVER_REQUEST_RELEASE_ALL or TRITONSERVER_REQUEST_RELEASE_RESCHEDULE"
            )
        if flags == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE and not self._can_reschedule:
            raise TritonModelException(
                f"model '{self.model_name()}' cannot schedule a request again; write sequence_batching {{ "
                "iterative_sequence: true } into its config.pbtxt"
            )
        self.is_rescheduled = flags == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE

    def get_response_sender(self) -> InferenceResponseSender:
        """The sender of the responses to this request; ``execute`` then returns None for it."""
        served = self._received()
        if self._outlet is None:
            self.reply = Reply()
            self._outlet = self.reply.outlet()
        return InferenceResponseSender(self._outlet, served.has_left)

    def exec(self, decoupled: bool = False) -> InferenceResponse | Iterator[InferenceResponse]:
        """Call the model and wait for its response, which carries the error of a failure.

        ``decoupled``: the model may send any number of responses: an iterator over them, which has a method ``cancel``.
        Raises TritonModelException where calls are not available, or an input cannot be sent.
        """
        caller, call, parents = self._prepared()
        if decoupled:
            return ResponseIterator(caller.stream(call, parents, self._origin))
        return _response_of(caller.infer(call, parents, self._origin)) or InferenceResponse()

    async def async_exec(
        self, decoupled: bool = False
    ) -> "InferenceResponse | Iterator[InferenceResponse] | AsyncIterator[InferenceResponse]":
        """As ``exec``, awaited; the iterator serves ``for`` and ``async for``, and has its first response.

        Between later ones a plain ``for`` blocks the event loop, ``async for`` does not. Cancelling the task withdraws
        the call.
        """
        caller, call, parents = self._prepared()
        if decoupled:
            responses = ResponseIterator(caller.stream(call, parents, self._origin))
            await responses.begin()
            return responses
        future = caller.infer(call, parents, self._origin)
        await _wait(future)
        return _response_of(future) or InferenceResponse()

    def fail(self, error: WeftError) -> None:
        """Fail the request, unless its last response was sent; not for models."""
        if self._outlet is not None:
            self._outlet.fail(error)

    def disclaim(self) -> None:
        """Do not require a response of this request: it is answered otherwise. Not for models."""
        if self._outlet is not None:
            self._outlet.is_closed = True

    def _received(self) -> ServedRequest:
        if self._served is None:
            raise TritonModelException("only a request that execute received has this; the model made this one")
        return self._served

    def _prepared(self) -> tuple[ModelCaller, InferCall, Sequence[ServedRequest]]:
        if self._served is not None:
            raise TritonModelException("a request that execute received cannot be executed; make an InferenceRequest")
        if self._caller is None:
            raise TritonModelException("this model cannot call other models: no service runs it")
        try:
            self._call.inputs = {tensor.name(): encode(tensor.as_numpy()) for tensor in self.inputs()}
        except InvalidArgumentError as error:
            raise TritonModelException(error.message) from None
        parents = in_work.get() if self._trace is None else (self._trace._served,)
        return self._caller, self._call, parents


def _text(value: Any) -> Any:
    """A name that a model gives as ``bytes``, as elements of a BYTES tensor are, as text; anything else as it is."""
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise TritonModelException(f"names must be UTF-8, got {value[:80]!r}") from None
