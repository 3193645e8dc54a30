"""What all calls of a client have in common: how they begin, what they make of an answer, and when they are retried."""

from collections.abc import Callable
from typing import Any, Final

from weft.wire.client.outcome import CallOutcome, CallOwner
from weft.wire.connection.streams import StreamStates
from weft.wire.errors import ErrorCode
from weft.wire.hpack import DecodedHeaders
from weft.wire.interface import StatusCode
from weft.wire.rpc.heads import ResponseHead
from weft.wire.rpc.status import status_of_reset

_OK: Final = StatusCode.OK
_INTERNAL: Final = StatusCode.INTERNAL
#: Of the body of an answer that is none of gRPC, for the message of its status.
_MAX_QUOTED_BYTES: Final = 1000

CALL_ENDED: Final = "RPC already finished."


class ClientCall(CallOutcome):
    """A call, and the stream that it is on.

    Args:
        owner: The channel's link.
        block: Encoded fields of the request, without the timeout.
        deserialize: Makes a response of bytes; None: bytes are given as they are.

    Attributes:
        waits_for_ready: Failed attempts to connect do not end the call.
        has_waited: The call was not sent at once, or is sent once more.
    """

    waits_for_ready: bool = False
    has_waited: bool = False
    _timeout_s: float | None = None
    _odd_head: ResponseHead | None = None
    _odd_body: bytes = b""
    _is_committed: bool = False
    _is_retried: bool = False

    def __init__(self, owner: CallOwner, block: bytes, deserialize: Callable[[bytes], Any] | None) -> None:
        self._owner = owner
        self._block = block
        self._deserialize = deserialize

    # Beginning.

    def set_timeout(self, timeout_s: float) -> None:
        """End the call in so many seconds; to be called before ``CallOwner.begin``."""
        self._timeout_s = timeout_s
        self._deadline = self._owner.deadlines.add(timeout_s, self._expire)

    def start(self, connection: StreamStates) -> None:
        """Send the request on a connection that accepts a stream now."""
        raise NotImplementedError

    def _request_block(self) -> bytes:
        timeout_s = self._timeout_s
        if timeout_s is None:
            return self._block
        if self.has_waited and self._deadline is not None:
            timeout_s = max(0.0, self._deadline.when_s - self._owner.loop.time())
        return self._block + self._owner.heads.timeout(timeout_s)

    def _can_be_sent_again(self) -> bool:
        """Whether the whole request, as far as it was given, can be sent once more."""
        return True

    def _retry(self) -> bool:
        """Send once more what the server has not begun; at most once in the life of a call."""
        if self._is_retried or self._is_committed or not self._can_be_sent_again():
            return False
        self._is_retried = self.has_waited = True
        self.is_local_ended = self.is_remote_ended = False
        self.pending = self.final = None
        self.num_unacked_bytes = 0
        self._odd_head = None
        self._owner.begin(self)
        return True

    # Events of the stream.

    def on_headers(self, headers: DecodedHeaders, is_end: bool) -> None:
        """Initial metadata, or trailers."""
        head = headers.memo
        if head is None:
            if headers.is_too_large:
                limit = self._owner.options.max_header_list_bytes
                self.fail(StatusCode.RESOURCE_EXHAUSTED, f"the metadata of the response is larger than {limit} bytes")
                return
            head = headers.memo = ResponseHead(headers.fields)
        if is_end:
            self._on_end(head)
        elif head.http_status == 200 and self._head is None and not head.fault:
            self._head = head
            self._is_committed = True
            if self._watchers is not None:
                self._wake_watchers()
        else:
            self._on_odd_head(head)

    def on_data(self, data: bytes | memoryview, is_end: bool) -> None:
        """A part of the response."""
        if self._head is None:
            self._on_odd_data(data, is_end)
            return
        self._on_body(data)
        if is_end and self._status is None:
            self._finish(_INTERNAL, "the server closed the stream without sending trailers")
            self._end_stream()

    def on_reset(self, code: int, reason: str, *, is_unprocessed: bool = False) -> None:
        """The stream ended without trailers."""
        if self._status is not None:
            return
        if is_unprocessed:
            if not (self.connection.is_peer_leaving or self.connection.is_closed):
                self._owner.hold()
            if self._retry():
                return
        self._is_unprocessed = is_unprocessed
        if self.connection.is_closed:
            self._finish(StatusCode.UNAVAILABLE, f"Socket closed: {reason}")
        elif code == ErrorCode.CANCEL and self._deadline is not None and self.time_remaining() == 0:
            self._expire()
        else:
            self._finish(status_of_reset(code), reason)

    def on_drained(self) -> None:
        """What waited for a window or for the socket has been handed over."""
        if self._watchers is not None:
            self._wake_watchers()

    def _on_body(self, data: bytes | memoryview) -> None:
        raise NotImplementedError

    def _response_fault(self) -> str:
        """Why a response with status OK is none; "" if it is one."""
        return ""

    def _on_end(self, head: ResponseHead) -> None:
        """Trailers, or an answer that has nothing else."""
        status, details = head.status, head.message
        if self._odd_head is not None and status is None:
            self._finish_odd()
            return
        if head.http_status and (self._head is not None or head.http_status < 200):
            status, details = _INTERNAL, f"the answer ends with fields of HTTP status {head.http_status}"
        elif status is None:
            status, details = StatusCode.UNKNOWN, head.fault or "No status received"
        elif head.fault:
            status, details = _INTERNAL, head.fault
        elif status is _OK and (fault := self._response_fault()):
            status, details = _INTERNAL, fault
        self._finish(status, details, head)
        self._end_stream()

    def _on_odd_head(self, head: ResponseHead) -> None:
        """Fields that neither begin an answer of gRPC nor end one."""
        if 100 <= head.http_status < 200 and self._head is None:
            return
        if self._head is not None or self._odd_head is not None or not head.http_status:
            self.fail(_INTERNAL, "the server sent fields that neither begin nor end an answer")
            return
        self._is_committed = True
        self._odd_head = head

    def _on_odd_data(self, data: bytes | memoryview, is_end: bool) -> None:
        """The body of an answer that is none of gRPC: its beginning is quoted in the message."""
        if self._odd_head is None:
            self.fail(_INTERNAL, "the server sent data before any fields")
            return
        self._odd_body += bytes(data[: _MAX_QUOTED_BYTES - len(self._odd_body)])
        if is_end or len(self._odd_body) >= _MAX_QUOTED_BYTES:
            self._finish_odd()

    def _finish_odd(self) -> None:
        head = self._odd_head
        if head is not None:
            details = head.message or head.fault
            if self._odd_body:
                details += f": {self._odd_body.decode('utf-8', 'replace')}"
            self._finish(head.status or StatusCode.UNKNOWN, details, head)
            self._end_stream(ErrorCode.CANCEL)

    def _forget(self) -> None:
        self._owner.forget(self)
