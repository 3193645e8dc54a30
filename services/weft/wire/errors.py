"""Errors of HTTP/2 (RFC 9113, sections 5.4 and 7)."""

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


class Http2ConnectionError(Exception):
    """The peer broke the protocol: the connection ends with GOAWAY.

    Args:
        code: Sent to the peer.
        reason: For the log and the debug data of GOAWAY.
    """

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(f"{code.name}: {reason}")
        self.code = code
        self.reason = reason
