"""Responses of models that a ``model.py`` calls."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

from weft.base.core import InferCall, InferResult
from weft.base.errors import InternalError, RequestCancelledError, WeftError
from weft.base.tensors import decode
from weft.serving.backends.base import NestedStream
from weft.serving.backends.python.errors import TritonError, inline_refusal
from weft.serving.backends.python.responses import InferenceResponse
from weft.serving.backends.python.tensors import Tensor, writable
from weft.serving.request.request import InferenceRequest


class ResponseIterator(Iterator[InferenceResponse], AsyncIterator[InferenceResponse]):
    """The responses to one call, as they come; an error is the last of them.

    The last one is empty where the called model signalled the end after its last outputs. It waits while its
    responses are not read.
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


class InlineCaller:
    """The ``ModelCaller`` of a model that executes on the event loop: it calls nobody."""

    def infer(self, call: InferCall, parents: Sequence[InferenceRequest], origin: str) -> "Future[InferResult]":
        """Raise TritonModelException."""
        raise inline_refusal(f"cannot call model '{call.model_name}'")

    def stream(self, call: InferCall, parents: Sequence[InferenceRequest], origin: str) -> NestedStream:
        """Raise TritonModelException."""
        raise inline_refusal(f"cannot call model '{call.model_name}'")


def result_of(future: "Future[InferResult]") -> InferenceResponse:
    """The response of a call; waits for it."""
    return _response_of(future) or InferenceResponse()


async def result_of_async(future: "Future[InferResult]") -> InferenceResponse:
    """The response of a call; cancelling the awaiting task withdraws it."""
    await _wait(future)
    return _response_of(future) or InferenceResponse()


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
