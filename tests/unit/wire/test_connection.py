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


def open_request(stream_id: int = 1, *, is_end: bool = False) -> bytes:
    return frames.headers(stream_id, REQUEST, frames.END_STREAM if is_end else 0)


# Which faults end what, ``tests/wire/exchanges`` say for all.


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


@pytest.mark.parametrize("size", [0, 10, 16_384, 16_385, 50_000])
def test_header_blocks_are_split(size):
    """A block longer than a frame goes on in CONTINUATION frames, of which the last has END_HEADERS."""
    block = bytes(index % 251 for index in range(size))
    data = frames.headers(7, block, frames.END_STREAM)
    found, heads = b"", []
    while data:
        length_and_type, flags, stream_id = frames.unpack_header(data)
        end = 9 + (length_and_type >> 8)
        found += data[9:end]
        heads.append((length_and_type & 0xFF, flags, stream_id))
        data = data[end:]
    kinds = [frames.HEADERS, *[frames.CONTINUATION] * (len(heads) - 1)]
    flags = [frames.END_STREAM, *[0] * (len(heads) - 1)]
    flags[-1] |= frames.END_HEADERS
    assert (block, list(zip(kinds, flags, [7] * len(heads), strict=True))) == (found, heads)


def test_data_beyond_the_window_of_a_stream_resets_it():
    """Data beyond its window is answered with RST_STREAM; the connection goes on."""
    end = server(ConnectionLimits(stream_window_bytes=1000))
    end.connection.receive(open_request() + frame(frames.DATA, 0, 1, bytes(2000)))
    assert ("reset", 1, ErrorCode.FLOW_CONTROL_ERROR, False) == end.events[-1]
    assert frames.rst_stream(1, ErrorCode.FLOW_CONTROL_ERROR) in end.take()
    end.connection.receive(open_request(3, is_end=True))
    assert 2 == len(end.accepted)
