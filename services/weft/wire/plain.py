"""The parts of ``grpc`` and ``grpc.aio`` that Weft uses, in plain Python, for installations without grpcio."""

import enum
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar


class StatusCode(enum.Enum):
    """Statuses of calls; each value is the number and the words of the protocol."""

    OK = (0, "ok")
    CANCELLED = (1, "cancelled")
    UNKNOWN = (2, "unknown")
    INVALID_ARGUMENT = (3, "invalid argument")
    DEADLINE_EXCEEDED = (4, "deadline exceeded")
    NOT_FOUND = (5, "not found")
    ALREADY_EXISTS = (6, "already exists")
    PERMISSION_DENIED = (7, "permission denied")
    RESOURCE_EXHAUSTED = (8, "resource exhausted")
    FAILED_PRECONDITION = (9, "failed precondition")
    ABORTED = (10, "aborted")
    OUT_OF_RANGE = (11, "out of range")
    UNIMPLEMENTED = (12, "unimplemented")
    INTERNAL = (13, "internal")
    UNAVAILABLE = (14, "unavailable")
    DATA_LOSS = (15, "data loss")
    UNAUTHENTICATED = (16, "unauthenticated")


class RpcError(Exception):
    """A call failed."""


_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
_Metadatum = tuple[str, str | bytes]


class _EndOfStream:
    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "<EOF>"


#: What ``read`` gives at the end of a stream.
EOF = _EndOfStream()


class UsageError(Exception):
    """A call or channel was used in a way that it does not support."""


class AbortError(Exception):
    """A handler has aborted its call."""


class Metadata(Collection[_Metadatum]):
    """Pairs of key and value in their order; a key may repeat."""

    def __init__(self, *pairs: _Metadatum) -> None:
        self._pairs = list(pairs)

    def __len__(self) -> int:
        return len(self._pairs)

    def __iter__(self) -> Iterator[_Metadatum]:
        return iter(self._pairs)

    def __contains__(self, key: object) -> bool:
        return any(key == name for name, _ in self._pairs)

    def __getitem__(self, key: str) -> str | bytes:
        for name, value in self._pairs:
            if name == key:
                return value
        raise KeyError(key)

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, Metadata | tuple) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as grpcio's, it may change

    def __repr__(self) -> str:
        return f"Metadata({tuple(self)!r})"

    def add(self, key: str, value: str | bytes) -> None:
        """Add a value after those of the same key."""
        self._pairs.append((key, value))

    def get(self, key: str, default: str | bytes | None = None) -> str | bytes | None:
        """The first value of a key."""
        return next((value for name, value in self._pairs if name == key), default)

    def get_all(self, key: str) -> list[str | bytes]:
        """Every value of a key."""
        return [value for name, value in self._pairs if name == key]

    def keys(self) -> list[str]:
        """Each key once."""
        return list(dict.fromkeys(name for name, _ in self._pairs))


class AioRpcError(RpcError):
    """A call ended with a status other than OK."""

    def __init__(
        self,
        code: StatusCode,
        initial_metadata: Any = None,
        trailing_metadata: Any = None,
        details: str | None = None,
        debug_error_string: str | None = None,
    ) -> None:
        super().__init__(code, details)
        self._code, self._details, self._debug = code, details, debug_error_string
        self._initial, self._trailing = initial_metadata, trailing_metadata

    def code(self) -> StatusCode:
        """The status."""
        return self._code

    def details(self) -> str | None:
        """The error's message."""
        return self._details

    def initial_metadata(self) -> Any:
        """Metadata sent before the first response."""
        return self._initial

    def trailing_metadata(self) -> Any:
        """Metadata sent with the status."""
        return self._trailing

    def debug_error_string(self) -> str | None:
        """Details for logs."""
        return self._debug

    def __str__(self) -> str:
        kind = type(self).__name__
        return f"<{kind} of RPC that terminated with:\n\tstatus = {self._code}\n\tdetails = {self._details!r}\n>"

    __repr__ = __str__

    def __reduce__(self) -> Any:
        return type(self), (self._code, self._initial, self._trailing, self._details, self._debug)


class Plain(Generic[_Request, _Response]):
    """Base of servers, channels, methods, calls, contexts and interceptors."""


class StreamUnaryCall(Generic[_Request, _Response]):
    """Base of calls that send a stream and get one response."""


StreamStreamCall = StreamUnaryCall
Server = Channel = Call = ServerInterceptor = ServicerContext = Plain
UnaryUnaryCall = UnaryStreamCall = Plain
UnaryUnaryMultiCallable = UnaryStreamMultiCallable = StreamUnaryMultiCallable = StreamStreamMultiCallable = Plain
#: The module ``grpc.aio``.
aio = sys.modules[__name__]


class ChannelConnectivity(enum.Enum):
    """State of a channel."""

    IDLE = (0, "idle")
    CONNECTING = (1, "connecting")
    READY = (2, "ready")
    TRANSIENT_FAILURE = (3, "transient failure")
    SHUTDOWN = (4, "shutdown")


class Compression(enum.IntEnum):
    """Compression of messages."""

    NoCompression = 0  # the names in grpc
    Deflate = 1
    Gzip = 2


class HandlerCallDetails:
    """Method and metadata of a call, for interceptors; see ``weft.wire.server.methods.CallDetails``."""

    method: str
    invocation_metadata: Any


class RpcMethodHandler(NamedTuple):
    """The handler of one method; exactly one of the last four fields is set."""

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

    def __init__(self, handlers: Mapping[str, RpcMethodHandler]) -> None:
        self._handlers = handlers

    def service(self, handler_call_details: Any) -> RpcMethodHandler | None:
        """Return the handler of the call's path, or None if the path is not served here."""
        return self._handlers.get(handler_call_details.method)


def method_handlers_generic_handler(service: str, method_handlers: Mapping[str, RpcMethodHandler]) -> GenericRpcHandler:
    """A handler of all methods of a service."""
    return GenericRpcHandler({f"/{service}/{name}": handler for name, handler in method_handlers.items()})


def _maker(request: str, response: str) -> Callable[..., RpcMethodHandler]:
    """Make a function that builds handlers for ``unary`` or ``stream`` requests and responses."""

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
