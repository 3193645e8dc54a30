"""The response of a call at a server: what its handler sets and sends, and how the call ends."""

import asyncio
import functools
import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from weft.wire.connection.stream import Stream
from weft.wire.errors import ErrorCode
from weft.wire.hpack import encode
from weft.wire.interface import StatusCode
from weft.wire.rpc.compression import ACCEPTED, compress
from weft.wire.rpc.heads import CONTENT_TYPE, RequestHead
from weft.wire.rpc.messages import Body, Message, MessageReader, is_body, pack_prefix
from weft.wire.rpc.metadata import encode_metadata
from weft.wire.rpc.status import NUMBER_BY_STATUS, CallError, encode_message
from weft.wire.server.methods import Method
from weft.wire.transport.deadlines import Deadline

if TYPE_CHECKING:
    from weft.wire.server.protocol import ServerProtocol

_RESPONSE_FIELDS = [(":status", "200"), ("content-type", CONTENT_TYPE)]
_RESPONSE_HEADERS = encode(_RESPONSE_FIELDS)
_OK_TRAILERS = encode([("grpc-status", "0")])

_log = logging.getLogger("weft.wire.server")


@functools.lru_cache(maxsize=256)
def _ok_trailers(metadata: tuple[tuple[str, str | bytes], ...], details: str) -> bytes:
    """The block of the trailers of a call that went well: services repeat theirs. Raises what makes them unsendable."""
    fields = [("grpc-status", "0")]
    if details:
        fields.append(("grpc-message", encode_message(details)))
    return encode([*fields, *encode_metadata(metadata)])


