"""One call at a server: HTTP/2 stream, context of the handler and owner of its task, in one object."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from weft.wire.event_loop import start_now
from weft.wire.frames import ErrorCode
from weft.wire.heads import Metadata, RequestHead, encode_metadata
from weft.wire.hpack import DecodedHeaders
from weft.wire.interface import StatusCode, grpc
from weft.wire.messages import STATUS_BY_NUMBER, CallError, Message, compress, pack_prefix, whole_message
from weft.wire.server.methods import CallDetails, Method
from weft.wire.server.stream import CUT_OFF, CallStream

_ENCODINGS = {grpc.Compression.Gzip: "gzip", grpc.Compression.Deflate: "deflate"}
#: Metadata up to this size are not counted among what the server holds.
_FREE_METADATA_BYTES = 2048

_log = logging.getLogger("weft.wire.server")


class ServerCall(CallStream):
    """A call from its headers to the end of its handler, which sees it as a ``grpc.aio.ServicerContext``."""

    # Events of the stream.

    def on_headers(self, headers: DecodedHeaders, is_end: bool) -> None:
        """Request headers arrived, or trailers, which only mark the end of the request."""
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
                method = head.resolved = self._server.find(head.path, head.metadata)
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
        """The client reset the stream, or the connection is lost."""
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
        if not self._has_begun and not self.is_finished:
            self._has_begun = True
            self._start(self._run())

    async def _run_plain(self, method: Method, message: Message | memoryview) -> None:
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

    # The context of the handler.

    def invocation_metadata(self) -> Metadata:
        """Metadata of the request."""
        return self.head.metadata if self.head is not None else ()

    def time_remaining(self) -> float | None:
        """Seconds until the deadline, at least 0; None without one."""
        if self._deadline is None:
            return None
        return max(0.0, self._deadline.when_s - self._protocol.loop.time())

    def peer(self) -> str:
        """Address of the client, as gRPC writes it."""
        return self._protocol.peer

    def auth_context(self) -> dict[str, list[bytes]]:
        """Properties of the client that TLS verified; empty without TLS."""
        return self._protocol.auth_context

    def peer_identity_key(self) -> str | None:
        """Key of ``auth_context`` that identifies the client; None without a certificate."""
        names = ("x509_subject_alternative_name", "x509_common_name")
        return next((name for name in names if name in self.auth_context()), None)

    def peer_identities(self) -> list[bytes] | None:
        """The values under ``peer_identity_key``."""
        key = self.peer_identity_key()
        return None if key is None else self.auth_context()[key]

    def set_code(self, code: StatusCode | int) -> None:
        """Set the final status of the call."""
        self._code = STATUS_BY_NUMBER.get(code, StatusCode.UNKNOWN) if isinstance(code, int) else code

    def code(self) -> StatusCode | None:
        """The status set so far."""
        return self._code

    def set_details(self, details: str) -> None:
        """Set the message of the status."""
        self._details = details

    def details(self) -> str:
        """The message set so far."""
        return self._details

    def set_trailing_metadata(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Set the metadata sent with the status."""
        self._trailing = tuple(metadata)

    def trailing_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """The metadata set so far."""
        return self._trailing

    async def send_initial_metadata(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Send metadata before the response. Raises RuntimeError: they were sent, ValueError: they cannot be sent."""
        if self._has_sent_headers:
            raise RuntimeError("the initial metadata were sent")
        initial = tuple(metadata)
        encode_metadata(initial)  # raises before anything is kept
        self._initial = initial
        self._send_headers()

    def set_compression(self, compression: grpc.Compression) -> None:
        """Compress responses, if the client reads that encoding. Raises RuntimeError once the fields were sent."""
        if self._has_sent_headers:
            raise RuntimeError("Compression setting must be specified before sending initial metadata")
        encoding = _ENCODINGS.get(compression, "")
        accepted = self.head.accepted if self.head is not None else ""
        self._encoding = encoding if encoding in accepted.replace(" ", "").split(",") else ""

    def disable_next_message_compression(self) -> None:
        """Ignored: all messages of a call are compressed alike."""

    async def read(self) -> Any:
        """The next request of a stream; ``grpc.aio.EOF`` at its end."""
        assert self._method is not None  # noqa: S101  # its handler runs
        return await self._next_request(self._method)

    async def write(self, response: Any) -> None:
        """Send one response of a stream; waits while the client reads slower. Raises UsageError if the call is over."""
        method = self._method
        if self.is_finished or method is None:
            raise grpc.aio.UsageError("the call is over")
        body = self._serialized(method, response)
        prefix = b"\0" + len(body).to_bytes(4, "big")
        headers = None
        if not self._has_sent_headers:
            headers = self._header_block()
            self._has_sent_headers = True
        if self._encoding:
            body = compress(self._encoding, body)
            prefix = pack_prefix(1, len(body))
        self.connection.send_message(self, headers, prefix, body)
        if self.pending is not None:
            self._hold_response(len(body))
            await self._drain()

    async def _drain(self) -> None:
        while self.pending is not None and not self.is_finished:
            drained = self._drained
            if drained is None or drained.done():
                drained = self._drained = self._protocol.loop.create_future()
            await asyncio.wait((drained,))  # several tasks may write; one that is cancelled leaves the others waiting

    async def abort(
        self, code: StatusCode, details: str = "", trailing_metadata: Iterable[tuple[str, str | bytes]] = ()
    ) -> NoReturn:
        """End the call with a status other than OK, by raising AbortError."""
        if code is StatusCode.OK:
            raise ValueError("a call cannot be aborted with OK")
        self._code, self._details = code, details
        if trailing_metadata:
            self._trailing = tuple(trailing_metadata)
        raise grpc.aio.AbortError("the handler aborted the call")

    async def abort_with_status(self, status: "grpc.Status") -> NoReturn:
        """``abort`` with code, details and metadata of ``status``."""
        await self.abort(status.code, status.details, status.trailing_metadata or ())

    def add_done_callback(self, callback: Callable[["ServerCall"], None]) -> None:
        """Call ``callback`` with this context when the call is over."""
        if self.is_finished:
            callback(self)
        elif self._callbacks is None:
            self._callbacks = [callback]
        else:
            self._callbacks.append(callback)

    def cancelled(self) -> bool:
        """Whether the client has cancelled the call."""
        return self.is_broken_off

    def done(self) -> bool:
        """Whether the call is over."""
        return self.is_finished

    def cancel(self) -> bool:
        """End the call with CANCELLED; False if it is over."""
        if self.is_finished:
            return False
        self.connection.reset(self, ErrorCode.CANCEL)
        self._end()
        if self._task is not None:
            self._task.cancel()
        return True
