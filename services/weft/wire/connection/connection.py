"""One HTTP/2 connection without I/O: ``receive`` parses bytes, ``take_output`` returns bytes; streams get events.

Large data is not copied on its way out, and once on its way in, if a frame arrives in parts.
"""

import time
from collections.abc import Callable

from weft.wire import frames
from weft.wire.connection import ConnectionLimits
from weft.wire.connection.field_rules import content_length, request_fault, response_fault, trailer_fault
from weft.wire.connection.sending import Owner, Stream
from weft.wire.connection.streams import RESET_COST, StreamStates
from weft.wire.frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HAS_PRIORITY,
    HEADERS,
    PADDED,
    PREFACE,
    PUSH_PROMISE,
    SETTINGS,
    ErrorCode,
    Http2ConnectionError,
    unpack_header,
)
from weft.wire.hpack import DecodedHeaders, Decoder

#: Largest frame apart from DATA, and most frames of one header block.
_MAX_CONTROL_BYTES = 128 << 10
_MAX_BLOCK_FRAMES = 64
#: Work after which a connection lets others have their turn, and how many decoded fields are a unit of it. A unit is
#: about one control frame, 2 us; so a turn takes about 1 ms beside the handlers that it starts.
_MAX_TURN_WORK = 512
_FIELDS_PER_UNIT = 4
#: Fields of a header block, beyond which so many each cost a token: requests have 10 to 20 fields.
_FREE_FIELDS = 64
_FIELDS_PER_TOKEN = 8
#: DATA on a stream that was reset costs a token if it is smaller: what was on its way has large frames.
_SMALL_DATA_BYTES = 1024
#: A chunk smaller than this share of what was received with it is copied, so that it does not keep the rest alive.
_PINNED_SHARE = 4
_NO_BLOCKS: dict[bytes, DecodedHeaders] = {}


