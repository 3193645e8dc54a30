"""An HTTP/2 connection on an asyncio transport: reads at once, writes once per loop iteration; keepalive."""

import asyncio
from dataclasses import dataclass
from enum import Enum
from typing import Any

from weft.wire.connection import ConnectionLimits
from weft.wire.connection.connection import Http2Connection
from weft.wire.connection.sending import Owner


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
    """What a liveness check asks for; FINISH_DRAIN: the PING of a drain was not answered."""

    NOTHING = "nothing"
    PING = "send a PING"
    DRAIN = "stop accepting calls"
    FINISH_DRAIN = "the peer did not answer the PING of the drain"
    ABORT = "end the connection at once"


class Liveness:
    """Decides when to ping, drain or close a connection; ``age_factor`` spreads the ages of equally old connections."""

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

    def check(self, seen: Http2Connection, num_received: int, num_unwritten_bytes: int, now_s: float) -> LivenessAction:
        """Return the action due now; ``num_received`` grows whenever bytes arrive."""
        options = self._options
        if num_received != self._num_received:
            self._num_received, self._heard_s, self._ping_s = num_received, now_s, None
        if seen.streams:
            self._used_s = now_s
        if self._is_stalled(seen, num_unwritten_bytes, now_s):
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
        return self._keepalive(bool(seen.streams), now_s)

    def _keepalive(self, has_calls: bool, now_s: float) -> LivenessAction:
        options = self._options
        if not options.keepalive_time_s or not (has_calls or options.keepalive_without_calls):
            return LivenessAction.NOTHING
        if self._ping_s is not None:
            if now_s - self._ping_s >= options.keepalive_timeout_s:
                self.reason = f"the peer did not answer a keepalive PING within {options.keepalive_timeout_s:g} s"
                return LivenessAction.ABORT
        elif now_s - self._heard_s >= options.keepalive_time_s:
            self._ping_s = now_s
            return LivenessAction.PING
        return LivenessAction.NOTHING

    def _is_stalled(self, seen: Http2Connection, num_unwritten_bytes: int, now_s: float) -> bool:
        options = self._options
        if not seen.has_partial_frame:
            self._partial = None
        elif self._partial is None or self._partial[0] != seen.num_partial_frames:
            self._partial = (seen.num_partial_frames, now_s)
        else:
            limit_s = options.frame_timeout_s if seen.num_partial_frames else options.handshake_timeout_s
            if limit_s and now_s - self._partial[1] >= limit_s:
                self.reason = f"the peer did not finish its handshake or a frame within {limit_s:g} s"
                return True
        if not num_unwritten_bytes:
            self._unwritten = None
        elif self._unwritten is None or self._unwritten[0] != num_unwritten_bytes:
            self._unwritten = (num_unwritten_bytes, now_s)
        elif options.write_timeout_s and now_s - self._unwritten[1] >= options.write_timeout_s:
            self.reason = f"the peer's socket took nothing for {options.write_timeout_s:g} s"
            return True
        return False


class PingPolice:
    """Limits a client's PINGs: strikes within an interval (0: no limit), forgiven when data is sent."""

    def __init__(self, min_interval_s: float, max_strikes: int = 2) -> None:
        self._min_interval_s = min_interval_s
        self._max_strikes = max_strikes
        self._last_s = float("-inf")
        self._num_strikes = 0

    def is_too_many(self, now_s: float, *, has_sent_data: bool) -> bool:
        """Count a PING; return True if the connection must end with ENHANCE_YOUR_CALM and ``too_many_pings``."""
        if has_sent_data:
            self._num_strikes, self._last_s = 0, now_s
            return False
        if now_s - self._last_s < self._min_interval_s:
            self._num_strikes += 1
        self._last_s = now_s
        return self._num_strikes > self._max_strikes


#: The transport's buffer above which data waits with its stream.
_HIGH_WATER_BYTES = 2 << 20
#: Pieces up to this size are joined into one write; larger ones are handed over as they are.
_JOINED_BYTES = 65_536
#: How long a closing transport may take to write its last bytes, in seconds.
_CLOSE_TIMEOUT_S = 2.0
#: So many of these, one after another, may pass without progress when a drained connection closes.
_MAX_STALLS = 5
_PING = b"weftwire"


