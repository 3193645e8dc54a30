"""Arguments of every service process, and connection limits for either wire; imports nothing heavy."""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.base.errors import EXIT_HUNG
from weft.base.text.argument_types import add, not_negative, not_negative_integer, positive, positive_integer

if TYPE_CHECKING:
    from weft.wire.server.methods import ServerOptions

LOG_LEVELS = ("debug", "info", "warning", "error")

Parser = argparse.ArgumentParser | argparse._ArgumentGroup


class _Limit(NamedTuple):
    name: str  # of the field of ServerOptions
    type: Callable[[str], float]
    default: float
    meaning: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


#: Options of grpcio, in seconds, milliseconds or bytes as they are named, and the limits that they are.
_GRPCIO = {
    "grpc.max_concurrent_streams": "max_concurrent_streams",
    "grpc.max_metadata_size": "max_header_list_bytes",
    "grpc.absolute_max_metadata_size": "max_header_list_bytes",
    "grpc.keepalive_time_ms": "keepalive_time_s",
    "grpc.keepalive_timeout_ms": "keepalive_timeout_s",
    "grpc.http2.min_ping_interval_without_data_ms": "min_ping_interval_s",
    "grpc.max_connection_age_ms": "max_connection_age_s",
    "grpc.max_connection_age_grace_ms": "max_connection_age_grace_s",
    "grpc.max_connection_idle_ms": "max_connection_idle_s",
    "grpc.server_handshake_timeout_ms": "handshake_timeout_s",
}
_UNREAD = "requests that are not complete or not read yet, over all connections; 0: no limit"
_RESETS = (
    "cancelled calls a second on one connection, which ends beyond; 0: no limit, as on Unix sockets: for services "
    "that only the router reaches"
)
_STREAMS = "calls at once on one connection; its client holds back the next"
_LIMITS = (
    # Above the default of --max-inflight and of queues, so that those refuse, with a reason.
    _Limit("max_concurrent_streams", positive_integer, 4096, _STREAMS),
    _Limit("max_header_list_bytes", positive_integer, 16 << 10, "metadata of one call, each pair with 32 bytes more"),
    _Limit("max_connections", not_negative_integer, 0, "connections at once; 0: no limit"),
    _Limit("max_buffered_bytes", not_negative_integer, 4 << 30, _UNREAD),
    _Limit("max_resets_per_s", not_negative_integer, 1000, _RESETS),
    _Limit("stream_window_bytes", positive_integer, 4 << 20, "what a client may send of a call before it is read"),
    _Limit("keepalive_time_s", not_negative, 30.0, "silence after which a client is pinged; 0: never"),
    _Limit("keepalive_timeout_s", positive, 10.0, "further silence after which its connection is closed"),
    _Limit("min_ping_interval_s", not_negative, 5.0, "a client that pings more often is disconnected; 0: no limit"),
    _Limit("max_connection_age_s", not_negative, 0.0, "age at which a connection takes no more calls; 0: never"),
    _Limit("max_connection_age_grace_s", not_negative, 0.0, "time to finish calls from then on; 0: no limit"),
    _Limit(
        "max_connection_idle_s", not_negative, 0.0, "time without calls after which a connection is closed; 0: never"
    ),
    _Limit("handshake_timeout_s", positive, 20.0, "time for the handshakes of TLS and HTTP/2"),
    _Limit("frame_timeout_s", positive, 20.0, "time for one frame of HTTP/2"),
    _Limit("write_timeout_s", positive, 60.0, "time a client may take to read anything of a response"),
)


def add_limit_arguments(parser: Parser, *, has_defaults: bool = True) -> None:
    """Add one argument for each limit; without defaults, an absent one is None."""
    for limit in _LIMITS:
        default = limit.default if has_defaults else None
        where = "" if limit.name in _GRPCIO.values() else "; --wire weft alone"
        text = f"{limit.meaning}{where} (default {limit.default:.12g})"
        add(parser, f"{limit.flag} N", text, limit.type, default)


def given_limits(options: argparse.Namespace) -> Iterator[str]:
    """Yield the limits that were given, as command-line arguments for a service."""
    for limit in _LIMITS:
        if (value := getattr(options, limit.name)) is not None:
            yield f"{limit.flag}={value}"


def limits_of(options: argparse.Namespace) -> dict[str, Any]:
    """Limits by name, from the arguments of ``add_limit_arguments``."""
    return {limit.name: getattr(options, limit.name) for limit in _LIMITS}


def grpcio_limits(options: "ServerOptions") -> list[tuple[str, int]]:
    """The limits that grpcio's server supports, as its options; limits of 0 are left out."""
    return [
        (option, round(value * 1000) if option.endswith("_ms") else round(value))
        for option, name in _GRPCIO.items()
        if (value := getattr(options, name))
    ]


def add_process_arguments(parser: argparse.ArgumentParser, *, metrics_port: int) -> None:
    """Add arguments for addresses, shutdown, take-over and logging."""
    option = partial(add, parser)
    option("--host HOST", "address to listen on (default %(default)s)", default="127.0.0.1")
    option("--metrics-port METRICS_PORT", "0: chosen by the system (default %(default)s)", int, metrics_port)
    option("--grace-s GRACE_S", "time to finish work at a stop (default %(default)g)", not_negative, 10.0)
    option(
        "--share-ports",
        "let a process with --take-over listen on the same ports; without it a second process is refused",
    )
    option(
        "--take-over",
        "another process, with --share-ports, serves on these ports and will be told to end: listen when everything is "
        "ready, and end if it is not",
    )
    hung = f"end the process with status {EXIT_HUNG} when its event loop hangs for so long; 0: never (default 0)"
    option("--watchdog-abort-s N", hung, not_negative, 0.0)
    option(
        "--log-level",
        "lowest level logged, to standard error: for people on a terminal, else JSON lines (default info)",
        choices=LOG_LEVELS,
        default="info",
    )
    option("--stop-with-stdin", "stop when standard input ends, so as not to outlive the parent")
