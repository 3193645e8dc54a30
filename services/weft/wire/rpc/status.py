"""Statuses of calls: their messages on the wire, and the statuses of HTTP and of RST_STREAM."""

import logging
import time
from collections.abc import Callable
from urllib.parse import quote_from_bytes, unquote_to_bytes

from weft.wire.errors import ErrorCode
from weft.wire.interface import StatusCode

STATUS_BY_NUMBER: dict[int, StatusCode] = {code.value[0]: code for code in StatusCode}
NUMBER_BY_STATUS: dict[StatusCode, int] = {code: number for number, code in STATUS_BY_NUMBER.items()}

_UNESCAPED = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
_BY_RESET = {
    ErrorCode.REFUSED_STREAM: StatusCode.UNAVAILABLE,
    ErrorCode.CANCEL: StatusCode.CANCELLED,
    ErrorCode.ENHANCE_YOUR_CALM: StatusCode.RESOURCE_EXHAUSTED,
    ErrorCode.INADEQUATE_SECURITY: StatusCode.PERMISSION_DENIED,
}
_BY_HTTP = {
    400: StatusCode.INTERNAL,
    401: StatusCode.UNAUTHENTICATED,
    403: StatusCode.PERMISSION_DENIED,
    404: StatusCode.UNIMPLEMENTED,
    429: StatusCode.UNAVAILABLE,
    431: StatusCode.INTERNAL,
    502: StatusCode.UNAVAILABLE,
    503: StatusCode.UNAVAILABLE,
    504: StatusCode.UNAVAILABLE,
}


class CallError(Exception):
    """A call that ends with a status other than OK.

    Args:
        code: The status.
        details: Its message.
    """

    def __init__(self, code: StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code = code
        self.details = details


def encode_message(text: str) -> str:
    """``text`` as the value of ``grpc-message``: percent-encoded UTF-8; a lone surrogate becomes a question mark."""
    return quote_from_bytes(text.encode("utf-8", "replace"), safe=_UNESCAPED)


def decode_message(value: str) -> str:
    """The text of a ``grpc-message``; whatever is no percent-encoded UTF-8 is kept or replaced, never an error."""
    return unquote_to_bytes(value.encode("latin-1", "replace")).decode("utf-8", "replace") if "%" in value else value


def status_of_reset(code: int) -> StatusCode:
    """The status of a call that the server ended with RST_STREAM."""
    return _BY_RESET.get(ErrorCode(code), StatusCode.INTERNAL) if code in _ERROR_CODES else StatusCode.INTERNAL


def status_of_http(status: int) -> StatusCode:
    """The status of an answer that has a status of HTTP other than 200, and none of gRPC."""
    return _BY_HTTP.get(status, StatusCode.UNKNOWN)


_ERROR_CODES = frozenset(ErrorCode)


#: Requests of this time share one line in the log: whoever sends garbage must not fill it. In seconds.
_LOG_PERIOD_S = 1.0

_log = logging.getLogger("weft.wire.server")


class UnreadableRequests:
    """Makes the errors of requests that a deserializer refused, and logs that there are some.

    Args:
        clock_s: Time in seconds.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._num_untold = 0
        self._told_s = -_LOG_PERIOD_S

    def failure(self, path: str, peer: str, error: BaseException) -> CallError:
        """The error of one call.

        Args:
            path: ``/service/method``.
            peer: Address of the client.
            error: Raised by the deserializer.

        Returns:
            INVALID_ARGUMENT; RESOURCE_EXHAUSTED for a MemoryError.
        """
        if isinstance(error, MemoryError):
            code = StatusCode.RESOURCE_EXHAUSTED
            details = f"the server has no memory left to read a request of this size for {path}; send a smaller one"
        else:
            code = StatusCode.INVALID_ARGUMENT
            details = f"the request is not a message that {path} takes: {error}; serialize it by the service's .proto"
        self._num_untold += 1
        now_s = self._clock_s()
        if now_s - self._told_s >= _LOG_PERIOD_S:
            extra = {"num_unreadable": self._num_untold, "peer": peer, "status": code.name}
            _log.warning("a request cannot be read: %s", details, extra=extra)
            self._num_untold, self._told_s = 0, now_s
        return CallError(code, details)
