"""What the parent opens for its workers: the reserved port, the metrics of all, the Unix socket."""

import argparse
import contextlib
import socket

from prometheus_client.registry import CollectorRegistry

from weft.base.errors import UnavailableError
from weft.base.processes.process import reserve_port
from weft.v2.client.wires import WireName
from weft.v2.security.tls import ServerTls, server_tls_files
from weft.v2.server.listening import Ports, host_and_port
from weft.v2.server.metrics import serve_metrics
from weft.v2.server.unix_socket import UnixSocket


class GroupPorts:
    """The ports of a group of workers.

    With ``--take-over`` those of another process go on until ``publish``.

    Args:
        options: Of the service.
        registry: Metrics to serve.

    Raises:
        UnavailableError: A port is taken, or the Unix socket cannot be made; the message says which.
        InvalidArgumentError: A file of certificates is missing or invalid.

    Attributes:
        grpc_port: On which the workers listen.
        unix_socket: Which the workers serve; None: there is none, or the first worker opens it.
    """

    def __init__(self, options: argparse.Namespace, registry: CollectorRegistry) -> None:
        self._options = options
        self._registry = registry
        self._shares_ports = options.share_ports or options.take_over
        self._metrics_port = 0
        self.unix_socket: socket.socket | None = None
        with contextlib.ExitStack() as opened:
            files = server_tls_files(options)
            self._tls = None if files is None else ServerTls(files)
            self.grpc_port = opened.enter_context(self._reserve()).getsockname()[1]
            # A server of grpcio takes no socket that listens already.
            path = options.unix_socket if options.wire is WireName.WEFT else None
            self._path = None if path is None else UnixSocket(path, takes_over=options.take_over)
            if self._path is not None:
                self.unix_socket = opened.enter_context(self._path.listen())
                opened.callback(self._path.remove)
            if not options.take_over:
                self._open()
            self._opened = opened.pop_all()

    def publish(self) -> Ports:
        """Every port is open, now that all workers serve; their addresses. Raises UnavailableError."""
        if self._options.take_over:
            self._open()
        host = self._options.host
        return Ports(host_and_port(host, self.grpc_port), host_and_port(host, self._metrics_port))

    def close(self) -> None:
        """Give back the port, and remove the Unix socket."""
        self._opened.close()

    def _reserve(self) -> socket.socket:
        options = self._options
        try:
            return reserve_port(options.host, options.grpc_port, is_shared=self._shares_ports)
        except OSError as error:
            raise self._taken("--grpc-port", options.grpc_port, error) from error

    def _open(self) -> None:
        options = self._options
        try:
            self._metrics_port = serve_metrics(
                self._registry, options.host, options.metrics_port, self._tls, shares_port=self._shares_ports
            )
        except OSError as error:
            raise self._taken("--metrics-port", options.metrics_port, error) from error
        if self._path is not None:
            self._path.publish()

    def _taken(self, option: str, port: int, error: OSError) -> UnavailableError:
        address = host_and_port(self._options.host, port)
        return UnavailableError(f"cannot listen on {address}: {error.strerror}; choose another {option}")
