"""Base class of all client calls: start, status and metadata, and the retry of calls that the server did not begin."""

import asyncio
from collections.abc import Callable
from typing import Any, Final, Protocol

from typing_extensions import override

from weft.wire.client.protocol import ChannelOptions, RequestHeads
from weft.wire.connection.sending import Stream
from weft.wire.connection.streams import StreamStates
from weft.wire.event_loop import Deadline, DeadlineQueue
from weft.wire.frames import ErrorCode
from weft.wire.heads import Metadata, ResponseHead
from weft.wire.hpack import DecodedHeaders
from weft.wire.interface import StatusCode, grpc
from weft.wire.messages import status_of_reset

_OK: Final = StatusCode.OK
_CANCELLED: Final = StatusCode.CANCELLED
_INTERNAL: Final = StatusCode.INTERNAL
#: Of the body of an answer that is none of gRPC, for the message of its status.
_MAX_QUOTED_BYTES: Final = 1000


class UnansweredError(grpc.aio.AioRpcError):
    """A call that ended without a status from the server; if ``is_unprocessed``, it is safe to send it elsewhere."""

    is_unprocessed: bool = False


class _Owner(Protocol):
    """The parts of a channel's link that its calls need."""

    options: ChannelOptions
    loop: asyncio.AbstractEventLoop
    deadlines: DeadlineQueue
    heads: RequestHeads

    def begin(self, call: "ClientCall") -> None: ...
    def forget(self, call: "ClientCall") -> None: ...
    def hold(self) -> None: ...


