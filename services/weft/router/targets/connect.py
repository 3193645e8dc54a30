"""Creates targets from the command line: addresses, connections, health watches."""

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from weft.base.observing.logs import get_logger
from weft.router.target import Target
from weft.router.targets.grpc_target import GrpcTarget
from weft.router.targets.replicas import Health, MembershipSettings, OnHealth
from weft.router.targets.replicated import ReplicatedTarget
from weft.router.targets.specification import BalancingPolicy, channel_address, channel_options, dns_name
from weft.v2.client.wires import WireName
from weft.v2.protocol.services import HEALTH, HealthCheckRequest, HealthCheckResponse, stub_of
from weft.v2.security.channel import ChannelSecurity
from weft.wire.interface import grpc

#: A server that was started again is noticed soon.
_RECONNECT_OPTIONS: list[tuple[str, Any]] = [("grpc.max_reconnect_backoff_ms", 500)]
#: Whose health it is: that of the V2 service.
_SERVICE = "inference.GRPCInferenceService"
_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 2.0
#: Pause before a server that has no health service is asked again, in seconds; it may have been replaced.
_UNKNOWN_PAUSE_S = 30.0
#: Any other status: the server has a health service that does not know the name.
_HEALTH = {HealthCheckResponse.SERVING: Health.SERVING, HealthCheckResponse.NOT_SERVING: Health.NOT_SERVING}

_log = get_logger("weft.router.targets")


def make_target(
    name: str,
    address: str,
    policy: BalancingPolicy | None = None,
    security: ChannelSecurity | None = None,
    *,
    wire: WireName | None = None,
    mesh_key: str = "",
) -> Target:
    """Create the target of ``address``, not connected yet, on the event loop that uses it.

    Args:
        address: As of ``parse_target``.
        policy: As of ``parse_policy``, without a ``policy_fault``; None: the default, if there may be replicas.
        security: TLS and key; None: plaintext without a key.
        wire: Implementation of gRPC; None: ``default_wire``.
        mesh_key: As of ``ReplicatedTarget``.
    """
    host_and_port = dns_name(address)
    if security is not None and security.is_encrypted and host_and_port and not security.server_name:
        security = replace(security, server_name=host_and_port.rpartition(":")[0])  # replicas are called by address
    connected = partial(GrpcTarget, name, security=security, wire=wire)
    is_list = "," in address and not address.startswith(("ipv4:", "ipv6:"))
    if policy is None and not host_and_port and not is_list:
        return connected(address, options=_RECONNECT_OPTIONS)
    policy = policy or BalancingPolicy()
    options = [*_RECONNECT_OPTIONS, *([("grpc.default_authority", host_and_port)] if host_and_port else [])]

    async def given() -> Sequence[str]:
        return address.split(",")

    settings = MembershipSettings(
        resolve=partial(resolve, host_and_port) if host_and_port else given,
        is_fixed=not host_and_port,
        connect=partial(connected, options=options),
        watch=_watch,
    )
    by_grpc = None
    if policy.is_by_grpc:
        by_grpc = connected(channel_address(address), options=[*_RECONNECT_OPTIONS, *channel_options(policy)])
    return ReplicatedTarget(name, address, policy, settings, by_grpc, mesh_key=mesh_key)


async def _watch(target: Target, on_health: OnHealth) -> None:
    if isinstance(target, GrpcTarget):
        await watch_health(target.client.channel, on_health)


async def resolve(host_and_port: str) -> list[str]:
    """Resolve ``host:port`` to all its addresses, sorted, as ``ip:port``. Raises OSError if it has none now."""
    host, _, port = host_and_port.rpartition(":")
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a label of more than 63 characters
        raise OSError(f"'{host}' is no name: {error}") from None
    return sorted(
        f"[{place[0]}]:{port}" if family == socket.AF_INET6 else f"{place[0]}:{port}"
        for family, _, _, _, place in found
    )


async def watch_health(channel: grpc.aio.Channel, on_health: OnHealth) -> None:
    """Report the server's health to ``on_health``, now and at every change, until cancelled.

    A server without a health service is UNKNOWN as long as it answers at all.
    """
    stub = stub_of(channel, HEALTH)
    request = HealthCheckRequest(service=_SERVICE)
    pause_s = _FIRST_BACKOFF_S
    is_lost = False
    while True:
        try:
            # Once it is lost, gRPC connects again by itself, and the call begins as soon as it has.
            async for answer in stub.Watch(request, wait_for_ready=is_lost):
                is_lost, pause_s = False, _FIRST_BACKOFF_S
                on_health(_HEALTH.get(answer.status, Health.UNKNOWN))
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                is_lost = True
                on_health(Health.UNREACHABLE)
            else:
                _log.debug("no health service: %s: %s", error.code().name, error.details())
                on_health(Health.UNKNOWN)
                pause_s = _UNKNOWN_PAUSE_S
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _MAX_BACKOFF_S)
