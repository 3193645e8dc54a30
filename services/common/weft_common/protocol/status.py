"""The one table between Weft's errors and gRPC status codes, in both directions."""

from typing import Any

import grpc

from weft_common.errors import RemoteError, WeftError

#: Longest status message in bytes: gRPC carries it percent-encoded in a header, and peers drop headers above 8 KiB.
MAX_TEXT_BYTES = 4000
_CUT_MARK = " ..."

#: What gRPC itself says when nobody answers at the other end; its text speaks of sockets, not of services.
_TRANSPORT_HINTS = (
    "failed to connect",
    "connections to all backends failing",
    "Socket closed",
    "Connection re",
    "recvmsg",
    "GOAWAY",
    "DNS resolution",
    "errors resolving",
    "keepalive",
    "Stream removed",
)
_UNREACHABLE = "cannot be reached"

#: How the text begins when gRPC found no connection to send a call on: it never left this process.
_NEVER_SENT = (
    "failed to connect to all addresses",
    "connections to all backends failing",
    "errors resolving",
    "DNS resolution failed",
    "empty address list",
)

#: What a call that the caller did not cancel ends with, as CANCELLED and without metadata, when the server at the other
#: end stops before a handler has seen it.
_STOPPED = "CANCELLED"

#: Trailing metadata of an error: the request was never begun.
_REFUSED = ("x-refused", "true")


def to_status(error: WeftError) -> grpc.StatusCode:
    """GRPC status of an error."""
    status: grpc.StatusCode = grpc.StatusCode[error.code]
    return status


def cut_message(text: str) -> str:
    """``text`` as a status message: at most ``MAX_TEXT_BYTES`` when encoded, with a mark where it was cut."""
    text = text.encode(errors="replace").decode()  # a lone surrogate, as in odd file names, cannot be sent
    size_bytes = num_kept = 0
    for position, char in enumerate(text, start=1):
        size_bytes += 1 if " " <= char <= "~" and char != "%" else 3 * len(char.encode())
        if size_bytes <= MAX_TEXT_BYTES - len(_CUT_MARK):
            num_kept = position
        elif size_bytes > MAX_TEXT_BYTES:
            return text[:num_kept] + _CUT_MARK
    return text


def trailing_pairs(error: WeftError) -> list[tuple[str, str]]:
    """Trailing metadata that an error carries: ``retry-after-ms``, ``x-error-id`` and ``x-refused``.

    That a server behind this one refused a call says nothing about what was done here.
    """
    pairs: list[tuple[str, str]] = []
    if error.is_refused and not isinstance(error, RemoteError):
        pairs.append(_REFUSED)
    retry_after_ms = getattr(error, "retry_after_ms", None)
    if retry_after_ms is not None:
        pairs.append(("retry-after-ms", str(retry_after_ms)))
    error_id = getattr(error, "error_id", None)
    if error_id is not None:
        pairs.append(("x-error-id", str(error_id)))
    return pairs


def from_rpc_error(error: grpc.aio.AioRpcError, where: str) -> RemoteError:
    """The error that a call ended with, its code, ``retry-after-ms``, ``x-error-id`` and ``x-refused`` kept.

    Args:
        error: As raised by a gRPC call.
        where: Who was called, for example ``target 'model' (127.0.0.1:8021)``; names a peer that gave no answer.
    """
    details = error.details() or ""
    code = error.code()
    is_silent = not details or (_UNREACHABLE not in details and any(hint in details for hint in _TRANSPORT_HINTS))
    if code is grpc.StatusCode.CANCELLED and details == _STOPPED and not error.trailing_metadata():
        code, is_silent = grpc.StatusCode.UNAVAILABLE, True
    is_unanswered = code is grpc.StatusCode.UNAVAILABLE and is_silent  # else a peer answered, perhaps about another
    is_refused = is_unanswered and details.startswith(_NEVER_SENT)
    if is_unanswered:
        details = f"{where} {_UNREACHABLE}: {details or 'connection lost'}"
    retry_after_ms = error_id = None
    trailing: Any = error.trailing_metadata() or ()
    for key, value in trailing:
        if key == "retry-after-ms" and str(value).isdecimal():
            retry_after_ms = int(value)
        elif key == "x-error-id":
            error_id = str(value)
        is_refused = is_refused or (key, value) == _REFUSED
    failure = RemoteError(
        code.name,
        details or f"{where} answered {code.name}",
        retry_after_ms=retry_after_ms,
        is_unanswered=is_unanswered,
        error_id=error_id,
    )
    return failure.refused() if is_refused else failure
