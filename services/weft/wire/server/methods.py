"""Methods of a server: from the path of a call to its handler, as generated code registers it."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from weft.wire.interface import grpc
from weft.wire.rpc.messages import Body
from weft.wire.rpc.metadata import Metadata

#: Most paths that are remembered; a server has few methods, and unknown paths are not remembered.
_MAX_KNOWN = 4096


class CallDetails(NamedTuple):
    """What interceptors and generic handlers see of a call, as ``grpc.HandlerCallDetails``."""

    method: str
    invocation_metadata: Metadata


class Method:
    """A handler, ready to be called.

    Args:
        handler: A ``grpc.RpcMethodHandler``.

    Attributes:
        behave: The function of the servicer.
        deserialize: From bytes; None: bytes as they are.
        serialize: To bytes; None: bytes as they are.
        reads_stream: Any number of requests.
        takes_parts: ``deserialize`` also takes a message in pieces.
        writes_stream: Any number of responses.
        is_plain: Not more than a coroutine function from one request to one response.
        is_generator: Responses are yielded, not written to the context.
        is_blocking: A plain function, which is called on a thread.
    """

    __slots__ = (
        "behave",
        "deserialize",
        "handler",
        "is_blocking",
        "is_generator",
        "is_plain",
        "reads_stream",
        "serialize",
        "takes_parts",
        "writes_stream",
    )

    def __init__(self, handler: Any) -> None:
        self.handler = handler
        self.reads_stream: bool = handler.request_streaming
        self.writes_stream: bool = handler.response_streaming
        name = f"{'stream' if self.reads_stream else 'unary'}_{'stream' if self.writes_stream else 'unary'}"
        self.behave: Callable[..., Any] = getattr(handler, name)
        self.deserialize: Callable[[Any], Any] | None = handler.request_deserializer
        self.takes_parts: bool = getattr(self.deserialize, "takes_parts", False)
        serialize = handler.response_serializer
        self.serialize: Callable[[Any], Body] | None = getattr(serialize, "to_parts", serialize)
        self.is_generator = inspect.isasyncgenfunction(self.behave)
        self.is_blocking = not (self.is_generator or inspect.iscoroutinefunction(self.behave))
        self.is_plain = not (self.reads_stream or self.writes_stream or self.is_blocking)


class Methods:
    """The methods of a server, by path."""

    def __init__(self) -> None:
        self._handlers: dict[str, Any] = {}
        self._generic: list[grpc.GenericRpcHandler[Any, Any]] = []
        self._known: dict[str, Method] = {}

    def add_generic(self, handlers: Sequence[Any]) -> None:
        """Add handlers that are asked for each path."""
        self._generic += handlers
        self._known.clear()

    def add_registered(self, service: str, handlers: dict[str, Any]) -> None:
        """Add the methods of one service by name."""
        self._handlers |= {f"/{service}/{name}": handler for name, handler in handlers.items()}
        self._known.clear()

    def find(self, path: str, metadata: Metadata = ()) -> Method | None:
        """The method at a path; None: there is none."""
        method = self._known.get(path)
        if method is None and (handler := self.handler(CallDetails(path, metadata))) is not None:
            method = Method(handler)
            if len(self._known) < _MAX_KNOWN:
                self._known[path] = method
        return method

    def handler(self, details: CallDetails) -> Any:
        """The handler as it was registered; None: there is none."""
        handler = self._handlers.get(details.method)
        for generic in self._generic if handler is None else ():
            handler = generic.service(details)  # type: ignore[arg-type]  # the stubs ask for grpc's own class
            if handler is not None:
                break
        return handler
