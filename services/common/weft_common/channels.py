"""gRPC channels and the options that clients and servers share."""

import grpc

#: Message limit both ways, as TIS and its clients have it.
MAX_MESSAGE_BYTES = 2**31 - 1

#: Longest timeout of a call in seconds, about 3 years: gRPC takes one beyond its range as passed already.
MAX_TIMEOUT_S = 1e8

_KEEPALIVE_OPTIONS: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
]


def channel_options(max_message_bytes: int = MAX_MESSAGE_BYTES) -> list[tuple[str, int]]:
    """Options of a channel between services; a lost peer is tried again after 100 ms to 2 s."""
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        *_KEEPALIVE_OPTIONS,
    ]


def server_options(max_message_bytes: int = MAX_MESSAGE_BYTES) -> list[tuple[str, int]]:
    """Options of a server; a second process on the same port is refused instead of sharing it."""
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        *_KEEPALIVE_OPTIONS,
    ]


def open_channel(address: str) -> grpc.aio.Channel:
    """A plaintext channel to ``host:port``; it connects at the first call."""
    return grpc.aio.insecure_channel(address, options=channel_options())
