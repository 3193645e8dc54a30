"""The four kinds of client calls: one request or a stream of them, one response or a stream of them."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Generator, Iterable
from typing import Any, Final

from typing_extensions import override

from weft.wire.client.call import ClientCall
from weft.wire.connection.streams import StreamStates
from weft.wire.heads import ResponseHead
from weft.wire.interface import StatusCode, grpc
from weft.wire.messages import (
    PREFIX_BYTES,
    Body,
    CallError,
    CompressedMessage,
    Message,
    MessageReader,
    compress,
    decompress,
    is_body,
    pack_prefix,
    whole_message,
)

_OK: Final = StatusCode.OK
_UNREADABLE: Final = "Exception deserializing response!"
_ENDED: Final = "RPC already finished."
_HALF_CLOSED: Final = 'RPC is half closed after calling "done_writing".'
_MIXED: Final = "The iterator and read/write APIs may not be mixed on a single RPC."
#: Requests kept for a call that the server may refuse; one that has sent more is not sent again.
_MAX_KEPT_BYTES: Final = 256 << 10

_log = logging.getLogger("weft.wire.client")


class MessagingCall(ClientCall):
    """A call that sends one request or a stream of them and queues responses as they arrive."""

    needs_whole_request = True
    _serialize: Callable[[Any], Body] | None = None
    _encoding: str = "identity"
    _body: Body = b""  # of the one request
    _kept: list[tuple[bytes, Body]] | None = None  # of several
    _num_kept_bytes: int = 0
    _is_done_writing: bool = False
    _feeder: asyncio.Task[None] | None = None
    _reader: MessageReader | None = None
    _waiter: asyncio.Future[None] | None = None
    _message: Message | memoryview | None = None  # the one response

    # Requests.

    def set_request(self, request: Any, serialize: Callable[[Any], Body] | None, encoding: str) -> bool:
        """Set the only request, to be sent with the headers; returns False if it cannot be sent, which fails the call.

        Call it, like ``set_requests``, before ``Link.begin``.
        """
        if encoding != "identity":
            self._encoding = encoding
        body = self.serialized(request, serialize)
        if body is None:
            return False
        self._body = body
        return True

    def set_requests(self, requests: Any, serialize: Callable[[Any], Body] | None, encoding: str) -> None:
        """Send the requests of an iterator; with None, those passed to ``write``."""
        self.needs_whole_request = False
        self._serialize, self._encoding, self._kept = serialize, encoding, []
        if requests is not None:
            self._feeder = self.owner.loop.create_task(self._feed(requests))

    def serialized(self, request: Any, serialize: Callable[[Any], Body] | None) -> Body | None:
        """Serialize and compress a request; None if it cannot be sent, which fails the call."""
        try:
            body: Body = request if serialize is None else serialize(request)
            if type(body) is not bytes and not is_body(body):  # nothing may fail once it is in a connection's output
                raise TypeError(f"a serialized request is bytes, not {type(body)}")
        except Exception:
            _log.exception("a request cannot be serialized")
            self.fail(StatusCode.INTERNAL, "Exception serializing request!")
            return None
        limit = self.owner.options.max_message_bytes
        if len(body) > limit:
            self.fail(StatusCode.RESOURCE_EXHAUSTED, f"Sent message larger than max ({len(body)} vs. {limit})")
            return None
        return body if self._encoding == "identity" else compress(self._encoding, body)

    async def _feed(self, requests: AsyncIterable[Any] | Iterable[Any]) -> None:
        try:
            if isinstance(requests, AsyncIterable):
                async for request in requests:
                    await self._send(request)
            else:
                for request in requests:
                    await self._send(request)
            self._half_close()
        except (asyncio.InvalidStateError, grpc.RpcError):
            pass  # the call has ended
        except BaseException as error:
            if self._status is None:
                _log.debug("the iterator of requests has failed", exc_info=error)
                self.cancel()
            if not isinstance(error, Exception):
                raise

    @override
    def start(self, connection: StreamStates) -> None:
        connection.open_stream(self)
        if self.needs_whole_request:
            prefix = pack_prefix(int(self._encoding != "identity"), len(self._body))
            connection.send_message(self, self._request_block(), prefix, self._body, is_end=True)
        else:
            kept = self._kept or ()
            connection.send_headers(self, self._request_block(), is_end=self._is_done_writing and not kept)
            for prefix, body in kept:
                connection.send_message(self, None, prefix, body)
            if self._is_done_writing:
                connection.end_data(self)
        if self._watchers is not None:
            self._wake_watchers()

    @override
    def _can_be_sent_again(self) -> bool:
        return self.needs_whole_request or self._kept is not None

    async def write(self, request: Any) -> None:
        """Send a request; wait while flow control blocks it. Cancelling the caller cancels the call."""
        if self._feeder is not None:
            raise grpc.aio.UsageError(_MIXED)
        await self._send(request)

    async def done_writing(self) -> None:
        """No more requests follow. Raises UsageError if the call has an iterator of requests."""
        if self._feeder is not None:
            raise grpc.aio.UsageError(_MIXED)
        self._half_close()

    async def _send(self, request: Any) -> None:
        if self._status is not None:
            raise asyncio.InvalidStateError(_ENDED)
        if self._is_done_writing:
            raise asyncio.InvalidStateError(_HALF_CLOSED)
        try:
            if not self.is_open:
                await self._wait_until(lambda: self.is_open)
                self._raise_if_ended()
            body = self.serialized(request, self._serialize)
            if body is None:
                self._raise_if_ended()
                return
            prefix = pack_prefix(int(self._encoding != "identity"), len(body))
            if self._kept is not None:
                self._num_kept_bytes += len(prefix) + len(body)
                if self._is_committed or self._is_retried or self._num_kept_bytes > _MAX_KEPT_BYTES:
                    self._kept = None
                else:
                    self._kept.append((prefix, body))
            self.connection.send_message(self, None, prefix, body)
            if self.pending is not None:
                await self._wait_until(lambda: self.is_open and self.pending is None)
                self._raise_if_ended()
        except asyncio.CancelledError:
            self.cancel()
            raise

    def _raise_if_ended(self) -> None:
        if self._status is not None:
            self._raise_failure()

    def _half_close(self) -> None:
        if not self._is_done_writing:
            self._is_done_writing = True
            if self.is_open:
                self.connection.end_data(self)

    # Responses.

    def _read(self, data: bytes | memoryview, *, decompresses: bool, keeps_parts: bool) -> list[Message]:
        reader = self._reader
        if reader is None:
            head = self._head
            reader = self._reader = MessageReader(
                self.owner.options.max_message_bytes,
                may_compress=head is not None and head.encoding != "identity",
                decompresses=decompresses,
                keeps_parts=keeps_parts,
            )
        try:
            return reader.feed(data)
        except CallError as failure:
            self.fail(failure.code, failure.details)
            return []

    @override
    def _wake(self) -> None:
        self._body = b""
        self._kept = self._reader = self._message = None
        feeder, waiter = self._feeder, self._waiter
        if feeder is not None and not feeder.done():
            self.owner.loop.call_soon(feeder.cancel)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class UnaryCall(MessagingCall, grpc.aio.UnaryUnaryCall[Any, Any], grpc.aio.StreamUnaryCall[Any, Any]):
    """A call that is awaited for its response."""

    _response: Any = None

    def send(self, connection: StreamStates, body: Body, timeout_s: float | None) -> None:
        """As ``set_request`` (not compressed), ``set_timeout`` and ``Link.begin``, on a connection that accepts one."""
        block, owner = self._block, self.owner
        self._body = body
        if timeout_s is not None:
            self._timeout_s = timeout_s
            self._deadline = owner.deadlines.add(timeout_s, self._expire)
            block += owner.heads.timeout(timeout_s)
        connection.open_stream(self)
        connection.send_message(self, block, pack_prefix(0, len(body)), body, is_end=True)

    def __await__(self) -> Generator[Any, None, Any]:
        if self._status is None:
            waiter = self._waiter
            if waiter is None:
                waiter = self._waiter = self.owner.loop.create_future()
            try:
                yield from waiter
            except asyncio.CancelledError:
                self.cancel()
                raise
        elif self._status is not _OK:
            yield  # a caller that tries again at once must not keep the event loop from the next attempt to connect
        if self._status is _OK:
            return self._response
        self._raise_failure()

    @override
    def _on_body(self, data: bytes | memoryview) -> None:
        limit = self.owner.options.max_message_bytes
        if self._message is None and self._reader is None:
            message = whole_message(data)
            if message is not None and len(message) <= limit:
                self._message = message
                return
        if self._status is not None:
            return
        takes_parts = getattr(self._deserialize, "takes_parts", False)
        for complete in self._read(data, decompresses=True, keeps_parts=takes_parts):
            if self._message is not None:
                self.fail(StatusCode.INTERNAL, "the server sent more than one message for a unary call")
                return
            self._message = complete
        if self._status is None:
            self.connection.grant(self)

    @override
    def _on_end(self, head: ResponseHead) -> None:
        if (
            self._message is None
            or self._reader is not None
            or self.is_open
            or head.status is not _OK
            or head.http_status
            or head.fault
        ):
            super()._on_end(head)
        elif self._deserialized():
            self._finish(_OK, head.message, head)
        else:
            self._finish(StatusCode.INTERNAL, _UNREADABLE, head)

    def _deserialized(self) -> bool:
        message: Any = self._message
        deserialize = self._deserialize
        if isinstance(message, memoryview) and not getattr(deserialize, "takes_parts", False):
            message = bytes(message)
        try:
            self._response = message if deserialize is None else deserialize(message)
        except Exception:
            return False
        return True

    @override
    def _response_fault(self) -> str:
        if self._message is None:
            return "the server ended a unary call with OK and no message (cardinality violation)"
        if self._reader is not None and not self._reader.is_empty:
            return "the response ends within a message"
        return "" if self._deserialized() else _UNREADABLE


class StreamCall(MessagingCall, grpc.aio.UnaryStreamCall[Any, Any], grpc.aio.StreamStreamCall[Any, Any]):
    """A call whose responses are iterated over or read."""

    _num_held_bytes: int = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._messages: deque[Message] = deque()

    @override
    def _wake(self) -> None:
        if self.trailers is None:  # not the server's end: what was not read is not given any more
            self._messages.clear()
        super()._wake()

    @override
    def _on_body(self, data: bytes | memoryview) -> None:
        if self._status is not None:
            return
        messages = self._read(data, decompresses=False, keeps_parts=False)
        if messages:
            self._messages += messages
            self._num_held_bytes += sum(map(len, messages)) + PREFIX_BYTES * len(messages)
            waiter = self._waiter
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
        elif not self._messages and self._status is None:
            self.connection.grant(self)

    @override
    def _response_fault(self) -> str:
        if self._reader is not None and not self._reader.is_empty:
            return "the response ends within a message"
        return ""

    async def _next(self) -> bool:
        if self._status is not None and self._status is not _OK and not self._messages:
            await asyncio.sleep(0)  # as when a unary call is awaited that has failed before
        while not self._messages:
            if self._status is not None:
                self._raise_failure()
                return False
            waiter = self._waiter
            try:
                if waiter is not None:  # another task reads too
                    await asyncio.wait((waiter,))
                    continue
                waiter = self._waiter = self.owner.loop.create_future()
                await waiter
            except asyncio.CancelledError:
                self.cancel()
                raise
            finally:
                if self._waiter is waiter:
                    self._waiter = None
        return True

    def _take(self) -> Any:
        message = self._messages.popleft()
        self._num_held_bytes -= len(message) + PREFIX_BYTES
        if self.is_open and self.num_unacked_bytes:
            reader = self._reader
            num_held_bytes = self._num_held_bytes
            if num_held_bytes and reader is not None:
                num_held_bytes += reader.num_bytes
            self.connection.grant(self, num_held_bytes)
        try:
            if isinstance(message, CompressedMessage):
                message = decompress(message, self.owner.options.max_message_bytes)
            if self._deserialize is None:
                return message
            return self._deserialize(message)  # type: ignore[arg-type]  # only unary calls keep parts
        except CallError as error:
            raise self._refused(error.code, error.details) from None
        except Exception:
            raise self._refused(StatusCode.INTERNAL, _UNREADABLE) from None

    def _refused(self, status: StatusCode, details: str) -> grpc.aio.AioRpcError:
        """Return the error for a response that cannot be read, even if the server has ended the call."""
        self._messages.clear()
        self.fail(status, details)
        self._status, self._details = status, details
        return self._error()

    async def read(self) -> Any:
        """The next response; ``grpc.aio.EOF`` at the end. Cancelling the caller cancels the call."""
        if self._messages or await self._next():
            return self._take()
        return grpc.aio.EOF  # type: ignore[attr-defined]  # missing in the stubs

    async def __aiter__(self) -> AsyncIterator[Any]:
        try:
            while self._messages or await self._next():
                yield self._take()
        finally:
            self.cancel()  # of an iteration that was left; no effect at the end
