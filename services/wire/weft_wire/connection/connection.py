"""One HTTP/2 connection without I/O: ``receive`` takes bytes, ``take_output`` gives bytes; events go to streams.

Large data is neither copied on its way in (one copy where a frame comes in parts) nor on its way out.
"""

import os
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from weft_wire import frames
from weft_wire.connection.field_rules import content_length, request_fault, response_fault, trailer_fault
from weft_wire.connection.limits import ConnectionLimits, ControlBudget
from weft_wire.connection.sending import Sender
from weft_wire.connection.stream import Stream
from weft_wire.errors import ErrorCode, Http2ConnectionError
from weft_wire.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HAS_PRIORITY,
    HEADERS,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    unpack_header,
)
from weft_wire.hpack import DecodedHeaders, Decoder

#: Streams that this end has reset lately: frames that were on their way are ignored.
_NUM_REMEMBERED_RESETS = 256
#: Largest frame apart from DATA, and most frames of one header block.
_MAX_CONTROL_BYTES = 128 << 10
_MAX_BLOCK_FRAMES = 64
#: A chunk smaller than this share of what was received with it is copied, so that it does not keep the rest alive.
_PINNED_SHARE = 4
#: Tokens of the control budget for a finished stream, and cost of a stream that the peer resets.
_STREAM_TOKENS = 8
_RESET_COST = 4


class Owner(Protocol):
    """What a connection tells the layer that owns its socket."""

    def accept_stream(self, connection: "Connection") -> Stream | None:
        """The stream for a new request of the peer; None refuses it. Servers only."""

    def on_output(self) -> None:
        """There is output, for the first time since ``take_output``; not called within ``receive``."""

    def on_peer_settings(self) -> None:
        """Settings of the peer are in force."""

    def on_peer_ping(self) -> None:
        """The peer has sent a PING, which is answered."""

    def on_ping_ack(self, data: bytes) -> None:
        """The peer has answered a PING."""

    def on_goaway(self, last_stream_id: int, code: int, debug: bytes) -> None:
        """The peer opens or accepts no more streams; streams above ``last_stream_id`` have been told."""

    def on_stream_closed(self) -> None:
        """A stream has ended."""


