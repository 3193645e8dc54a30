"""Frames and errors of HTTP/2 (RFC 9113, sections 4 to 7): layouts, builders, constants.

Types and flags are plain integers: comparing members of an ``IntEnum`` costs three times as much.
"""

import struct
from enum import IntEnum


class ErrorCode(IntEnum):
    """Error codes of RST_STREAM and GOAWAY (RFC 9113, section 7)."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


def error_name(code: int) -> str:
    """The name of an error code, also of one that no standard knows."""
    return ErrorCode(code).name if code in ErrorCode._value2member_map_ else f"error code {code}"


class Http2ConnectionError(Exception):
    """The peer broke the protocol: the connection ends with GOAWAY, which gets code and reason."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(f"{code.name}: {reason}")
        self.code = code
        self.reason = reason


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)

ACK = END_STREAM = 0x1
END_HEADERS = 0x4
PADDED = 0x8
HAS_PRIORITY = 0x20

HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = (
    range(1, 7)
)

#: Dynamic table of header compression before any setting.
DEFAULT_TABLE_BYTES = 4096
#: Window of each stream and of the connection before any setting, and its limit (RFC 9113, section 6.9).
DEFAULT_WINDOW_BYTES = 65_535
MAX_WINDOW_BYTES = 2**31 - 1
#: Limits of SETTINGS_MAX_FRAME_SIZE; the smaller one is what every peer accepts.
DEFAULT_FRAME_BYTES = 16_384
MAX_FRAME_BYTES = 2**24 - 1
MAX_STREAM_ID = 2**31 - 1

#: Length and type in one number (``length << 8 | type``), flags, stream id with its reserved bit.
unpack_header = struct.Struct(">IBI").unpack_from
pack_header = struct.Struct(">IBI").pack
_pack_with_u32 = struct.Struct(">IBII").pack
_pack_goaway = struct.Struct(">IBIII").pack
_pack_setting = struct.Struct(">HI").pack

SETTINGS_ACK = pack_header(SETTINGS, ACK, 0)


def rst_stream(stream_id: int, code: int) -> bytes:
    """A RST_STREAM frame."""
    return _pack_with_u32(4 << 8 | RST_STREAM, 0, stream_id, code)


def window_update(stream_id: int, num_bytes: int) -> bytes:
    """A WINDOW_UPDATE frame; stream 0 is the connection."""
    return _pack_with_u32(4 << 8 | WINDOW_UPDATE, 0, stream_id, num_bytes)


def ping(data: bytes, *, is_ack: bool = False) -> bytes:
    """A PING frame with eight bytes of data."""
    return pack_header(8 << 8 | PING, ACK if is_ack else 0, 0) + data


def goaway(last_stream_id: int, code: int, debug: bytes = b"") -> bytes:
    """A GOAWAY frame."""
    return _pack_goaway(8 + len(debug) << 8 | GOAWAY, 0, 0, last_stream_id, code) + debug


def settings(values: dict[int, int]) -> bytes:
    """A SETTINGS frame."""
    body = b"".join([_pack_setting(key, value) for key, value in values.items()])
    return pack_header(len(body) << 8 | SETTINGS, 0, 0) + body


def headers(stream_id: int, block: bytes, flags: int, max_frame_bytes: int = DEFAULT_FRAME_BYTES) -> bytes:
    """A header block as HEADERS and as many CONTINUATION frames as it needs; ``flags``: ``END_STREAM`` or 0."""
    if len(block) <= max_frame_bytes:
        return pack_header(len(block) << 8 | HEADERS, flags | END_HEADERS, stream_id) + block
    parts = [pack_header(max_frame_bytes << 8 | HEADERS, flags, stream_id), block[:max_frame_bytes]]
    for start in range(max_frame_bytes, len(block), max_frame_bytes):
        part = block[start : start + max_frame_bytes]
        is_last = start + max_frame_bytes >= len(block)
        parts += (pack_header(len(part) << 8 | CONTINUATION, END_HEADERS if is_last else 0, stream_id), part)
    return b"".join(parts)
