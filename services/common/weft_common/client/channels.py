"""gRPC channels and options for clients and servers."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import grpc

from weft_common.client.wires import WireName
from weft_common.security.channel import ChannelSecurity, SecuredChannel
from weft_common.security.tls import TlsContent, channel_credentials

#: Message limit in both directions, the same as in Triton Inference Server and its clients.
MAX_MESSAGE_BYTES = 2**31 - 1

#: Longest timeout of a call in seconds, about 3 years: gRPC treats one beyond its range as expired.
MAX_TIMEOUT_S = 1e8

#: Minimum connect timeout (gRPC's name is misleading): with 100 ms, a peer at a distance of two round
#: trips of 50 ms is never reached. A recovered peer is found as fast as with 100 ms (0.15-0.25 s after 0.3 s).
_MIN_CONNECT_MS = 1_000

#: Calls that may wait until the event loop accepts them. gRPC cancels some beyond 1,000 and all beyond 3,000, which
#: a client that starts a few thousand calls at once exceeds; here the service's own limits refuse, with a reason.
_MAX_PENDING_CALLS = 65_536

_KEEPALIVE_OPTIONS: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
]


def channel_options(max_message_bytes: int = MAX_MESSAGE_BYTES) -> list[tuple[str, int]]:
    """Options of a channel between services; a lost peer is redialled after 100 ms to 2 s."""
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", _MIN_CONNECT_MS),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        *_KEEPALIVE_OPTIONS,
    ]


def server_options(max_message_bytes: int = MAX_MESSAGE_BYTES, *, shares_ports: bool = False) -> list[tuple[str, int]]:
    """Options of a server; two processes can listen on one port only if both set ``shares_ports``."""
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.so_reuseport", int(shares_ports)),
        ("grpc.server.max_pending_requests", _MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING_CALLS),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        *_KEEPALIVE_OPTIONS,
    ]


def open_channel(
    address: str,
    *,
    options: Sequence[tuple[str, Any]] = (),
    security: ChannelSecurity | None = None,
    wire: WireName | None = None,
) -> grpc.aio.Channel:
    """A channel to ``host:port``; it connects at the first call.

    Args:
        address: ``host:port`` or any name that gRPC resolves.
        options: Additional options in gRPC's words; they override those of ``channel_options``.
        security: TLS and key; None: plaintext without a key.
        wire: Implementation; None: ``default_wire``.

    Raises:
        InvalidArgumentError: A file of ``security`` is missing or invalid.
    """
    connect = partial(_of_grpcio, address, [*options, *channel_options()], security)
    return connect(None) if security is None else SecuredChannel(address, security, connect)


def _of_grpcio(
    address: str, options: Sequence[tuple[str, Any]], security: ChannelSecurity | None, tls: TlsContent | None
) -> grpc.aio.Channel:
    if security is not None:
        options = [*security.options, *options]  # gRPC uses the first of duplicate options
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, channel_credentials(tls), options=options)
