"""A gRPC server on Weft's own wire or on grpcio's, behind one interface."""

from collections.abc import Sequence

import grpc

from weft_common.client.channels import server_options
from weft_common.client.wires import WireName
from weft_common.errors import UnsupportedError
from weft_common.security.tls import ServerTls
from weft_common.server.limits import ServerLimits, grpcio_limits


def make_server(
    wire: WireName,
    options: ServerLimits,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),  # type: ignore[type-arg]  # no generic at run time
) -> grpc.aio.Server:
    """A server without ports that has not been started; on the event loop that it will run on."""
    if wire is WireName.WEFT:
        raise UnsupportedError("there is no server of --wire weft yet; use --wire grpcio")
    # gRPC uses the first of duplicate options.
    limits = [
        *grpcio_limits(options),
        *server_options(options.max_message_bytes, shares_ports=options.shares_ports),
    ]
    return grpc.aio.server(options=limits, interceptors=tuple(interceptors) or None)


def add_tls_port(server: grpc.aio.Server, address: str, tls: ServerTls) -> int:
    """Make a server of ``make_server`` listen with this certificate; returns the port.

    Raises:
        RuntimeError, OSError: The port is taken, or the address is not one of this machine.
    """
    return server.add_secure_port(address, tls.credentials())
