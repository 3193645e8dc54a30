"""Limits of a server's connections: their arguments, and what they are for either wire; imports nothing heavy."""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from weft_common.text.argument_types import not_negative, not_negative_integer, positive, positive_integer

Parser = argparse.ArgumentParser | argparse._ArgumentGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Limits of a server, as its arguments are named; 0 is none, where it is allowed."""

    max_message_bytes: int
    shares_ports: bool
    max_concurrent_streams: int
    max_header_list_bytes: int
    max_connections: int
    max_buffered_bytes: int
    keepalive_time_s: float
    keepalive_timeout_s: float
    min_ping_interval_s: float
    max_connection_age_s: float
    max_connection_age_grace_s: float
    max_connection_idle_s: float


class _Limit(NamedTuple):
    """One limit, named like its field of ``ServerLimits``.

    Attributes:
        name: Of the field; the argument is named like it.
        type: Of the value; of those that take 0, 0 is no limit.
        default: Of every service.
        grpcio: Options of grpcio, in seconds or milliseconds as they are named.
        meaning: For ``--help``.
    """

    name: str
    type: Callable[[str], float]
    default: float
    grpcio: tuple[str, ...]
    meaning: str

    @property
    def flag(self) -> str:
        """Its argument."""
        return "--" + self.name.replace("_", "-")


_LIMITS = (
    _Limit(
        "max_concurrent_streams",
        positive_integer,
        1024,
        ("grpc.max_concurrent_streams",),
        "calls at once on one connection; its client holds back the next",
    ),
    _Limit(
        "max_header_list_bytes",
        positive_integer,
        16 << 10,
        ("grpc.max_metadata_size", "grpc.absolute_max_metadata_size"),
        "metadata of one call, each pair with 32 bytes more",
    ),
    _Limit(
        "max_connections",
        not_negative_integer,
        0,
        ("grpc.max_allowed_incoming_connections",),
        "connections at once; 0: no limit",
    ),
    _Limit(
        "max_buffered_bytes",
        positive_integer,
        1 << 30,
        (),
        "parts of messages in memory, over all connections; --wire weft alone",
    ),
    _Limit("keepalive_time_s", positive, 30.0, ("grpc.keepalive_time_ms",), "silence after which a client is pinged"),
    _Limit(
        "keepalive_timeout_s",
        positive,
        10.0,
        ("grpc.keepalive_timeout_ms",),
        "further silence after which its connection is closed",
    ),
    _Limit(
        "min_ping_interval_s",
        not_negative,
        5.0,
        ("grpc.http2.min_ping_interval_without_data_ms",),
        "a client that pings more often is disconnected",
    ),
    _Limit(
        "max_connection_age_s",
        not_negative,
        0.0,
        ("grpc.max_connection_age_ms",),
        "age at which a connection takes no more calls; 0: never",
    ),
    _Limit(
        "max_connection_age_grace_s",
        not_negative,
        0.0,
        ("grpc.max_connection_age_grace_ms",),
        "time to finish calls from then on; 0: no limit",
    ),
    _Limit(
        "max_connection_idle_s",
        not_negative,
        0.0,
        ("grpc.max_connection_idle_ms",),
        "time without calls after which a connection is closed; 0: never",
    ),
)


def add_limit_arguments(parser: Parser, *, has_defaults: bool = True) -> None:
    """Add one argument for each limit; without defaults, one that is not given is None."""
    for limit in _LIMITS:
        default = limit.default if has_defaults else None
        parser.add_argument(
            limit.flag,
            type=limit.type,
            default=default,
            metavar="N",
            help=f"{limit.meaning} (default {limit.default:.12g})",
        )


def given_limits(options: argparse.Namespace) -> Iterator[str]:
    """The arguments that were given, for the command line of a service."""
    for limit in _LIMITS:
        if (value := getattr(options, limit.name)) is not None:
            yield f"{limit.flag}={value}"


def server_limits_of(options: argparse.Namespace) -> ServerLimits:
    """Options of a server by the arguments of ``weft_common.server.server.add_arguments``."""
    return ServerLimits(
        max_message_bytes=options.max_message_bytes,
        shares_ports=options.share_ports or options.take_over,
        **{limit.name: getattr(options, limit.name) for limit in _LIMITS},
    )


def grpcio_limits(options: ServerLimits) -> list[tuple[str, int]]:
    """The limits as options of grpcio's server, as far as it has them; without those that are 0."""
    return [
        (name, round(value * 1000) if name.endswith("_ms") else round(value))
        for limit in _LIMITS
        if (value := getattr(options, limit.name))
        for name in limit.grpcio
    ]
