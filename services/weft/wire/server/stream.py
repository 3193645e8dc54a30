"""The response side of a server's call: headers, messages, final status."""

import asyncio
import functools
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from weft.wire.connection.sending import Stream
from weft.wire.connection.streams import StreamStates
from weft.wire.event_loop import Deadline
from weft.wire.frames import ErrorCode
from weft.wire.heads import CONTENT_TYPE, RequestHead, encode_metadata
from weft.wire.hpack import encode
from weft.wire.interface import StatusCode, grpc
from weft.wire.messages import (
    ACCEPTED,
    NUMBER_BY_STATUS,
    Body,
    CallError,
    CompressedMessage,
    Message,
    MessageReader,
    compress,
    decompress,
    encode_message,
    is_body,
    pack_prefix,
)
from weft.wire.server.methods import Host, Method

_RESPONSE_FIELDS = [(":status", "200"), ("content-type", CONTENT_TYPE)]
_RESPONSE_HEADERS = encode(_RESPONSE_FIELDS)
_OK_TRAILERS = encode([("grpc-status", "0")])

#: Messages of a request that wait to be read; beyond it the client gets no more credit.
_MAX_QUEUED = 8
#: What a message that waits costs beside its bytes: hundreds of thousands of empty ones fit into a window.
_MESSAGE_COST_BYTES = 64
CUT_OFF = "the request ends in the middle of a message"

_log = logging.getLogger("weft.wire.server")


@functools.lru_cache(maxsize=256)
def _ok_trailers(metadata: tuple[tuple[str, str | bytes], ...], details: str) -> bytes:
    """Encoded trailers of a successful call, cached because services repeat theirs. Raises if they cannot be sent."""
    fields = [("grpc-status", "0")]
    if details:
        fields.append(("grpc-message", encode_message(details)))
    return encode([*fields, *encode_metadata(metadata)])


class CallEndedError(grpc.RpcError):
    """Raised when a request is read from a call that has ended: cancelled, or failed on an unreadable request."""


class _Connection(Protocol):
    num_running: int
    loop: asyncio.AbstractEventLoop
    peer: str
    server: Host

    @property
    def auth_context(self) -> dict[str, list[bytes]]: ...
    def count_buffered(self, num_bytes: int) -> None: ...


