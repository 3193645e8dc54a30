"""Leak-free cancellation of calls, which on ``grpc.aio`` takes a work-around, and the end of response streams."""

import asyncio
import contextlib
from typing import Any

from weft.base.core import InferResult
from weft.v2.protocol.codec import InferMessage
from weft.v2.protocol.wire import result_of
from weft.wire.interface import grpc

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
    """Wait until the server has started to respond, or the call has failed.

    The first read would wait for the same task of ``grpc.aio``, and a cancel would reach it: see ``response_of``.
    """
    task = getattr(rpc, "_initializer", None)
    if task is not None:
        await asyncio.shield(task)


def cancel(rpc: Any) -> None:
    """Cancel a call, unless it is over, but not the tasks of ``grpc.aio``: see ``response_of``."""
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
    """Convert a response of a stream; removes the final flag from its parameters.

    Args:
        response: One without outputs that is final only tells the end.
        may_be_whole: Unless it has no parameters either: then it is an answer whose outputs are all left out.
    """
    result = result_of(response)
    parameters = dict(result.parameters)
    result.is_final = parameters.pop(_FINAL, False) is True
    result.is_null = result.is_final and not result.outputs and not (may_be_whole and not parameters)
    result.parameters = parameters
    return result
