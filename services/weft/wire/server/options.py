"""Options of a server."""

from dataclasses import dataclass

from weft.wire.connection.limits import ConnectionLimits
from weft.wire.transport.keepalive import LivenessOptions


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Limits and time-outs of a server; 0 turns those off that may be.

    Attributes:
        max_message_bytes: Largest message in both directions, after decompression.
        max_concurrent_streams: Calls of one connection at once; a client waits with more.
        max_header_list_bytes: Metadata of one call, as HTTP/2 counts them.
        max_connections: Connections at once; more are closed at once. 0: no limit.
        max_buffered_bytes: Requests that are not complete, or not read by their handler, and responses that wait for
            their client, over all connections. One connection holds at most four times what is then left, alone four
            fifths, so that there is always some for others. A call that would exceed it ends with RESOURCE_EXHAUSTED.
            0: no limit.
        max_resets_per_s: Calls that a client may cancel a second on one connection, in the long run; beyond it the
            connection ends with ENHANCE_YOUR_CALM. 0: no limit, as on Unix sockets, whose clients are the same user's:
            those of a router pass on the cancels of all its clients.
        stream_window_bytes: What a client may send of a call before it is consumed.
        keepalive_time_s: Silence of a client after which it gets a PING. 0: never.
        keepalive_timeout_s: Silence after that which ends the connection.
        min_ping_interval_s: Between two PINGs of a client, unless data was sent to it; after three that come earlier
            the connection ends with ENHANCE_YOUR_CALM and ``too_many_pings``. 0: no limit.
        max_connection_age_s: Then a connection is drained, with 10 % of jitter. 0: never.
        max_connection_age_grace_s: For calls in flight after that. 0: as long as they take.
        max_connection_idle_s: Without a call; then a connection is drained. 0: never.
        handshake_timeout_s: For TLS, and for HTTP/2's preface and settings.
        frame_timeout_s: For one frame from its first byte.
        write_timeout_s: The client's socket takes nothing.
        shares_ports: Other processes may listen on the same ports (SO_REUSEPORT).
    """

    max_message_bytes: int = 2**31 - 1
    max_concurrent_streams: int = 1024
    max_header_list_bytes: int = 64 << 10
    max_connections: int = 0
    max_buffered_bytes: int = 4 << 30
    max_resets_per_s: int = 1000
    stream_window_bytes: int = 4 << 20
    keepalive_time_s: float = 30.0
    keepalive_timeout_s: float = 10.0
    min_ping_interval_s: float = 5.0
    max_connection_age_s: float = 0.0
    max_connection_age_grace_s: float = 0.0
    max_connection_idle_s: float = 0.0
    handshake_timeout_s: float = 20.0
    frame_timeout_s: float = 20.0
    write_timeout_s: float = 60.0
    shares_ports: bool = False

    @property
    def limits(self) -> ConnectionLimits:
        """Those of one connection."""
        return ConnectionLimits(
            max_concurrent_streams=self.max_concurrent_streams,
            stream_window_bytes=self.stream_window_bytes,
            max_header_list_bytes=self.max_header_list_bytes,
            resets_per_s=self.max_resets_per_s,
        )

    @property
    def liveness(self) -> LivenessOptions:
        """Keepalive and time-outs of one connection."""
        return LivenessOptions(
            keepalive_time_s=self.keepalive_time_s,
            keepalive_timeout_s=self.keepalive_timeout_s,
            handshake_timeout_s=self.handshake_timeout_s,
            frame_timeout_s=self.frame_timeout_s,
            write_timeout_s=self.write_timeout_s,
            max_idle_s=self.max_connection_idle_s,
            max_age_s=self.max_connection_age_s,
            max_age_grace_s=self.max_connection_age_grace_s,
        )
