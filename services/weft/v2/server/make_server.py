"""A gRPC server on Weft's own wire or on grpcio's, behind one interface, and the V2 service on it."""

import argparse
import socket
from collections.abc import Sequence
from typing import Any

from weft.base.errors import UnsupportedError
from weft.v2.client.channels import server_options
from weft.v2.client.wires import WireName, default_wire
from weft.v2.protocol.codec import deserialize_call, serialize_result, serialize_stream_answer
from weft.v2.protocol.services import add_service, method_handlers
from weft.v2.security.tls import ServerTls
from weft.v2.server.limits import grpcio_limits, limits_of
from weft.v2.server.unreadable import UnreadableInterceptor
from weft.wire.interface import HAS_GRPCIO, grpc
from weft.wire.server.options import ServerOptions
from weft.wire.server.server import Server
from weft_protos import grpc_service_pb2 as pb

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

    Raises:
        UnsupportedError: It is grpcio's, which is not installed.
    """
    if (wire or default_wire()) is WireName.WEFT:
        return Server(options, interceptors)
    if not HAS_GRPCIO:
        raise UnsupportedError("--wire grpcio needs grpcio, which is not installed: pip install 'weft-mesh[grpcio]'")
    # gRPC uses the first of duplicate options.
    limits = [*grpcio_limits(options), *server_options(options.max_message_bytes, shares_ports=options.shares_ports)]
    return grpc.aio.server(options=limits, interceptors=(*interceptors, UnreadableInterceptor()))


def server_options_of(options: argparse.Namespace) -> ServerOptions:
    """Options of a server from the arguments of ``weft.v2.server.server.add_arguments``."""
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


def add_v2_service(servicer: Any, server: grpc.aio.Server) -> None:
    """Add the V2 service to a server, inference by the codec.

    Args:
        servicer: Has the methods of ``GRPCInferenceService``.
        server: Of ``make_server``.
    """
    service = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    handlers = method_handlers(servicer, service)
    handlers["ModelInfer"] = grpc.unary_unary_rpc_method_handler(
        servicer.ModelInfer, request_deserializer=deserialize_call, response_serializer=serialize_result
    )
    handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
        servicer.ModelStreamInfer, request_deserializer=deserialize_call, response_serializer=serialize_stream_answer
    )
    add_service(server, service.full_name, handlers)


def add_reflection(server: grpc.aio.Server, names: Sequence[str]) -> bool:
    """Offer reflection, with which clients like grpcurl find services without their ``.proto`` files.

    Returns:
        False: grpcio-reflection is not installed, and nothing changes.
    """
    try:
        from grpc_health.v1 import health_pb2  # noqa: F401, PLC0415  # its descriptor is reflected too
        from grpc_reflection.v1alpha import reflection  # noqa: PLC0415  # it needs grpcio, which is optional
    except ModuleNotFoundError:
        return False
    reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), server)
    return True
