"""Requests that cannot be read, on grpcio's server, which answers them with UNKNOWN and a traceback for each."""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from weft.wire.interface import grpc
from weft.wire.rpc.status import UnreadableRequests

Handler = Any  # grpc.RpcMethodHandler, of which the stubs know no members
Context = grpc.aio.ServicerContext[Any, Any]


class UnreadableInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # no generic at run time
    """Ends calls whose request cannot be read as Weft's own server does; the innermost interceptor."""

    def __init__(self) -> None:
        self._requests = UnreadableRequests()
        self._known: dict[str, tuple[Handler, Handler]] = {}

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]], details: grpc.HandlerCallDetails
    ) -> Handler:
        """The handler with a deserializer that gives what cannot be read to the method, which ends the call."""
        handler = await continuation(details)
        if handler is None or handler.request_deserializer is None:
            return handler
        known = self._known.get(details.method)
        if known is None or known[0] is not handler:
            known = self._known[details.method] = handler, self._reading(handler, details.method)
        return known[1]

    def _reading(self, handler: Handler, path: str) -> Handler:
        kind = f"{_word(handler.request_streaming)}_{_word(handler.response_streaming)}"
        behave = getattr(handler, kind)

        def read(data: bytes) -> Any:
            try:
                return handler.request_deserializer(data)
            except Exception as error:
                return _Unreadable(error)

        def end(context: Context, error: Exception) -> None:
            failure = self._requests.failure(path, context.peer(), error)
            context.set_code(failure.code)
            context.set_details(failure.details)

        async def answer(request: Any, context: Context) -> Any:
            if type(request) is _Unreadable:
                return end(context, request.error)
            return await behave(request, context)

        async def answer_many(request: Any, context: Context) -> AsyncIterator[Any]:
            if type(request) is _Unreadable:
                end(context, request.error)
                return
            requests = _ReadableRequests(request) if handler.request_streaming else None
            responses = behave(requests or request, context)
            try:
                async for response in responses:
                    yield response
            finally:
                await responses.aclose()
            if requests is not None and requests.error is not None:
                end(context, requests.error)

        make: Any = getattr(grpc, f"{kind}_rpc_method_handler")
        if inspect.isasyncgenfunction(behave):
            return make(answer_many, read, handler.response_serializer)
        if inspect.iscoroutinefunction(behave) and not handler.request_streaming:
            return make(answer, read, handler.response_serializer)
        return handler


class _Unreadable:
    """In place of a message that cannot be read."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class _ReadableRequests:
    """The requests of a stream before one that cannot be read, which is to the method as a client that has left."""

    def __init__(self, requests: AsyncIterator[Any]) -> None:
        self._requests = requests
        self.error: Exception | None = None

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        request = await anext(self._requests)
        if type(request) is _Unreadable:
            self.error = request.error
            raise StopAsyncIteration
        return request


def _word(is_streaming: bool) -> str:
    return "stream" if is_streaming else "unary"
