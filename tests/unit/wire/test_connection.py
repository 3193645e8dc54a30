"""HTTP/2 without I/O: two ends, and one end with frames made by hand."""

import pytest
from tests.unit.wire.pair import REQUEST, RESPONSE, TRAILERS, End, Pair, RecordingStream

from weft.wire import frames
from weft.wire.connection import ConnectionLimits
from weft.wire.connection.sending import Parts
from weft.wire.frames import ErrorCode


def frame(kind: int, flags: int, stream_id: int, body: bytes = b"") -> bytes:
    return frames.pack_header(len(body) << 8 | kind, flags, stream_id) + body


def server(limits: ConnectionLimits | None = None, **options) -> End:
    """A server that has had a client's preface and settings."""
    end = End(limits or ConnectionLimits(), is_client=False, **options)
    end.connection.receive(frames.PREFACE + frames.settings({}))
    end.take()
    end.events.clear()
    return end


def test_request_and_response():
    """A message with fields, data and trailers arrives as it was sent, and nothing is left of the stream."""
    pair = Pair()
    stream = pair.request(b"hello")
    assert [("headers", 1, pair.server.events[0][2], False), ("data", 1, 5, True)] == pair.server.events
    assert "/a/b" == pair.server.events[0][2][":path"]
    pair.server.connection.send_message(pair.server.accepted[0], RESPONSE, b"12345", b"world", TRAILERS)
    pair.carry()
    assert b"12345world" == stream.data
    assert ("headers", 1, {"grpc-status": "0"}, True) == pair.client.events[-1]
    assert {} == pair.client.connection.streams == pair.server.connection.streams


@pytest.mark.parametrize("seed", range(20))
def test_splits_of_bytes_change_nothing(seed):
    """Large bodies both ways arrive whole, however the bytes are split."""
    pair = Pair(seed=seed)
    body = bytes(range(256)) * pair.random.randint(1, 2_000)
    stream = pair.request(body)
    assert body == pair.server.accepted[0].data
    assert pair.server.events[-1][3]
    pair.server.connection.send_message(pair.server.accepted[0], RESPONSE, b"", body, TRAILERS)
    pair.carry()
    assert body == stream.data
    assert not stream.is_open


def test_streams_take_turns():
    """A small message on one stream does not wait for a large one on another."""
    pair = Pair()
    streams = [RecordingStream(pair.client.events) for _ in range(2)]
    for stream, size in zip(streams, (3_000_000, 100), strict=True):
        pair.client.connection.open_stream(stream)
        pair.client.connection.send_message(stream, REQUEST, b"", bytes(size), is_end=True)
    pair.carry()
    ends = [event[1] for event in pair.server.events if event[0] == "data" and event[3]]
    assert [3, 1] == ends


def test_window_of_a_stream_holds_a_sender_back():
    """Data beyond the window of a stream that is not read waits at its sender, until credit is given."""
    pair = Pair(server=ConnectionLimits(stream_window_bytes=1000))
    pair.server.reads = False
    stream = pair.request(bytes(5000))
    received = pair.server.accepted[0]
    assert 1000 == len(received.data)
    assert stream.pending is not None
    received.reads = True
    pair.server.connection.grant(received)
    pair.carry()
    assert 5000 == len(received.data)
    assert ("drained", 1) in pair.client.events


def test_paused_socket_keeps_data_with_its_stream():
    """While the socket takes nothing, no data is added to the output; it goes out in order afterwards."""
    pair = Pair()
    pair.client.connection.pause()
    stream = RecordingStream(pair.client.events)
    pair.client.connection.open_stream(stream)
    pair.client.connection.send_message(stream, REQUEST, b"", b"abc")
    pair.client.connection.send_message(stream, None, b"", b"def", is_end=True)
    assert b"abc" not in pair.client.take()
    pair.client.connection.resume()
    pair.carry()
    # The headers were taken by the assertion, and are given again.
    assert stream.pending is None


