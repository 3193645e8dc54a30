"""Nested calls answered by the router."""

import time
from collections.abc import AsyncGenerator
from dataclasses import replace

from weft.base.core import CallContext, InferCall, InferResult
from weft.v2.client.channels import MAX_TIMEOUT_S
from weft.v2.client.v2_client import V2Client, metadata_of
from weft.v2.client.wires import WireName
from weft.v2.protocol.rpc import SEND_EMPTY_FINAL
from weft.v2.security.channel import ChannelSecurity


class RouterCallee:
    """The router behind one channel; make it on the event loop that uses it. It connects at the first call.

    Args:
        address: ``host:port``.
        security: TLS and key; None: plaintext without a key.
        wire: Implementation of gRPC; None: ``default_wire``.
    """

    def __init__(self, address: str, security: ChannelSecurity | None = None, *, wire: WireName | None = None) -> None:
        self._client = V2Client(address, where=f"the router ({address})", security=security, wire=wire)

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        """The answer of a graph or model. Raises as ``V2Client``."""
        return await self._client.infer(call, timeout_s=_timeout_s(context), metadata=metadata_of(context))

    def stream_infer(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        """The responses of a graph or model, which may be decoupled. Raises as ``V2Client``."""
        request = replace(call, parameters={**call.parameters, SEND_EMPTY_FINAL: True})
        return self._client.stream(request, timeout_s=_timeout_s(context), metadata=metadata_of(context))

    async def close(self) -> None:
        """Close the channel, which cancels calls in flight."""
        await self._client.close()


def _timeout_s(context: CallContext) -> float | None:
    if context.deadline_ns is None:
        return None
    return max(0.0, min((context.deadline_ns - time.monotonic_ns()) / 1e9, MAX_TIMEOUT_S))
