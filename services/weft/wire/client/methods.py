"""Methods of a channel: what a stub calls."""

import logging
from collections.abc import Callable
from typing import Any, Final

from weft.wire.client.call import ClientCall
from weft.wire.client.heads import ENCODING_BY_COMPRESSION
from weft.wire.client.link import Link
from weft.wire.client.requests import OneRequest, StreamedRequests, check_body
from weft.wire.client.responses import OneResponse, StreamedResponses
from weft.wire.connection.streams import StreamStates
from weft.wire.interface import StatusCode, grpc
from weft.wire.rpc.messages import Body, pack_prefix

#: A longer timeout is none, in seconds: about 30 years.
_MAX_TIMEOUT_S: Final = 1e9

_log = logging.getLogger("weft.wire.client")


class UnaryCall(OneRequest, OneResponse, grpc.aio.UnaryUnaryCall[Any, Any]):
    """A call with one request and one response."""

    def send(self, connection: StreamStates, body: Body, timeout_s: float | None) -> None:
        """The same as ``set_request``, ``set_timeout`` and ``CallOwner.begin``, where the call need not wait.

        Args:
            connection: Accepts a stream now.
            body: The request; not compressed.
            timeout_s: More than 0; None: no deadline.
        """
        block, owner = self._block, self._owner
        self._body = body
        if timeout_s is not None:
            self._timeout_s = timeout_s
            self._deadline = owner.deadlines.add(timeout_s, self._expire)
            block += owner.heads.timeout(timeout_s)
        connection.open_stream(self)
        connection.send_message(self, block, pack_prefix(0, len(body)), body, is_end=True)

    def _wake(self) -> None:
        self._body = b""
        self._message = self._reader = None
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


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

    def _set_request(self, call: OneRequest, request: Any, encoding: str) -> None:
        """Serialize the request; a call whose request cannot be sent fails."""
        try:
            body = request if self._serialize is None else self._serialize(request)
            check_body(body)
        except Exception:
            self._fail_request(call)
            return
        limit = self._link.options.max_message_bytes
        if len(body) > limit:
            text = f"Sent message larger than max ({len(body)} vs. {limit})"
            call.fail(StatusCode.RESOURCE_EXHAUSTED, text)
            return
        call.set_request(body, encoding)

    def _fail_request(self, call: ClientCall) -> None:
        _log.exception("a request cannot be serialized")
        call.fail(StatusCode.INTERNAL, "Exception serializing request!")


class UnaryMethod(BoundMethod, grpc.aio.UnaryUnaryMultiCallable[Any, Any]):
    """A method with one request and one response."""

    def __call__(
        self,
        request: Any,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: Any = None,
        wait_for_ready: bool | None = None,
        compression: Any = None,
    ) -> UnaryCall:
        """Begin a call; it is awaited for its response.

        Raises:
            UsageError: The channel is closed.
            ValueError: The metadata cannot be sent.
        """
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
            try:
                body = request if self._serialize is None else self._serialize(request)
                if type(body) is not bytes:
                    check_body(body)
            except Exception:
                self._fail_request(call)
                return call
            if len(body) <= link.options.max_message_bytes:
                call.send(connection, body, timeout)
                return call
        block, encoding = self._prepare(metadata, credentials, compression)
        call = UnaryCall(link, block, self._deserialize)
        self._set_request(call, request, encoding)
        if not call.done():
            self._begin(call, timeout, wait_for_ready)
        return call


class UnaryStreamingMethod(BoundMethod, grpc.aio.UnaryStreamMultiCallable[Any, Any]):
    """A method with one request and a stream of responses."""

    def __call__(
        self,
        request: Any,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: Any = None,
        wait_for_ready: bool | None = None,
        compression: Any = None,
    ) -> UnaryStreamingCall:
        """Begin a call; its responses are iterated over, or read.

        Raises:
            UsageError: The channel is closed.
            ValueError: The metadata cannot be sent.
        """
        block, encoding = self._prepare(metadata, credentials, compression)
        call = UnaryStreamingCall(self._link, block, self._deserialize)
        self._set_request(call, request, encoding)
        if not call.done():
            self._begin(call, timeout, wait_for_ready)
        return call


class StreamingUnaryMethod(BoundMethod, grpc.aio.StreamUnaryMultiCallable[Any, Any]):
    """A method with a stream of requests and one response."""

    def __call__(
        self,
        request_iterator: Any = None,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: Any = None,
        wait_for_ready: bool | None = None,
        compression: Any = None,
    ) -> StreamingUnaryCall:
        """Begin a call; its requests come from an iterator or are written, and it is awaited for its response.

        Raises:
            UsageError: The channel is closed.
            ValueError: The metadata cannot be sent.
        """
        block, encoding = self._prepare(metadata, credentials, compression)
        call = StreamingUnaryCall(self._link, block, self._deserialize, self._serialize, encoding)
        if request_iterator is not None:
            call.feed_from(request_iterator)
        self._begin(call, timeout, wait_for_ready)
        return call


class StreamingMethod(BoundMethod, grpc.aio.StreamStreamMultiCallable[Any, Any]):
    """A method with streams in both directions."""

    def __call__(
        self,
        request_iterator: Any = None,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: Any = None,
        wait_for_ready: bool | None = None,
        compression: Any = None,
    ) -> StreamingCall:
        """Begin a call; requests come from an iterator or are written, responses are iterated over or read.

        Raises:
            UsageError: The channel is closed.
            ValueError: The metadata cannot be sent.
        """
        block, encoding = self._prepare(metadata, credentials, compression)
        call = StreamingCall(self._link, block, self._deserialize, self._serialize, encoding)
        if request_iterator is not None:
            call.feed_from(request_iterator)
        self._begin(call, timeout, wait_for_ready)
        return call
