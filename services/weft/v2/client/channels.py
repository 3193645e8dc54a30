"""Opens gRPC channels, on Weft's wire or on grpcio, and holds grpcio's options for clients and servers."""

import ipaddress
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from weft.base.errors import UnsupportedError
from weft.v2.client.wires import WireName, default_wire
from weft.v2.security.channel import MIN_HANDSHAKE_MS, ChannelSecurity, SecuredChannel
from weft.v2.security.tls import TlsContent, channel_credentials
from weft.wire.client import Channel, ChannelOptions
from weft.wire.interface import HAS_GRPCIO, grpc

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

#: Longest time from one attempt to connect to the next.
_MAX_BACKOFF_MS = 2_000

#: Silence after which a peer is pinged, and silence after that which ends a connection.
_KEEPALIVE_TIME_MS = 30_000
_KEEPALIVE_TIMEOUT_MS = 10_000

#: ``host:port`` and ``unix:path``.
_OWN_ADDRESS = re.compile(r"unix:[^,]+|(?:\[[0-9A-Fa-f:.]+\]|[\w.-]+):(?P<port>\d{1,5})")
#: Options that channels of Weft's own wire have too, or need not have.
_OWN_OPTIONS = frozenset(("grpc.max_reconnect_backoff_ms", "grpc.default_authority", "grpc.use_local_subchannel_pool"))

_KEEPALIVE_OPTIONS: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", _KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
]


def channel_options(max_message_bytes: int = MAX_MESSAGE_BYTES) -> list[tuple[str, int]]:
    """Options of a channel between services; a lost peer is redialled after 100 ms to 2 s."""
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", _MIN_CONNECT_MS),
        ("grpc.max_reconnect_backoff_ms", _MAX_BACKOFF_MS),
        *_KEEPALIVE_OPTIONS,
    ]


def server_options(max_message_bytes: int = MAX_MESSAGE_BYTES, *, shares_ports: bool = False) -> list[tuple[str, int]]:
    """Options of a server; two processes can listen on one port only if both set ``shares_ports``."""
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.so_reuseport", int(shares_ports)),
        # Else calls beyond the limit of streams are refused by chance before the client knows the limit.
        ("grpc.http.overload_protection", 0),
        ("grpc.server.max_pending_requests", _MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING_CALLS),
        # Else calls that wait for Python for 30 s end with CANCELLED; those of clients that left end by themselves.
        ("grpc.server_max_unrequested_time_in_server", 3600),
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
    """Open a channel to ``host:port``; it connects at the first call.

    Names that only gRPC resolves, like ``dns:///name:port`` and ``xds:``, and options that only its core knows, like a
    balancing policy, get a channel of grpcio on either wire.

    Args:
        options: Additional channel options of gRPC; they override those of ``channel_options``.

    Raises:
        UnsupportedError: Only grpcio can call the address, and it is not installed.
    """
    connect: Callable[[TlsContent | None], grpc.aio.Channel]
    if is_on_weft(address, options, wire):
        connect = partial(_of_weft, address, dict(options), security)
    else:
        connect = partial(_of_grpcio, address, [*options, *channel_options()], security)
    return connect(None) if security is None else SecuredChannel(address, security, connect)


def is_on_weft(address: str, options: Sequence[tuple[str, Any]], wire: WireName | None) -> bool:
    """Whether ``open_channel`` would use Weft's own wire: ``host:port`` or a Unix socket, and no special options."""
    found = _OWN_ADDRESS.fullmatch(address)
    return (
        (wire or default_wire()) is WireName.WEFT
        and found is not None
        and int(found["port"] or 0) < 1 << 16
        and all(name in _OWN_OPTIONS for name, _ in options)
    )


def is_one_endpoint(address: str) -> bool:
    """Whether an address names exactly one server: a Unix socket, or ``host:port`` of an IP address or localhost."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0]
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host == "localhost"
    return True


def _of_weft(
    address: str, options: Mapping[str, Any], security: ChannelSecurity | None, tls: TlsContent | None
) -> grpc.aio.Channel:
    own = ChannelOptions(
        connect_timeout_s=(_MIN_CONNECT_MS if tls is None else MIN_HANDSHAKE_MS) / 1000,
        max_backoff_s=options.get("grpc.max_reconnect_backoff_ms", _MAX_BACKOFF_MS) / 1000,
        keepalive_time_s=_KEEPALIVE_TIME_MS / 1000,
        keepalive_timeout_s=_KEEPALIVE_TIMEOUT_MS / 1000,
    )
    name = ("" if security is None else security.server_name) or options.get("grpc.default_authority", "")
    return Channel(address, own, None if tls is None else tls.grpc_channel, name)


def _of_grpcio(
    address: str, options: Sequence[tuple[str, Any]], security: ChannelSecurity | None, tls: TlsContent | None
) -> grpc.aio.Channel:
    if not HAS_GRPCIO:
        raise UnsupportedError(
            f"'{address}' is called by grpcio, which is not installed: pip install 'weft-mesh[grpcio]'"
        )
    if security is not None:
        options = [*security.options, *options]  # gRPC uses the first of duplicate options
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, channel_credentials(tls), options=options)
