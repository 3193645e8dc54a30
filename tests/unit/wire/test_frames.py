"""Frames and their parts as bytes."""

import pytest
from hyperframe.frame import Frame

from weft.wire import frames


def parsed(data: bytes):
    """The one frame in ``data``, read by another implementation."""
    frame, length = Frame.parse_frame_header(memoryview(data[:9]))
    frame.parse_body(memoryview(data[9 : 9 + length]))
    assert len(data) == 9 + length
    return frame


def test_frames_are_those_of_another_implementation():
    """Each builder gives what hyperframe reads with the same values."""
    assert (5, 8) == (parsed(frames.rst_stream(5, 8)).stream_id, parsed(frames.rst_stream(5, 8)).error_code)
    assert 77 == parsed(frames.window_update(3, 77)).window_increment
    assert b"12345678" == parsed(frames.ping(b"12345678")).opaque_data
    assert {"ACK"} == set(parsed(frames.ping(b"12345678", is_ack=True)).flags)
    goaway = parsed(frames.goaway(9, 11, b"why"))
    assert (9, 11, b"why") == (goaway.last_stream_id, goaway.error_code, goaway.additional_data)
    assert {4: 10, 5: 20_000} == parsed(frames.settings({4: 10, 5: 20_000})).settings
    assert {"ACK"} == set(parsed(frames.SETTINGS_ACK).flags)


@pytest.mark.parametrize("size", [0, 10, 16_384, 16_385, 50_000])
def test_header_blocks_are_split(size):
    """A block longer than a frame goes on in CONTINUATION frames, of which the last has END_HEADERS."""
    block = bytes(index % 251 for index in range(size))
    data = frames.headers(7, block, frames.END_STREAM)
    found, kinds, flags = b"", [], []
    while data:
        length_and_type, flag, stream_id = frames.unpack_header(data)
        assert 7 == stream_id
        length = length_and_type >> 8
        found += data[9 : 9 + length]
        kinds.append(length_and_type & 0xFF)
        flags.append(flag)
        data = data[9 + length :]
    assert block == found
    assert [frames.HEADERS] + [frames.CONTINUATION] * (len(kinds) - 1) == kinds
    assert [bool(flag & frames.END_HEADERS) for flag in flags] == [False] * (len(kinds) - 1) + [True]
    assert flags[0] & frames.END_STREAM
