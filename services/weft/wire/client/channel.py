"""``Channel``, a gRPC channel on asyncio, and the multi-callables that stubs use."""

import ssl
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self

from typing_extensions import override

from weft.wire.client.calls import MessagingCall, StreamCall, UnaryCall
from weft.wire.client.dialling import Dialler, parse_address
from weft.wire.client.link import Link
from weft.wire.client.protocol import ENCODING_BY_COMPRESSION, ChannelOptions, RequestHeads
from weft.wire.interface import ChannelConnectivity, StatusCode, grpc
from weft.wire.messages import Body

#: A longer timeout is none, in seconds: about 30 years.
_MAX_TIMEOUT_S: Final = 1e9
_DEFAULT: Final = ChannelOptions()


class Method:
    """A method of one channel; without (de)serializer, messages are bytes."""

    _call_class: type[MessagingCall]
    _reads_iterator = False

    def __init__(
        self,
        link: Link,
        path: str,
        serialize: Callable[[Any], bytes] | None,
        deserialize: Callable[[bytes], Any] | None,
    ) -> None:
        self._link = link
        self._path = path
        self._serialize: Callable[[Any], Body] | None = getattr(serialize, "to_parts", serialize)
        self._deserialize = deserialize
        self._encoding = ENCODING_BY_COMPRESSION[link.options.compression]
        self._block = link.heads.method(path, self._encoding)
        self._other_blocks: dict[str, bytes] = {}

    def __call__(
        self,
        request: Any = None,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: Any = None,
        wait_for_ready: bool | None = None,
        compression: Any = None,
        *,
        request_iterator: Any = None,
    ) -> Any:
        """Begin a call. Raises UsageError: the channel is closed, ValueError: the metadata cannot be sent."""
        link = self._link
        if link.is_closed:
            raise grpc.aio.UsageError("Channel is closed.")
        link.attach()
        if credentials is not None:
            raise grpc.aio.UsageError("call credentials are not supported: send them as metadata")
        block, encoding = self._block, self._encoding
        if compression is not None:
            encoding = ENCODING_BY_COMPRESSION[compression]
            if encoding != self._encoding:
                if encoding not in self._other_blocks:
                    self._other_blocks[encoding] = link.heads.method(self._path, encoding)
                block = self._other_blocks[encoding]
        if metadata is not None:
            block += link.heads.metadata(metadata)
        call = self._call_class(link, block, self._deserialize)
        if self._reads_iterator:
            call.set_requests(request_iterator if request is None else request, self._serialize, encoding)
        elif not call.set_request(request, self._serialize, encoding):
            return call
        if timeout is not None and timeout < _MAX_TIMEOUT_S:
            if timeout <= 0:
                call.fail(StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
                return call
            call.set_timeout(timeout)
        if wait_for_ready:
            call.waits_for_ready = True
        link.begin(call)
        return call


class UnaryMethod(Method, grpc.aio.UnaryUnaryMultiCallable[Any, Any]):
    """A method with one request and one response."""

    _call_class = UnaryCall

    @override
    def __call__(  # type: ignore[override]
        self,
        request: Any,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: Any = None,
        wait_for_ready: bool | None = None,
        compression: Any = None,
    ) -> UnaryCall:
        link = self._link
        connection = link.direct
        if (
            connection is not None
            and connection.can_open_stream
            and credentials is None
            and compression is None
            and self._encoding == "identity"
            and (timeout is None or 0.0 < timeout < _MAX_TIMEOUT_S)
        ):
            block = self._block if metadata is None else self._block + link.heads.metadata(metadata)
            call = UnaryCall(link, block, self._deserialize)
            body = call.serialized(request, self._serialize)
            if body is not None:
                call.send(connection, body, timeout)
            return call
        begun: UnaryCall = super().__call__(request, timeout, metadata, credentials, wait_for_ready, compression)
        return begun


class UnaryStreamingMethod(Method, grpc.aio.UnaryStreamMultiCallable[Any, Any]):
    """A method with one request and a stream of responses."""

    _call_class = StreamCall


# These two are generic from grpcio 1.84 on.
class StreamingUnaryMethod(Method, grpc.aio.StreamUnaryMultiCallable):  # type: ignore[misc,type-arg]
    """A method with a stream of requests and one response."""

    _call_class = UnaryCall
    _reads_iterator = True


class StreamingMethod(Method, grpc.aio.StreamStreamMultiCallable):  # type: ignore[misc,type-arg]
    """A method with streams in both directions."""

    _call_class = StreamCall
    _reads_iterator = True


def _maker(method_class: type[Any]) -> Any:
    def make(
        channel: "Channel",
        method: str,
        request_serializer: Callable[[Any], bytes] | None = None,
        response_deserializer: Callable[[bytes], Any] | None = None,
        _registered_method: bool | None = False,
    ) -> Any:
        """A method of a channel; without (de)serializer, messages are bytes."""
        return method_class(channel.link, method, request_serializer, response_deserializer)

    return make


class Channel(grpc.aio.Channel):
    """A channel to one server, over one connection that is opened by the first call.

    It belongs to the event loop of its first call.

    Args:
        ssl_context: Trusted CAs, and a client certificate if the server asks for one; its ALPN protocols are set to
            ``h2``. None: no TLS.
        server_name: Expected name in the server's certificate, and the authority of calls; "": the host.

    Raises:
        ValueError: The address is invalid.
    """

    unary_unary = _maker(UnaryMethod)
    unary_stream = _maker(UnaryStreamingMethod)
    stream_unary = _maker(StreamingUnaryMethod)
    stream_stream = _maker(StreamingMethod)

    def __init__(
        self,
        address: str,
        options: ChannelOptions = _DEFAULT,
        ssl_context: ssl.SSLContext | None = None,
        server_name: str = "",
    ) -> None:
        if ssl_context is not None:
            ssl_context.set_alpn_protocols(["h2"])
        destination = parse_address(address)
        dialler = Dialler(destination, ssl_context, server_name, options.connect_timeout_s)
        scheme = "http" if ssl_context is None else "https"
        heads = RequestHeads(scheme, server_name or destination.authority, options.user_agent)
        self.link = Link(dialler, heads, options)

    async def close(self, grace: float | None = None) -> None:
        """Begin no more calls; end those in flight, at once or after ``grace`` seconds; close the connection."""
        await self.link.close(grace)

    def get_state(self, try_to_connect: bool = False) -> ChannelConnectivity:
        """The state of the connection; with ``try_to_connect`` an idle channel connects."""
        if try_to_connect:
            self.link.connect()
        return self.link.connectivity.state

    async def wait_for_state_change(self, last_observed_state: ChannelConnectivity) -> None:
        """Return once the state differs from ``last_observed_state``."""
        await self.link.connectivity.wait_for_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Connect, and return once that is done, however many attempts it takes. Raises UsageError if it is closed."""
        while (state := self.get_state(try_to_connect=True)) is not ChannelConnectivity.READY:
            if state is ChannelConnectivity.SHUTDOWN:
                raise grpc.aio.UsageError("Channel is closed.")
            await self.wait_for_state_change(state)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        await self.close(None)