def test_drain_in_two_steps():
    """A request that crosses the first GOAWAY is answered; one after the last GOAWAY is told that it was not begun."""
    pair = Pair()
    first = pair.request(is_end=True)
    pair.server.connection.drain()
    goaway = pair.server.take()
    crossing = RecordingStream(pair.client.events)
    pair.client.connection.open_stream(crossing)
    pair.client.connection.send_message(crossing, REQUEST, b"", b"x", is_end=True)
    pair.client.connection.receive(goaway)
    assert not pair.client.connection.can_open_stream
    pair.carry()
    assert 2 == len(pair.server.accepted)
    assert pair.server.connection.is_drain_finished
    assert not pair.server.connection.is_drained
    late = RecordingStream(pair.client.events)
    pair.client.connection.open_stream(late)
    pair.client.connection.send_message(late, REQUEST, b"", b"x", is_end=True)
    pair.carry()
    assert 2 == len(pair.server.accepted)
    for stream in pair.server.accepted:
        pair.server.connection.send_message(stream, RESPONSE, b"", b"ok", TRAILERS)
    pair.carry()
    assert b"ok" == first.data == crossing.data
    assert pair.server.connection.is_drained


def test_goaway_fails_streams_that_were_not_begun():
    """Streams above the last id of a GOAWAY are reset as unprocessed, those below go on."""
    pair = Pair()
    streams = [pair.request(is_end=False) for _ in range(2)]
    pair.client.connection.receive(frames.goaway(1, ErrorCode.NO_ERROR))
    assert ("reset", 3, ErrorCode.REFUSED_STREAM, True) in pair.client.events
    assert streams[0].is_open


def test_refused_stream_is_unprocessed():
    """A server beyond its limit refuses a stream, which its client may send again."""
    pair = Pair()
    pair.server.refuses = True
    pair.request()
    assert [("reset", 1, ErrorCode.REFUSED_STREAM, True)] == pair.client.events


def test_response_before_the_end_of_a_request_stops_it():
    """A response that ends before its request resets the stream without an error."""
    pair = Pair()
    stream = pair.request(b"part", is_end=False)
    pair.server.connection.send_headers(pair.server.accepted[0], RESPONSE, is_end=True)
    pair.carry()
    assert not stream.is_open
    assert ("reset", 1, ErrorCode.NO_ERROR, False) == pair.client.events[-1]


def test_lost_connection_tells_every_stream():
    """Each open stream learns once that its connection is lost."""
    pair = Pair()
    for _ in range(3):
        pair.request(is_end=False)
    pair.client.connection.close("gone")
    assert [1, 3, 5] == [event[1] for event in pair.client.events if event[0] == "reset"]
    pair.client.connection.close("gone")
    assert 3 == len(pair.client.events)


def open_request(stream_id: int = 1, *, is_end: bool = False) -> bytes:
    return frames.headers(stream_id, REQUEST, frames.END_STREAM if is_end else 0)


