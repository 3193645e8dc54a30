"""A channel of gRPC on asyncio."""

import ssl
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from weft.wire.client.dialling import Dialler, parse_address
from weft.wire.client.heads import RequestHeads
from weft.wire.client.link import Link
from weft.wire.client.methods import StreamingMethod, StreamingUnaryMethod, UnaryMethod, UnaryStreamingMethod
from weft.wire.client.options import ChannelOptions
from weft.wire.interface import ChannelConnectivity, grpc

_DEFAULT = ChannelOptions()


class Channel(grpc.aio.Channel):
    """Calls to one server, over one connection that is made at the first call.

    It belongs to the event loop of its first call.

    Args:
        address: As ``parse_address`` takes it: ``host:port``, ``unix:path`` and others.
        options: Limits and times.
        ssl_context: Trust, and certificates if the server asks for them; its ALPN protocols are set to ``h2``. None:
            no TLS.
        server_name: Expected name in the server's certificate, and the authority of calls; "": the host.

    Raises:
        ValueError: The address is none.
    """

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
        self._link = Link(dialler, heads, options)

    def unary_unary(
        self,
        method: str,
        request_serializer: Callable[[Any], bytes] | None = None,
        response_deserializer: Callable[[bytes], Any] | None = None,
        _registered_method: bool | None = False,
    ) -> UnaryMethod:
        """A method with one request and one response; without (de)serializer, messages are bytes."""
        return UnaryMethod(self._link, method, request_serializer, response_deserializer)

    def unary_stream(
        self,
        method: str,
        request_serializer: Callable[[Any], bytes] | None = None,
        response_deserializer: Callable[[bytes], Any] | None = None,
        _registered_method: bool | None = False,
    ) -> UnaryStreamingMethod:
        """A method with one request and a stream of responses."""
        return UnaryStreamingMethod(self._link, method, request_serializer, response_deserializer)

    def stream_unary(
        self,
        method: str,
        request_serializer: Callable[[Any], bytes] | None = None,
        response_deserializer: Callable[[bytes], Any] | None = None,
        _registered_method: bool | None = False,
    ) -> StreamingUnaryMethod:
        """A method with a stream of requests and one response."""
        return StreamingUnaryMethod(self._link, method, request_serializer, response_deserializer)

    def stream_stream(
        self,
        method: str,
        request_serializer: Callable[[Any], bytes] | None = None,
        response_deserializer: Callable[[bytes], Any] | None = None,
        _registered_method: bool | None = False,
    ) -> StreamingMethod:
        """A method with streams in both directions."""
        return StreamingMethod(self._link, method, request_serializer, response_deserializer)

    async def close(self, grace: float | None = None) -> None:
        """Begin no more calls; end those in flight, at once or after ``grace`` seconds; close the connection."""
        await self._link.close(grace)

    def get_state(self, try_to_connect: bool = False) -> ChannelConnectivity:
        """The state of the connection; with ``try_to_connect`` an idle channel connects."""
        if try_to_connect:
            self._link.connect()
        return self._link.connectivity.state

    async def wait_for_state_change(self, last_observed_state: ChannelConnectivity) -> None:
        """Return once the state is another than ``last_observed_state``."""
        await self._link.connectivity.wait_for_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Connect, and return once that is done, however many attempts it takes.

        Raises:
            UsageError: The channel is closed.
        """
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