class Http2Protocol(Owner, asyncio.Protocol):
    """Base of both ends; each overrides the ``Owner`` events that it needs."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        limits: ConnectionLimits,
        liveness: LivenessOptions,
        *,
        is_client: bool,
        age_factor: float = 1.0,
    ) -> None:
        self.loop = loop
        self.connection = Http2Connection(self, limits, is_client=is_client, clock_s=loop.time)
        self.transport: Any = None
        self.is_lost = False
        self._liveness = Liveness(liveness, loop.time(), age_factor)
        self._num_received = 0
        self._is_client = is_client
        self._is_lingering = False
        self._is_reading_paused = False
        self._linger_timer: asyncio.TimerHandle | None = None

    # Events of the transport.

    def connection_made(self, transport: Any) -> None:
        """Send the settings."""
        self.transport = transport
        transport.set_write_buffer_limits(high=_HIGH_WATER_BYTES)
        self.flush()

    def data_received(self, data: bytes) -> None:
        """Process received bytes, and write the output that they caused."""
        self._num_received += 1
        if self._is_lingering:
            return
        connection = self.connection
        connection.receive(data)
        if connection.has_unread:
            self._pause_reading()
        if connection.output:
            self.flush()
        else:
            connection.is_output_due = False
        if connection.is_closed:
            self.close()
        elif connection.is_peer_leaving and connection.is_drained:
            self.close_if_drained()

    def _pause_reading(self) -> None:
        """Process the remaining frames after other connections have had their turn."""
        if not self._is_reading_paused:
            self._is_reading_paused = True
            self.transport.pause_reading()
        self.loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        if self.is_lost or self.connection.is_closed:
            return
        if self.connection.has_unread:  # else what came meanwhile has brought them on
            self.data_received(b"")
        if not self.connection.has_unread and self._is_reading_paused:
            self._is_reading_paused = False
            self.transport.resume_reading()

    def eof_received(self) -> bool:
        """The peer sends no more: the connection is over, as for every gRPC peer."""
        return False

    def connection_lost(self, error: Exception | None) -> None:
        """Tell all streams."""
        self.is_lost = True
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None
        self.connection.close(f"the connection was lost: {error}" if error else "the peer closed the connection")
        self.on_lost(error)

    def pause_writing(self) -> None:
        """The socket buffer is full."""
        self.connection.pause()

    def resume_writing(self) -> None:
        """The socket buffer has room again."""
        self.connection.resume()

    # Output.

    def on_output(self) -> None:
        """Write at the end of this loop iteration, with all other output of it."""
        self.loop.call_soon(self.flush)

    def flush(self) -> None:
        """Write the output now."""
        connection = self.connection
        output = connection.take_output()
        transport = self.transport
        if transport is None or self.is_lost or transport.is_closing():
            return  # a transport that closes for an error drops what it is given
        connection.last_written_id = connection.last_local_id
        if output:
            if max(map(len, output)) > _JOINED_BYTES:
                transport.writelines(output)
            else:
                transport.write(b"".join(output))
        if connection.is_overflowing:
            self.abort("the peer causes frames and does not read them")
        elif connection.has_more:
            connection.pump()

    def close(self) -> None:
        """Write the output and close; abort if the peer does not read it in time."""
        self.connection.close("the connection was closed")
        if self.is_lost or self.transport is None:
            return
        self.flush()
        if self.connection.is_paused:
            self.transport.abort()
        elif not self.transport.is_closing():
            self.transport.close()
            if self.transport.get_write_buffer_size():
                self.loop.call_later(_CLOSE_TIMEOUT_S, self.transport.abort)

    def abort(self, reason: str) -> None:
        """Close without writing pending output."""
        self.connection.close(reason)
        if self.transport is not None and not self.is_lost:
            self.transport.abort()

    # Once a second.

    def check(self, now_s: float) -> None:
        """Do what keepalive and time-outs ask for."""
        connection = self.connection
        if connection.is_closed:
            return
        connection.budget.cap()
        num_unwritten_bytes = self.transport.get_write_buffer_size()
        action = self._liveness.check(connection, self._num_received, num_unwritten_bytes, now_s)
        if action is LivenessAction.ABORT:
            self.abort(self._liveness.reason)
        elif action is LivenessAction.PING:
            connection.ping(_PING)
        elif action is LivenessAction.DRAIN:
            self.drain()
        elif action is LivenessAction.FINISH_DRAIN:
            connection.finish_draining()
            self.close_if_drained()

    def drain(self) -> None:
        """Accept no more calls, and close when those in flight have ended."""
        self.connection.drain()

    def close_if_drained(self) -> None:
        """Close once no stream is left and the peer knows that none is accepted."""
        if not self.connection.is_drained or self.connection.is_closed:
            return
        if self._is_client:
            self.close()
            return
        self.connection.close("the connection was closed")
        if self.transport is None or self.is_lost or self.transport.is_closing():
            return
        self.flush()
        self._is_lingering = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._linger(-1, 0)

    def _linger(self, num_unwritten_bytes: int, num_stalls: int) -> None:
        """Close once the peer has closed, or reads nothing for a while; read and drop its data until then.

        A socket closed with unread bytes resets its connection, and the peer loses what it has not read.
        """
        if self.is_lost:
            return
        size = self.transport.get_write_buffer_size()
        num_stalls = num_stalls + 1 if size == num_unwritten_bytes else 0
        if num_stalls >= _MAX_STALLS:
            self.transport.abort()
        elif num_stalls and not size:
            self.transport.close()  # the rest is with the kernel, which goes on to send it
        else:
            self._linger_timer = self.loop.call_later(_CLOSE_TIMEOUT_S, self._linger, size, num_stalls)

    def on_lost(self, error: Exception | None) -> None:
        """The transport is closed."""


class Heartbeat:
    """Checks connections once a second, as long as there are any."""

    def __init__(self, loop: asyncio.AbstractEventLoop, period_s: float = 1.0) -> None:
        self._loop = loop
        self._period_s = period_s
        self._timer: asyncio.TimerHandle | None = None
        self.protocols: set[Http2Protocol] = set()

    def add(self, protocol: Http2Protocol) -> None:
        """Check this connection too."""
        self.protocols.add(protocol)
        if self._timer is None:
            self._timer = self._loop.call_later(self._period_s, self._beat)

    def discard(self, protocol: Http2Protocol) -> None:
        """Stop checking this connection."""
        self.protocols.discard(protocol)
        if not self.protocols and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _beat(self) -> None:
        self._timer = self._loop.call_later(self._period_s, self._beat)
        now_s = self._loop.time()
        for protocol in tuple(self.protocols):
            protocol.check(now_s)
