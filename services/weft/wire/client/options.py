"""Options of a channel."""

from dataclasses import dataclass

from weft.wire.connection.limits import ConnectionLimits
from weft.wire.interface import grpc
from weft.wire.transport.keepalive import LivenessOptions


@dataclass(frozen=True, slots=True)
class ChannelOptions:
    """Options of a channel.

    Attributes:
        max_message_bytes: Largest message in either direction, in bytes, compressed or not.
        max_header_list_bytes: Largest metadata of a response, uncompressed.
        stream_window_bytes: Bytes of one response that are received before they are read.
        connection_window_bytes: The same over all calls.
        connect_timeout_s: For one address: connection, TLS and HTTP/2's handshake, in seconds.
        initial_backoff_s: From the start of a failed attempt to connect to the next one.
        max_backoff_s: The same after many failures.
        backoff_factor: Growth from one failure to the next.
        backoff_jitter: Share by which each of these times is spread, 0 to 1.
        keepalive_time_s: Silence of the server after which a PING is sent; 0: never. Servers of gRPC end a connection
            whose PINGs come more often than they allow, by default every five minutes.
        keepalive_timeout_s: Silence after that PING that ends the connection.
        keepalive_without_calls: Send PINGs also while no call is in flight.
        frame_timeout_s: For one header block, from its first byte.
        write_timeout_s: The server's socket takes nothing of what is to be written; 0: no limit.
        user_agent: Sent with each call.
        compression: Of requests, unless a call says otherwise.
    """

    max_message_bytes: int = 2**31 - 1
    max_header_list_bytes: int = 64 << 10
    stream_window_bytes: int = 4 << 20
    connection_window_bytes: int = 32 << 20
    connect_timeout_s: float = 20.0
    initial_backoff_s: float = 0.1
    max_backoff_s: float = 2.0
    backoff_factor: float = 1.6
    backoff_jitter: float = 0.2
    keepalive_time_s: float = 0.0
    keepalive_timeout_s: float = 20.0
    keepalive_without_calls: bool = False
    frame_timeout_s: float = 20.0
    write_timeout_s: float = 60.0
    user_agent: str = "grpc-python-weft-wire/0.1"
    compression: grpc.Compression = grpc.Compression.NoCompression

    def limits(self) -> ConnectionLimits:
        """What a server may do on one connection."""
        return ConnectionLimits(
            stream_window_bytes=self.stream_window_bytes,
            connection_window_bytes=self.connection_window_bytes,
            max_header_list_bytes=self.max_header_list_bytes,
        )

    def liveness(self, keepalive_factor: int = 1) -> LivenessOptions:
        """Keepalive and time-outs of one connection, with the time between PINGs multiplied."""
        return LivenessOptions(
            keepalive_time_s=self.keepalive_time_s * keepalive_factor,
            keepalive_timeout_s=self.keepalive_timeout_s,
            keepalive_without_calls=self.keepalive_without_calls,
            handshake_timeout_s=self.connect_timeout_s,
            frame_timeout_s=self.frame_timeout_s,
            write_timeout_s=self.write_timeout_s,
        )