class Connection(Sender):
    """One end of a connection.

    Args:
        owner: Told of what concerns the whole connection.
        limits: What the peer may do.
        is_client: Which end this is.
        clock_s: Monotonic clock in seconds.

    Attributes:
        streams: Open streams by id.
        failure: Why this end closed the connection; None: it has not.
        is_closed: Nothing more is read or written, but for the output that is there.
        last_peer_stream_id: Newest stream of the peer.
        peer_max_streams: Streams that may be open at once towards the peer.
        has_peer_settings: The peer's first SETTINGS have come.
        is_peer_leaving: The peer has sent GOAWAY.
        num_partial_frames: Grows whenever another frame is left incomplete.
    """

    def __init__(
        self,
        owner: Owner,
        limits: ConnectionLimits,
        *,
        is_client: bool = False,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(owner, limits)
        self._owner = owner
        self._is_client = is_client
        self._decoder = Decoder(max_list_bytes=limits.max_header_list_bytes)
        self._budget = ControlBudget(limits, clock_s)
        self.failure: Http2ConnectionError | None = None
        self.last_peer_stream_id = 0
        self._last_local_id = -1
        self.peer_max_streams = frames.MAX_STREAM_ID
        self.has_peer_settings = False
        self.is_peer_leaving = False
        self.num_partial_frames = 0
        self._goaway_id: int | None = None  # newest stream that this end still answers, after GOAWAY
        self._drain_ping = b""
        self._reset_ids: deque[int] = deque(maxlen=_NUM_REMEMBERED_RESETS)
        self._num_unacked_bytes = 0
        # What is left of bytes received: an incomplete frame, or the rest of a DATA frame passed on in parts.
        self._rest = b""
        self._skip = 0
        self._partial: Stream | None = None
        self._partial_left = 0
        self._partial_end = False
        self._block: list[bytes] = []
        self._block_id = 0
        self._block_end = False
        self._awaits_preface = not is_client
        self._start()

    def _start(self) -> None:
        limits = self.limits
        values = {
            frames.INITIAL_WINDOW_SIZE: limits.stream_window_bytes,
            frames.MAX_FRAME_SIZE: limits.max_frame_bytes,
            frames.MAX_HEADER_LIST_SIZE: limits.max_header_list_bytes,
        }
        if self._is_client:
            self.output.append(PREFACE)
            values = {frames.ENABLE_PUSH: 0} | values
        else:
            values = {frames.MAX_CONCURRENT_STREAMS: limits.max_concurrent_streams} | values
        self.output.append(frames.settings(values))
        if limits.connection_window_bytes > frames.DEFAULT_WINDOW_BYTES:
            increment = limits.connection_window_bytes - frames.DEFAULT_WINDOW_BYTES
            self.output.append(frames.window_update(0, increment))

    # What the owner asks for.

    @property
    def has_partial_frame(self) -> bool:
        """Whether the preface, a header block or a frame other than DATA has begun and not ended."""
        return self._block_id != 0 or bool(self._rest) or self._awaits_preface or not self.has_peer_settings

    def open_stream(self, stream: Stream) -> None:
        """Client: register a new stream; send its headers at once."""
        self._last_local_id += 2
        self._register(stream, self._last_local_id)

    @property
    def can_open_stream(self) -> bool:
        """Client: whether the peer accepts another stream now."""
        return not (self.is_closed or self.is_peer_leaving) and (
            len(self.streams) < self.peer_max_streams and self._last_local_id < frames.MAX_STREAM_ID - 1
        )

    def grant(self, stream: Stream) -> None:
        """Let the peer send as many bytes as were consumed on a stream; sent once they are half a window."""
        num_bytes = stream.num_unacked_bytes
        if num_bytes * 2 >= self.limits.stream_window_bytes and not stream.is_remote_ended and stream.is_open:
            stream.num_unacked_bytes = 0
            self.write(frames.window_update(stream.stream_id, num_bytes))

    def ping(self, data: bytes) -> None:
        """Send a PING with eight bytes of data."""
        self.write(frames.ping(data))

    def drain(self) -> None:
        """Stop accepting streams in two steps: streams that are on their way are still answered.

        A GOAWAY that excludes none and a PING are sent first; the last GOAWAY follows the answer to the PING, when no
        stream that the peer opened before can be on its way any more (RFC 9113, section 6.8).
        """
        if self._goaway_id is None and not self._drain_ping:
            self._drain_ping = os.urandom(8)
            self.write(frames.goaway(frames.MAX_STREAM_ID, ErrorCode.NO_ERROR) + frames.ping(self._drain_ping))

    def finish_draining(self) -> None:
        """Accept no more streams from now on; also when the PING of ``drain`` was not answered in time."""
        if self._goaway_id is None:
            self._goaway_id = self.last_peer_stream_id
            self.write(frames.goaway(self._goaway_id, ErrorCode.NO_ERROR))

    @property
    def is_draining(self) -> bool:
        """Whether a drain has begun."""
        return bool(self._drain_ping) or self._goaway_id is not None

    @property
    def is_drain_finished(self) -> bool:
        """Whether the last GOAWAY of a drain was sent."""
        return self._goaway_id is not None

    @property
    def is_drained(self) -> bool:
        """Whether no stream is left and no more are accepted."""
        return not self.streams and (self._goaway_id is not None or self.is_peer_leaving)

    def fail(self, error: Http2ConnectionError) -> None:
        """End the connection with GOAWAY; all streams are told."""
        if self.is_closed:
            return
        self.failure = error
        debug = error.reason.encode("ascii", "replace")[:256]
        self.write(frames.goaway(self.last_peer_stream_id, error.code, debug))
        self.close(error.reason, error.code)

    def close(self, reason: str, code: int = ErrorCode.CANCEL) -> None:
        """The connection is lost or ends: all streams are told, and nothing more is read."""
        if self.is_closed:
            return
        self.is_closed = True
        self._rest = b""
        self._partial = None
        self._block = []
        streams = list(self.streams.values())
        self.streams.clear()
        self.waiting.clear()
        for stream in streams:
            stream.is_open = False
            stream.pending = None
            stream.on_reset(code, reason)

    # Bytes in.

    def receive(self, data: bytes) -> None:
        """Process bytes of the peer; a fault of the peer ends the stream or the connection, and raises nothing."""
        if self.is_closed:
            return
        self.is_output_due = True  # the owner takes the output after this call
        try:
            self._read(data)
        except Http2ConnectionError as error:
            self.fail(error)
        if self.is_overflowing:
            self.fail(Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, "the peer does not read what its frames cause"))

    def _read(self, data: bytes) -> None:
        position, end = 0, len(data)
        if self._partial_left:
            position = self._read_partial(data)
        elif self._skip:
            position = min(self._skip, end)
            self._skip -= position
        elif self._rest:
            data = self._rest + data
            end = len(data)
            self._rest = b""
        if self._awaits_preface:
            if data[:24] != PREFACE[:end]:
                raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "the connection does not begin with HTTP/2's preface")
            if end < len(PREFACE):
                self._rest = data
                return
            position = len(PREFACE)
            self._awaits_preface = False
        if not self.has_peer_settings and end - position >= 9 and data[position + 3] != SETTINGS:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        streams = self.streams
        while end - position >= 9:
            length_and_type, flags, stream_id = unpack_header(data, position)
            length = length_and_type >> 8
            kind = length_and_type & 0xFF
            stream_id &= 0x7FFFFFFF
            start = position + 9
            stop = start + length
            if stop > end or length > _MAX_CONTROL_BYTES:
                position = self._read_incomplete(data, position, kind, flags, stream_id, length)
                if position < 0:
                    return
                if stop > end:
                    break
                continue
            if self._block_id and (kind != CONTINUATION or stream_id != self._block_id):
                raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "a header block was interrupted")
            if kind == DATA:
                if flags & PADDED:
                    self._on_padded(stream_id, data, start, stop, flags)
                else:
                    stream = streams.get(stream_id)
                    if stream is None or stream.is_remote_ended or not length:
                        self._on_odd_data(stream_id, stream, length, flags)
                    else:
                        is_end = flags & END_STREAM
                        if self._count_data(stream, length, length, is_end):
                            if is_end:
                                self._end_remote(stream)
                            if length * _PINNED_SHARE < end or length <= 4096:
                                stream.on_data(data[start:stop], is_end == 1)
                            else:
                                stream.on_data(memoryview(data)[start:stop], is_end == 1)
            elif kind == HEADERS:
                self._on_headers_frame(stream_id, data, start, stop, flags)
            else:
                self._on_other(kind, flags, stream_id, data[start:stop], length)
            if self.is_closed:
                return
            position = stop
        if position < end and not self._partial_left and not self._skip:
            self._rest = data[position:]
            if position:
                self.num_partial_frames += 1

    def _read_partial(self, data: bytes) -> int:
        """Pass on the next part of a DATA frame; returns how much that was."""
        num_bytes = min(self._partial_left, len(data))
        self._partial_left -= num_bytes
        stream, is_end = self._partial, self._partial_end and not self._partial_left
        if not self._partial_left:
            self._partial = None
        if stream is not None and stream.is_open:
            if is_end:
                self._end_remote(stream)
            self._pass_on(stream, data, 0, num_bytes, is_end)
        return num_bytes

    def _read_incomplete(self, data: bytes, position: int, kind: int, flags: int, stream_id: int, length: int) -> int:
        """A frame that is not all there, or very large; returns where to go on, or -1 if nothing is left."""
        if length > self.limits.max_frame_bytes:
            raise Http2ConnectionError(
                ErrorCode.FRAME_SIZE_ERROR, f"a frame of {length} bytes; at most {self.limits.max_frame_bytes} are allowed"
            )
        start, end = position + 9, len(data)
        if kind == DATA and not flags & PADDED and not self._block_id:
            if start == end:
                return position  # wait for its first byte
            stream = self.streams.get(stream_id)
            is_end = flags & END_STREAM
            if stream is None or stream.is_remote_ended:
                self._on_odd_data(stream_id, stream, length, flags)
                stream = None
            elif not self._count_data(stream, length, length, is_end):
                stream = None
            num_there = min(length, end - start)
            self._partial_left, self._partial_end = length - num_there, is_end == 1
            self._partial = stream if self._partial_left else None
            if stream is not None:
                is_whole_end = is_end == 1 and not self._partial_left
                if is_whole_end:
                    self._end_remote(stream)
                self._pass_on(stream, data, start, start + num_there, is_whole_end)
            return -1 if self.is_closed or self._partial_left else start + num_there
        if length > _MAX_CONTROL_BYTES:
            if kind == DATA:  # padded: it is taken as a whole
                return position if start + length > end else self._read_large_padded(data, start, length, flags, stream_id)
            if kind in (HEADERS, CONTINUATION, SETTINGS, PUSH_PROMISE, GOAWAY) or self._block_id:
                raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, f"a control frame of {length} bytes")
            if kind <= CONTINUATION:
                raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, f"a frame of type {kind} has {length} bytes")
            num_there = min(length, end - start)
            self._skip = length - num_there
            self._spend(1, "of an unknown type")
            return start + num_there if not self._skip else -1
        return position

    def _read_large_padded(self, data: bytes, start: int, length: int, flags: int, stream_id: int) -> int:
        self._on_padded(stream_id, data, start, start + length, flags)
        return -1 if self.is_closed else start + length

    def _pass_on(self, stream: Stream, data: bytes, start: int, stop: int, is_end: bool) -> None:
        size = stop - start
        if size <= 4096 or size * _PINNED_SHARE < len(data):
            stream.on_data(data[start:stop], is_end)
        else:
            stream.on_data(memoryview(data)[start:stop], is_end)

    # DATA.

    def _count_data(self, stream: Stream, flow_bytes: int, content_bytes: int, is_end: int) -> bool:
        """Flow control and length of a DATA frame; False if the stream was reset for it."""
        self._count_connection_data(flow_bytes)
        stream.num_unacked_bytes += flow_bytes
        if stream.num_unacked_bytes > self.limits.stream_window_bytes:
            self._break(stream, ErrorCode.FLOW_CONTROL_ERROR, "more data than the stream's window")
            return False
        if stream.content_bytes_left >= 0:
            stream.content_bytes_left -= content_bytes
            if stream.content_bytes_left < 0 or (is_end and stream.content_bytes_left):
                self._break(stream, ErrorCode.PROTOCOL_ERROR, "the data is not as long as content-length says")
                return False
        return True

    def _end_remote(self, stream: Stream) -> None:
        """The peer ends the stream with what is passed on next."""
        stream.is_remote_ended = True
        if stream.is_local_ended and stream.pending is None:
            self.forget(stream)

    def _count_connection_data(self, num_bytes: int) -> None:
        self._num_unacked_bytes += num_bytes
        window = self.limits.connection_window_bytes
        if self._num_unacked_bytes * 2 > window:
            if self._num_unacked_bytes > max(window, frames.DEFAULT_WINDOW_BYTES):
                raise Http2ConnectionError(ErrorCode.FLOW_CONTROL_ERROR, "more data than the connection's window")
            self.write(frames.window_update(0, self._num_unacked_bytes))
            self._num_unacked_bytes = 0

    def _on_odd_data(self, stream_id: int, stream: Stream | None, length: int, flags: int) -> None:
        """DATA that is empty, or for a stream that expects none."""
        if stream is not None and not stream.is_remote_ended:
            is_end = flags & END_STREAM
            if not is_end:
                self._spend(1, "DATA without data")
            elif self._count_data(stream, 0, 0, is_end):
                self._end_remote(stream)
                stream.on_data(b"", True)
            return
        if self._is_idle(stream_id):
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, f"DATA on idle stream {stream_id}")
        self._count_connection_data(length)
        if stream is not None:
            self._break(stream, ErrorCode.STREAM_CLOSED, "DATA after the end of the stream")
        elif stream_id not in self._reset_ids and not self._is_past_goaway(stream_id):
            self._spend(_RESET_COST, "DATA on a closed stream")
            self._reset_ids.append(stream_id)
            self.write(frames.rst_stream(stream_id, ErrorCode.STREAM_CLOSED))

    def _on_padded(self, stream_id: int, data: bytes, start: int, stop: int, flags: int) -> None:
        length = stop - start
        if not length or data[start] >= length:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "more padding than frame")
        stop -= data[start]
        start += 1
        stream = self.streams.get(stream_id)
        is_end = flags & END_STREAM
        if stream is None or stream.is_remote_ended:
            self._on_odd_data(stream_id, stream, length, flags)
        elif start == stop and not is_end:
            self._spend(1, "DATA of padding alone")
            if self._count_data(stream, length, 0, 0):
                self.grant(stream)
        elif self._count_data(stream, length, stop - start, is_end):
            if is_end:
                self._end_remote(stream)
            self._pass_on(stream, data, start, stop, is_end == 1)

    # HEADERS and CONTINUATION.

    def _on_headers_frame(self, stream_id: int, data: bytes, start: int, stop: int, flags: int) -> None:
        if flags & (PADDED | HAS_PRIORITY):
            if flags & PADDED:
                if start == stop:
                    raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "HEADERS without the length of its padding")
                stop -= data[start]
                start += 1
            if flags & HAS_PRIORITY:
                if int.from_bytes(data[start : start + 4], "big") & 0x7FFFFFFF == stream_id:
                    self._reset_unopened(stream_id, ErrorCode.PROTOCOL_ERROR, "a stream that depends on itself")
                    self._decoder.decode(data[start + 5 : stop])
                    return
                start += 5
            if start > stop:
                raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "more padding than frame")
        if not stream_id:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "HEADERS on stream 0")
        if flags & END_HEADERS:
            self._on_block(stream_id, data[start:stop], flags & END_STREAM)
        else:
            self._block, self._block_id, self._block_end = [data[start:stop]], stream_id, bool(flags & END_STREAM)

    def _on_continuation(self, body: bytes, flags: int) -> None:
        block = self._block
        if not self._block_id:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        block.append(body)
        if len(block) > _MAX_BLOCK_FRAMES or sum(map(len, block)) > self.limits.max_header_list_bytes:
            raise Http2ConnectionError(
                ErrorCode.ENHANCE_YOUR_CALM,
                f"a header block of more than {_MAX_BLOCK_FRAMES} frames or {self.limits.max_header_list_bytes} bytes",
            )
        if flags & END_HEADERS:
            stream_id, self._block_id, self._block = self._block_id, 0, []
            self._on_block(stream_id, b"".join(block), self._block_end)

    def _on_block(self, stream_id: int, block: bytes, end: int) -> None:
        headers = self._decoder.decode(block)
        stream = self.streams.get(stream_id)
        if stream is None:
            if self._is_client or stream_id <= self.last_peer_stream_id or not stream_id & 1:
                self._on_late_headers(stream_id)
                return
            self.last_peer_stream_id = stream_id
            if self._goaway_id is not None:
                return  # the peer knows that this one is not answered
            if headers.memo is None and (fault := request_fault(headers.fields)) and not headers.is_too_large:
                self._reset_unopened(stream_id, ErrorCode.PROTOCOL_ERROR, fault)
                return
            limits = self.limits
            stream = self._owner.accept_stream(self) if len(self.streams) < limits.max_concurrent_streams else None
            if stream is None:
                self._reset_unopened(stream_id, ErrorCode.REFUSED_STREAM, "too many streams")
                return
            self._register(stream, stream_id)
            if headers.memo is None:
                stream.content_bytes_left = content_length(headers.fields)
        elif stream.is_remote_ended:
            self._break(stream, ErrorCode.STREAM_CLOSED, "HEADERS after the end of the stream")
            return
        elif headers.memo is None and (fault := self._later_fault(headers, end)):
            self._break(stream, ErrorCode.PROTOCOL_ERROR, fault)
            return
        if end:
            if stream.content_bytes_left > 0:
                self._break(stream, ErrorCode.PROTOCOL_ERROR, "the data is not as long as content-length says")
                return
            self._end_remote(stream)
        stream.on_headers(headers, end != 0)

    def _later_fault(self, headers: DecodedHeaders, end: int) -> str:
        """Why fields on an open stream are malformed: a response for a client, or trailers; "" if they are not."""
        fields = headers.fields
        if self._is_client and fields and fields[0][0].startswith(":"):
            return response_fault(fields)
        return trailer_fault(fields) if end else "trailers without END_STREAM"

    def _on_late_headers(self, stream_id: int) -> None:
        if not self._is_client and not stream_id & 1:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, f"a client opened stream {stream_id}, which is even")
        if self._is_idle(stream_id):
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, f"HEADERS on idle stream {stream_id}")
        if stream_id not in self._reset_ids and not self._is_past_goaway(stream_id):
            raise Http2ConnectionError(ErrorCode.STREAM_CLOSED, f"HEADERS on closed stream {stream_id}")

    # All other frames.

    def _on_other(self, kind: int, flags: int, stream_id: int, body: bytes, length: int) -> None:
        if kind == WINDOW_UPDATE:
            self._on_window_update(stream_id, body, length)
        elif kind == RST_STREAM:
            self._on_rst_stream(stream_id, body, length)
        elif kind == CONTINUATION:
            self._on_continuation(body, flags)
        elif kind == SETTINGS:
            self._on_settings(stream_id, body, flags)
        elif kind == PING:
            self._on_ping(stream_id, body, flags)
        elif kind == GOAWAY:
            self._on_goaway(stream_id, body)
        elif kind == PRIORITY:
            self._on_priority(stream_id, body)
        elif kind == PUSH_PROMISE:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE, which is not accepted")
        else:
            self._spend(1, "of an unknown type")

    def _on_window_update(self, stream_id: int, body: bytes, length: int) -> None:
        if length != 4:
            raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, f"WINDOW_UPDATE of {length} bytes")
        increment = int.from_bytes(body, "big") & 0x7FFFFFFF
        self._spend(1, "WINDOW_UPDATE")
        if not stream_id:
            self.send_window_bytes += increment
            if not increment or self.send_window_bytes > frames.MAX_WINDOW_BYTES:
                code = ErrorCode.FLOW_CONTROL_ERROR if increment else ErrorCode.PROTOCOL_ERROR
                raise Http2ConnectionError(code, f"the connection's window grows by {increment}")
            self.pump()
            return
        stream = self.streams.get(stream_id)
        if stream is None:
            if self._is_idle(stream_id):
                raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, f"WINDOW_UPDATE on idle stream {stream_id}")
            return
        stream.send_window_bytes += increment
        if not increment or stream.send_window_bytes > frames.MAX_WINDOW_BYTES:
            code = ErrorCode.FLOW_CONTROL_ERROR if increment else ErrorCode.PROTOCOL_ERROR
            self._break(stream, code, f"the stream's window grows by {increment}")
        elif stream.pending is not None:
            self.waiting[stream] = None
            self.pump()

    def _on_rst_stream(self, stream_id: int, body: bytes, length: int) -> None:
        if length != 4:
            raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, f"RST_STREAM of {length} bytes")
        if self._is_idle(stream_id):
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, f"RST_STREAM on idle stream {stream_id}")
        self._spend(_RESET_COST, "RST_STREAM")
        stream = self.streams.get(stream_id)
        if stream is not None:
            code = int.from_bytes(body, "big")
            self.forget(stream)
            is_unprocessed = code == ErrorCode.REFUSED_STREAM
            stream.on_reset(code, f"the peer reset the stream ({_code_name(code)})", is_unprocessed=is_unprocessed)

    def _on_settings(self, stream_id: int, body: bytes, flags: int) -> None:
        if stream_id:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "SETTINGS on a stream")
        if len(body) % 6 or (flags & ACK and body):
            raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, f"SETTINGS of {len(body)} bytes")
        self._spend(1 + len(body) // 60, "SETTINGS")
        if flags & ACK:
            return
        for start in range(0, len(body), 6):
            key, value = int.from_bytes(body[start : start + 2], "big"), int.from_bytes(body[start + 2 : start + 6], "big")
            self._apply_setting(key, value)
        self.write(frames.SETTINGS_ACK)
        self.has_peer_settings = True
        self._owner.on_peer_settings()
        self.pump()

    def _apply_setting(self, key: int, value: int) -> None:
        if key == frames.INITIAL_WINDOW_SIZE:
            if value > frames.MAX_WINDOW_BYTES:
                raise Http2ConnectionError(ErrorCode.FLOW_CONTROL_ERROR, f"an initial window of {value} bytes")
            self.set_initial_window(value)
        elif key == frames.MAX_FRAME_SIZE:
            if not frames.DEFAULT_FRAME_BYTES <= value <= frames.MAX_FRAME_BYTES:
                raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, f"a largest frame of {value} bytes")
            self.peer_frame_bytes = min(value, self.limits.max_frame_bytes)
        elif key == frames.MAX_CONCURRENT_STREAMS:
            self.peer_max_streams = value
        elif key == frames.ENABLE_PUSH and (value > 1 or (value and self._is_client)):
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, f"SETTINGS_ENABLE_PUSH of {value}")

    def _on_ping(self, stream_id: int, body: bytes, flags: int) -> None:
        if stream_id:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "PING on a stream")
        if len(body) != 8:
            raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, f"PING of {len(body)} bytes")
        self._spend(1, "PING")
        if not flags & ACK:
            self.write(frames.ping(body, is_ack=True))
            self._owner.on_peer_ping()
        elif body == self._drain_ping:
            self.finish_draining()
            self._owner.on_stream_closed()  # there may be none left
        else:
            self._owner.on_ping_ack(body)

    def _on_goaway(self, stream_id: int, body: bytes) -> None:
        if stream_id:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "GOAWAY on a stream")
        if len(body) < 8:
            raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, f"GOAWAY of {len(body)} bytes")
        self._spend(1, "GOAWAY")
        last_id, code = int.from_bytes(body[:4], "big") & 0x7FFFFFFF, int.from_bytes(body[4:8], "big")
        self.is_peer_leaving = True
        if self._is_client:
            reason = f"the server accepts no more calls on this connection (GOAWAY, {_code_name(code)})"
            for stream in [stream for number, stream in self.streams.items() if number > last_id]:
                self.forget(stream)
                stream.on_reset(ErrorCode.REFUSED_STREAM, reason, is_unprocessed=True)
        self._owner.on_goaway(last_id, code, body[8:])

    def _on_priority(self, stream_id: int, body: bytes) -> None:
        if not stream_id:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "PRIORITY on stream 0")
        self._spend(1, "PRIORITY")
        if len(body) != 5:
            self._reset_unopened(stream_id, ErrorCode.FRAME_SIZE_ERROR, "PRIORITY of a wrong size")
        elif int.from_bytes(body[:4], "big") & 0x7FFFFFFF == stream_id:
            self._reset_unopened(stream_id, ErrorCode.PROTOCOL_ERROR, "a stream that depends on itself")

    # States of streams.

    def _register(self, stream: Stream, stream_id: int) -> None:
        stream.connection = self
        stream.stream_id = stream_id
        stream.send_window_bytes = self.initial_send_window_bytes
        stream.is_open = True
        self.streams[stream_id] = stream

    def _on_response_ended(self, stream: Stream) -> None:
        # The rest of the request would not be read: RFC 9113, section 8.1.
        if not self._is_client:
            self.reset(stream, ErrorCode.NO_ERROR)

    def _on_forgotten(self) -> None:
        self._budget.num_left += _STREAM_TOKENS
        self._owner.on_stream_closed()

    def _is_idle(self, stream_id: int) -> bool:
        """Whether a stream was never opened. Stream 0 counts as idle: no stream's frame may be on it."""
        if self._is_client == bool(stream_id & 1):
            return stream_id > self._last_local_id or not stream_id
        return stream_id > self.last_peer_stream_id or not stream_id

    def _is_past_goaway(self, stream_id: int) -> bool:
        return self._goaway_id is not None and stream_id > self._goaway_id

    def _break(self, stream: Stream, code: ErrorCode, reason: str) -> None:
        """End a stream for a fault of the peer."""
        self._spend(_RESET_COST, reason)
        self.reset(stream, code)
        stream.on_reset(code, reason)

    def _reset_unopened(self, stream_id: int, code: ErrorCode, reason: str) -> None:
        """Reset a stream that may not be open."""
        stream = self.streams.get(stream_id)
        if stream is not None:
            self._break(stream, code, reason)
            return
        self._spend(_RESET_COST, reason)
        if not self._is_client and stream_id & 1:
            self.last_peer_stream_id = max(self.last_peer_stream_id, stream_id)
        self._reset_ids.append(stream_id)
        self.write(frames.rst_stream(stream_id, code))

    def reset(self, stream: Stream, code: int) -> None:
        """Send RST_STREAM, unless the stream is over; its owner is not told."""
        if stream.is_open:
            self._reset_ids.append(stream.stream_id)
            self.forget(stream)
            self.write(frames.rst_stream(stream.stream_id, code))

    def _spend(self, num_tokens: int, what: str) -> None:
        budget = self._budget
        budget.num_left -= num_tokens
        if budget.num_left <= 0:
            budget.refill(what)


def _code_name(code: int) -> str:
    return ErrorCode(code).name if code in ErrorCode._value2member_map_ else f"error code {code}"
