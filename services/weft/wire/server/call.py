"""One call at a server: stream of HTTP/2, context of the handler, and the handler's task, in one object."""

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from weft.wire.hpack import DecodedHeaders
from weft.wire.interface import StatusCode, grpc
from weft.wire.rpc.heads import RequestHead
from weft.wire.rpc.messages import Message, whole_message
from weft.wire.rpc.status import CallError
from weft.wire.server.context import CallContextMethods
from weft.wire.server.eager import start_now
from weft.wire.server.methods import CallDetails, Method
from weft.wire.server.request import CUT_OFF

if TYPE_CHECKING:
    pass

#: Metadata up to this size are not counted among what the server holds.
_FREE_METADATA_BYTES = 2048

_log = logging.getLogger("weft.wire.server")


class ServerCall(CallContextMethods):
    """A call, from its first fields to the end of its handler.

    Args:
        protocol: Its connection.
    """

    # Events of the stream.

    def on_headers(self, headers: DecodedHeaders, is_end: bool) -> None:
        """The request's fields, or its trailers, which mean nothing but its end."""
        if self.head is not None:
            if self._reader is not None and not self._reader.is_empty:
                self.fail(StatusCode.INTERNAL, CUT_OFF)
            else:
                self._on_request_end()
            return
        head: RequestHead | None = headers.memo
        if head is None:
            head = headers.memo = RequestHead(headers.fields, is_too_large=headers.is_too_large)
        self.head = head
        if head.http_status != 200:
            self._refuse(head.http_status)
            return
        if head.failure is not None:
            self.fail(*head.failure)
            return
        if head.metadata_bytes > _FREE_METADATA_BYTES:
            try:
                self._protocol.count_buffered(head.metadata_bytes)
            except CallError as error:
                self.fail(error.code, error.details)
                return
            self._num_metadata_bytes = head.metadata_bytes
        method: Method | None = head.resolved
        if method is None:
            try:
                method = head.resolved = self._server.methods.find(head.path, head.metadata)
            except Exception as error:
                _log.error("the handler of a call cannot be found", exc_info=error)
                self.fail(StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}")
                return
            if method is None and not self._server.interceptors:
                self.fail(StatusCode.UNIMPLEMENTED, f"Method not found: '{head.path}'")
                return
        self._method = method
        if head.timeout_s is not None:
            if not head.timeout_s:
                self._expire()
                return
            self._deadline = self._server.deadlines.add(head.timeout_s, self._expire)
        self._is_request_complete = is_end
        if method is None or method.reads_stream:
            self._begin()
        elif self._server.interceptors and not is_end:
            # An interceptor may refuse the call before its message has come; nearly always it came with the fields.
            self._protocol.loop.call_soon(self._begin)
        elif is_end:
            self.fail(StatusCode.UNIMPLEMENTED, "the call has no message; this method takes one")

    def on_data(self, data: bytes | memoryview, is_end: bool) -> None:
        """A part of the request."""
        if self.is_finished:
            return
        method = self._method
        try:
            if is_end and self._reader is None and method is not None and method.is_plain:
                message = whole_message(data)
                if message is not None and len(message) <= self._server.max_message_bytes:
                    self._is_request_complete = True
                    if not self._server.interceptors:
                        self._start(self._run_plain(method, message))
                        return
                    self._enqueue(bytes(message))
                    self._begin()
                    self._wake()
                    return
            self._read(data, is_end)
        except CallError as error:
            self.fail(error.code, error.details)

    def on_reset(self, code: int, reason: str, *, is_unprocessed: bool = False) -> None:
        """The client broke the call off, or its connection is lost."""
        if not self.is_finished:
            self.is_broken_off = True
            self._end()
            if self._task is not None:
                self._task.cancel()
        self._release_response()

    def _on_request_end(self) -> None:
        self._is_request_complete = True
        method = self._method
        if self._task is not None:
            self._wake()
        elif not self.is_finished:
            if not self._messages:
                self.fail(StatusCode.UNIMPLEMENTED, "the call has no message; this method takes one")
            elif method is not None and method.is_plain and not self._server.interceptors:
                try:
                    message = self._take()
                except CallError as error:
                    self.fail(error.code, error.details)
                    return
                self._start(self._run_plain(method, message))
            else:
                self._begin()

    # The handler.

    def _start(self, coroutine: Any) -> None:
        self._protocol.num_running += 1
        task = self._task = start_now(coroutine, self._protocol.loop)
        if self.is_finished and task is not None:
            task.cancel()  # the call was broken off in the first step, when there was no task to cancel

    def _begin(self) -> None:
        """Start the handler, through the interceptors, unless that was done or the call is over."""
        if not self._has_begun and not self.is_finished:
            self._has_begun = True
            self._start(self._run())

    async def _run_plain(self, method: Method, message: Message | memoryview) -> None:
        """A coroutine function from one request to one response, without interceptors: nearly all calls."""
        try:
            request = method.deserialize(message) if method.deserialize is not None else bytes(message)  # type: ignore[arg-type]
            del message
        except Exception as error:
            self._after(self._unreadable_request(error))
            return
        try:
            response = await method.behave(request, self)
            if not self.is_finished:
                self._finish(method, response)
        except BaseException as error:
            self._after(error)
            if not isinstance(error, Exception):
                raise
        else:
            self._task = None
            self._protocol.num_running -= 1

    async def _run(self) -> None:
        """Any handler, found by interceptors if there are some."""
        try:
            method = self._method
            if self._server.interceptors:
                method = await self._intercepted(method)
            if method is None:
                head = self.head
                raise CallError(StatusCode.UNIMPLEMENTED, f"Method not found: '{head.path if head else ''}'")
            self._method = method
            requests = self._requests(method) if method.reads_stream else None
            argument = requests
            if requests is None:
                argument = self._deserialized(method, await self._only_message())
            if method.is_generator:
                await self._write_all(method, argument)
            elif method.is_blocking:
                response = await asyncio.to_thread(method.behave, argument, self)
            else:
                response = await method.behave(argument, self)
            if self._unreadable is not None:
                raise self._unreadable
            if self.is_finished:
                pass
            elif method.writes_stream:
                self._send_status(self._code or StatusCode.OK, self._details)
            else:
                self._finish(method, response)
        except BaseException as error:
            self._after(error)
            if not isinstance(error, Exception):
                raise
        else:
            self._task = None
            self._protocol.num_running -= 1

    async def _write_all(self, method: Method, argument: Any) -> None:
        responses = method.behave(argument, self)
        try:
            async for response in responses:
                await self.write(response)
        finally:
            await responses.aclose()

    async def _intercepted(self, method: Method | None) -> Method | None:
        head = self.head
        assert head is not None  # noqa: S101  # it has begun
        details = CallDetails(head.path, head.metadata)
        handler = await self._server.intercept(details)
        if handler is None:
            return None
        if method is not None and handler is method.handler:
            return method
        return Method(handler)

    def _after(self, error: BaseException) -> None:
        """The handler has ended with an exception."""
        self._task = None
        self._protocol.num_running -= 1
        if self.is_finished:
            return
        if isinstance(error, Exception) and self._unreadable is not None:
            error = self._unreadable
        if isinstance(error, CallError):
            self._send_status(error.code, error.details)
        elif isinstance(error, grpc.aio.AbortError):
            self._send_status(self._code or StatusCode.UNKNOWN, self._details)
        elif isinstance(error, Exception):
            _log.error("a handler failed", exc_info=error)
            code = self._code if self._code not in (None, StatusCode.OK) else StatusCode.UNKNOWN
            self._send_status(code or StatusCode.UNKNOWN, self._details or f"Unexpected {type(error)}: {error}")
        elif isinstance(error, asyncio.CancelledError):
            self._send_status(StatusCode.CANCELLED, "the call was cancelled at the server")
