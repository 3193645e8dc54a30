"""The sending half of a connection: output buffer, flow control, and data that waits for a window or the socket."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from weft.wire import frames
from weft.wire.connection import ConnectionLimits, ControlBudget
from weft.wire.frames import (
    DATA,
    DEFAULT_FRAME_BYTES,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    ErrorCode,
    Http2ConnectionError,
    pack_header,
)
from weft.wire.hpack import DecodedHeaders


class Parts:
    """Bytes in several pieces, sent or received without joining; immutable."""

    __slots__ = ("_num_bytes", "pieces")

    def __init__(self, pieces: Sequence[bytes | bytearray | memoryview]) -> None:
        self.pieces = pieces
        self._num_bytes = sum(map(len, pieces))

    def __len__(self) -> int:
        return self._num_bytes

    def joined(self) -> bytes:
        """All pieces joined."""
        return b"".join(self.pieces)


Buffer: TypeAlias = bytes | bytearray | memoryview


class Stream:
    """One request and its response; calls subclass it, so that a request costs one object.

    Class attributes hold the defaults, so that an instance stores only what differs.

    Attributes:
        content_bytes_left: Bytes still missing from the announced content-length; -1: none was announced.
        needs_whole_request: The peer starts work only when the request is complete.
    """

    connection: "Sender"
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
        """The stream ended without END_STREAM; ``is_unprocessed``: the peer has not begun it, or does not have it."""
        raise NotImplementedError

    def on_drained(self) -> None:
        """Called when all queued data of the stream has been handed to the socket."""


#: A dynamic table of 0 bytes (RFC 7541, section 6.3): what this end encodes never refers to it.
_NO_TABLE = b"\x20"
#: Bytes that waiting streams may add to the output before it is taken.
_MAX_TURN_BYTES = 1 << 20
#: WINDOW_UPDATE frames that a DATA frame may cause without cost: for the stream and for the connection.
_FREE_UPDATES = 2
#: Tokens of the control budget for a stream that has ended.
STREAM_TOKENS = 8
_END = END_HEADERS | END_STREAM


class Owner:
    """Events that a connection reports to the owner of its socket; the defaults ignore or refuse."""

    def accept_stream(self) -> Stream | None:
        """Return a stream for a new request, or None to refuse it. Servers only."""
        return None

    def on_output(self) -> None:
        """There is output for the first time since ``take_output``; not called within ``receive``."""

    def on_peer_settings(self) -> None:
        """Settings of the peer are in force."""

    def on_peer_ping(self) -> None:
        """The peer has sent a PING, which is answered."""

    def on_ping_ack(self, data: bytes) -> None:
        """The peer has answered a PING."""

    def on_goaway(self, last_stream_id: int, code: int, debug: bytes) -> None:
        """The peer opens and accepts no more streams; those above ``last_stream_id`` have been reset."""

    def on_stream_closed(self) -> None:
        """A stream has ended."""


class Sender:
    """Sends headers and data within the peer's flow-control windows; waiting streams take turns, one frame each.

    Attributes:
        is_output_due: The owner knows that there is output.
        is_paused: The socket is full: data waits with its stream, not in the output.
        is_overflowing: The peer triggers control frames and does not read them; abort the connection.
        has_sent_data: A HEADERS or DATA frame was sent since the reader of this flag cleared it.
        num_free_updates: WINDOW_UPDATE frames that follow from data sent.
        owes_table_size: The peer shrank its dynamic table, which the next header block must acknowledge.
    """

    def __init__(
        self, owner: Owner, limits: ConnectionLimits, *, is_client: bool, clock_s: Callable[[], float]
    ) -> None:
        self._owner = owner
        self._is_client = is_client
        self.limits = limits
        self.budget = ControlBudget(limits, clock_s)
        self.output: list[Buffer] = []
        self.is_output_due = True  # the owner takes the first output itself
        self.is_paused = False
        self.is_overflowing = False
        self.is_closed = False
        self.streams: dict[int, Stream] = {}
        self.waiting: dict[Stream, None] = {}
        self.send_window_bytes = frames.DEFAULT_WINDOW_BYTES
        self.initial_send_window_bytes = frames.DEFAULT_WINDOW_BYTES
        self.peer_frame_bytes = frames.DEFAULT_FRAME_BYTES
        self.has_sent_data = False
        self.num_free_updates = 0
        self.owes_table_size = False
        self.has_told_table_size = False
        self._num_unread_bytes = 0

    def take_output(self) -> list[Buffer]:
        """Return and clear the bytes to write now."""
        output, self.output = self.output, []
        self.is_output_due = False
        return output

    def write(self, frame: bytes) -> None:
        """Send a control frame; it needs no window."""
        self.output.append(frame)
        if self.is_paused:
            self._num_unread_bytes += len(frame)
            if self._num_unread_bytes > self.limits.max_unread_bytes:
                self.is_overflowing = True
        if not self.is_output_due:
            self.is_output_due = True
            self._owner.on_output()

    def send_headers(self, stream: Stream, block: bytes, *, is_end: bool = False) -> None:
        """Send headers; trailers, or headers with ``is_end``, wait for queued data."""
        if not stream.is_open:
            return
        if stream.pending is not None:
            stream.final = block
            stream.is_local_ended = True
            return
        self._write_headers(stream, block, END_STREAM if is_end else 0)
        if is_end:
            self._end(stream)

    def send_message(
        self,
        stream: Stream,
        headers: bytes | None,
        prefix: bytes,
        body: Buffer | Parts,
        trailers: bytes | None = None,
        *,
        is_end: bool = False,
    ) -> None:
        """Send fields, data (not copied) and trailers, each if given, as one piece where windows allow."""
        if not stream.is_open:
            return
        size = len(prefix) + len(body)
        stream_id = stream.stream_id
        if (
            size <= self.send_window_bytes
            and size <= stream.send_window_bytes
            and size <= self.peer_frame_bytes
            and stream.pending is None
            and not (self.is_paused or self.waiting or self.owes_table_size)
            and (headers is None or len(headers) <= DEFAULT_FRAME_BYTES)
            and (trailers is None or len(trailers) <= DEFAULT_FRAME_BYTES)
        ):
            self.has_sent_data = True
            self.send_window_bytes -= size
            stream.send_window_bytes -= size
            self.num_free_updates += _FREE_UPDATES
            output = self.output
            if headers is not None:
                output += (pack_header(len(headers) << 8 | HEADERS, END_HEADERS, stream_id), headers)
            output += (pack_header(size << 8 | DATA, END_STREAM if is_end else 0, stream_id), prefix)
            if isinstance(body, Parts):
                output += body.pieces
            else:
                output.append(body)
            if trailers is not None:
                output += (pack_header(len(trailers) << 8 | HEADERS, _END, stream_id), trailers)
                self._end(stream)
            elif is_end:
                self._end(stream)
            if not self.is_output_due:
                self.is_output_due = True
                self._owner.on_output()
            return
        if headers is not None:
            self.send_headers(stream, headers)
        if stream.pending is None:
            stream.pending = deque()
            self.waiting[stream] = None
        stream.pending.append(prefix)
        if isinstance(body, Parts):
            # An empty piece would wait for a window, and the end of the stream with it.
            stream.pending += [memoryview(piece) for piece in body.pieces if len(piece)]
        elif len(body):
            stream.pending.append(memoryview(body))
        if trailers is not None or is_end:
            stream.final = trailers or b""
            stream.is_local_ended = True
        self.pump()

    def end_data(self, stream: Stream) -> None:
        """Half-close a stream once its queued data is sent."""
        if not stream.is_open or stream.is_local_ended:
            return
        if stream.pending is not None:
            stream.final = b""
            stream.is_local_ended = True
            return
        self.has_sent_data = True
        self.write(pack_header(DATA, END_STREAM, stream.stream_id))
        self._end(stream)

    def discard(self, stream: Stream) -> None:
        """Drop queued data, so that the end of a failed call does not wait for a window."""
        if stream.pending is not None:
            stream.pending = stream.final = None
            self.waiting.pop(stream, None)

    def set_initial_window(self, num_bytes: int) -> None:
        """Apply the peer's SETTINGS_INITIAL_WINDOW_SIZE. Raises Http2ConnectionError if a window gets too large."""
        difference = num_bytes - self.initial_send_window_bytes
        self.initial_send_window_bytes = num_bytes
        for stream in self.streams.values():
            stream.send_window_bytes += difference
            if stream.send_window_bytes > frames.MAX_WINDOW_BYTES:
                raise Http2ConnectionError(
                    ErrorCode.FLOW_CONTROL_ERROR, "an initial window that makes another too large"
                )
            if stream.pending is not None:
                self.waiting[stream] = None

    def pause(self) -> None:
        """The socket takes no more for now."""
        self.is_paused = True
        self._num_unread_bytes = 0

    def resume(self) -> None:
        """The socket takes more."""
        self.is_paused = False
        self.pump()

    def pump(self) -> None:
        """Move queued data to the output, as far as windows and the socket allow."""
        num_bytes = 0
        waiting = self.waiting
        while waiting and num_bytes < _MAX_TURN_BYTES and not self.is_paused and not self.is_closed:
            stream = next(iter(waiting))
            del waiting[stream]
            limit = min(self.send_window_bytes, stream.send_window_bytes, self.peer_frame_bytes)
            if limit <= 0:
                if self.send_window_bytes <= 0:
                    waiting[stream] = None  # its turn comes when the connection has a window
                    break
                continue  # it comes back with a window of its own
            num_bytes += self._send_frame(stream, limit)
            if stream.pending is not None:
                waiting[stream] = None
        if num_bytes and not self.is_output_due:
            self.is_output_due = True
            self._owner.on_output()

    @property
    def has_more(self) -> bool:
        """Whether ``pump`` would add to the output now."""
        return bool(self.waiting) and self.send_window_bytes > 0 and not self.is_paused and not self.is_closed

    def _send_frame(self, stream: Stream, limit: int) -> int:
        pending = stream.pending
        assert pending is not None  # noqa: S101  # it was waiting
        size = 0
        pieces: list[Buffer] = []
        while pending and size < limit:
            piece = pending.popleft()
            if size + len(piece) > limit:
                view = memoryview(piece)
                pending.appendleft(view[limit - size :])
                piece = view[: limit - size]
            size += len(piece)
            pieces.append(piece)
        is_last = not pending
        flags = END_STREAM if is_last and stream.final == b"" else 0
        self.has_sent_data = True
        self.send_window_bytes -= size
        stream.send_window_bytes -= size
        self.num_free_updates += _FREE_UPDATES
        self.output.append(pack_header(size << 8 | DATA, flags, stream.stream_id))
        self.output += pieces
        if is_last:
            stream.pending = None
            final, stream.final = stream.final, None
            if final:
                self._write_headers(stream, final, END_STREAM)
            if final is not None:
                self._end(stream)
            stream.on_drained()
        return size

    def _write_headers(self, stream: Stream, block: bytes, flags: int) -> None:
        if self.owes_table_size:
            self.owes_table_size, self.has_told_table_size = False, True
            block = _NO_TABLE + block
        self.has_sent_data = True
        self.write(frames.headers(stream.stream_id, block, flags, self.peer_frame_bytes))

    def _end(self, stream: Stream) -> None:
        stream.is_local_ended = True
        if stream.is_remote_ended:
            self.forget(stream)
        elif not self._is_client:  # the rest of the request would not be read: RFC 9113, section 8.1
            self.reset(stream, ErrorCode.NO_ERROR)

    def forget(self, stream: Stream) -> None:
        """Remove a stream that is over."""
        if self.streams.pop(stream.stream_id, None) is not None:
            stream.is_open = False
            if stream.pending is not None:
                stream.pending = None
                self.waiting.pop(stream, None)
            self.budget.num_left += STREAM_TOKENS
            self._owner.on_stream_closed()

    def reset(self, stream: Stream, code: int) -> None:
        """Send RST_STREAM, unless the stream is over; its owner is not told."""
        raise NotImplementedError