class CallStream(Stream):
    """The HTTP/2 stream of a call at a server: request messages, response, and final status.

    Class attributes hold the defaults, so that an instance stores only what differs.

    Attributes:
        is_finished: The status was sent or the call was cancelled: nothing more is sent.
        is_broken_off: The client has reset the stream, or its connection is lost.
    """

    connection: StreamStates
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
    _callbacks: list[Callable[[Any], None]] | None = None
    _unreadable: CallError | None = None

    def __init__(self, protocol: _Connection) -> None:
        self._protocol = protocol
        self._server = protocol.server

    def on_drained(self) -> None:
        """``write`` may go on."""
        self._release_response()
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def _finish(self, method: Method, response: Any) -> None:
        code = self._code
        if code is not None and code is not StatusCode.OK:
            self._send_status(code, self._details)
            return
        body = self._serialized(method, response)
        trailers = _OK_TRAILERS
        if self._trailing or self._details:
            try:
                trailers = _ok_trailers(self._trailing, self._details)
            except Exception:  # not hashable, or not sendable, which the status then says
                trailers = encode(self._trailer_fields(StatusCode.OK, self._details))
        headers = None
        if not self._has_sent_headers:
            headers = _RESPONSE_HEADERS if not (self._initial or self._encoding) else self._header_block()
        if self._encoding:
            body = compress(self._encoding, body)
        prefix = pack_prefix(int(self._encoding != ""), len(body))
        self.connection.send_message(self, headers, prefix, body, trailers)
        if self.pending is not None:
            self._hold_response(len(body))
        self._end()

    def _serialized(self, method: Method, response: Any) -> Body:
        try:
            body = response if method.serialize is None else method.serialize(response)
            if type(body) is not bytes and not is_body(body):
                raise TypeError(f"a serialized response is bytes, not {type(body)}")
        except Exception as error:
            _log.error("a response cannot be serialized: %s", error)
            raise CallError(StatusCode.INTERNAL, "Failed to serialize response!") from None
        limit = self._server.max_message_bytes
        if len(body) > limit:
            text = f"Sent message larger than max ({len(body)} vs. {limit})"
            raise CallError(StatusCode.RESOURCE_EXHAUSTED, text)
        return body

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
        """Count a response that waits for the client; end the call if the server holds too much."""
        try:
            self._protocol.count_buffered(num_bytes)
        except CallError as error:
            self.connection.reset(self, ErrorCode.ENHANCE_YOUR_CALM)
            self.on_reset(ErrorCode.ENHANCE_YOUR_CALM, error.details)
        else:
            self._num_held_bytes += num_bytes

    def _release_response(self) -> None:
        if self._num_held_bytes and self.pending is None:
            self._protocol.count_buffered(-self._num_held_bytes)
            self._num_held_bytes = 0

    def _trailer_fields(self, code: StatusCode, details: str) -> list[tuple[str, str]]:
        # A handler may have set anything; an exception here would be one of the connection, with all its calls.
        fields = [("grpc-status", str(NUMBER_BY_STATUS[code if isinstance(code, StatusCode) else StatusCode.UNKNOWN]))]
        try:
            if details:
                text = details.decode("utf-8", "replace") if isinstance(details, bytes) else str(details)
                fields.append(("grpc-message", encode_message(text)))
            return [*fields, *encode_metadata(self._trailing)]
        except Exception as error:
            _log.error("the status or the trailing metadata of a call cannot be sent: %s", error)
            return [
                ("grpc-status", str(NUMBER_BY_STATUS[StatusCode.INTERNAL])),
                ("grpc-message", encode_message(str(error))),
            ]

    def _send_status(self, code: StatusCode, details: str) -> None:
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
        text = "this server speaks gRPC: POST, with content-type application/grpc"
        fields = [(":status", str(http_status)), ("content-type", CONTENT_TYPE), ("grpc-status", "13")]
        self.connection.send_headers(self, encode([*fields, ("grpc-message", encode_message(text))]), is_end=True)
        self._end()

    def fail(self, code: StatusCode, details: str) -> None:
        """End the call with a status and cancel its handler."""
        if self.is_finished:
            return
        self.connection.discard(self)
        self._send_status(code, details)
        if self._task is not None:
            self._task.cancel()

    def _expire(self) -> None:
        self.fail(StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    def _end(self) -> None:
        self.is_finished = True
        if self._deadline is not None:
            self._deadline.cancel()
        if self._reader is not None or self._messages or self._waiter is not None:
            self._release_request()
        if self._num_metadata_bytes:
            self._protocol.count_buffered(-self._num_metadata_bytes)
            self._num_metadata_bytes = 0
        if self._num_held_bytes or self._drained is not None:
            self.on_drained()
        if self._callbacks is not None:
            callbacks, self._callbacks = self._callbacks, None
            for callback in callbacks:
                try:
                    callback(self)
                except Exception as error:
                    _log.error("a callback of a call has failed", exc_info=error)

    # The request.

    def _on_request_end(self) -> None:
        raise NotImplementedError

    def _read(self, data: bytes | memoryview, is_end: bool) -> None:
        reader = self._reader
        if reader is None:
            head = self.head
            reader = self._reader = MessageReader(
                self._server.max_message_bytes,
                may_compress=head is not None and head.encoding != "identity",
                count_bytes=self._protocol.count_buffered,
                decompresses=False,
                keeps_parts=self._method is not None and self._method.takes_parts and not self._server.interceptors,
            )
        for message in reader.feed(data):
            self._enqueue(message)
        if is_end:
            if not reader.is_empty:
                raise CallError(StatusCode.INTERNAL, CUT_OFF)
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
        self._protocol.count_buffered(len(message) + _MESSAGE_COST_BYTES)
        messages.append(message)
        if method is None or method.reads_stream:
            self._wake()

    def _release_request(self) -> None:
        if self._reader is not None:
            self._reader.release()
        if self._messages:
            self._protocol.count_buffered(-sum(map(len, self._messages)) - _MESSAGE_COST_BYTES * len(self._messages))
            self._messages.clear()
        self._wake()

    def _take(self) -> Message:
        assert self._messages is not None  # noqa: S101  # the caller has seen one
        message = self._messages.popleft()
        self._protocol.count_buffered(-len(message) - _MESSAGE_COST_BYTES)
        if isinstance(message, CompressedMessage):
            return decompress(message, self._server.max_message_bytes)
        return message

    async def _next_message(self) -> Message | None:
        """The next message of the request; None at its end. Raises CallEndedError if the call was aborted."""
        while not self._messages:
            if self.is_broken_off or self.is_finished:
                raise CallEndedError("the client broke the call off")
            if self._is_request_complete:
                return None
            if self._waiter is not None:  # another task reads too
                await asyncio.wait((self._waiter,))
                continue
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
            raise self._unreadable_request(error) from None

    def _unreadable_request(self, error: Exception) -> CallError:
        head = self.head
        return self._server.unreadable.failure(head.path if head else "", self._protocol.peer, error)

    async def _requests(self, method: Method) -> AsyncIterator[Any]:
        while (request := await self._next_request(method)) is not grpc.aio.EOF:  # type: ignore[attr-defined]  # missing in the stubs
            yield request

    async def _next_request(self, method: Method) -> Any:
        """The next request of a stream; EOF at its end. An unreadable one fails the call when its handler ends."""
        try:
            message = await self._next_message()
            return grpc.aio.EOF if message is None else self._deserialized(method, message)  # type: ignore[attr-defined]
        except CallError as error:
            self._unreadable = error
            raise CallEndedError(error.details) from None
