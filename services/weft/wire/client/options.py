"""Options of a channel."""

from dataclasses import dataclass, replace

from weft.wire.connection.limits import ConnectionLimits
from weft.wire.interface import grpc
from weft.wire.transport.keepalive import LivenessOptions


@dataclass(frozen=True)
class ChannelOptions(ConnectionLimits, LivenessOptions):
    """Options of a channel and of its connection.

    Attributes:
        max_message_bytes: Largest message in either direction, in bytes, compressed or not.
        connect_timeout_s: For one address: connection, TLS and HTTP/2's handshake, in seconds.
        initial_backoff_s: From the start of a failed attempt to connect to the next one.
        max_backoff_s: The same after many failures.
        backoff_factor: Growth from one failure to the next.
        backoff_jitter: Share by which each of these times is spread, 0 to 1.
        keepalive_time_s: Silence of the server after which a PING is sent; 0: never. Servers of gRPC end a connection
            whose PINGs come more often than they allow, by default every five minutes.
        user_agent: Sent with each call.
        compression: Of requests, unless a call says otherwise.
    """

    max_message_bytes: int = 2**31 - 1
    connect_timeout_s: float = 20.0
    initial_backoff_s: float = 0.1
    max_backoff_s: float = 2.0
    backoff_factor: float = 1.6
    backoff_jitter: float = 0.2
    keepalive_time_s: float = 0.0
    keepalive_timeout_s: float = 20.0
    keepalive_without_calls: bool = False
    user_agent: str = "grpc-python-weft-wire/0.1"
    compression: grpc.Compression = grpc.Compression.NoCompression

    def liveness(self, keepalive_factor: int = 1) -> LivenessOptions:
        """Keepalive and time-outs of one connection, with the time between PINGs multiplied."""
        keepalive_time_s = self.keepalive_time_s * keepalive_factor
        return replace(self, keepalive_time_s=keepalive_time_s, handshake_timeout_s=self.connect_timeout_s)
