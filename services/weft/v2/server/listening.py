"""Ports of a service: TLS and authentication as configured, with warnings if exposed without them."""

import argparse
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from prometheus_client.registry import Collector, CollectorRegistry

from weft.base.errors import UnavailableError
from weft.base.observing.logs import get_logger
from weft.base.security.access import KeyRing
from weft.base.statistics import ModelStatistics
from weft.v2.security.channel import is_local
from weft.v2.security.tls import ServerTls, server_tls_files
from weft.v2.server.interceptor import AccessInterceptor, RefusalCollector
from weft.v2.server.local_tensors import LocalTensorService
from weft.v2.server.make_server import add_listening, add_tls_port, make_server, server_options_of
from weft.v2.server.metrics import DroppedLogsCollector, make_registry, serve_metrics
from weft.v2.server.unix_socket import UnixSocket

_log = get_logger("weft.server")


class Ports(NamedTuple):
    """Addresses of a service, ``host:port``."""

    grpc: str
    metrics: str


class Worker(Protocol):
    """This process's place among several that serve on one port."""

    @property
    def index(self) -> int:
        """From 1."""

    @property
    def num_workers(self) -> int:
        """How many there are."""

    @property
    def unix_descriptor(self) -> int | None:
        """Of a Unix socket that all of them serve."""

    @property
    def listens_late(self) -> bool:
        """Whether it listens only once it is ready, as others serve meanwhile."""

    def publish(self, registry: CollectorRegistry) -> None:
        """Take the metrics of this process, which has no port for them."""


class Listener:
    """Creates the server of a service and opens its ports.

    Args:
        service: Name for log lines, for example ``weft.router``.
        options: Parsed arguments of ``weft.v2.server.server.add_arguments``.
        worker: The place of this process among several; None: it is alone.

    Attributes:
        server: The server.
        local_tensors: Memory for tensors that callers on the Unix socket share; None without it.

    Raises:
        InvalidArgumentError: A file of certificates or keys is missing or invalid.
    """

    def __init__(self, service: str, options: argparse.Namespace, worker: Worker | None = None) -> None:
        self._options = options
        self._worker = worker
        num_workers = 1 if worker is None else worker.num_workers
        files = server_tls_files(options)
        self._tls = None if files is None else ServerTls(files)
        self._keys = KeyRing(options.auth_keys, num_workers=num_workers) if options.auth_keys else None
        interceptors = () if self._keys is None else (AccessInterceptor(self._keys, service),)
        self.server = make_server(server_options_of(options), interceptors, wire=options.wire)
        if worker is not None and worker.unix_descriptor is not None:
            add_listening(self.server, worker.unix_descriptor)
        path = options.unix_socket
        self._unix_socket = None if path is None else UnixSocket(path, takes_over=options.take_over)
        self.local_tensors: LocalTensorService | None = None
        if path is not None:
            self.local_tensors = LocalTensorService(
                path, takes_over=options.take_over, max_message_bytes=options.max_message_bytes
            )

    def listen(self, statistics: Callable[[], Iterable[ModelStatistics]], collectors: Sequence[Collector]) -> Ports:
        """Open both ports; the gRPC port responds once the server is started.

        Args:
            statistics: See ``weft.v2.server.metrics.make_registry``.
            collectors: Collectors of the service.

        Raises:
            UnavailableError: A port is taken; the message says which. Or the Unix socket cannot be created.
        """
        options = self._options
        for warning in exposure(
            options.host,
            is_encrypted=self._tls is not None,
            asks_for_certificates=self._tls is not None and self._tls.requires_client_certificate,
            asks_for_keys=self._keys is not None,
        ):
            _log.warning("%s", warning)
        if self._keys is not None:
            collectors = (*collectors, RefusalCollector(self._keys))
        option, port = "--grpc-port", options.grpc_port
        try:
            grpc_port = self._listen_grpc(host_and_port(options.host, port))
            option, port = "--metrics-port", options.metrics_port
            registry = make_registry(statistics, (*collectors, DroppedLogsCollector()))
            if self._worker is None:
                shares_port = options.share_ports or options.take_over
                metrics_port = serve_metrics(registry, options.host, port, self._tls, shares_port=shares_port)
            else:
                self._worker.publish(registry)
                metrics_port = 0
        except (RuntimeError, OSError) as error:
            reason = str(error).partition(";")[0]  # gRPC goes on with advice on its own logs
            address = host_and_port(options.host, port)
            raise UnavailableError(f"cannot listen on {address}: {reason}; choose another {option}") from error
        if self._unix_socket is not None:
            self._unix_socket.add_to(self.server)
        if self.local_tensors is not None:
            self.local_tensors.start()
        return Ports(host_and_port(options.host, grpc_port), host_and_port(options.host, metrics_port))

    def close(self) -> None:
        """Remove the Unix socket after the server has stopped."""
        if self._unix_socket is not None:
            self._unix_socket.remove()
        if self.local_tensors is not None:
            self.local_tensors.close()

    def _listen_grpc(self, address: str) -> int:
        if self._tls is None:
            return self.server.add_insecure_port(address)
        return add_tls_port(self.server, address, self._tls)


def exposure(host: str, *, is_encrypted: bool, asks_for_certificates: bool, asks_for_keys: bool) -> list[str]:
    """Security warnings for ports on ``host`` that other machines can reach."""
    if is_local(host):
        return []
    warnings = []
    if not is_encrypted:
        warnings.append(
            f"plaintext ports listen on {host}, which other machines can reach: requests, answers and keys can be read "
            "and changed on the way; give --tls-cert and --tls-key"
        )
    if not (asks_for_keys or asks_for_certificates):
        warnings.append(
            f"ports without authentication listen on {host}, which other machines can reach: whoever reaches them may "
            "call; give --auth-keys or --tls-client-ca"
        )
    if not asks_for_certificates:
        warnings.append(
            f"the metrics port on {host} asks for no certificate, and never for a key: who reaches it reads the names "
            "of models and clients, and figures"
        )
    return warnings


def host_and_port(host: str, port: int) -> str:
    """``host:port``, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
