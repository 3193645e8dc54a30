"""Stream states of a connection; ends streams, drains and closes the connection."""

import os
from collections.abc import Callable
from itertools import islice

from typing_extensions import override

from weft.wire import frames
from weft.wire.connection import ConnectionLimits
from weft.wire.connection.sending import STREAM_TOKENS, Owner, Sender, Stream
from weft.wire.frames import (
    ACK,
    GOAWAY,
    PING,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    ErrorCode,
    Http2ConnectionError,
    error_name,
)

#: Streams that this end has reset lately: frames that were on their way are ignored. As many as a client may have open
#: and cancel at once.
_NUM_REMEMBERED_RESETS = 8192
#: Cost of a stream that is reset, which gives back the tokens of one that has ended.
RESET_COST = STREAM_TOKENS + 4
#: Largest DATA frame that is sent: streams take turns by frames.
_MAX_SENT_FRAME_BYTES = 256 << 10


class StreamStates(Sender):
    """Opens and ends streams, drains and ends the connection.

    Attributes:
        last_written_id: Newest stream of this end of which the socket got any byte; set by the owner.
        turn_work: Cost of the frames read in this loop iteration, in tokens of the budget.
    """

    def __init__(
        self, owner: Owner, limits: ConnectionLimits, *, is_client: bool, clock_s: Callable[[], float]
    ) -> None:
        super().__init__(owner, limits, is_client=is_client, clock_s=clock_s)
        self.turn_work = 0
        #: A stream that the peer resets gives tokens back as any other; a limit is what it costs beyond these.
        self._peer_reset_cost = STREAM_TOKENS + (
            limits.max_resets_per_s and -(-limits.control_per_s // limits.max_resets_per_s)
        )
        self.failure: Http2ConnectionError | None = None
        self.last_peer_stream_id = 0
        self.last_local_id = self.last_written_id = -1
        self.peer_max_streams = frames.MAX_STREAM_ID
        self.has_peer_settings = False
        self.is_peer_leaving = False
        self._goaway_id: int | None = None  # newest stream that this end still answers, after GOAWAY
        self._drain_ping = b""
        self._reset_ids: dict[int, None] = {}
        self._last_dropped_reset_id = 0  # newest of those that were in ``_reset_ids`` and are no more

    # What the layer above asks for.

    def open_stream(self, stream: Stream) -> None:
        """Client: register a new stream; send its headers at once."""
        self.last_local_id += 2
        self._register(stream, self.last_local_id)

    @property
    def can_open_stream(self) -> bool:
        """Client: whether the peer accepts another stream now."""
        return not (self.is_closed or self.is_peer_leaving) and (
            len(self.streams) < self.peer_max_streams and self.last_local_id < frames.MAX_STREAM_ID - 1
        )

    @property
    def has_stream_ids(self) -> bool:
        """Client: whether there is an id for another stream."""
        return self.last_local_id < frames.MAX_STREAM_ID - 1

    def grant(self, stream: Stream, num_held_bytes: int = 0) -> None:
        """Return consumed bytes (less those still held) to the peer's window, in updates of at least half a window."""
        num_bytes = stream.num_unacked_bytes - num_held_bytes
        if num_bytes * 2 >= self.limits.stream_window_bytes and not stream.is_remote_ended and stream.is_open:
            stream.num_unacked_bytes = num_held_bytes
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
        """Accept no more streams; also called when the PING of ``drain`` is not answered in time."""
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
        """Close: tell all streams and read nothing more."""
        if self.is_closed:
            return
        self.is_closed = True
        streams = list(self.streams.values())
        self.streams.clear()
        self.waiting.clear()
        for stream in streams:
            is_partial = stream.pending is not None and stream.needs_whole_request
            is_unsent = self._is_client and (is_partial or stream.stream_id > self.last_written_id)
            stream.is_open = False
            stream.pending = None
            stream.on_reset(code, reason, is_unprocessed=is_unsent)

    # States of streams.

    def _register(self, stream: Stream, stream_id: int) -> None:
        stream.connection = self
        stream.stream_id = stream_id
        stream.send_window_bytes = self.initial_send_window_bytes
        stream.is_open = True
        self.streams[stream_id] = stream

    def _is_idle(self, stream_id: int) -> bool:
        """Whether a stream was never opened. Stream 0 counts as idle: no stream's frame may be on it."""
        if self._is_client == bool(stream_id & 1):
            return stream_id > self.last_local_id or not stream_id
        return stream_id > self.last_peer_stream_id or not stream_id

    def _is_past_goaway(self, stream_id: int) -> bool:
        return self._goaway_id is not None and stream_id > self._goaway_id

    def _break(self, stream: Stream, code: ErrorCode, reason: str) -> None:
        self._spend(RESET_COST, reason)
        self.reset(stream, code)
        stream.on_reset(code, reason)

    def _reset_unopened(self, stream_id: int, code: ErrorCode, reason: str) -> None:
        stream = self.streams.get(stream_id)
        if stream is not None:
            self._break(stream, code, reason)
            return
        if self._is_client and self._is_idle(stream_id):
            raise Http2ConnectionError(code, f"stream {stream_id} is idle: {reason}")
        self._spend(RESET_COST, reason)
        if not self._is_client and stream_id & 1:
            self.last_peer_stream_id = max(self.last_peer_stream_id, stream_id)
        self._remember_reset(stream_id)
        self.write(frames.rst_stream(stream_id, code))

    @override
    def reset(self, stream: Stream, code: int) -> None:
        if stream.is_open:
            self._remember_reset(stream.stream_id)
            self.forget(stream)
            self.write(frames.rst_stream(stream.stream_id, code))

    def _remember_reset(self, stream_id: int) -> None:
        self._reset_ids[stream_id] = None
        if len(self._reset_ids) > _NUM_REMEMBERED_RESETS:
            for oldest in list(islice(self._reset_ids, _NUM_REMEMBERED_RESETS // 2)):
                del self._reset_ids[oldest]
                self._last_dropped_reset_id = max(self._last_dropped_reset_id, oldest)

    def _spend(self, num_tokens: int, what: str) -> None:
        budget = self.budget
        self.turn_work += num_tokens
        budget.num_left -= num_tokens
        if budget.num_left <= 0:
            budget.refill(what)

    # Control frames of the peer.

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
            stream.on_reset(code, f"the peer reset the stream ({error_name(code)})", is_unprocessed=is_unprocessed)

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
            reason = f"the server accepts no more calls on this connection (GOAWAY, {error_name(code)})"
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