class ResponseHalf(Stream):
    """The sending half of a call.

    Attributes:
        head: Fields of the request; None before they have come.
        is_finished: The status was sent or the call was broken off: nothing more is sent.
        is_broken_off: The client has reset the stream, or its connection is lost.
    """

    head: RequestHead | None = None
    is_finished = False
    is_broken_off = False
    _method: Method | None = None
    _task: "asyncio.Task[None] | None" = None
    _deadline: Deadline | None = None
    _reader: MessageReader | None = None
    _messages: deque[Message] | None = None
    _is_request_complete = False
    _waiter: "asyncio.Future[None] | None" = None
    _drained: "asyncio.Future[None] | None" = None
    _has_sent_headers = False
    _has_begun = False
    _num_held_bytes = 0
    _num_metadata_bytes = 0
    _initial: tuple[tuple[str, str | bytes], ...] = ()
    _trailing: tuple[tuple[str, str | bytes], ...] = ()
    _code: StatusCode | None = None
    _details = ""
    _encoding = ""
    _callbacks: list[Callable[[Any], None]] | None = None

    def __init__(self, protocol: "ServerProtocol") -> None:
        self._protocol = protocol
        self._server = protocol.server

    def on_drained(self) -> None:
        """``write`` may go on."""
        self._release_response()
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def _finish(self, method: Method, response: Any) -> None:
        """Send the one response and the status of a call."""
        code = self._code
        if code is not None and code is not StatusCode.OK:
            self._send_status(code, self._details)
            return
        body = self._serialized(method, response)
        trailers = _OK_TRAILERS
        if self._trailing or self._details:
            try:
                trailers = _ok_trailers(self._trailing, self._details)
            except Exception:  # not hashable, or not sendable, which the status then says
                trailers = encode(self._trailer_fields(StatusCode.OK, self._details))
        headers = None
        if not self._has_sent_headers:
            headers = _RESPONSE_HEADERS if not (self._initial or self._encoding) else self._header_block()
        prefix = b"\0" + len(body).to_bytes(4, "big")
        if self._encoding:
            body = compress(self._encoding, body)
            prefix = pack_prefix(1, len(body))
        self.connection.send_message(self, headers, prefix, body, trailers)
        if self.pending is not None:
            self._hold_response(len(body))
        self._end()

    def _serialized(self, method: Method, response: Any) -> Body:
        try:
            body = response if method.serialize is None else method.serialize(response)
            if type(body) is not bytes and not is_body(body):
                raise TypeError(f"a serialized response is bytes, not {type(body)}")
        except Exception as error:
            _log.error("a response cannot be serialized: %s", error)
            raise CallError(StatusCode.INTERNAL, "Failed to serialize response!") from None
        limit = self._server.max_message_bytes
        if len(body) > limit:
            text = f"Sent message larger than max ({len(body)} vs. {limit})"
            raise CallError(StatusCode.RESOURCE_EXHAUSTED, text)
        return body

    def _header_block(self) -> bytes:
        fields = [*_RESPONSE_FIELDS, *encode_metadata(self._initial)]
        if self._encoding:
            fields.append(("grpc-encoding", self._encoding))
        return encode(fields)

    def _send_headers(self) -> None:
        if not self._has_sent_headers:
            block = self._header_block()
            self._has_sent_headers = True
            self.connection.send_headers(self, block)

    def _hold_response(self, num_bytes: int) -> None:
        """Count a response that waits for the client; if the server holds too much, the call is broken off."""
        try:
            self._protocol.count_buffered(num_bytes)
        except CallError as error:
            self.connection.reset(self, ErrorCode.ENHANCE_YOUR_CALM)
            self.on_reset(ErrorCode.ENHANCE_YOUR_CALM, error.details)
        else:
            self._num_held_bytes += num_bytes

    def _release_response(self) -> None:
        if self._num_held_bytes and self.pending is None:
            self._protocol.count_buffered(-self._num_held_bytes)
            self._num_held_bytes = 0

    def _trailer_fields(self, code: StatusCode, details: str) -> list[tuple[str, str]]:
        # A handler may have set anything; an exception here would be one of the connection, with all its calls.
        fields = [("grpc-status", str(NUMBER_BY_STATUS[code if isinstance(code, StatusCode) else StatusCode.UNKNOWN]))]
        try:
            if details:
                text = details.decode("utf-8", "replace") if isinstance(details, bytes) else str(details)
                fields.append(("grpc-message", encode_message(text)))
            return [*fields, *encode_metadata(self._trailing)]
        except Exception as error:
            _log.error("the status or the trailing metadata of a call cannot be sent: %s", error)
            return [
                ("grpc-status", str(NUMBER_BY_STATUS[StatusCode.INTERNAL])),
                ("grpc-message", encode_message(str(error))),
            ]

    def _send_status(self, code: StatusCode, details: str) -> None:
        """End the call with a status, without a further message."""
        if self.is_finished:
            return
        fields = self._trailer_fields(code, details)
        if code is StatusCode.UNIMPLEMENTED and self.head is not None and self.head.failure is not None:
            fields.append(("grpc-accept-encoding", ACCEPTED))
        if not self._has_sent_headers:
            fields = [*_RESPONSE_FIELDS, *fields]
        self.connection.send_headers(self, encode(fields), is_end=True)
        self._end()

    def _refuse(self, http_status: int) -> None:
        """Answer something that is no call of gRPC."""
        text = "this server speaks gRPC: POST, with content-type application/grpc"
        fields = [(":status", str(http_status)), ("content-type", CONTENT_TYPE), ("grpc-status", "13")]
        self.connection.send_headers(self, encode([*fields, ("grpc-message", encode_message(text))]), is_end=True)
        self._end()

    def _release_request(self) -> None:
        raise NotImplementedError

    def fail(self, code: StatusCode, details: str) -> None:
        """End the call with a status, and cancel its handler if it runs."""
        if self.is_finished:
            return
        self.connection.discard(self)
        self._send_status(code, details)
        if self._task is not None:
            self._task.cancel()

    def _expire(self) -> None:
        self.fail(StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    def _end(self) -> None:
        """Nothing more is sent: release what the call holds."""
        self.is_finished = True
        if self._deadline is not None:
            self._deadline.cancel()
        self._release_request()
        if self._num_metadata_bytes:
            self._protocol.count_buffered(-self._num_metadata_bytes)
            self._num_metadata_bytes = 0
        self.on_drained()
        if self._callbacks is not None:
            callbacks, self._callbacks = self._callbacks, None
            for callback in callbacks:
                try:
                    callback(self)
                except Exception as error:
                    _log.error("a callback of a call has failed", exc_info=error)
