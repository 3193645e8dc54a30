"""Frames other than DATA and HEADERS: windows, resets, settings, PING, GOAWAY, priorities."""

from weft.wire import frames
from weft.wire.connection.streams import RESET_COST, StreamStates, code_name
from weft.wire.errors import ErrorCode, Http2ConnectionError
from weft.wire.frames import (
    ACK,
    GOAWAY,
    PING,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
)

#: Largest DATA frame that is sent: streams take turns by frames.
_MAX_SENT_FRAME_BYTES = 256 << 10


class ControlFrames(StreamStates):
    """Processes control frames of the peer."""

    def _on_control(self, kind: int, flags: int, stream_id: int, body: bytes, length: int) -> None:
        if kind == WINDOW_UPDATE:
            self._on_window_update(stream_id, body, length)
        elif kind == RST_STREAM:
            self._on_rst_stream(stream_id, body, length)
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
        if self.num_free_updates > 0:
            self.num_free_updates -= 1
        else:
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
        stream = self.streams.get(stream_id)
        self._spend(RESET_COST if stream is None else self._peer_reset_cost, "RST_STREAM")
        if stream is not None:
            code = int.from_bytes(body, "big")
            self.forget(stream)
            is_unprocessed = code == ErrorCode.REFUSED_STREAM
            stream.on_reset(code, f"the peer reset the stream ({code_name(code)})", is_unprocessed=is_unprocessed)

    def _on_settings(self, stream_id: int, body: bytes, flags: int) -> None:
        if stream_id:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "SETTINGS on a stream")
        if len(body) % 6 or (flags & ACK and body):
            raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, f"SETTINGS of {len(body)} bytes")
        self._spend(1 + len(body) // 60 + len(self.streams) // 16, "SETTINGS")
        if flags & ACK:
            return
        window_bytes = self.initial_send_window_bytes
        for start in range(0, len(body), 6):
            key, value = (
                int.from_bytes(body[start : start + 2], "big"),
                int.from_bytes(body[start + 2 : start + 6], "big"),
            )
            if key == frames.INITIAL_WINDOW_SIZE:
                if value > frames.MAX_WINDOW_BYTES:
                    raise Http2ConnectionError(ErrorCode.FLOW_CONTROL_ERROR, f"an initial window of {value} bytes")
                window_bytes = value  # a frame may change it thousands of times, and there may be a thousand streams
            else:
                self._apply_setting(key, value)
        if window_bytes != self.initial_send_window_bytes:
            self.set_initial_window(window_bytes)
        self.write(frames.SETTINGS_ACK)
        self.has_peer_settings = True
        self._owner.on_peer_settings()
        self.pump()

    def _apply_setting(self, key: int, value: int) -> None:
        if key == frames.MAX_FRAME_SIZE:
            if not frames.DEFAULT_FRAME_BYTES <= value <= frames.MAX_FRAME_BYTES:
                raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, f"a largest frame of {value} bytes")
            self.peer_frame_bytes = min(value, _MAX_SENT_FRAME_BYTES)
        elif key == frames.HEADER_TABLE_SIZE:
            if value < frames.DEFAULT_TABLE_BYTES and not self.has_told_table_size:
                self.owes_table_size = True
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
            reason = f"the server accepts no more calls on this connection (GOAWAY, {code_name(code)})"
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