CONNECTION_FAULTS = {
    "preface": (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", ErrorCode.PROTOCOL_ERROR),
    "data on stream 0": (frame(frames.DATA, 0, 0, b"x"), ErrorCode.PROTOCOL_ERROR),
    "data on an idle stream": (frame(frames.DATA, 0, 1, b"x"), ErrorCode.PROTOCOL_ERROR),
    "padding": (open_request() + frame(frames.DATA, frames.PADDED, 1, b"\5abc"), ErrorCode.PROTOCOL_ERROR),
    "even stream": (open_request(2), ErrorCode.PROTOCOL_ERROR),
    "smaller stream": (open_request(5) + open_request(3), ErrorCode.STREAM_CLOSED),
    "interrupted block": (
        frame(frames.HEADERS, 0, 1, REQUEST) + frame(frames.PING, 0, 0, bytes(8)),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "continuation alone": (open_request() + frame(frames.CONTINUATION, 4, 1, b""), ErrorCode.PROTOCOL_ERROR),
    "window of an idle stream": (frames.window_update(7, 1), ErrorCode.PROTOCOL_ERROR),
    "no increment": (frames.window_update(0, 0), ErrorCode.PROTOCOL_ERROR),
    "window too large": (frames.window_update(0, 2**31 - 1), ErrorCode.FLOW_CONTROL_ERROR),
    "reset of an idle stream": (frames.rst_stream(1, 0), ErrorCode.PROTOCOL_ERROR),
    "settings on a stream": (frame(frames.SETTINGS, 0, 1), ErrorCode.PROTOCOL_ERROR),
    "settings of 5 bytes": (frame(frames.SETTINGS, 0, 0, bytes(5)), ErrorCode.FRAME_SIZE_ERROR),
    "initial window": (frames.settings({frames.INITIAL_WINDOW_SIZE: 2**31}), ErrorCode.FLOW_CONTROL_ERROR),
    "frame size": (frames.settings({frames.MAX_FRAME_SIZE: 100}), ErrorCode.PROTOCOL_ERROR),
    "push": (frames.settings({frames.ENABLE_PUSH: 2}), ErrorCode.PROTOCOL_ERROR),
    "ping on a stream": (frame(frames.PING, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
    "ping of 6 bytes": (frame(frames.PING, 0, 0, bytes(6)), ErrorCode.FRAME_SIZE_ERROR),
    "goaway on a stream": (frame(frames.GOAWAY, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
    "priority on stream 0": (frame(frames.PRIORITY, 0, 0, bytes(5)), ErrorCode.PROTOCOL_ERROR),
    "push promise": (frame(frames.PUSH_PROMISE, 4, 1, bytes(4)), ErrorCode.PROTOCOL_ERROR),
    "field block": (frame(frames.HEADERS, 4, 1, b"\xff\xff\xff\xff\xff\xff"), ErrorCode.COMPRESSION_ERROR),
    "large frame": (open_request() + frames.pack_header((2 << 20) << 8, 0, 1), ErrorCode.FRAME_SIZE_ERROR),
}


@pytest.mark.parametrize("case", CONNECTION_FAULTS)
def test_faults_that_end_the_connection(case):
    """Each is answered with GOAWAY and its code, and every stream is told."""
    data, code = CONNECTION_FAULTS[case]
    end = server()
    if case == "preface":
        end = End(ConnectionLimits(), is_client=False)
        end.take()
    end.connection.receive(data)
    assert code == end.connection.failure.code
    assert frames.GOAWAY == end.take()[3]
    assert end.connection.is_closed
    assert {} == end.connection.streams


STREAM_FAULTS = {
    "no increment": (frames.window_update(1, 0), ErrorCode.PROTOCOL_ERROR),
    "window too large": (frames.window_update(1, 2**31 - 1), ErrorCode.FLOW_CONTROL_ERROR),
    "priority of 4 bytes": (frame(frames.PRIORITY, 0, 1, bytes(4)), ErrorCode.FRAME_SIZE_ERROR),
    "depends on itself": (frame(frames.PRIORITY, 0, 1, b"\0\0\0\1\0"), ErrorCode.PROTOCOL_ERROR),
    "trailers without an end": (frames.headers(1, TRAILERS, 0), ErrorCode.PROTOCOL_ERROR),
    "beyond the window": (frame(frames.DATA, 0, 1, bytes(2000)), ErrorCode.FLOW_CONTROL_ERROR),
}


@pytest.mark.parametrize("case", STREAM_FAULTS)
def test_faults_that_end_a_stream(case):
    """Each is answered with RST_STREAM and its code; the connection goes on."""
    data, code = STREAM_FAULTS[case]
    end = server(ConnectionLimits(stream_window_bytes=1000))
    end.connection.receive(open_request() + data)
    assert ("reset", 1, code, False) == end.events[-1]
    assert frames.rst_stream(1, code) in end.take()
    end.connection.receive(open_request(3, is_end=True))
    assert 2 == len(end.accepted)


def test_data_after_the_end_of_a_request():
    """DATA on a half-closed stream resets it with STREAM_CLOSED; frames that follow are ignored."""
    end = server()
    end.connection.receive(open_request(is_end=True) + frame(frames.DATA, 0, 1, b"x") + frame(frames.DATA, 1, 1, b"y"))
    assert [("reset", 1, ErrorCode.STREAM_CLOSED, False)] == end.events[1:]
    assert not end.connection.is_closed


def test_control_frames_have_a_budget():
    """PINGs beyond a burst end the connection with ENHANCE_YOUR_CALM, unless time has passed."""
    now_s = 0.0
    limits = ConnectionLimits(control_burst=10, control_per_s=5)
    end = server(limits, clock_s=lambda: now_s)
    for _ in range(8):
        end.connection.receive(frames.ping(bytes(8)))
    now_s = 2.0
    for _ in range(10):
        end.connection.receive(frames.ping(bytes(8)))
    assert not end.connection.is_closed
    for _ in range(10):
        end.connection.receive(frames.ping(bytes(8)))
    assert ErrorCode.ENHANCE_YOUR_CALM == end.connection.failure.code


def test_rapid_reset_uses_up_the_budget():
    """Streams that are opened and reset at once are not free, although finished streams give tokens back."""
    end = server(ConnectionLimits(control_burst=100, control_per_s=4, max_resets_per_s=1))
    for stream_id in range(1, 101, 2):
        end.connection.receive(open_request(stream_id) + frames.rst_stream(stream_id, 8))
    assert ErrorCode.ENHANCE_YOUR_CALM == end.connection.failure.code


def test_peer_that_does_not_read_its_pings():
    """Answers to PINGs for a peer that does not read are bounded: then the connection is to be aborted."""
    end = server(ConnectionLimits(max_unread_bytes=1000))
    end.connection.pause()
    for _ in range(100):
        end.connection.receive(frames.ping(bytes(8)))
    assert end.connection.is_closed


def test_long_header_blocks_end_the_connection():
    """A field block in endless CONTINUATION frames ends the connection before it takes memory."""
    end = server()
    end.connection.receive(frame(frames.HEADERS, 0, 1, b""))
    for _ in range(100):
        end.connection.receive(frame(frames.CONTINUATION, 0, 1, b""))
    assert ErrorCode.ENHANCE_YOUR_CALM == end.connection.failure.code


def test_blocks_of_many_frames_are_whole():
    """A field block in several CONTINUATION frames is one block."""
    end = server()
    parts = [REQUEST[:5], REQUEST[5:9], REQUEST[9:]]
    data = frame(frames.HEADERS, frames.END_STREAM, 1, parts[0]) + frame(frames.CONTINUATION, 0, 1, parts[1])
    end.connection.receive(data + frame(frames.CONTINUATION, frames.END_HEADERS, 1, parts[2]))
    assert "/a/b" == end.events[0][2][":path"]
    assert end.events[0][3]


def test_content_length_must_match():
    """Data shorter or longer than content-length says resets the stream."""
    from weft.wire.hpack import encode

    fields = [(":method", "POST"), (":scheme", "http"), (":path", "/a"), ("content-length", "3")]
    for body, flags in ((b"abcd", 0), (b"ab", 1)):
        end = server()
        end.connection.receive(frames.headers(1, encode(fields), 0) + frame(frames.DATA, flags, 1, body))
        assert ("reset", 1, ErrorCode.PROTOCOL_ERROR, False) == end.events[-1]


def test_padded_data_counts_and_is_left_out():
    """Padding is not passed on, but counts for the windows."""
    end = server(ConnectionLimits(stream_window_bytes=100))
    end.connection.receive(open_request() + frame(frames.DATA, frames.PADDED, 1, b"\x14abc" + bytes(20)))
    assert b"abc" == end.accepted[0].data
    assert 24 == end.accepted[0].num_unacked_bytes


@pytest.mark.parametrize("kind", [0xB, 0xFF])
def test_unknown_frames_are_skipped(kind):
    """A frame of an unknown type, small or large, changes nothing."""
    end = server()
    data = frame(kind, 0xFF, 3, bytes(200_000)) + open_request(is_end=True)
    for start in range(0, len(data), 7001):
        end.connection.receive(data[start : start + 7001])
    assert 1 == len(end.accepted)
    assert end.connection.failure is None


def test_end_of_a_failed_call_does_not_wait():
    """Trailers after data that was discarded leave at once, although the stream has no window."""
    pair = Pair(client=ConnectionLimits(stream_window_bytes=10))
    stream = pair.request(b"")
    stream.reads = False
    response = pair.server.accepted[0]
    pair.server.connection.send_message(response, RESPONSE, b"", bytes(1000))
    pair.carry()
    assert response.pending is not None
    pair.server.connection.discard(response)
    pair.server.connection.send_headers(response, TRAILERS, is_end=True)
    pair.carry()
    assert ("headers", 1, {"grpc-status": "0"}, True) == pair.client.events[-1]


def test_answers_to_many_cancelled_requests_are_ignored():
    """A client that cancels thousands of calls at once keeps its connection when their answers come nevertheless."""
    pair = Pair(server=ConnectionLimits(max_concurrent_streams=3000), client=ConnectionLimits())
    streams = [RecordingStream(pair.client.events) for _ in range(3000)]
    for stream in streams:
        pair.client.connection.open_stream(stream)
        pair.client.connection.send_message(stream, REQUEST, b"", b"", is_end=True)
    pair.server.connection.receive(pair.client.take())
    for stream in streams:
        pair.client.connection.reset(stream, ErrorCode.CANCEL)
    for accepted in pair.server.accepted:
        pair.server.connection.send_message(accepted, RESPONSE, b"", b"data", TRAILERS)
    pair.client.connection.receive(pair.server.take())
    assert pair.client.connection.failure is None


def test_answers_to_many_reset_streams_are_ignored():
    """A server that was busy answers calls long after the client has reset them, and thousands of others since."""
    client = End(ConnectionLimits(), is_client=True)
    client.connection.receive(frames.settings({}))
    for _ in range(9000):
        stream = RecordingStream(client.events)
        client.connection.open_stream(stream)
        client.connection.send_headers(stream, REQUEST)
        client.connection.reset(stream, ErrorCode.CANCEL)
    client.connection.receive(frames.headers(1, RESPONSE, 0) + frame(frames.DATA, 1, 1, b"late"))
    assert client.connection.failure is None


def test_empty_piece_at_the_end_of_a_message():
    """It needs no window: a message that fills the window exactly is followed by its trailers."""
    end = server()
    end.connection.receive(frames.settings({frames.INITIAL_WINDOW_SIZE: 20_005}) + frames.headers(1, REQUEST, 1))
    stream = end.accepted[0]
    end.connection.send_message(stream, RESPONSE, b"12345", Parts([bytes(20_000), b""]), TRAILERS)
    assert (None, False) == (stream.pending, stream.is_open)


@pytest.mark.parametrize("flags", [0, frames.PADDED])
def test_large_data_within_a_header_block(flags):
    """It ends the connection as small data does, and reaches no stream."""
    end = server(ConnectionLimits(max_frame_bytes=1 << 20))
    end.connection.receive(frames.headers(1, REQUEST, 0))
    end.connection.receive(frame(frames.HEADERS, 0, 3, REQUEST) + frame(frames.DATA, flags, 1, bytes(200_000)))
    assert end.connection.failure is not None
    assert ErrorCode.PROTOCOL_ERROR is end.connection.failure.code
    assert b"" == end.accepted[0].data


def resets(number: int) -> bytes:
    """Requests that are withdrawn at once."""
    return b"".join(open_request(stream_id) + frames.rst_stream(stream_id, 8) for stream_id in range(1, 2 * number, 2))


def read_all(end: End, data: bytes) -> int:
    """Give an end bytes and let it read on; returns how many turns it took."""
    end.connection.receive(data)
    num_turns = 1
    while end.connection.has_unread:
        end.connection.receive(b"")
        num_turns += 1
    return num_turns


def test_a_known_peer_may_reset_as_many_calls_as_it_makes():
    """With `max_resets_per_s` 0, as for a router, 5,000 resets are read; with the default 40 use up a budget of 160."""
    known = server(ConnectionLimits(control_burst=160, control_per_s=4000, max_resets_per_s=0))
    read_all(known, resets(5_000))
    assert not known.connection.is_closed
    unknown = server(ConnectionLimits(control_burst=160, control_per_s=4000), clock_s=lambda: 0.0)
    read_all(unknown, resets(41))
    assert ErrorCode.ENHANCE_YOUR_CALM == unknown.connection.failure.code


def test_work_is_done_in_turns():
    """Frames that cost work wait for the next turn after some 512 units of it; all are read in the end."""
    end = server(ConnectionLimits(control_burst=1_000_000))
    assert 10 == read_all(end, frames.ping(b"12345678") * 5_000)
    assert 1 == read_all(end, frames.ping(b"12345678") * 500)
    assert 5_500 * 17 == sum(map(len, end.connection.take_output()))


def test_a_request_costs_no_turn():
    """A hundred usual requests that come together are read together, so that their model can batch them."""
    end = server()
    data = b"".join(
        open_request(stream_id) + frame(frames.DATA, 1, stream_id, b"hello") for stream_id in range(1, 200, 2)
    )
    assert 1 == read_all(end, data)
    assert 100 == len(end.accepted)


def test_a_frame_that_comes_byte_by_byte_is_not_copied_each_time():
    """The bytes of an incomplete frame are kept in one buffer that grows, which no byte replaces."""
    end = server()
    data = frame(frames.SETTINGS, 0, 0, bytes(6 * 1_000))
    end.connection.receive(data[:20])
    buffer = end.connection._rest
    for byte in data[20:-1]:
        end.connection.receive(bytes([byte]))
    assert buffer is end.connection._rest
    end.connection.receive(data[-1:])
    assert not end.connection.has_partial_frame
