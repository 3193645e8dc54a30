"""A gRPC server on Weft's own wire or on grpcio's, behind one interface, and the V2 service on it."""

import argparse
import socket
from collections.abc import Sequence
from typing import Any

import grpc

from weft_common.client.channels import server_options
from weft_common.client.wires import WireName, default_wire
from weft_common.protocol.known_messages import deserialize_call, serialize_result
from weft_common.security.tls import ServerTls
from weft_common.server.limits import grpcio_limits, limits_of
from weft_common.server.unreadable import UnreadableInterceptor
from weft_protos import grpc_service_pb2_grpc as pb_grpc
from weft_wire.server.options import ServerOptions
from weft_wire.server.server import Server

_DEFAULTS = ServerOptions()


def make_server(
    options: ServerOptions = _DEFAULTS,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),  # type: ignore[type-arg]  # no generic at run time
    *,
    wire: WireName | None = None,
) -> grpc.aio.Server:
    """A server without ports that has not been started; on the event loop that it will run on.

    Args:
        options: Limits, those of grpcio as far as it has them.
        interceptors: Around every call, the first outermost.
        wire: Implementation; None: ``default_wire``.
    """
    if (wire or default_wire()) is WireName.WEFT:
        return Server(options, interceptors)
    # gRPC uses the first of duplicate options.
    limits = [*grpcio_limits(options), *server_options(options.max_message_bytes, shares_ports=options.shares_ports)]
    return grpc.aio.server(options=limits, interceptors=(*interceptors, UnreadableInterceptor()))


def server_options_of(options: argparse.Namespace) -> ServerOptions:
    """Options of a server from the arguments of ``weft_common.server.server.add_arguments``."""
    return ServerOptions(
        max_message_bytes=options.max_message_bytes,
        shares_ports=options.share_ports or options.take_over,
        **limits_of(options),
    )


def add_listening(server: grpc.aio.Server, descriptor: int) -> None:
    """Make a server of ``make_server`` serve a socket that listens already. Raises TypeError for one of grpcio."""
    if not isinstance(server, Server):
        raise TypeError("a server of grpcio takes no socket that listens already")
    server.add_socket(socket.socket(fileno=descriptor))


def add_tls_port(server: grpc.aio.Server, address: str, tls: ServerTls) -> int:
    """Make a server of ``make_server`` listen with this certificate; returns the port.

    Raises:
        RuntimeError, OSError: The port is taken, or the address is not one of this machine.
    """
    if isinstance(server, Server):
        return server.add_tls_port(address, tls.grpc_context())
    return server.add_secure_port(address, tls.credentials())


class _Generated:
    """Takes what generated code registers at a server."""

    def __init__(self) -> None:
        self.name = ""
        self.handlers: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: Sequence[object]) -> None:
        """The same handlers, in a form that cannot be changed."""

    def add_registered_method_handlers(self, name: str, handlers: dict[str, Any]) -> None:
        """Take them."""
        self.name, self.handlers = name, dict(handlers)


def add_v2_service(servicer: pb_grpc.GRPCInferenceServiceServicer, server: grpc.aio.Server) -> None:
    """Add the V2 service to a server; protobuf does not copy large tensors of ``ModelInfer``."""
    generated: Any = _Generated()
    pb_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, generated)
    generated.handlers["ModelInfer"] = grpc.unary_unary_rpc_method_handler(
        servicer.ModelInfer, request_deserializer=deserialize_call, response_serializer=serialize_result
    )
    generic = grpc.method_handlers_generic_handler(generated.name, generated.handlers)
    server.add_generic_rpc_handlers((generic,))
    server.add_registered_method_handlers(generated.name, generated.handlers)  # type: ignore[attr-defined]
