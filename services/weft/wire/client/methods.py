"""Methods of a channel: what a stub calls."""

import asyncio
import logging
from collections.abc import AsyncIterable, Callable, Iterable
from typing import Any, Final

from typing_extensions import override

from weft.wire.client.call import CALL_ENDED, CallOwner, ClientCall
from weft.wire.client.heads import ENCODING_BY_COMPRESSION
from weft.wire.client.link import Link
from weft.wire.client.responses import OneResponse, StreamedResponses
from weft.wire.connection.streams import StreamStates
from weft.wire.interface import StatusCode, grpc
from weft.wire.rpc.messages import Body, compress, is_body, pack_prefix

_HALF_CLOSED: Final = 'RPC is half closed after calling "done_writing".'
_MIXED: Final = "The iterator and read/write APIs may not be mixed on a single RPC."
#: A longer timeout is none, in seconds: about 30 years.
_MAX_TIMEOUT_S: Final = 1e9
#: Requests kept for a call that the server may refuse; one that has sent more is not sent again.
_MAX_KEPT_BYTES: Final = 256 << 10

_log = logging.getLogger("weft.wire.client")


def serialized(
    call: ClientCall, serialize: Callable[[Any], Body] | None, request: Any, encoding: str = "identity"
) -> Body | None:
    """The bytes of a request, compressed; None: it cannot be sent, and the call has failed for that."""
    try:
        body: Body = request if serialize is None else serialize(request)
        if type(body) is not bytes and not is_body(body):  # nothing may fail once it is in the output of a connection
            raise TypeError(f"a serialized request is bytes, not {type(body)}")
    except Exception:
        _log.exception("a request cannot be serialized")
        call.fail(StatusCode.INTERNAL, "Exception serializing request!")
        return None
    if encoding != "identity":
        body = compress(encoding, body)
    limit = call.owner.options.max_message_bytes
    if len(body) > limit:
        text = f"Sent message larger than max ({len(body)} vs. {limit})"
        call.fail(StatusCode.RESOURCE_EXHAUSTED, text)
        return None
    return body


class OneRequest(ClientCall):
    """A call with one request, which is sent in one piece with the fields."""

    needs_whole_request = True
    _body: Body = b""
    _encoding: str = "identity"

    def set_request(self, body: Body, encoding: str) -> None:
        """What is to be sent; to be called before ``CallOwner.begin``."""
        self._body = body
        if encoding != "identity":
            self._encoding = encoding

    @override
    def start(self, connection: StreamStates) -> None:
        connection.open_stream(self)
        body = self._body
        if self._encoding == "identity":
            prefix = pack_prefix(0, len(body))
        else:
            body = compress(self._encoding, body)
            prefix = pack_prefix(1, len(body))
        connection.send_message(self, self._request_block(), prefix, body, is_end=True)
        if self._watchers is not None:
            self._wake_watchers()

    @override
    def _wake(self) -> None:
        self._body = b""
        super()._wake()