class ClientCall(Stream):
    """A client's call, with the interface of ``grpc.aio.Call``; it is also the HTTP/2 stream that carries it.

    Class attributes hold the defaults, so that an instance stores only what differs.

    Attributes:
        waits_for_ready: Failed attempts to connect do not end the call.
        has_waited: The call was not sent at once, or is sent once more.
        trailers: Metadata that came with the final status; None: none came.
    """

    connection: StreamStates
    waits_for_ready: bool = False
    has_waited: bool = False
    trailers: ResponseHead | None = None
    _timeout_s: float | None = None
    _deadline: Deadline | None = None
    _status: StatusCode | None = None
    _details: str = ""
    _head: ResponseHead | None = None
    _odd_head: ResponseHead | None = None
    _odd_body: bytes = b""
    _is_committed: bool = False
    _is_retried: bool = False
    _is_cancelled: bool = False
    _is_unprocessed: bool = False
    _callbacks: list[Callable[[Any], None]] | None = None
    _watchers: list[asyncio.Future[None]] | None = None

    def __init__(self, owner: _Owner, block: bytes, deserialize: Callable[[bytes], Any] | None) -> None:
        self.owner = owner
        self._block = block
        self._deserialize = deserialize

    # Beginning.

    def set_timeout(self, timeout_s: float) -> None:
        """Set the timeout of the call; call it before ``Link.begin``."""
        self._timeout_s = timeout_s
        self._deadline = self.owner.deadlines.add(timeout_s, self._expire)

    def start(self, connection: StreamStates) -> None:
        """Send the request on a connection that accepts a stream now."""
        raise NotImplementedError

    def _request_block(self) -> bytes:
        timeout_s = self._timeout_s
        if timeout_s is None:
            return self._block
        if self.has_waited and self._deadline is not None:
            timeout_s = max(0.0, self._deadline.when_s - self.owner.loop.time())
        return self._block + self.owner.heads.timeout(timeout_s)

    def _can_be_sent_again(self) -> bool:
        raise NotImplementedError

    def _retry(self) -> bool:
        if self._is_retried or self._is_committed or not self._can_be_sent_again():
            return False
        self._is_retried = self.has_waited = True
        self.is_local_ended = self.is_remote_ended = False
        self.pending = self.final = None
        self.num_unacked_bytes = 0
        self._odd_head = None
        self.owner.begin(self)
        return True

    # Events of the stream.

    @override
    def on_headers(self, headers: DecodedHeaders, is_end: bool) -> None:
        head = headers.memo
        if head is None:
            if headers.is_too_large:
                limit = self.owner.options.max_header_list_bytes
                self.fail(StatusCode.RESOURCE_EXHAUSTED, f"the metadata of the response is larger than {limit} bytes")
                return
            head = headers.memo = ResponseHead(headers.fields)
        if is_end:
            self._on_end(head)
        elif head.http_status == 200 and self._head is None and not head.fault:
            self._head = head
            self._is_committed = True
            if self._watchers is not None:
                self._wake_watchers()
        else:
            self._on_odd_head(head)

    @override
    def on_data(self, data: bytes | memoryview, is_end: bool) -> None:
        if self._head is None:
            self._on_odd_data(data, is_end)
            return
        self._on_body(data)
        if is_end and self._status is None:
            self._finish(_INTERNAL, "the server closed the stream without sending trailers")
            self._end_stream()

    @override
    def on_reset(self, code: int, reason: str, *, is_unprocessed: bool = False) -> None:
        if self._status is not None:
            return
        if is_unprocessed:
            if not (self.connection.is_peer_leaving or self.connection.is_closed):
                self.owner.hold()
            if self._retry():
                return
        self._is_unprocessed = is_unprocessed
        if self.connection.is_closed:
            self._finish(StatusCode.UNAVAILABLE, f"Socket closed: {reason}")
        elif code == ErrorCode.CANCEL and self._deadline is not None and self.time_remaining() == 0:
            self._expire()
        else:
            self._finish(status_of_reset(code), reason)

    @override
    def on_drained(self) -> None:
        if self._watchers is not None:
            self._wake_watchers()

    def _on_body(self, data: bytes | memoryview) -> None:
        raise NotImplementedError

    def _response_fault(self) -> str:
        """Return an error message if an OK response violates gRPC's framing, else ""."""
        raise NotImplementedError

    def _on_end(self, head: ResponseHead) -> None:
        status, details = head.status, head.message
        if self._odd_head is not None and status is None:
            self._finish_odd()
            return
        if head.http_status and (self._head is not None or head.http_status < 200):
            status, details = _INTERNAL, f"the answer ends with fields of HTTP status {head.http_status}"
        elif status is None:
            status, details = StatusCode.UNKNOWN, head.fault or "No status received"
        elif head.fault:
            status, details = _INTERNAL, head.fault
        elif status is _OK and (fault := self._response_fault()):
            status, details = _INTERNAL, fault
        self._finish(status, details, head)
        self._end_stream()

    def _on_odd_head(self, head: ResponseHead) -> None:
        """Handle header fields that neither begin nor end a gRPC response."""
        if 100 <= head.http_status < 200 and self._head is None:
            return
        if self._head is not None or self._odd_head is not None or not head.http_status:
            self.fail(_INTERNAL, "the server sent fields that neither begin nor end an answer")
            return
        self._is_committed = True
        self._odd_head = head

    def _on_odd_data(self, data: bytes | memoryview, is_end: bool) -> None:
        """Handle the body of a response that is not gRPC; the error message quotes its beginning."""
        if self._odd_head is None:
            self.fail(_INTERNAL, "the server sent data before any fields")
            return
        self._odd_body += bytes(data[: _MAX_QUOTED_BYTES - len(self._odd_body)])
        if is_end or len(self._odd_body) >= _MAX_QUOTED_BYTES:
            self._finish_odd()

    def _finish_odd(self) -> None:
        head = self._odd_head
        if head is not None:
            details = head.message or head.fault
            if self._odd_body:
                details += f": {self._odd_body.decode('utf-8', 'replace')}"
            self._finish(head.status or StatusCode.UNKNOWN, details, head)
            self._end_stream(ErrorCode.CANCEL)

    # Ending.

    def fail(self, status: StatusCode, details: str) -> None:
        """End the call locally with a status and tell the server. No effect on a call that has ended."""
        if self._status is not None:
            return
        is_open = self.is_open
        self._is_unprocessed = not is_open
        self._finish(status, details)
        if is_open:
            self._end_stream(ErrorCode.CANCEL)
        else:
            self.owner.forget(self)

    def _end_stream(self, code: ErrorCode = ErrorCode.NO_ERROR) -> None:
        if self.is_open:
            self.connection.reset(self, code)

    def _expire(self) -> None:
        self.fail(StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    def _finish(self, status: StatusCode, details: str, trailers: ResponseHead | None = None) -> None:
        if self._status is not None:
            return
        self._status = status
        self._details = details
        self.trailers = trailers
        if self._deadline is not None:
            self._deadline.cancel()
        self._wake()
        if self._watchers is not None:
            self._wake_watchers()
        if self._callbacks is not None:
            callbacks, self._callbacks = self._callbacks, None
            for callback in callbacks:
                self._call_back(callback)

    def _wake(self) -> None:
        """Wake those that wait for the response: the call has ended."""
        raise NotImplementedError

    def _call_back(self, callback: Callable[[Any], None]) -> None:
        try:
            callback(self)
        except Exception as error:
            context = {"message": "a callback of a call has failed", "exception": error}
            self.owner.loop.call_exception_handler(context)

    def _raise_failure(self) -> None:
        if self._is_cancelled:
            raise asyncio.CancelledError
        if self._status is not _OK:
            raise self._error()

    def _error(self) -> grpc.aio.AioRpcError:
        assert self._status is not None  # noqa: S101  # the call has ended
        about = self._status, self._initial(), self._trailing(), self._details, self._details
        if self.trailers is not None:
            return grpc.aio.AioRpcError(*about)
        error = UnansweredError(*about)
        error.is_unprocessed = self._is_unprocessed
        return error

    def _initial(self) -> Any:
        return _as_metadata(() if self._head is None else self._head.metadata)

    def _trailing(self) -> Any:
        return _as_metadata(() if self.trailers is None else self.trailers.metadata)

    # Waiting for something else than the response.

    async def _wait_until(self, is_so: Callable[[], bool] = lambda: False) -> None:
        while self._status is None and not is_so():
            watcher: asyncio.Future[None] = self.owner.loop.create_future()
            if self._watchers is None:
                self._watchers = []
            self._watchers.append(watcher)
            await watcher

    def _wake_watchers(self) -> None:
        watchers, self._watchers = self._watchers, None
        for watcher in watchers or ():
            if not watcher.done():
                watcher.set_result(None)

    # The interface of grpc.aio.Call.

    def cancel(self) -> bool:
        """Cancel the call here and at the server; return False if it had ended."""
        if self._status is not None:
            return False
        self._is_cancelled = True
        self.fail(_CANCELLED, "Locally cancelled by application!")
        return True

    def cancelled(self) -> bool:
        """Whether the call ended with CANCELLED."""
        return self._status is _CANCELLED

    def done(self) -> bool:
        """Whether the call has ended."""
        return self._status is not None

    def time_remaining(self) -> float | None:
        """Seconds to the deadline, at least 0; None without one."""
        if self._deadline is None:
            return None
        return max(0.0, self._deadline.when_s - self.owner.loop.time())

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call ``callback`` with this call when it has ended; at once if it has."""
        if self._status is not None:
            self._call_back(callback)
        elif self._callbacks is None:
            self._callbacks = [callback]
        else:
            self._callbacks.append(callback)

    async def initial_metadata(self) -> Any:
        """Metadata sent before the first response; empty if there was none."""
        await self._wait_until(lambda: self._head is not None)
        return self._initial()

    async def trailing_metadata(self) -> Any:
        """Metadata sent with the status; waits for the end of the call."""
        await self._wait_until()
        return self._trailing()

    async def code(self) -> StatusCode:
        """The status; waits for the end of the call."""
        await self._wait_until()
        assert self._status is not None  # noqa: S101  # the call has ended
        return self._status

    async def details(self) -> str:
        """The message of the status; waits for the end of the call."""
        await self._wait_until()
        return self._details

    debug_error_string = details

    async def wait_for_connection(self) -> None:
        """Return once the call is on a connection; raises AioRpcError if it ended before."""
        await self._wait_until(lambda: self.is_open)
        if self._status is not None:
            self._raise_failure()

    def __repr__(self) -> str:
        kind = type(self).__name__
        if self._status is None:
            return f"<{kind} of RPC in flight>"
        return f"<{kind} of RPC that terminated with:\n\tstatus = {self._status}\n\tdetails = {self._details!r}\n>"


def _as_metadata(pairs: Metadata) -> Any:
    return grpc.aio.Metadata(*pairs)
