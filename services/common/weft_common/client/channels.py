"""gRPC channels and the options that clients and servers share."""

from collections.abc import Sequence
from typing import Any

import grpc

from weft_common.security.channel import ChannelSecurity, SecuredChannel

#: Message limit both ways, as TIS and its clients have it.
MAX_MESSAGE_BYTES = 2**31 - 1

#: Longest timeout of a call in seconds, about 3 years: gRPC takes one beyond its range as passed already.
MAX_TIMEOUT_S = 1e8

#: How long a connection may take to be made at least, whatever name gRPC gives that: at 100 ms a peer that is two round
#: trips of 50 ms away is never reached. One that comes back is found as soon as with 100 ms (0.15-0.25 s after 0.3 s).
_MIN_CONNECT_MS = 1_000

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
        ("grpc.min_reconnect_backoff_ms", _MIN_CONNECT_MS),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        *_KEEPALIVE_OPTIONS,
    ]


def server_options(max_message_bytes: int = MAX_MESSAGE_BYTES, *, shares_ports: bool = False) -> list[tuple[str, int]]:
    """Options of a server; a second process on the same port is refused unless both share it."""
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.so_reuseport", int(shares_ports)),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        *_KEEPALIVE_OPTIONS,
    ]


def open_channel(
    address: str, *, options: Sequence[tuple[str, Any]] = (), security: ChannelSecurity | None = None
) -> grpc.aio.Channel:
    """A channel to ``host:port``; it connects at the first call.

    Args:
        address: ``host:port`` or any name that gRPC resolves.
        options: Beside those of ``channel_options``; one of them given here wins.
        security: TLS and key; None: plaintext without a key.

    Raises:
        InvalidArgumentError: A file of ``security`` is missing or wrong.
    """
    options = [*options, *channel_options()]  # of one given twice gRPC takes the first
    if security is None:
        return grpc.aio.insecure_channel(address, options=options)
    return SecuredChannel(address, options, security)