class StreamedRequests(ClientCall):
    """A call whose requests come from an iterator, or from ``write``."""

    _is_done_writing: bool = False
    _feeder: asyncio.Task[None] | None = None
    _num_kept_bytes: int = 0

    def __init__(
        self,
        owner: CallOwner,
        block: bytes,
        deserialize: Callable[[bytes], Any] | None,
        serialize: Callable[[Any], Body] | None,
        encoding: str,
    ) -> None:
        super().__init__(owner, block, deserialize)
        self._serialize = serialize
        self._encoding = encoding
        self._kept: list[tuple[bytes, Body]] | None = []

    def feed_from(self, requests: AsyncIterable[Any] | Iterable[Any]) -> None:
        """Send what an iterator gives; to be called before ``CallOwner.begin``."""
        self._feeder = self.owner.loop.create_task(self._feed(requests))

    async def _feed(self, requests: AsyncIterable[Any] | Iterable[Any]) -> None:
        try:
            if isinstance(requests, AsyncIterable):
                async for request in requests:
                    await self._send(request)
            else:
                for request in requests:
                    await self._send(request)
            self._half_close()
        except (asyncio.InvalidStateError, grpc.RpcError):
            pass  # the call has ended
        except BaseException as error:
            if self._status is None:
                _log.debug("the iterator of requests has failed", exc_info=error)
                self.cancel()
            if not isinstance(error, Exception):
                raise

    @override
    def start(self, connection: StreamStates) -> None:
        connection.open_stream(self)
        kept = self._kept or ()
        connection.send_headers(self, self._request_block(), is_end=self._is_done_writing and not kept)
        for prefix, body in kept:
            connection.send_message(self, None, prefix, body)
        if self._is_done_writing:
            connection.end_data(self)
        if self._watchers is not None:
            self._wake_watchers()

    def _can_be_sent_again(self) -> bool:
        return self._kept is not None

    def _wake(self) -> None:
        self._kept = None
        if self._feeder is not None and not self._feeder.done():
            self.owner.loop.call_soon(self._feeder.cancel)
        super()._wake()

    async def write(self, request: Any) -> None:
        """Send a request; waits while the server takes no more. Cancelling the caller cancels the call.

        Raises:
            AioRpcError: The call ends while this waits.
            InvalidStateError: The call has ended, or ``done_writing`` was called.
            UsageError: The call has an iterator of requests.
        """
        if self._feeder is not None:
            raise grpc.aio.UsageError(_MIXED)
        await self._send(request)

    async def done_writing(self) -> None:
        """No more requests follow.

        Raises:
            UsageError: The call has an iterator of requests.
        """
        if self._feeder is not None:
            raise grpc.aio.UsageError(_MIXED)
        self._half_close()

    async def _send(self, request: Any) -> None:
        if self._status is not None:
            raise asyncio.InvalidStateError(CALL_ENDED)
        if self._is_done_writing:
            raise asyncio.InvalidStateError(_HALF_CLOSED)
        try:
            if not self.is_open:
                await self._wait_until(lambda: self.is_open)
                self._raise_if_ended()
            body = serialized(self, self._serialize, request, self._encoding)
            if body is None:
                self._raise_if_ended()
                return
            prefix = pack_prefix(int(self._encoding != "identity"), len(body))
            self._keep(prefix, body)
            self.connection.send_message(self, None, prefix, body)
            if self.pending is not None:
                await self._wait_until(lambda: self.is_open and self.pending is None)
                self._raise_if_ended()
        except asyncio.CancelledError:
            self.cancel()
            raise

    def _raise_if_ended(self) -> None:
        if self._status is not None:
            self._raise_failure()

    def _keep(self, prefix: bytes, body: Body) -> None:
        """Keep a request for the case that the server refuses the call."""
        if self._kept is None:
            return
        self._num_kept_bytes += len(prefix) + len(body)
        if self._is_committed or self._is_retried or self._num_kept_bytes > _MAX_KEPT_BYTES:
            self._kept = None
        else:
            self._kept.append((prefix, body))

    def _half_close(self) -> None:
        if not self._is_done_writing:
            self._is_done_writing = True
            if self.is_open:
                self.connection.end_data(self)


class UnaryCall(OneRequest, OneResponse, grpc.aio.UnaryUnaryCall[Any, Any]):
    """A call with one request and one response."""

    def send(self, connection: StreamStates, body: Body, timeout_s: float | None) -> None:
        """The same as ``set_request``, ``set_timeout`` and ``CallOwner.begin``, where the call need not wait.

        Args:
            connection: Accepts a stream now.
            body: The request; not compressed.
            timeout_s: More than 0; None: no deadline.
        """
        block, owner = self._block, self.owner
        self._body = body
        if timeout_s is not None:
            self._timeout_s = timeout_s
            self._deadline = owner.deadlines.add(timeout_s, self._expire)
            block += owner.heads.timeout(timeout_s)
        connection.open_stream(self)
        connection.send_message(self, block, pack_prefix(0, len(body)), body, is_end=True)

    @override
    def _wake(self) -> None:
        self._body = b""
        self._message = self._reader = None
        self._release_waiter()


