"""Creates the gRPC server, on Weft's wire or on grpcio, and adds the V2 service to it."""

import argparse
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from weft.base.errors import UnsupportedError
from weft.v2.client.channels import server_options
from weft.v2.client.wires import WireName, default_wire
from weft.v2.protocol.codec import deserialize_call
from weft.v2.protocol.encoding import serialize_result, serialize_stream_answer
from weft.v2.protocol.services import add_service, method_handlers
from weft.v2.security.tls import ServerTls
from weft.v2.server.arguments import grpcio_limits, limits_of
from weft.wire.interface import HAS_GRPCIO, grpc
from weft.wire.messages import UnreadableRequests
from weft.wire.server.methods import ServerOptions
from weft.wire.server.server import Server
from weft_protos import grpc_service_pb2 as pb

#: Both versions of the protocol, which are alike: proxies and newer clients ask for the first.
_REFLECTION_NAMES = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")

Handler = Any  # grpc.RpcMethodHandler, of which the stubs know no members
Context = grpc.aio.ServicerContext[Any, Any]


class UnreadableInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # no generic at run time
    """Makes grpcio end calls with an unreadable request as Weft's server does; the innermost interceptor."""

    def __init__(self) -> None:
        self._requests = UnreadableRequests()
        self._known: dict[str, tuple[Handler, Handler]] = {}

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]], details: grpc.HandlerCallDetails
    ) -> Handler:
        """Return a handler whose deserializer passes unreadable requests to the method, which ends the call."""
        handler = await continuation(details)
        if handler is None or handler.request_deserializer is None:
            return handler
        known = self._known.get(details.method)
        if known is None or known[0] is not handler:
            known = self._known[details.method] = handler, self._reading(handler, details.method)
        return known[1]

    def _reading(self, handler: Handler, path: str) -> Handler:
        behave = getattr(handler, kind_of(handler))

        def read(data: bytes) -> Any:
            try:
                return handler.request_deserializer(data)
            except Exception as error:
                return _Unreadable(error)

        def end(context: Context, error: Exception) -> None:
            failure = self._requests.failure(path, context.peer(), error)
            context.set_code(failure.code)
            context.set_details(failure.details)

        async def answer(request: Any, context: Context) -> Any:
            if type(request) is _Unreadable:
                return end(context, request.error)
            return await behave(request, context)

        async def answer_many(request: Any, context: Context) -> AsyncIterator[Any]:
            if type(request) is _Unreadable:
                end(context, request.error)
                return
            requests = _ReadableRequests(request) if handler.request_streaming else None
            responses = behave(requests or request, context)
            try:
                async for response in responses:
                    yield response
            finally:
                await responses.aclose()
            if requests is not None and requests.error is not None:
                end(context, requests.error)

        if inspect.isasyncgenfunction(behave):
            return handler_like(handler, answer_many, read)
        if inspect.iscoroutinefunction(behave) and not handler.request_streaming:
            return handler_like(handler, answer, read)
        return handler


class _Unreadable:
    """Placeholder for a message that cannot be read."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class _ReadableRequests:
    """The requests of a stream before an unreadable one, where the stream ends for the method."""

    def __init__(self, requests: AsyncIterator[Any]) -> None:
        self._requests = requests
        self.error: Exception | None = None

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        request = await anext(self._requests)
        if type(request) is _Unreadable:
            self.error = request.error
            raise StopAsyncIteration
        return request


def kind_of(handler: Handler) -> str:
    """The name of a handler's function attribute, for example ``unary_stream``."""
    streams = handler.request_streaming, handler.response_streaming
    return "_".join("stream" if is_streaming else "unary" for is_streaming in streams)


def handler_like(handler: Handler, behave: Callable[..., Any], read: Callable[[bytes], Any] | None = None) -> Handler:
    """Copy a handler with another function and, if given, ``read`` as its deserializer."""
    make: Any = getattr(grpc, f"{kind_of(handler)}_rpc_method_handler")
    return make(behave, read or handler.request_deserializer, handler.response_serializer)


_DEFAULTS = ServerOptions()


def make_server(
    options: ServerOptions = _DEFAULTS,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),  # type: ignore[type-arg]  # no generic at run time
    *,
    wire: WireName | None = None,
) -> grpc.aio.Server:
    """Create a server without ports, not started; ``wire`` None: ``default_wire``. Raises UnsupportedError."""
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


def add_tls_port(server: grpc.aio.Server, address: str, tls: ServerTls) -> int:
    """Add a port with this certificate to a server of ``make_server``; return it. Raises RuntimeError or OSError."""
    if isinstance(server, Server):
        return server.add_tls_port(address, tls.grpc_context())
    return server.add_secure_port(address, tls.credentials())


def add_v2_service(servicer: Any, server: grpc.aio.Server) -> None:
    """Add the V2 service to a server, with Weft's codec for inference messages."""
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
    """Add server reflection, for clients like grpcurl; return False if grpcio-reflection is not installed."""
    try:
        from grpc_health.v1 import health_pb2  # noqa: F401, PLC0415  # its descriptor is reflected too
        from grpc_reflection.v1alpha import reflection, reflection_pb2  # noqa: PLC0415  # it needs grpcio, an extra
    except ModuleNotFoundError:
        return False
    protocol = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
    names = (*names, *_REFLECTION_NAMES)
    servicer = reflection.aio.ReflectionServicer(names)  # type: ignore[attr-defined]  # its stubs do not export aio
    handlers = method_handlers(servicer, protocol)
    for name in _REFLECTION_NAMES:
        add_service(server, name, handlers)
    return True
