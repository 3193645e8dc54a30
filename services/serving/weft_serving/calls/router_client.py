"""A client of the router: what models call other models through."""

import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Any

import grpc

from weft_common.client.channels import MAX_TIMEOUT_S, open_channel
from weft_common.core import CallContext, InferCall, InferResult
from weft_common.errors import RemoteError, UnavailableError
from weft_common.observing import telemetry
from weft_common.protocol.rpc import ASKS_FOR_FINAL, ASKS_FOR_STATUS, EOF, begun, cancel, ended, response_of, streamed
from weft_common.protocol.status import from_rpc_error
from weft_common.protocol.wire import request_from_call, result_from_response
from weft_common.security.channel import ChannelSecurity
from weft_protos.grpc_service_pb2_grpc import GRPCInferenceServiceStub


class RouterClient:
    """The router behind one channel; make it on the event loop that uses it. It connects at the first call.

    Args:
        address: ``host:port``.
        security: TLS and key; None: plaintext without a key.
    """

    def __init__(self, address: str, security: ChannelSecurity | None = None) -> None:
        self._where = f"the router ({address})"
        self._channel = open_channel(address, security=security)
        self._stub: Any = GRPCInferenceServiceStub(self._channel)

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        """The answer of a graph or model. Cancelling the awaiting task cancels the call at the router.

        Raises:
            RemoteError: The router answered with an error, or could not be reached (UNAVAILABLE).
            UnavailableError: The client is closed.
        """
        rpc = self._stub.ModelInfer(request_from_call(call), timeout=_timeout_s(context), metadata=_metadata(context))
        with self._translated():
            return result_from_response(await response_of(rpc))

    async def stream_infer(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        """The responses of a graph or model, which may be decoupled; closing the generator cancels the call.

        Raises:
            RemoteError, UnavailableError: As ``infer``, also after some responses.
        """
        request = request_from_call(call)
        request.parameters[ASKS_FOR_FINAL].bool_param = True
        metadata = (*_metadata(context), ASKS_FOR_STATUS)
        rpc = self._stub.ModelStreamInfer(iter((request,)), timeout=_timeout_s(context), metadata=metadata)
        is_final = False
        try:
            with self._translated():
                await begun(rpc)
            while not is_final:
                with self._translated():
                    message = await rpc.read()
                if message is EOF:
                    return
                if message.error_message:
                    raise RemoteError("UNKNOWN", message.error_message)
                result = streamed(message.infer_response)
                is_final = result.is_final
                yield result
            await ended(rpc)
        finally:
            cancel(rpc)

    async def close(self) -> None:
        """The channel is closed; calls in flight are cancelled."""
        await self._channel.close(None)

    @contextlib.contextmanager
    def _translated(self) -> Any:
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, self._where) from error
        except grpc.aio.UsageError as error:
            raise UnavailableError(f"{self._where} is not called any more: the service is stopping") from error


def _timeout_s(context: CallContext) -> float | None:
    if context.deadline_ns is None:
        return None
    return max(0.0, min((context.deadline_ns - time.monotonic_ns()) / 1e9, MAX_TIMEOUT_S))


def _metadata(context: CallContext) -> tuple[tuple[str, str], ...]:
    return (*context.headers.items(), *telemetry.inject(context.trace_context).items())
