"""Timeouts of client connections that uvicorn lacks, and the end of those that go on sending what nobody reads."""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

#: Time for a request line and headers, in seconds; also for the rest of a body whose response was sent already.
HEADERS_TIMEOUT_S = 60.0
#: Time that a client may leave response data unread, in seconds.
READ_TIMEOUT_S = 60.0
#: Time that a new connection has for its first request when the server stops, in seconds.
FIRST_REQUEST_S = 0.25
#: So much of a body is read after its response was sent, so that the client can read that; then its connection ends.
MAX_UNREAD_BYTES = 1 << 20


class Connection(H11Protocol):  # type: ignore[misc]  # uvicorn's types are not read
    """uvicorn's protocol with more timeouts; uvicorn itself only limits the pause between two requests."""

    _idle_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _num_unread_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Start the timeout for the first request."""
        super().connection_made(transport)
        self._update_idle_timer()

    def data_received(self, data: bytes) -> None:
        """Handle request data and update the idle timeout."""
        super().data_received(data)
        self._update_idle_timer()
        if self._idle_timer is None or self.conn.their_state is h11.IDLE:
            self._num_unread_bytes = 0
        elif (num_bytes := self._num_unread_bytes + len(data)) <= MAX_UNREAD_BYTES:
            self._num_unread_bytes = num_bytes
        else:
            self.transport.abort()

    def pause_writing(self) -> None:
        """Start the timeout of a client that does not read."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(READ_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the timeout of a client that does not read."""
        super().resume_writing()
        self._cancel_write_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timeouts."""
        super().connection_lost(exc)
        self._cancel_idle_timer()
        self._cancel_write_timer()

    def shutdown(self) -> None:
        """Close the connection after its request; a new one whose first request is on its way may still send it."""
        if self.cycle is None:
            self.loop.call_later(FIRST_REQUEST_S, self._shutdown)
        else:
            self._shutdown()

    def _shutdown(self) -> None:
        if not self.transport.is_closing():
            super().shutdown()

    def _update_idle_timer(self) -> None:
        """Run the idle timeout while no request is complete. Single bytes do not restart it; complete requests do."""
        is_awaiting_client = self.conn.their_state is h11.IDLE or (
            self.conn.their_state is h11.SEND_BODY and self.cycle is not None and self.cycle.response_complete
        )
        if not is_awaiting_client:
            self._cancel_idle_timer()
        elif self._idle_timer is None:
            self._idle_timer = self.loop.call_later(HEADERS_TIMEOUT_S, self.transport.abort)

    def _cancel_idle_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    def _cancel_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
