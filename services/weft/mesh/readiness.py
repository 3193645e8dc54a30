"""Waits until a service serves; says what of it does not."""

import asyncio
from typing import NamedTuple

from weft.base.errors import RemoteError
from weft.mesh.preflight import MeshError
from weft.v2.client.v2_client import V2Client
from weft.v2.client.wires import WireName
from weft.v2.security.channel import ChannelSecurity

_POLL_INTERVAL_S = 0.05
_CALL_TIMEOUT_S = 5.0
#: A service that loads nothing, and whose models have failed for the same reasons for so long, will not get ready.
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


async def wait_ready(
    name: str,
    address: str,
    *,
    deadline_s: float,
    security: ChannelSecurity | None = None,
    wire: WireName | None = None,
) -> list[str]:
    """Wait until the service answers SERVING to ``grpc.health.v1`` and is ready by ``ServerReady``.

    Args:
        name: Service name, for messages.
        address: ``host:port`` to dial.
        deadline_s: Until when to wait, on the clock of the running loop, seconds.
        security: Of the calls; None: plaintext without a key.
        wire: Implementation of gRPC for the calls; None: ``default_wire``.

    Returns:
        What is not READY all the same, a line for each; some of a service whose readiness is not strict.

    Raises:
        MeshError: The deadline passed, or no model loads any more and some cannot serve.
    """
    now = asyncio.get_running_loop().time
    async with V2Client(address, security=security, wire=wire) as service:
        seen: list[_Obstacle] = []
        seen_since_s = now()
        while not await _is_ready(service):
            obstacles = await _obstacles(service)
            if obstacles != seen:
                seen, seen_since_s = obstacles, now()
            has_settled = bool(seen) and all(o.state == "UNAVAILABLE" and o.reason for o in seen)
            if now() >= deadline_s or (has_settled and now() - seen_since_s >= _SETTLED_S):
                reasons = "".join(f"\n  {obstacle}" for obstacle in seen) or " it does not answer SERVING"
                raise MeshError(f"{name} at {address} is not ready:{reasons}")
            await asyncio.sleep(_POLL_INTERVAL_S)
        return [str(obstacle) for obstacle in await _obstacles(service)]


async def _is_ready(service: V2Client) -> bool:
    try:
        return await service.is_serving(timeout_s=_CALL_TIMEOUT_S) and await service.is_ready(timeout_s=_CALL_TIMEOUT_S)
    except RemoteError:
        return False


async def _obstacles(service: V2Client) -> list[_Obstacle]:
    try:
        index = await service.index(timeout_s=_CALL_TIMEOUT_S)
    except RemoteError:
        return []
    return sorted(
        _Obstacle(f"{model.name}/{model.version}" if model.version else model.name, model.state, model.reason)
        for model in index
        if model.state != "READY"
    )
