"""Liveness of one connection, checked about once a second: keepalive PINGs, stalled peers, age. Policy without I/O."""

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True)
class LivenessOptions:
    """When a connection is checked, and when it ends; all in seconds, 0 turns a limit off.

    Attributes:
        keepalive_time_s: Silence of the peer after which a PING is sent.
        keepalive_timeout_s: Silence after that PING that ends the connection.
        keepalive_without_calls: Send PINGs also while no call is in flight.
        handshake_timeout_s: For TLS, and for HTTP/2's preface and settings.
        frame_timeout_s: For one frame or header block, from its first byte.
        write_timeout_s: The peer's socket takes nothing of what is to be written.
        max_connection_idle_s: Without a call; then the connection is drained.
        max_connection_age_s: Since the connection was made; then it is drained. A server spreads it by 10 %.
        max_connection_age_grace_s: For calls in flight after that; 0: as long as they take.
        drain_timeout_s: For the answer to the PING of a drain.
    """

    keepalive_time_s: float = 30.0
    keepalive_timeout_s: float = 10.0
    keepalive_without_calls: bool = True
    handshake_timeout_s: float = 20.0
    frame_timeout_s: float = 20.0
    write_timeout_s: float = 60.0
    max_connection_idle_s: float = 0.0
    max_connection_age_s: float = 0.0
    max_connection_age_grace_s: float = 0.0
    drain_timeout_s: float = 2.0


class LivenessAction(Enum):
    """What a check asks for."""

    NOTHING = "nothing"
    PING = "send a PING"
    DRAIN = "stop accepting calls"
    FINISH_DRAIN = "the peer did not answer the PING of the drain"
    ABORT = "end the connection at once"


@dataclass(slots=True)
class Observation:
    """What the connection is like at a check.

    Attributes:
        num_received: Grows with every receipt of bytes.
        num_streams: Calls in flight.
        has_partial_frame: A frame, a header block or the handshake is incomplete.
        num_partial: Grows with every new incomplete frame.
        num_unwritten_bytes: Output that the socket has not taken.
        is_draining: A drain has begun.
        is_drain_finished: And its last GOAWAY was sent.
    """

    num_received: int
    num_streams: int
    has_partial_frame: bool
    num_partial: int
    num_unwritten_bytes: int
    is_draining: bool
    is_drain_finished: bool


class Liveness:
    """Decides what one connection needs.

    Args:
        options: The limits.
        now_s: By any monotonic clock, as in ``check``.
        age_factor: Spreads the ages of connections that began together, for example 0.9 to 1.1.

    Attributes:
        reason: Why the last check asked for ABORT or DRAIN.
    """

    def __init__(self, options: LivenessOptions, now_s: float, age_factor: float = 1.0) -> None:
        self._options = options
        self._begun_s = self._heard_s = self._used_s = now_s
        self._max_age_s = options.max_connection_age_s * age_factor
        self._num_received = 0
        self._ping_s: float | None = None
        self._partial: tuple[int, float] | None = None
        self._unwritten: tuple[int, float] | None = None
        self._drain_s: float | None = None
        self.reason = ""

    def check(self, seen: Observation, now_s: float) -> LivenessAction:
        """What to do now."""
        options = self._options
        if seen.num_received != self._num_received:
            self._num_received, self._heard_s, self._ping_s = seen.num_received, now_s, None
        if seen.num_streams:
            self._used_s = now_s
        if self._is_stalled(seen, now_s):
            return LivenessAction.ABORT
        if seen.is_draining:
            self._drain_s = now_s if self._drain_s is None else self._drain_s
            if not seen.is_drain_finished and now_s - self._drain_s >= options.drain_timeout_s:
                return LivenessAction.FINISH_DRAIN
            if self.reason and self._max_age_s and now_s - self._drain_s >= options.max_connection_age_grace_s > 0:
                self.reason = "its calls did not end in the grace after its age"
                return LivenessAction.ABORT
        else:
            if self._max_age_s and now_s - self._begun_s >= self._max_age_s:
                self.reason = "it has reached its age"
                return LivenessAction.DRAIN
            if options.max_connection_idle_s and now_s - self._used_s >= options.max_connection_idle_s:
                self.reason = "it was idle"
                return LivenessAction.DRAIN
        return self._keepalive(seen, now_s)

    def _keepalive(self, seen: Observation, now_s: float) -> LivenessAction:
        options = self._options
        if not options.keepalive_time_s or not (seen.num_streams or options.keepalive_without_calls):
            return LivenessAction.NOTHING
        if self._ping_s is not None:
            if now_s - self._ping_s >= options.keepalive_timeout_s:
                self.reason = f"the peer did not answer a keepalive PING within {options.keepalive_timeout_s:g} s"
                return LivenessAction.ABORT
        elif now_s - self._heard_s >= options.keepalive_time_s:
            self._ping_s = now_s
            return LivenessAction.PING
        return LivenessAction.NOTHING

    def _is_stalled(self, seen: Observation, now_s: float) -> bool:
        options = self._options
        if not seen.has_partial_frame:
            self._partial = None
        elif self._partial is None or self._partial[0] != seen.num_partial:
            self._partial = (seen.num_partial, now_s)
        else:
            limit_s = options.frame_timeout_s if seen.num_partial else options.handshake_timeout_s
            if limit_s and now_s - self._partial[1] >= limit_s:
                self.reason = f"the peer did not finish its handshake or a frame within {limit_s:g} s"
                return True
        if not seen.num_unwritten_bytes:
            self._unwritten = None
        elif self._unwritten is None or self._unwritten[0] != seen.num_unwritten_bytes:
            self._unwritten = (seen.num_unwritten_bytes, now_s)
        elif options.write_timeout_s and now_s - self._unwritten[1] >= options.write_timeout_s:
            self.reason = f"the peer's socket took nothing for {options.write_timeout_s:g} s"
            return True
        return False


class PingPolice:
    """Limits a client's keepalive PINGs as gRPC's servers do: strikes within an interval, forgiven when data is sent.

    Args:
        min_interval_s: Between two PINGs with no data sent by this end between them; 0: no limit.
        max_strikes: PINGs that may come earlier.
    """

    def __init__(self, min_interval_s: float, max_strikes: int = 2) -> None:
        self._min_interval_s = min_interval_s
        self._max_strikes = max_strikes
        self._last_s = float("-inf")
        self._num_strikes = 0

    def is_too_many(self, now_s: float, *, has_sent_data: bool) -> bool:
        """Count a PING; True: the connection is to end with ENHANCE_YOUR_CALM and ``too_many_pings``."""
        if has_sent_data:
            self._num_strikes, self._last_s = 0, now_s
            return False
        if now_s - self._last_s < self._min_interval_s:
            self._num_strikes += 1
        self._last_s = now_s
        return self._num_strikes > self._max_strikes
