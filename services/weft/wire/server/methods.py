"""Registered methods of a server, by path, and the server's options."""

import asyncio
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from weft.wire.connection import ConnectionLimits
from weft.wire.event_loop import DeadlineQueue
from weft.wire.heads import Metadata
from weft.wire.interface import StatusCode, grpc
from weft.wire.messages import Body, CallError, UnreadableRequests
from weft.wire.transport import Heartbeat, Http2Protocol, LivenessOptions


@dataclass(frozen=True)
class ServerOptions(ConnectionLimits, LivenessOptions):
    """Limits and time-outs of a server and of each of its connections; 0 turns those off that may be.

    Attributes:
        max_message_bytes: Largest message in both directions, after decompression.
        max_connections: Connections at once; more are closed at once. 0: no limit.
        max_buffered_bytes: Requests that are not complete, or not read by their handler, and responses that wait for
            their client, over all connections. One connection holds at most four times what is then left, alone four
            fifths, so that there is always some for others. A call that would exceed it ends with RESOURCE_EXHAUSTED.
            0: no limit.
        min_ping_interval_s: Between two PINGs of a client, unless data was sent to it; after three that come earlier
            the connection ends with ENHANCE_YOUR_CALM and ``too_many_pings``. 0: no limit.
        shares_ports: Other processes may listen on the same ports (SO_REUSEPORT).
    """

    max_message_bytes: int = 2**31 - 1
    max_connections: int = 0
    max_buffered_bytes: int = 4 << 30
    min_ping_interval_s: float = 5.0
    shares_ports: bool = False


#: Most paths that are remembered; a server has few methods, and unknown paths are not remembered.
_MAX_KNOWN = 4096
#: One connection holds at most so many times what is then left of ``max_buffered_bytes``.
_SHARE = 4


class CallDetails(NamedTuple):
    """Method and metadata of a call for interceptors and generic handlers, like ``grpc.HandlerCallDetails``."""

    method: str
    invocation_metadata: Metadata


class Method:
    """A registered handler, ready to be called.

    Attributes:
        deserialize: From bytes; None: bytes as they are.
        serialize: To bytes; None: bytes as they are.
        takes_parts: ``deserialize`` also takes a message in pieces.
        is_plain: The handler is a coroutine function from one request to one response.
        is_generator: Responses are yielded, not written to the context.
        is_blocking: The handler is a plain function, called on a thread.
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


class Host:
    """State that the connections and calls of a server share: methods, interceptors, limits, open connections.

    Attributes:
        options: Limits and time-outs.
        interceptors: Called in this order for each call.
        unreadable: Errors of requests whose message cannot be read.
        protocols: Open connections.
        is_stopping: ``stop`` was called.
        num_cut_off: Calls that ``stop`` has ended, as its grace had passed.
    """

    def __init__(self, options: ServerOptions, interceptors: Sequence[Any]) -> None:
        self.options = options
        self.max_message_bytes = options.max_message_bytes
        self.interceptors = tuple(interceptors)
        self.unreadable = UnreadableRequests()
        self.loop = asyncio.get_event_loop()
        self.deadlines = DeadlineQueue(self.loop)
        self.protocols: set[Http2Protocol] = set()
        self.is_stopping = False
        self.num_cut_off = 0
        self._heartbeat = Heartbeat(self.loop)
        self._none_left = asyncio.Event()
        self._none_left.set()
        self._num_buffered_bytes = 0
        self._handlers: dict[str, Any] = {}
        self._generic: list[grpc.GenericRpcHandler[Any, Any]] = []
        self._known: dict[str, Method] = {}

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[Any]) -> None:
        """Add handlers that are asked for each path."""
        self._generic += generic_rpc_handlers
        self._known.clear()

    def add_registered_method_handlers(self, service_name: str, method_handlers: dict[str, Any]) -> None:
        """Add the methods of one service by name, as generated code does."""
        self._handlers |= {f"/{service_name}/{name}": handler for name, handler in method_handlers.items()}
        self._known.clear()

    def find(self, path: str, metadata: Metadata = ()) -> Method | None:
        """Return the method at a path, None if there is none."""
        method = self._known.get(path)
        if method is None and (handler := self._handler(CallDetails(path, metadata))) is not None:
            method = Method(handler)
            if len(self._known) < _MAX_KNOWN:
                self._known[path] = method
        return method

    def _handler(self, details: CallDetails) -> Any:
        handler = self._handlers.get(details.method)
        for generic in self._generic if handler is None else ():
            handler = generic.service(details)  # type: ignore[arg-type]  # the stubs ask for grpc's own class
            if handler is not None:
                break
        return handler

    async def intercept(self, details: CallDetails) -> Any:
        """Return the handler of a call, after the interceptors; None if there is none."""

        async def find(position: int, details: Any) -> Any:
            if position == len(self.interceptors):
                return self._handler(details)

            async def go_on(details: Any) -> Any:
                return await find(position + 1, details)

            return await self.interceptors[position].intercept_service(go_on, details)

        return await find(0, details)

    def admit(self, protocol: Http2Protocol) -> bool:
        """Register a connection; return False if there are too many."""
        limit = self.options.max_connections
        if limit and len(self.protocols) >= limit:
            return False
        self.protocols.add(protocol)
        self._heartbeat.add(protocol)
        self._none_left.clear()
        return True

    def forget(self, protocol: Http2Protocol) -> None:
        """Unregister a closed connection."""
        self.protocols.discard(protocol)
        self._heartbeat.discard(protocol)
        if not self.protocols:
            self._none_left.set()

    def count_buffered(self, num_bytes: int, num_held_bytes: int) -> None:
        """Count bytes that a connection newly holds, negative when it releases them.

        Raises:
            CallError: RESOURCE_EXHAUSTED, if the server would hold too much, or too little would be left for other
                connections.
        """
        total = self._num_buffered_bytes + num_bytes
        limit = self.options.max_buffered_bytes
        if num_bytes > 0 and limit and num_held_bytes + num_bytes > _SHARE * (limit - total):
            raise CallError(
                StatusCode.RESOURCE_EXHAUSTED,
                f"what this connection has not read or finished has {num_held_bytes + num_bytes} bytes, that of all "
                f"{total}; this server holds at most {limit}, for one connection {_SHARE} times what is then left",
            )
        self._num_buffered_bytes = total