class UnaryStreamingCall(OneRequest, StreamedResponses, grpc.aio.UnaryStreamCall[Any, Any]):
    """A call with one request and a stream of responses."""


class StreamingUnaryCall(StreamedRequests, OneResponse, grpc.aio.StreamUnaryCall[Any, Any]):
    """A call with a stream of requests and one response."""


class StreamingCall(StreamedRequests, StreamedResponses, grpc.aio.StreamStreamCall[Any, Any]):
    """A call with streams in both directions."""


class BoundMethod:
    """A method of one channel.

    Args:
        link: Of the channel.
        path: Full name of the method, with a leading slash.
        serialize: Makes bytes of a request; None: requests are bytes.
        deserialize: Makes a response of bytes; None: responses are bytes.
    """

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

    def _prepare(self, metadata: Any, credentials: Any, compression: Any) -> tuple[bytes, str]:
        """The block of the fields and the encoding of a call that has more than a request."""
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
        return block, encoding

    def _begin(self, call: ClientCall, timeout_s: float | None, waits_for_ready: bool | None) -> None:
        if timeout_s is not None and timeout_s < _MAX_TIMEOUT_S:
            if timeout_s <= 0:
                call.fail(StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
                return
            call.set_timeout(timeout_s)
        if waits_for_ready:
            call.waits_for_ready = True
        self._link.begin(call)


class OneRequestMethod(BoundMethod):
    """A method with one request, which is serialized when the call begins."""

    _call_class: type[OneRequest]

    def __call__(
        self,
        request: Any,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: Any = None,
        wait_for_ready: bool | None = None,
        compression: Any = None,
    ) -> Any:
        """Begin a call: it is awaited for its response, or its responses are iterated over or read.

        Raises:
            UsageError: The channel is closed.
            ValueError: The metadata cannot be sent.
        """
        block, encoding = self._prepare(metadata, credentials, compression)
        call = self._call_class(self._link, block, self._deserialize)
        body = serialized(call, self._serialize, request)
        if body is not None:
            call.set_request(body, encoding)
            self._begin(call, timeout, wait_for_ready)
        return call


class UnaryMethod(OneRequestMethod, grpc.aio.UnaryUnaryMultiCallable[Any, Any]):
    """A method with one request and one response."""

    _call_class = UnaryCall

    @override
    def __call__(
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
            body = serialized(call, self._serialize, request)
            if body is not None:
                call.send(connection, body, timeout)
            return call
        begun: UnaryCall = super().__call__(request, timeout, metadata, credentials, wait_for_ready, compression)
        return begun


class UnaryStreamingMethod(OneRequestMethod, grpc.aio.UnaryStreamMultiCallable[Any, Any]):
    """A method with one request and a stream of responses."""

    _call_class = UnaryStreamingCall


class StreamedRequestsMethod(BoundMethod):
    """A method whose requests come from an iterator, or are written to the call."""

    _call_class: type[StreamedRequests]

    def __call__(
        self,
        request_iterator: Any = None,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: Any = None,
        wait_for_ready: bool | None = None,
        compression: Any = None,
    ) -> Any:
        """Begin a call: it is awaited for its response, or its responses are iterated over or read.

        Raises:
            UsageError: The channel is closed.
            ValueError: The metadata cannot be sent.
        """
        block, encoding = self._prepare(metadata, credentials, compression)
        call = self._call_class(self._link, block, self._deserialize, self._serialize, encoding)
        if request_iterator is not None:
            call.feed_from(request_iterator)
        self._begin(call, timeout, wait_for_ready)
        return call


class StreamingUnaryMethod(StreamedRequestsMethod, grpc.aio.StreamUnaryMultiCallable[Any, Any]):
    """A method with a stream of requests and one response."""

    _call_class = StreamingUnaryCall


class StreamingMethod(StreamedRequestsMethod, grpc.aio.StreamStreamMultiCallable[Any, Any]):
    """A method with streams in both directions."""

    _call_class = StreamingCall
