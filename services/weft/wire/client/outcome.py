"""The outcome of a call: its status, who waits for it, and the interface of ``grpc.aio.Call``."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

from weft.wire.client.heads import RequestHeads
from weft.wire.client.options import ChannelOptions
from weft.wire.connection.stream import Stream
from weft.wire.errors import ErrorCode
from weft.wire.interface import StatusCode, grpc
from weft.wire.rpc.heads import ResponseHead
from weft.wire.rpc.metadata import Metadata
from weft.wire.transport.deadlines import Deadline, DeadlineQueue

if TYPE_CHECKING:
    from weft.wire.client.call import ClientCall

_OK: Final = StatusCode.OK
_CANCELLED: Final = StatusCode.CANCELLED


class UnansweredError(grpc.aio.AioRpcError):
    """A call that ended without a status of the server: the client says what happened instead.

    Attributes:
        is_unprocessed: The server has not begun the call, so that it may be sent elsewhere without a risk.
    """

    is_unprocessed: bool = False


class CallOwner(Protocol):
    """What a call needs of its channel."""

    options: ChannelOptions
    loop: asyncio.AbstractEventLoop
    deadlines: DeadlineQueue
    heads: RequestHeads
    is_closed: bool

    def begin(self, call: "ClientCall") -> None:
        """Send a call, or let it wait for a connection or its turn."""

    def forget(self, call: "ClientCall") -> None:
        """A call that waits has ended."""

    def hold(self) -> None:
        """The server has refused a call, though it goes on: begin none for a moment."""


class CallOutcome(Stream):
    """What becomes of a call; it has the shape of ``grpc.aio.Call``.

    Attributes are defaults of the class: an instance holds only what differs.

    Attributes:
        trailers: What the server sent with the status of a call that has ended; None: nothing.
    """

    _owner: CallOwner
    _deadline: Deadline | None = None
    _status: StatusCode | None = None
    _details: str = ""
    _head: ResponseHead | None = None
    trailers: ResponseHead | None = None
    _is_cancelled: bool = False
    _is_unprocessed: bool = False
    _callbacks: list[Callable[[Any], None]] | None = None
    _watchers: list[asyncio.Future[None]] | None = None

    # Ending.

    def fail(self, status: StatusCode, details: str) -> None:
        """End the call from this side; the server is told. No effect on a call that has ended."""
        if self._status is not None:
            return
        is_open = self.is_open
        self._is_unprocessed = not is_open
        self._finish(status, details)
        if is_open:
            self._end_stream(ErrorCode.CANCEL)
        else:
            self._forget()

    def _forget(self) -> None:
        """The call is not sent any more."""

    def _end_stream(self, code: ErrorCode = ErrorCode.NO_ERROR) -> None:
        """Nothing more is sent or expected."""
        if self.is_open:
            self.connection.reset(self, code)

    def _expire(self) -> None:
        self.fail(StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    def _finish(self, status: StatusCode, details: str, trailers: ResponseHead | None = None) -> None:
        """The call has its status; whoever waits is told."""
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
        """The call has ended: whoever waits for the response may go on."""

    def _call_back(self, callback: Callable[[Any], None]) -> None:
        try:
            callback(self)
        except Exception as error:
            context = {"message": "a callback of a call has failed", "exception": error}
            self._owner.loop.call_exception_handler(context)

    def _raise_failure(self) -> None:
        """Raise what the call ended with, unless that is OK."""
        if self._is_cancelled:
            raise asyncio.CancelledError
        if self._status is not _OK:
            raise self._error()

    def _error(self) -> grpc.aio.AioRpcError:
        assert self._status is not None  # noqa: S101  # the call has ended
        initial, trailing = _as_metadata(self._initial()), _as_metadata(self._trailing())
        if self.trailers is not None:
            return grpc.aio.AioRpcError(self._status, initial, trailing, self._details, self._details)
        error = UnansweredError(self._status, initial, trailing, self._details, self._details)
        error.is_unprocessed = self._is_unprocessed
        return error

    def _initial(self) -> Metadata:
        return () if self._head is None else self._head.metadata

    def _trailing(self) -> Metadata:
        return () if self.trailers is None else self.trailers.metadata

    # Waiting for something else than the response.

    async def _wait_until(self, is_so: Callable[[], bool]) -> None:
        """Return once it is so, or the call has ended."""
        while self._status is None and not is_so():
            watcher: asyncio.Future[None] = self._owner.loop.create_future()
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
        """End the call at the server too; returns whether that has an effect."""
        if self._status is not None:
            return False
        self._is_cancelled = True
        self.fail(_CANCELLED, "Locally cancelled by application!")
        return True

    def cancelled(self) -> bool:
        """Whether the call ended with CANCELLED."""
        return self._status is _CANCELLED

    def done(self) -> bool:
        """Whether the call has its status."""
        return self._status is not None

    def time_remaining(self) -> float | None:
        """Seconds to the deadline, at least 0; None without one."""
        if self._deadline is None:
            return None
        return max(0.0, self._deadline.when_s - self._owner.loop.time())

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call ``callback`` with this call when it has ended; at once if it has."""
        if self._status is not None:
            self._call_back(callback)
        elif self._callbacks is None:
            self._callbacks = [callback]
        else:
            self._callbacks.append(callback)

    async def initial_metadata(self) -> Any:
        """What the server sent before its first response; empty if it sent none."""
        await self._wait_until(lambda: self._head is not None)
        return _as_metadata(self._initial())

    async def trailing_metadata(self) -> Any:
        """What the server sent with the status; waits for the end of the call."""
        await self._wait_until(_never)
        return _as_metadata(self._trailing())

    async def code(self) -> StatusCode:
        """The status; waits for the end of the call."""
        await self._wait_until(_never)
        assert self._status is not None  # noqa: S101  # the call has ended
        return self._status

    async def details(self) -> str:
        """The message of the status; waits for the end of the call."""
        await self._wait_until(_never)
        return self._details

    async def debug_error_string(self) -> str:
        """The same as ``details``."""
        return await self.details()

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


def _never() -> bool:
    return False


def _as_metadata(pairs: Metadata) -> Any:
    return grpc.aio.Metadata(*pairs)
