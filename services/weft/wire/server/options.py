"""Options of a server."""

from dataclasses import dataclass

from weft.wire.connection.limits import ConnectionLimits
from weft.wire.transport.keepalive import LivenessOptions


@dataclass(frozen=True)
class ServerOptions(ConnectionLimits, LivenessOptions):
    """Limits and time-outs of a server and of each of its connections; 0 turns those off that may be.

    Attributes:
        max_message_bytes: Largest message in both directions, after decompression.
        max_connections: Connections at once; more are closed at once. 0: no limit.
        max_buffered_bytes: Requests that are not complete, or not read by their handler, and responses that wait for
            their client, over all connections. One connection holds at most four times what is then left, alone four
            fifths, so that there is always some for others. A call that would exceed it ends with RESOURCE_EXHAUSTED.
            0: no limit.
        min_ping_interval_s: Between two PINGs of a client, unless data was sent to it; after three that come earlier
            the connection ends with ENHANCE_YOUR_CALM and ``too_many_pings``. 0: no limit.
        shares_ports: Other processes may listen on the same ports (SO_REUSEPORT).
    """

    max_message_bytes: int = 2**31 - 1
    max_connections: int = 0
    max_buffered_bytes: int = 4 << 30
    min_ping_interval_s: float = 5.0
    shares_ports: bool = False
