"""Calls of ``grpc.aio`` that may be cancelled without a leak, and what a stream of responses ends with."""

import asyncio
import contextlib
from typing import Any

import grpc

from weft_common.core import InferResult
from weft_common.protocol.wire import result_from_response
from weft_protos import grpc_service_pb2 as pb

#: How long the status of a stream is waited for when all its responses are there, in seconds; then it is cancelled.
STATUS_WAIT_S = 1.0

EOF = grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs lack it
#: The final flag comes also where no response is left to carry it.
ASKS_FOR_FINAL = "triton_enable_empty_final_response"
#: The first error ends a stream with its status, instead of a text without a code.
ASKS_FOR_STATUS = ("triton_grpc_error", "true")

_FINAL = "triton_final_response"


async def response_of(rpc: Any) -> pb.ModelInferResponse:
    """The response of a call that was started; cancelling the awaiting task cancels the call.

    To await the call itself would do the same, but ``grpc.aio`` loses 1 kB each time that its own task is cancelled
    (grpcio 1.85): a race that cancels 100 losers a second would lose 8 GB a day. So that task is left to end by itself,
    which it does as soon as the call beneath it is cancelled.
    """
    task = getattr(rpc, "_invocation_task", None)
    if task is not None:
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            cancel(rpc)
            raise
    response: pb.ModelInferResponse = await rpc
    return response


async def begun(rpc: Any) -> None:
    """The other side has begun to answer, or the call has failed.

    The first read would wait for the same task of ``grpc.aio``, and a cancel would reach it: see ``response_of``.
    """
    task = getattr(rpc, "_initializer", None)
    if task is not None:
        await asyncio.shield(task)


def cancel(rpc: Any) -> None:
    """Cancel a call, unless it is over, but none of the tasks that ``grpc.aio`` has for it: they end by themselves."""
    if not rpc.done():
        rpc._cython_call.cancel("the caller cancelled")


async def ended(rpc: Any) -> None:
    """The other side has closed the stream, or was given the time to; how it did so does not matter any more."""
    with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError):
        async with asyncio.timeout(STATUS_WAIT_S):
            while await rpc.read() is not EOF:
                pass


def streamed(response: pb.ModelInferResponse) -> InferResult:
    """A response of a stream; what marks it as the last does not stay among its parameters."""
    result = result_from_response(response)
    parameters = dict(result.parameters)
    result.is_final = parameters.pop(_FINAL, False) is True
    result.is_null = result.is_final and not result.outputs
    result.parameters = parameters
    return result
