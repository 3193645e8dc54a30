"""One call at a server: stream of HTTP/2, context of the handler, and the handler's task, in one object."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from grpc import StatusCode

from weft_wire.connection.stream import Stream
from weft_wire.errors import ErrorCode
from weft_wire.hpack import DecodedHeaders, encode
from weft_wire.rpc.compression import ACCEPTED, compress, decompress
from weft_wire.rpc.heads import CONTENT_TYPE, RequestHead
from weft_wire.rpc.messages import Body, CompressedMessage, Message, MessageReader, pack_prefix, whole_message
from weft_wire.rpc.metadata import Metadata, encode_metadata
from weft_wire.rpc.status import NUMBER_BY_STATUS, STATUS_BY_NUMBER, CallError, encode_message
from weft_wire.server.eager import start_now
from weft_wire.server.methods import CallDetails, Method
from weft_wire.transport.deadlines import Deadline

if TYPE_CHECKING:
    from weft_wire.server.protocol import ServerProtocol

#: Messages of a request that wait to be read; beyond it the client gets no more credit.
_MAX_QUEUED = 8
#: Metadata up to this size are not counted among what the server holds.
_FREE_METADATA_BYTES = 2048
#: What a message that waits costs beside its bytes: hundreds of thousands of empty ones fit into a window.
_MESSAGE_COST_BYTES = 64

_RESPONSE_FIELDS = [(":status", "200"), ("content-type", CONTENT_TYPE)]
_RESPONSE_HEADERS = encode(_RESPONSE_FIELDS)
_OK_TRAILERS = encode([("grpc-status", "0")])
_CUT_OFF = "the request ends in the middle of a message"
_ENCODINGS = {grpc.Compression.Gzip: "gzip", grpc.Compression.Deflate: "deflate"}

_log = logging.getLogger("weft_wire.server")


class CallEndedError(grpc.RpcError):
    """What reading a request raises when the client has broken the call off."""


class ServerCall(Stream):
    """A call; its public methods are those of ``grpc.aio.ServicerContext``.

    Attributes:
        head: Fields of the request; None before they have come.
        is_finished: Its status was sent or it was broken off: nothing more is sent.
        is_broken_off: The client has reset the stream, or its connection is lost.
    """

    head: RequestHead | None = None
    is_finished = False
    is_broken_off = False
    _method: Method | None = None
    _task: "asyncio.Task[None] | None" = None
    _deadline: Deadline | None = None
    _reader: MessageReader | None = None
    _messages: deque[Message] | None = None
    _is_request_complete = False
    _waiter: "asyncio.Future[None] | None" = None
    _drained: "asyncio.Future[None] | None" = None
    _has_sent_headers = False
    _has_begun = False
    _num_held_bytes = 0
    _num_metadata_bytes = 0
    _initial: tuple[tuple[str, str | bytes], ...] = ()
    _trailing: tuple[tuple[str, str | bytes], ...] = ()
    _code: StatusCode | None = None
    _details = ""
    _encoding = ""
    _callbacks: list[Callable[["ServerCall"], None]] | None = None

    def __init__(self, protocol: "ServerProtocol") -> None:
        self._protocol = protocol
        self._server = protocol.server

    # Events of the stream.

    def on_headers(self, headers: DecodedHeaders, is_end: bool) -> None:
        """The request's fields, or its trailers, which mean nothing but its end."""
        if self.head is not None:
            if self._reader is not None and not self._reader.is_empty:
                self.fail(StatusCode.INTERNAL, _CUT_OFF)
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
                self._server.count_buffered(head.metadata_bytes)
            except CallError as error:
                self.fail(error.code, error.details)
                return
            self._num_metadata_bytes = head.metadata_bytes
        method: Method | None = head.resolved
        if method is None:
            method = head.resolved = self._server.methods.find(head.path, head.metadata)
            if method is None and not self._server.interceptors:
                self.fail(StatusCode.UNIMPLEMENTED, f"Method not found: '{head.path}'")
                return
        self._method = method
        if head.timeout_s is not None:
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

    def on_drained(self) -> None:
        """``write`` may go on."""
        self._release_response()
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    # The request.

    def _read(self, data: bytes | memoryview, is_end: bool) -> None:
        reader = self._reader
        if reader is None:
            head = self.head
            reader = self._reader = MessageReader(
                self._server.max_message_bytes,
                may_compress=head is not None and head.encoding != "identity",
                count_bytes=self._server.count_buffered,
                decompresses=False,
                keeps_parts=self._method is not None and self._method.takes_parts and not self._server.interceptors,
            )
        for message in reader.feed(data):
            self._enqueue(message)
        if is_end:
            if not reader.is_empty:
                raise CallError(StatusCode.INTERNAL, _CUT_OFF)
            self._on_request_end()
        elif self._messages is None or len(self._messages) < _MAX_QUEUED:
            self.connection.grant(self)

    def _enqueue(self, message: Message) -> None:
        method = self._method
        messages = self._messages
        if messages is None:
            messages = self._messages = deque()
        elif method is not None and not method.reads_stream:
            raise CallError(StatusCode.UNIMPLEMENTED, "the call has several messages; this method takes one")
        self._server.count_buffered(len(message) + _MESSAGE_COST_BYTES)
        messages.append(message)
        if method is None or method.reads_stream:
            self._wake()

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

    def _take(self) -> Message:
        assert self._messages is not None  # noqa: S101  # the caller has seen one
        message = self._messages.popleft()
        self._server.count_buffered(-len(message) - _MESSAGE_COST_BYTES)
        if isinstance(message, CompressedMessage):
            return decompress(message, self._server.max_message_bytes)
        return message

    async def _next_message(self) -> Message | None:
        """The next message of the request; None at its end. Raises CallEndedError if it was broken off."""
        while not self._messages:
            if self.is_broken_off or self.is_finished:
                raise CallEndedError("the client broke the call off")
            if self._is_request_complete:
                return None
            self._waiter = self._protocol.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        message = self._take()
        if self.is_open and len(self._messages) < _MAX_QUEUED:
            self.connection.grant(self)
        return message

    async def _only_message(self) -> Message:
        message = await self._next_message()
        while not self._is_request_complete and not self._messages:
            self._waiter = self._protocol.loop.create_future()
            await self._waiter
        if message is None:
            raise CallError(StatusCode.UNIMPLEMENTED, "the call has no message; this method takes one")
        return message

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _deserialized(self, method: Method, message: Message) -> Any:
        if method.deserialize is None:
            return message
        try:
            return method.deserialize(message)
        except Exception as error:
            _log.debug("a request cannot be read: %s", error)
            raise CallError(StatusCode.INTERNAL, "Exception deserializing request!") from None

    async def _requests(self, method: Method) -> AsyncIterator[Any]:
        while (message := await self._next_message()) is not None:
            yield self._deserialized(method, message)

    # The handler.

    def _start(self, coroutine: Any) -> None:
        self._protocol.num_running += 1
        self._task = start_now(coroutine, self._protocol.loop)

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
            self._after(CallError(StatusCode.INTERNAL, "Exception deserializing request!"))
            _log.debug("a request cannot be read: %s", error)
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

    # The response.

    def _finish(self, method: Method, response: Any) -> None:
        """Send the one response and the status of a call."""
        code = self._code
        if code is not None and code is not StatusCode.OK:
            self._send_status(code, self._details)
            return
        body = self._serialized(method, response)
        trailers = _OK_TRAILERS
        if self._trailing or self._details:
            trailers = encode(self._trailer_fields(StatusCode.OK, self._details))
        headers = None
        if not self._has_sent_headers:
            headers = _RESPONSE_HEADERS if not (self._initial or self._encoding) else self._header_block()
        prefix = b"\0" + len(body).to_bytes(4, "big")
        if self._encoding:
            body = compress(self._encoding, body)
            prefix = pack_prefix(1, len(body))
        self.connection.send_message(self, headers, prefix, body, trailers)
        if self.pending is not None:
            self._hold_response(len(body))
        self._end()

    def _serialized(self, method: Method, response: Any) -> Body:
        if method.serialize is None:
            body = response
            if not isinstance(body, bytes | bytearray | memoryview):
                raise CallError(StatusCode.INTERNAL, "Failed to serialize response!")
        else:
            try:
                body = method.serialize(response)
            except Exception as error:
                _log.error("a response cannot be serialized: %s", error)
                raise CallError(StatusCode.INTERNAL, "Failed to serialize response!") from None
        limit = self._server.max_message_bytes
        if len(body) > limit:
            text = f"Sent message larger than max ({len(body)} vs. {limit})"
            raise CallError(StatusCode.RESOURCE_EXHAUSTED, text)
        return body  # type: ignore[no-any-return]  # a serializer gives bytes

    def _header_block(self) -> bytes:
        fields = [*_RESPONSE_FIELDS, *encode_metadata(self._initial)]
        if self._encoding:
            fields.append(("grpc-encoding", self._encoding))
        return encode(fields)

    def _send_headers(self) -> None:
        if not self._has_sent_headers:
            block = self._header_block()
            self._has_sent_headers = True
            self.connection.send_headers(self, block)

    def _hold_response(self, num_bytes: int) -> None:
        """Count a response that waits for the client; if the server holds too much, the call is broken off."""
        try:
            self._server.count_buffered(num_bytes)
        except CallError as error:
            self.connection.reset(self, ErrorCode.ENHANCE_YOUR_CALM)
            self.on_reset(ErrorCode.ENHANCE_YOUR_CALM, error.details)
        else:
            self._num_held_bytes += num_bytes

    def _release_response(self) -> None:
        if self._num_held_bytes and self.pending is None:
            self._server.count_buffered(-self._num_held_bytes)
            self._num_held_bytes = 0

    def _trailer_fields(self, code: StatusCode, details: str) -> list[tuple[str, str]]:
        fields = [("grpc-status", str(NUMBER_BY_STATUS[code]))]
        if details:
            fields.append(("grpc-message", encode_message(details)))
        try:
            return [*fields, *encode_metadata(self._trailing)]
        except ValueError as error:
            _log.error("trailing metadata cannot be sent: %s", error)
            return [
                ("grpc-status", str(NUMBER_BY_STATUS[StatusCode.INTERNAL])),
                ("grpc-message", encode_message(str(error))),
            ]

    def _send_status(self, code: StatusCode, details: str) -> None:
        """End the call with a status, without a further message."""
        if self.is_finished:
            return
        fields = self._trailer_fields(code, details)
        if code is StatusCode.UNIMPLEMENTED and self.head is not None and self.head.failure is not None:
            fields.append(("grpc-accept-encoding", ACCEPTED))
        if not self._has_sent_headers:
            fields = [*_RESPONSE_FIELDS, *fields]
        self.connection.send_headers(self, encode(fields), is_end=True)
        self._end()

    def _refuse(self, http_status: int) -> None:
        """Answer something that is no call of gRPC."""
        text = "this server speaks gRPC: POST, with content-type application/grpc"
        fields = [(":status", str(http_status)), ("content-type", CONTENT_TYPE), ("grpc-status", "13")]
        self.connection.send_headers(self, encode([*fields, ("grpc-message", encode_message(text))]), is_end=True)
        self._end()

    def fail(self, code: StatusCode, details: str) -> None:
        """End the call with a status, and cancel its handler if it runs."""
        if self.is_finished:
            return
        self.connection.discard(self)
        self._send_status(code, details)
        if self._task is not None:
            self._task.cancel()

    def _expire(self) -> None:
        self.fail(StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    def _end(self) -> None:
        """Nothing more is sent: release what the call holds."""
        self.is_finished = True
        if self._deadline is not None:
            self._deadline.cancel()
        if self._reader is not None:
            self._reader.release()
        if self._messages:
            self._server.count_buffered(-sum(map(len, self._messages)) - _MESSAGE_COST_BYTES * len(self._messages))
            self._messages.clear()
        if self._num_metadata_bytes:
            self._server.count_buffered(-self._num_metadata_bytes)
            self._num_metadata_bytes = 0
        self._wake()
        self.on_drained()
        if self._callbacks is not None:
            callbacks, self._callbacks = self._callbacks, None
            for callback in callbacks:
                callback(self)

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
        """What TLS has verified of the client; empty without TLS."""
        return self._protocol.auth_context

    def peer_identity_key(self) -> str | None:
        """Key of ``auth_context`` that identifies the client; None without a certificate."""
        names = ("x509_subject_alternative_name", "x509_common_name")
        return next((name for name in names if name in self.auth_context()), None)

    def peer_identities(self) -> list[bytes] | None:
        """What is under that key."""
        key = self.peer_identity_key()
        return None if key is None else self.auth_context()[key]

    def set_code(self, code: StatusCode | int) -> None:
        """Set the status that the call ends with."""
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
        """Set the metadata that follow the response."""
        self._trailing = tuple(metadata)

    def trailing_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """The metadata set so far."""
        return self._trailing

    async def send_initial_metadata(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Send metadata before the response.

        Raises:
            RuntimeError: They were sent.
            ValueError: They cannot be sent; the message says why.
        """
        if self._has_sent_headers:
            raise RuntimeError("the initial metadata were sent")
        initial = tuple(metadata)
        encode_metadata(initial)  # raises before anything is kept
        self._initial = initial
        self._send_headers()

    def set_compression(self, compression: grpc.Compression) -> None:
        """Compress responses, if the client reads that encoding."""
        encoding = _ENCODINGS.get(compression, "")
        accepted = self.head.accepted if self.head is not None else ""
        self._encoding = encoding if encoding in accepted.replace(" ", "").split(",") else ""

    def disable_next_message_compression(self) -> None:
        """Ignored: each message says itself whether it is compressed, and one is compressed as all are."""

    async def read(self) -> Any:
        """The next request of a stream; ``grpc.aio.EOF`` at its end."""
        message = await self._next_message()
        method = self._method
        if message is None or method is None:
            return grpc.aio.EOF  # type: ignore[attr-defined]  # missing in the stubs
        return self._deserialized(method, message)

    async def write(self, response: Any) -> None:
        """Send one response of a stream; waits while the client reads slower than this.

        Raises:
            UsageError: The call is over.
        """
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
            self._drained = self._protocol.loop.create_future()
            try:
                await self._drained
            finally:
                self._drained = None

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

    async def abort_with_status(self, status: grpc.Status) -> NoReturn:
        """``abort`` with what ``status`` has."""
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
        """Whether the client has broken the call off."""
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
