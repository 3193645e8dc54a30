"""One stream of a connection: its state, and the events that a layer above overrides."""

from collections import deque
from typing import TYPE_CHECKING, TypeAlias

from weft.wire.hpack import DecodedHeaders

if TYPE_CHECKING:
    from weft.wire.connection.streams import StreamStates

Buffer: TypeAlias = bytes | bytearray | memoryview


class Stream:
    """One request and its response. The layer above subclasses it, so that a request costs one object.

    Attributes are defaults of the class: an instance holds only what differs.

    Attributes:
        connection: Its connection, as long as the stream is open or its owner keeps it.
        stream_id: Odd for streams that the client opened.
        send_window_bytes: Bytes that may be sent now; negative after the peer has reduced its window.
        num_unacked_bytes: Received bytes that the peer has not been given credit for.
        content_bytes_left: What is missing of the announced content-length; -1: none was announced.
        is_local_ended: END_STREAM or RST_STREAM was sent, or is queued.
        is_remote_ended: END_STREAM was received.
        is_open: The connection knows the stream.
        needs_whole_request: The peer begins it when it has the end of the request, and not before.
        pending: Data that waits for a window or for the socket; None or not empty.
        final: Sent when ``pending`` is empty: the block of trailers, b"" for END_STREAM on the last data, or None.
    """

    connection: "StreamStates"
    stream_id: int = 0
    send_window_bytes: int = 0
    num_unacked_bytes: int = 0
    content_bytes_left: int = -1
    is_local_ended: bool = False
    is_remote_ended: bool = False
    is_open: bool = False
    needs_whole_request: bool = False
    pending: deque[Buffer] | None = None
    final: bytes | None = None

    def on_headers(self, headers: DecodedHeaders, is_end: bool) -> None:
        """Fields came: those of the request or response, or trailers."""
        raise NotImplementedError

    def on_data(self, data: bytes | memoryview, is_end: bool) -> None:
        """Data came, possibly none with ``is_end``. The peer may send more after ``connection.grant(stream)``."""
        raise NotImplementedError

    def on_reset(self, code: int, reason: str, *, is_unprocessed: bool = False) -> None:
        """The stream ended without END_STREAM: by the peer, by a fault of the peer, or with its connection.

        Args:
            code: Error code of HTTP/2.
            reason: For messages.
            is_unprocessed: The peer has not begun the request: it says so, or does not have it.
        """
        raise NotImplementedError

    def on_drained(self) -> None:
        """What waited for a window or for the socket has been handed over."""
