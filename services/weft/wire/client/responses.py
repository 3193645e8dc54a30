"""The two kinds of responses of a call: one message, or a stream of them."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Generator
from typing import Any, Final

from weft.wire.client.call import ClientCall
from weft.wire.interface import StatusCode, grpc
from weft.wire.rpc.heads import ResponseHead
from weft.wire.rpc.messages import PREFIX_BYTES, CompressedMessage, Message, MessageReader, decompress, whole_message
from weft.wire.rpc.status import CallError

_OK: Final = StatusCode.OK
_UNREADABLE: Final = "Exception deserializing response!"


class _Responses(ClientCall):
    """A call's side that receives messages."""

    _reader: MessageReader | None = None
    _waiter: asyncio.Future[None] | None = None

    def _read(self, data: bytes | memoryview, *, decompresses: bool, keeps_parts: bool) -> list[Message]:
        """The messages that are complete with this data; the call fails if it cannot be read."""
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

    def _release_waiter(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class OneResponse(_Responses):
    """A call that is awaited for its response."""

    _message: Message | memoryview | None = None
    _response: Any = None

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

    def _wake(self) -> None:
        self._message = self._reader = None
        self._release_waiter()

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

    def _on_end(self, head: ResponseHead) -> None:
        message, deserialize = self._message, self._deserialize
        if (
            message is None
            or self._reader is not None
            or self.is_open
            or head.status is not _OK
            or head.http_status
            or head.fault
        ):
            super()._on_end(head)
            return
        if type(message) is not bytes:
            message = self._as_taken(message)
        try:
            self._response = message if deserialize is None else deserialize(message)
        except Exception:
            self._finish(StatusCode.INTERNAL, _UNREADABLE, head)
        else:
            self._finish(_OK, head.message, head)

    def _as_taken(self, message: Message | memoryview) -> Any:
        """A message as the deserializer takes it; without one as bytes."""
        if isinstance(message, memoryview) and not getattr(self._deserialize, "takes_parts", False):
            return bytes(message)
        return message

    def _response_fault(self) -> str:
        if self._message is None:
            return "the server ended a unary call with OK and no message (cardinality violation)"
        if self._reader is not None and not self._reader.is_empty:
            return "the response ends within a message"
        message = self._as_taken(self._message)
        try:
            self._response = message if self._deserialize is None else self._deserialize(message)
        except Exception:
            return _UNREADABLE
        return ""


class StreamedResponses(_Responses):
    """A call whose responses are iterated over or read."""

    _num_held_bytes: int = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._messages: deque[Message] = deque()

    def _wake(self) -> None:
        self._reader = None
        if self.trailers is None:  # not the server's end: what was not read is not given any more
            self._messages.clear()
        self._release_waiter()

    def _on_body(self, data: bytes | memoryview) -> None:
        if self._status is not None:
            return
        messages = self._read(data, decompresses=False, keeps_parts=False)
        if messages:
            self._messages += messages
            self._num_held_bytes += sum(map(len, messages)) + PREFIX_BYTES * len(messages)
            self._release_waiter()
        elif not self._messages and self._status is None:
            self.connection.grant(self)

    def _response_fault(self) -> str:
        if self._reader is not None and not self._reader.is_empty:
            return "the response ends within a message"
        return ""

    async def _next(self) -> bool:
        """Wait for a message; False: there are no more."""
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
        """The next message, which must be there."""
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
        """The error of a call with a response that cannot be read, also if the server has ended it."""
        self._messages.clear()
        self.fail(status, details)
        self._status, self._details = status, details
        return self._error()

    async def read(self) -> Any:
        """The next response; ``grpc.aio.EOF`` at the end. Cancelling the caller cancels the call.

        Raises:
            AioRpcError: The call has failed.
        """
        if self._messages or await self._next():
            return self._take()
        return grpc.aio.EOF  # type: ignore[attr-defined]  # missing in the stubs

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[Any]:
        try:
            while self._messages or await self._next():
                yield self._take()
        finally:
            self.cancel()  # of an iteration that was left; no effect at the end
