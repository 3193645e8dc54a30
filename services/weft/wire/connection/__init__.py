"""HTTP/2 without I/O (RFC 9113): bytes in, events out, clock injected; used by server and client.

This module holds the limits of a connection and the budget for control frames.
"""

from collections.abc import Callable
from dataclasses import dataclass

from weft.wire.frames import ErrorCode, Http2ConnectionError


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of one connection; all but the last three are announced to the peer.

    Attributes:
        stream_window_bytes: Bytes that a peer may send on a stream before they are consumed.
        max_frame_bytes: Largest frame that is accepted, 16,384 to 16,777,215.
        max_header_list_bytes: Largest header list, uncompressed, as SETTINGS_MAX_HEADER_LIST_SIZE counts it.
        max_unread_bytes: Control frames queued for a peer that does not read its socket.
        control_burst: Control frames (PING, SETTINGS, RST_STREAM, WINDOW_UPDATE, PRIORITY, empty DATA) accepted at
            once, beyond those that follow from data and finished streams.
        max_resets_per_s: Streams that the peer may reset a second, in the long run; 0: no limit, as a server has it on
            Unix sockets, whose clients are the same user's: those of a router pass on the cancels of all its clients.
    """

    max_concurrent_streams: int = 1024
    stream_window_bytes: int = 4 << 20
    connection_window_bytes: int = 32 << 20
    max_frame_bytes: int = 1 << 20
    max_header_list_bytes: int = 64 << 10
    max_unread_bytes: int = 1 << 20
    control_burst: int = 40_000
    control_per_s: int = 4_000
    max_resets_per_s: int = 1_000


class ControlBudget:
    """Token bucket for frames that carry no request; the connection decrements ``num_left``."""

    __slots__ = ("_clock_s", "_limits", "_refilled_s", "num_left")

    def __init__(self, limits: ConnectionLimits, clock_s: Callable[[], float]) -> None:
        self._limits = limits
        self._clock_s = clock_s
        self._refilled_s = clock_s()
        self.num_left = limits.control_burst

    def refill(self, what: str) -> None:
        """Called with an empty bucket. Raises Http2ConnectionError (ENHANCE_YOUR_CALM) unless time has refilled it."""
        now_s = self._clock_s()
        self.num_left += int((now_s - self._refilled_s) * self._limits.control_per_s)
        self._refilled_s = now_s
        if self.num_left <= 0:
            raise Http2ConnectionError(
                ErrorCode.ENHANCE_YOUR_CALM,
                f"too many control frames, the last one {what}: more than {self._limits.control_burst} at once and "
                f"{self._limits.control_per_s} a second beside requests",
            )
        self.cap()

    def cap(self) -> None:
        """Keep no more tokens than a burst; called now and then."""
        self.num_left = min(self.num_left, self._limits.control_burst)
