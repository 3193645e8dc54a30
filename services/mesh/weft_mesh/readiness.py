"""Waits until a service serves, or says why it does not."""

import asyncio
from typing import TYPE_CHECKING, NamedTuple

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from weft_common.client.channels import open_channel
from weft_common.security.channel import ChannelSecurity
from weft_mesh.preflight import MeshError
from weft_protos import grpc_service_pb2 as pb
from weft_protos import grpc_service_pb2_grpc

if TYPE_CHECKING:
    _Stub = grpc_service_pb2_grpc.GRPCInferenceServiceAsyncStub

_POLL_INTERVAL_S = 0.05
_CALL_TIMEOUT_S = 5.0
#: A service whose models failed with the same reasons for this long, and loads nothing, will not become ready.
_SETTLED_S = 3.0


class _Obstacle(NamedTuple):
    model: str
    state: str
    reason: str

    def __str__(self) -> str:
        return f"{self.model} is {self.state or 'not loaded'}" + (f": {self.reason}" if self.reason else "")


def dialable(address: str) -> str:
    """``host:port`` that reaches a listener: an unspecified host is replaced by this machine's loopback."""
    host, _, port = address.rpartition(":")
    loopback = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)  # noqa: S104  # replaced, not bound
    return f"{loopback}:{port}"


async def wait_ready(name: str, address: str, *, deadline_s: float, security: ChannelSecurity | None = None) -> None:
    """The service answers SERVING to ``grpc.health.v1`` and is ready by ``ServerReady``.

    Args:
        name: Service name, for messages.
        address: ``host:port`` to dial.
        deadline_s: Until when to wait, on the clock of the running loop, seconds.
        security: Of the calls; None: plaintext without a key.

    Raises:
        MeshError: The deadline passed, or every model is settled and some cannot be served.
    """
    now = asyncio.get_running_loop().time
    async with open_channel(address, security=security) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        inference = grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel)
        seen: list[_Obstacle] = []
        seen_since_s = now()
        while not await _is_ready(health, inference):
            obstacles = await _obstacles(inference)
            if obstacles != seen:
                seen, seen_since_s = obstacles, now()
            has_settled = bool(seen) and all(o.state == "UNAVAILABLE" and o.reason for o in seen)
            if now() >= deadline_s or (has_settled and now() - seen_since_s >= _SETTLED_S):
                reasons = "".join(f"\n  {obstacle}" for obstacle in seen) or " it does not answer SERVING"
                raise MeshError(f"{name} at {address} is not ready:{reasons}")
            await asyncio.sleep(_POLL_INTERVAL_S)


async def _is_ready(health: health_pb2_grpc.HealthStub, inference: "_Stub") -> bool:
    try:
        status = await health.Check(health_pb2.HealthCheckRequest(), timeout=_CALL_TIMEOUT_S)
        if status.status != health_pb2.HealthCheckResponse.SERVING:
            return False
        return bool((await inference.ServerReady(pb.ServerReadyRequest(), timeout=_CALL_TIMEOUT_S)).ready)
    except grpc.aio.AioRpcError:
        return False


async def _obstacles(inference: "_Stub") -> list[_Obstacle]:
    try:
        index = await inference.RepositoryIndex(pb.RepositoryIndexRequest(), timeout=_CALL_TIMEOUT_S)
    except grpc.aio.AioRpcError:
        return []
    return sorted(
        _Obstacle(f"{model.name}/{model.version}" if model.version else model.name, model.state, model.reason)
        for model in index.models
        if model.state != "READY"
    )
