"""The request of a call at a server: its messages, assembled, counted and read."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from weft.wire.interface import StatusCode, grpc
from weft.wire.rpc.compression import decompress
from weft.wire.rpc.messages import CompressedMessage, Message, MessageReader
from weft.wire.rpc.status import CallError
from weft.wire.server.methods import Method
from weft.wire.server.response import ResponseHalf

if TYPE_CHECKING:
    pass

#: Messages of a request that wait to be read; beyond it the client gets no more credit.
_MAX_QUEUED = 8
#: What a message that waits costs beside its bytes: hundreds of thousands of empty ones fit into a window.
_MESSAGE_COST_BYTES = 64
CUT_OFF = "the request ends in the middle of a message"


class CallEndedError(grpc.RpcError):
    """What reading a request raises when the call is over: broken off, or ended for a request that cannot be read."""


class RequestHalf(ResponseHalf):
    """The receiving half of a call."""

    _unreadable: CallError | None = None

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
        """Forget what has come; whoever waits for more learns that the call is over."""
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
        """The next message of the request; None at its end. Raises CallEndedError if it was broken off."""
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
        """The next request of a stream; EOF at its end. One that cannot be read fails the call as its handler ends."""
        try:
            message = await self._next_message()
            return grpc.aio.EOF if message is None else self._deserialized(method, message)  # type: ignore[attr-defined]
        except CallError as error:
            self._unreadable = error
            raise CallEndedError(error.details) from None