class Http2Connection(StreamStates):
    """One end of a connection.

    Attributes:
        has_unread: Frames are left for the next loop iteration because this one took long; ``receive(b"")`` continues.
    """

    def __init__(
        self,
        owner: Owner,
        limits: ConnectionLimits,
        *,
        is_client: bool = False,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(owner, limits, is_client=is_client, clock_s=clock_s)
        self._decoder = Decoder(max_list_bytes=limits.max_header_list_bytes)
        self.num_partial_frames = 0
        self.has_unread = False
        self._num_unacked_bytes = 0
        # What is left of bytes received: an incomplete frame, or the rest of a DATA frame passed on in parts.
        self._rest: bytes | bytearray = b""
        self._num_needed_bytes = 0
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

    @property
    def has_partial_frame(self) -> bool:
        """Whether the preface, a header block or a frame other than DATA has begun and not ended."""
        return self._block_id != 0 or bool(self._rest) or self._awaits_preface or not self.has_peer_settings

    def close(self, reason: str, code: int = ErrorCode.CANCEL) -> None:
        """Close: tell all streams and read nothing more."""
        super().close(reason, code)
        self._rest = b""
        self._partial = None
        self._block = []

    def receive(self, data: bytes) -> None:
        """Process received bytes; a protocol error of the peer ends the stream or the connection and is not raised."""
        if self.is_closed:
            return
        self.is_output_due = True  # the owner takes the output after this call
        self.has_unread = False
        self.turn_work = 0
        try:
            self._read(data)
        except Http2ConnectionError as error:
            self.fail(error)
        if self.is_overflowing:
            self.fail(Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, "the peer does not read what its frames cause"))

    def _read(self, data: bytes) -> None:  # noqa: PLR0915  # a function a frame costs more than its frames
        position, end = 0, len(data)
        if self._partial_left:
            position = self._read_partial(data)
            if self.is_closed:
                return
        elif self._skip:
            position = min(self._skip, end)
            self._skip -= position
        elif self._rest:
            self._rest += data  # appended in place: a frame that comes byte by byte is not copied each time
            if len(self._rest) < self._num_needed_bytes:
                return
            data, self._rest = bytes(self._rest), b""
            end = len(data)
        if self._awaits_preface:
            if data[:24] != PREFACE[:end]:
                raise Http2ConnectionError(
                    ErrorCode.PROTOCOL_ERROR, "the connection does not begin with HTTP/2's preface"
                )
            if end < len(PREFACE):
                self._rest = bytearray(data)
                return
            position = len(PREFACE)
            self._awaits_preface = False
        if not self.has_peer_settings and end - position >= 9 and data[position + 3] != SETTINGS:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        streams, known_blocks = self.streams, self._decoder.stateless_blocks if self._is_client else _NO_BLOCKS
        half_bytes, whole_bytes = self.limits.connection_window_bytes // 2, self.limits.stream_window_bytes
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
                        num_bytes, num_of_stream = self._num_unacked_bytes + length, stream.num_unacked_bytes + length
                        is_counted = num_bytes <= half_bytes and num_of_stream <= whole_bytes
                        if is_counted and stream.content_bytes_left < 0:
                            self._num_unacked_bytes, stream.num_unacked_bytes = num_bytes, num_of_stream
                        else:
                            is_counted = self._count_data(stream, length, length, is_end)
                        if is_counted:
                            if is_end:
                                self._end_remote(stream)
                            if length * _PINNED_SHARE < end or length <= 4096:
                                stream.on_data(data[start:stop], is_end == 1)
                            else:
                                stream.on_data(memoryview(data)[start:stop], is_end == 1)
            elif kind == HEADERS:
                is_end = flags & END_STREAM
                if flags - is_end != END_HEADERS or not stream_id:
                    self._on_headers_frame(stream_id, data, start, stop, flags)
                elif (
                    (headers := known_blocks.get(block := data[start:stop])) is None
                    or headers.memo is None
                    or (stream := streams.get(stream_id)) is None
                    or stream.is_remote_ended
                    or stream.content_bytes_left > 0
                ):
                    self._on_block(stream_id, block, is_end)
                else:  # a response's fields, which were decoded and checked before
                    if is_end:
                        self._end_remote(stream)
                    stream.on_headers(headers, is_end == 1)
            elif kind == CONTINUATION:
                self._on_continuation(data[start:stop], flags)
            else:
                self._on_control(kind, flags, stream_id, data[start:stop], length)
            if self.is_closed:
                return
            position = stop
            if self.turn_work >= _MAX_TURN_WORK and position < end:
                self._rest, self._num_needed_bytes, self.has_unread = bytearray(data[position:]), 0, True
                return
        if position < end and not self._partial_left and not self._skip:
            self._rest = bytearray(data[position:])
            self._num_needed_bytes = 9 if end - position < 9 else 9 + (unpack_header(data, position)[0] >> 8)
            if position:
                self.num_partial_frames += 1

    def _read_partial(self, data: bytes) -> int:
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
        """Read from an incomplete or very large frame; returns where to continue, or -1 if nothing is left."""
        if length > self.limits.max_frame_bytes:
            raise Http2ConnectionError(
                ErrorCode.FRAME_SIZE_ERROR,
                f"a frame of {length} bytes; at most {self.limits.max_frame_bytes} are allowed",
            )
        if self._block_id and (kind != CONTINUATION or stream_id != self._block_id):
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "a header block was interrupted")
        start, end = position + 9, len(data)
        if kind == DATA and not flags & PADDED:
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
                if start + length > end:
                    return position
                self._on_padded(stream_id, data, start, start + length, flags)
                return -1 if self.is_closed else start + length
            if kind in (HEADERS, CONTINUATION, SETTINGS, PUSH_PROMISE, GOAWAY) or self._block_id:
                raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, f"a control frame of {length} bytes")
            if kind <= CONTINUATION:
                raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, f"a frame of type {kind} has {length} bytes")
            num_there = min(length, end - start)
            self._skip = length - num_there
            self._spend(1, "of an unknown type")
            return start + num_there if not self._skip else -1
        return position

    def _pass_on(self, stream: Stream, data: bytes, start: int, stop: int, is_end: bool) -> None:
        size = stop - start
        if size <= 4096 or size * _PINNED_SHARE < len(data):
            stream.on_data(data[start:stop], is_end)
        else:
            stream.on_data(memoryview(data)[start:stop], is_end)

    # DATA.

    def _count_data(self, stream: Stream, flow_bytes: int, content_bytes: int, is_end: int) -> bool:
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
        """Handle DATA that is empty, or for a stream that expects none."""
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
            self._spend(RESET_COST, "DATA on a closed stream")
            self._remember_reset(stream_id)
            self.write(frames.rst_stream(stream_id, ErrorCode.STREAM_CLOSED))
        elif length < _SMALL_DATA_BYTES:
            self._spend(1, "small DATA on a stream that was reset")

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
                if stream_id and int.from_bytes(data[start : start + 4], "big") & 0x7FFFFFFF == stream_id:
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
        # A list that is somewhat too large fails its stream alone; it must be decoded for the table of those after it.
        max_bytes = 2 * self.limits.max_header_list_bytes
        if len(block) > _MAX_BLOCK_FRAMES or sum(map(len, block)) > max_bytes:
            raise Http2ConnectionError(
                ErrorCode.ENHANCE_YOUR_CALM,
                f"a header block of more than {_MAX_BLOCK_FRAMES} frames or {max_bytes} bytes",
            )
        if flags & END_HEADERS:
            stream_id, self._block_id, self._block = self._block_id, 0, []
            self._on_block(stream_id, b"".join(block), self._block_end)

    def _on_block(self, stream_id: int, block: bytes, end: int) -> None:
        decoder = self._decoder
        headers = decoder.table_blocks.get(block) or decoder.stateless_blocks.get(block)
        if headers is None:
            headers = decoder.decode(block)
            num_fields = decoder.num_fields
            self.turn_work += num_fields // _FIELDS_PER_UNIT
            if num_fields > _FREE_FIELDS:
                self._spend(num_fields // _FIELDS_PER_TOKEN, "of many fields")
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
            stream = self._owner.accept_stream() if len(self.streams) < limits.max_concurrent_streams else None
            if stream is None:
                self._reset_unopened(stream_id, ErrorCode.REFUSED_STREAM, "too many streams")
                return
            self._register(stream, stream_id)
            if headers.memo is None:
                headers.content_bytes = content_length(headers.fields)
            stream.content_bytes_left = headers.content_bytes
        elif stream.is_remote_ended:
            self._break(stream, ErrorCode.STREAM_CLOSED, "HEADERS after the end of the stream")
            return
        elif (headers.memo is None or not self._is_client) and (fault := self._later_fault(headers, end)):
            self._break(stream, ErrorCode.PROTOCOL_ERROR, fault)
            return
        if end:
            if stream.content_bytes_left > 0:
                self._break(stream, ErrorCode.PROTOCOL_ERROR, "the data is not as long as content-length says")
                return
            self._end_remote(stream)
        stream.on_headers(headers, end != 0)

    def _later_fault(self, headers: DecodedHeaders, end: int) -> str:
        """Error message for malformed fields on an open stream (a response at a client, or trailers), else ""."""
        fields = headers.fields
        if self._is_client and fields and fields[0][0].startswith(":"):
            return response_fault(fields)
        return trailer_fault(fields) if end else "trailers without END_STREAM"

    def _on_late_headers(self, stream_id: int) -> None:
        if not self._is_client and not stream_id & 1:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, f"a client opened stream {stream_id}, which is even")
        if self._is_idle(stream_id):
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, f"HEADERS on idle stream {stream_id}")
        may_be_reset = stream_id in self._reset_ids or stream_id <= self._last_dropped_reset_id
        if not may_be_reset and not self._is_past_goaway(stream_id):
            raise Http2ConnectionError(ErrorCode.STREAM_CLOSED, f"HEADERS on closed stream {stream_id}")
        self._spend(1, "HEADERS on a stream that was reset")
