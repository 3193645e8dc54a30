"""Converts between Weft's errors and gRPC statuses (the only such table); cancels and ends calls safely."""

import asyncio
import contextlib
from typing import Any

from weft.base.core import InferResult
from weft.base.errors import RemoteError, WeftError
from weft.base.observing.failures import Disclosure
from weft.v2.protocol.codec import InferMessage
from weft.v2.protocol.wire import result_of
from weft.wire.client import UnansweredError
from weft.wire.interface import grpc

#: Longest status message in bytes: gRPC carries it percent-encoded in a header, and peers drop headers above 8 KiB.
MAX_TEXT_BYTES = 4000
_CUT_MARK = " ..."

#: Parts of grpcio's own messages for connection errors, which name sockets, not services.
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

#: Prefixes of grpcio's messages for calls that were never sent, because there was no connection.
_NEVER_SENT = (
    "failed to connect to all addresses",
    "connections to all backends failing",
    "errors resolving",
    "DNS resolution failed",
    "empty address list",
)

#: Message of a CANCELLED status without metadata that the caller did not cause: the server
#: stopped before a handler saw the call.
_STOPPED = "CANCELLED"

#: Trailing metadata of an error: the request was never started.
_REFUSED = ("x-refused", "true")
#: Trailing metadata of an answer that was in the model's response cache.
CACHE_HIT = ("x-cache", "hit")


def to_status(error: WeftError) -> grpc.StatusCode:
    """The gRPC status of an error."""
    status: grpc.StatusCode = grpc.StatusCode[error.code]
    return status


def cut_message(text: str) -> str:
    """``text`` as a status message: at most ``MAX_TEXT_BYTES`` when encoded, with a mark if truncated."""
    text = text.encode(errors="replace").decode()  # a lone surrogate, as in odd file names, cannot be sent
    size_bytes = num_kept = 0
    for position, char in enumerate(text, start=1):
        size_bytes += 1 if " " <= char <= "~" and char != "%" else 3 * len(char.encode())
        if size_bytes <= MAX_TEXT_BYTES - len(_CUT_MARK):
            num_kept = position
        elif size_bytes > MAX_TEXT_BYTES:
            return text[:num_kept] + _CUT_MARK
    return text


def text_for_client(error: WeftError) -> str:
    """The status message of an error: with the traceback of the model where ``--dev`` allows it."""
    text = f"{error.message}\n{error.traceback}" if error.traceback and Disclosure.is_on else error.message
    return cut_message(text)


def trailing_pairs(error: WeftError) -> list[tuple[str, str]]:
    """Trailing metadata of an error: ``retry-after-ms``, ``x-error-id`` and ``x-refused``.

    A refusal by a downstream server does not imply that nothing was done here, so it is not passed on.
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
    """Convert the error of a call: code, ``retry-after-ms``, ``x-error-id``, ``x-graph-path`` and ``x-refused``.

    Args:
        where: The callee, for example ``target 'model' (127.0.0.1:8021)``; used in messages for unreachable peers.
    """
    details = error.details() or ""
    code = error.code()
    is_silent = not details or (_UNREACHABLE not in details and any(hint in details for hint in _TRANSPORT_HINTS))
    is_never_sent = details.startswith(_NEVER_SENT)
    if isinstance(error, UnansweredError):  # Weft's own wire knows
        is_silent, is_never_sent = True, error.is_unprocessed
        if code is grpc.StatusCode.CANCELLED:  # by the server, or its connection
            code = grpc.StatusCode.UNAVAILABLE
    elif code is grpc.StatusCode.CANCELLED and details == _STOPPED and not error.trailing_metadata():
        code, is_silent = grpc.StatusCode.UNAVAILABLE, True
    is_unanswered = (
        code is grpc.StatusCode.UNAVAILABLE and is_silent
    )  # else a peer responded, possibly about another server
    is_refused = is_unanswered and is_never_sent
    if is_unanswered:
        details = f"{where} {_UNREACHABLE}: {details or 'connection lost'}"
    retry_after_ms = error_id = None
    path = ""
    trailing: Any = error.trailing_metadata() or ()
    for key, value in trailing:
        if key == "retry-after-ms" and str(value).isdecimal():
            retry_after_ms = int(value)
        elif key == "x-error-id":
            error_id = str(value)
        elif key == "x-graph-path":
            path = str(value)
        is_refused = is_refused or (key, value) == _REFUSED
    failure = RemoteError(
        code.name,
        details or f"{where} answered {code.name}",
        retry_after_ms=retry_after_ms,
        is_unanswered=is_unanswered,
        error_id=error_id,
        path=path,
    )
    return failure.refused() if is_refused else failure


#: Timeout for the status of a stream after its final response, in seconds; then the stream is cancelled.
STATUS_WAIT_S = 1.0

EOF = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in the stubs
#: Parameter: send an empty final response if no other one carries the final flag.
SEND_EMPTY_FINAL = "triton_enable_empty_final_response"
#: Metadata: the first error ends a stream with its status, instead of a message without a code.
SEND_STATUS = ("triton_grpc_error", "true")

_FINAL = "triton_final_response"


async def response_of(rpc: Any) -> Any:
    """The response of a started call; cancelling the awaiting task cancels the call.

    Awaiting the call itself would do the same, but ``grpc.aio`` leaks 1 kB each time its own task is cancelled (grpcio
    1.85): a race that cancels 100 losers per second would leak 8 GB a day. So that task ends by itself, as soon as the
    underlying call is cancelled.
    """
    task = getattr(rpc, "_invocation_task", None)
    if task is not None:
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            cancel(rpc)
            raise
    return await rpc


async def wait_started(rpc: Any) -> None:
    """Wait until the server starts to respond, or the call fails.

    The first read would wait on the same ``grpc.aio`` task and pass a cancellation on to it: see ``response_of``.
    """
    task = getattr(rpc, "_initializer", None)
    if task is not None:
        await asyncio.shield(task)


def cancel(rpc: Any) -> None:
    """Cancel a call that is still running, but not the tasks of ``grpc.aio``: see ``response_of``."""
    if rpc.done():
        return
    core_call = getattr(rpc, "_cython_call", None)
    if core_call is None:  # Weft's own wire, which leaks nothing
        rpc.cancel()
    else:
        core_call.cancel("the caller cancelled")


async def drain(rpc: Any) -> None:
    """Read until the server closes the stream, for at most ``STATUS_WAIT_S``; its status is ignored."""
    with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError):
        async with asyncio.timeout(STATUS_WAIT_S):
            while await rpc.read() is not EOF:
                pass


def stream_result(response: InferMessage, *, may_be_whole: bool = False) -> InferResult:
    """Convert a response of a stream; removes the final flag from its parameters."""
    result = result_of(response)
    parameters = dict(result.parameters)
    result.is_final = parameters.pop(_FINAL, False) is True
    result.is_null = result.is_final and not result.outputs and not (may_be_whole and not parameters)
    result.parameters = parameters
    return result
