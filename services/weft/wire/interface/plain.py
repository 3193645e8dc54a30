"""What Weft uses of the module ``grpc``, in plain Python."""

import enum
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from weft.wire.interface import plain_aio as aio
from weft.wire.interface.plain_aio import RpcError, StatusCode

__all__ = [
    "ChannelConnectivity",
    "Compression",
    "GenericRpcHandler",
    "HandlerCallDetails",
    "RpcError",
    "RpcMethodHandler",
    "StatusCode",
    "aio",
    "method_handlers_generic_handler",
    "stream_stream_rpc_method_handler",
    "stream_unary_rpc_method_handler",
    "unary_stream_rpc_method_handler",
    "unary_unary_rpc_method_handler",
]


class ChannelConnectivity(enum.Enum):
    """State of a channel."""

    IDLE = (0, "idle")
    CONNECTING = (1, "connecting")
    READY = (2, "ready")
    TRANSIENT_FAILURE = (3, "transient failure")
    SHUTDOWN = (4, "shutdown")


class Compression(enum.IntEnum):
    """Of messages."""

    NoCompression = 0  # the names in grpc
    Deflate = 1
    Gzip = 2


class HandlerCallDetails:
    """What interceptors see of a call; see ``weft.wire.server.methods.CallDetails``."""

    method: str
    invocation_metadata: Any


class RpcMethodHandler(NamedTuple):
    """How one method is called; exactly one of the last four is set."""

    request_streaming: bool
    response_streaming: bool
    request_deserializer: Callable[[bytes], Any] | None
    response_serializer: Callable[[Any], bytes] | None
    unary_unary: Callable[..., Any] | None = None
    unary_stream: Callable[..., Any] | None = None
    stream_unary: Callable[..., Any] | None = None
    stream_stream: Callable[..., Any] | None = None


class GenericRpcHandler:
    """Finds the handler of a path."""

    def service(self, handler_call_details: Any) -> RpcMethodHandler | None:
        """The handler; None: the path is of no method here."""
        raise NotImplementedError


class _ServiceHandler(GenericRpcHandler):
    def __init__(self, service: str, method_handlers: Mapping[str, RpcMethodHandler]) -> None:
        self._handlers = {f"/{service}/{name}": handler for name, handler in method_handlers.items()}

    def service(self, handler_call_details: Any) -> RpcMethodHandler | None:
        return self._handlers.get(handler_call_details.method)


def method_handlers_generic_handler(service: str, method_handlers: Mapping[str, RpcMethodHandler]) -> GenericRpcHandler:
    """A handler of all methods of a service."""
    return _ServiceHandler(service, method_handlers)


def _maker(request: str, response: str) -> Callable[..., RpcMethodHandler]:
    """The function that makes handlers of so many requests and responses, each ``unary`` or ``stream``."""

    def make(
        behavior: Callable[..., Any],
        request_deserializer: Callable[[bytes], Any] | None = None,
        response_serializer: Callable[[Any], bytes] | None = None,
    ) -> RpcMethodHandler:
        kind: dict[str, Any] = {f"{request}_{response}": behavior}
        streams = request == "stream", response == "stream"
        return RpcMethodHandler(*streams, request_deserializer, response_serializer, **kind)

    return make


unary_unary_rpc_method_handler = _maker("unary", "unary")
unary_stream_rpc_method_handler = _maker("unary", "stream")
stream_unary_rpc_method_handler = _maker("stream", "unary")
stream_stream_rpc_method_handler = _maker("stream", "stream")
