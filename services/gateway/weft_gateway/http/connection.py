"""A client's connection, which is closed when the client keeps it and does nothing."""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

#: How long a request line and headers may take, in seconds; and what is left of a body that was answered already.
HEADERS_WAIT_S = 60.0
#: How long a client may leave unread what waits for it, in seconds.
READ_WAIT_S = 60.0


class Connection(H11Protocol):  # type: ignore[misc]  # uvicorn's types are not read
    """uvicorn's, which bounds in time only the pause between two requests."""

    _quiet: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """A client has come, and should say what it wants."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """A part of a request has come."""
        super().data_received(data)
        self._watch()

    def pause_writing(self) -> None:
        """The client reads slower than it is written to."""
        super().pause_writing()
        self._unread = self.loop.call_later(READ_WAIT_S, self.transport.abort)

    def resume_writing(self) -> None:
        """It has read."""
        super().resume_writing()
        self._end_unread()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone, or was left."""
        super().connection_lost(exc)
        self._end_quiet()
        self._end_unread()

    def _watch(self) -> None:
        """The time runs while no request is whole; it begins anew with each request, and with no single byte."""
        is_waited_for = self.conn.their_state is h11.IDLE or (
            self.conn.their_state is h11.SEND_BODY and self.cycle is not None and self.cycle.response_complete
        )
        if not is_waited_for:
            self._end_quiet()
        elif self._quiet is None:
            self._quiet = self.loop.call_later(HEADERS_WAIT_S, self.transport.abort)

    def _end_quiet(self) -> None:
        if self._quiet is not None:
            self._quiet.cancel()
            self._quiet = None

    def _end_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
